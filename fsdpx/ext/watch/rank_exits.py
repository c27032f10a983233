"""Ranks that end while others go on: with which status, and which ranks wait for them in vain."""

from __future__ import annotations

import atexit
import os
import sys
import time
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any, NamedTuple

from fsdpx.core.base import hooks
from fsdpx.core.base.messages import last_words
from fsdpx.ext.watch.flight_recorder import FlightRecord, FlightRecorder, read

__all__ = [
    "LATE", "LEFT", "all_gone", "all_left", "ended", "gone", "leaving", "missed", "parted", "state_of", "status",
    "stays",
]  # fmt: skip

LEFT = 1
"""Exit status of a job that a rank has left with status 0 while others waited for it."""
EARLY, LATE = 1.0, 5.0
"""Seconds for which a rank waits before it checks whether others have ended; and before it gives up a wait that all
living ranks share, where no count of calls tells whether the ended rank is needed."""

TO_PASS_ON = 0.2
"""Seconds before an abort: a launcher may drop what it has not yet passed on of the last words."""

_reported: list[Any] = [0]
_open: dict[FlightRecorder, Open] = {}


class Open(NamedTuple):
    """The state of a rank that others may wait for. end: called at the end of the script. abort: ends all ranks with a
    status; None where the others go on."""

    rank: int
    end: Callable[[], None]
    abort: Callable[[int], None] | None


def stays(record: FlightRecorder, rank: int, end: Callable[[], None], abort: Callable[[int], None] | None) -> None:
    """From now on the end of this process concerns other ranks, which read it in `record`; see `Open`."""
    _open[record] = Open(rank, end, abort)
    atexit.register(end)


def leaving(record: FlightRecorder) -> None:
    """From now on the end of this process concerns no other rank."""
    if record in _open:
        atexit.unregister(_open.pop(record).end)


def status() -> int:
    """The exit status of this process that `sys.exit` was given, if it was called."""
    reported = _reported[0]
    return 0 if reported is None else reported & 0xFF if isinstance(reported, int) else 1


def _forget() -> None:
    """A child that was forked is no rank: no other rank waits for it."""
    for record in list(_open):
        leaving(record)


def _notes_status(former: Callable[..., Any]) -> Callable[..., Any]:
    """Python does not report its exit status when it ends: note the argument of `sys.exit`."""

    def exit(status: Any = None, /) -> Any:
        _reported[0] = status
        former(status)

    return exit


def _ends_all(former: Callable[..., Any]) -> Callable[..., Any]:
    """`os._exit` runs nothing at the end, and a rank that ends so with status 0 may pass for the good end of all with
    mpiexec of MPICH."""
    process = os.getpid()

    def _exit(status: int) -> Any:
        concerned = [one for one in _open.values() if one.abort is not None]
        _open.clear()
        if concerned and os.getpid() == process:
            code, rank = status or LEFT, concerned[0].rank
            hooks.tell_end(status)
            last_words(
                f"fsdpx: rank {rank} calls os._exit({status}) while others may wait for it: all end with {code}\n"
            )
            time.sleep(TO_PASS_ON)
            for one in concerned:
                if one.abort is not None:
                    one.abort(code)
        former(status)

    return _exit


hooks.register(hooks.Hook(sys, "exit", _notes_status), hooks.Hook(os, "_exit", _ends_all))
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)


# -- what the others see -----------------------------------------------------------------------------------------------


def state_of(process: int) -> str:
    """The state of a process of this host as Linux says it: R, S, D, T (stopped); "" if it has ended."""
    try:
        stat = Path(f"/proc/{process}/stat").read_text()
    except OSError:
        return "" if Path("/proc/self/stat").exists() else "?"
    state = stat.rpartition(")")[2].split()[0]
    return "" if state in "ZX" else state


def gone(flight: FlightRecord) -> bool:
    """Whether a rank of this host has come to its end, or its process has."""
    return flight.left is not None or state_of(flight.process) == ""


def all_left(places: Collection[Path]) -> bool:
    """Whether the ranks with these records have all come to a good end."""
    return all(flight is None or flight.left is not None for flight in map(_head, places))


def all_gone(places: Collection[Path]) -> bool:
    """Whether these ranks have all come to some end."""
    return all(flight is None or gone(flight) for flight in map(_head, places))


def missed(mine: FlightRecorder, waited: float, others: Collection[Path], everyone: bool) -> FlightRecord | None:
    """A rank of this host that has ended and for which this one, `mine`, waits in vain since `waited` seconds.

    A rank that ended before it began the call that others are in will never reach it, and a rank that ended in an
    action will not finish it. Other reasons to wait cannot be known; but if all living ranks wait, none can help the
    others. others: the records of the other ranks of this host. everyone: there are no others."""
    if waited < EARLY:
        return None
    flights = [flight for flight in map(_head, others) if flight is not None]
    for flight in filter(gone, flights):
        never = flight.calls < mine.calls or _inside(flight, others)
        if never or (everyone and waited >= LATE and all(_waits(f) or gone(f) for f in flights)):
            return flight
    return None


def parted(places: Collection[Path]) -> dict[int, str]:
    """The calls of the ranks with these records, by rank, if all wait for LATE seconds in differing calls; else
    nothing.

    All ranks make the same calls in the same order: equal counts with a different last call are a fault of the script,
    not a late rank."""
    flights = [flight for flight in map(_head, places) if flight is not None]
    if not flights or not all(_waits(flight) and not gone(flight) for flight in flights):
        return {}
    common = min(flight.calls for flight in flights)  # a wrong answer may have let one of them go on
    calls = {flight.rank: flight.call if flight.calls == common else flight.before for flight in flights}
    late = max(flight.calls for flight in flights) > common + 1
    return {} if late or len({*calls.values()}) < 2 else calls


def ended(flight: FlightRecord) -> str:
    """The fate of a rank that is gone, as text."""
    how = f"has ended with status {flight.left}" if flight.left else "has come to the end of its script"
    if flight.left is None:
        how = f"is gone (process {flight.process} has ended)"
    after = f"after its call {flight.calls}, {flight.call}" if flight.calls else "before its first call"
    return f"rank {flight.rank} {how}, {after}"


def _head(place: Path) -> FlightRecord | None:
    return read(place, whole=False)


def _waits(flight: FlightRecord) -> bool:
    return 0 < flight.since < time.time() - LATE + EARLY


def _inside(flight: FlightRecord, places: Collection[Path]) -> bool:
    """Whether its last action is still under way."""
    for place in places:
        whole = read(place)
        if whole is not None and whole.rank == flight.rank:
            return whole.last is not None and whole.last.end == 0
    return False
