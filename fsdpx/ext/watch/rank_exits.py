"""Detection of ranks that have exited while other ranks are still waiting for them."""

from __future__ import annotations

import atexit
import os
import sys
import time
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any, NamedTuple

from fsdpx.core.base import hooks
from fsdpx.core.base.messages import flush_and_write_stderr
from fsdpx.ext.watch.flight_recorder import FlightRecord, FlightRecorder, read_record

__all__ = [
    "LATE_SECONDS", "RANK_EXITED", "describe_rank_end", "find_awaited_ended_rank", "find_diverged_calls",
    "get_process_state", "get_sys_exit_status", "has_rank_ended", "have_all_ranks_ended", "have_all_scripts_ended",
    "register_exit_report", "unregister_exit_report",
]  # fmt: skip

RANK_EXITED = 1
"""Exit status of a job in which a rank ended with status 0 while other ranks were waiting for it."""
EARLY_SECONDS, LATE_SECONDS = 1.0, 5.0
"""A rank that has waited for EARLY_SECONDS checks whether other ranks have ended. The numbers of collective calls that
ranks have begun often show whether an ended rank is still needed. If these numbers do not show it, the ended rank is
presumed to be needed once all living ranks have waited for LATE_SECONDS."""

SECONDS_TO_PASS_ON = 0.2
"""Seconds to wait before an abort, because a launcher may drop output that it has not yet forwarded."""

_reported: list[Any] = [0]
_open: dict[FlightRecorder, WatchedRank] = {}


class WatchedRank(NamedTuple):
    """A rank of this process that other ranks may be waiting for.

    `end` is called at the end of the script. `abort` ends all ranks with a given exit status; it is None if the other
    ranks can continue without this rank."""

    rank: int
    end: Callable[[], None]
    abort: Callable[[int], None] | None


def register_exit_report(
    record: FlightRecorder, rank: int, end: Callable[[], None], abort: Callable[[int], None] | None
) -> None:
    """Make sure that the exit of this process is recorded in its flight record (the log of its last actions), where
    other ranks see it. For `end` and `abort`, see `WatchedRank`."""
    _open[record] = WatchedRank(rank, end, abort)
    atexit.register(end)


def unregister_exit_report(record: FlightRecorder) -> None:
    """Stop reporting the exit of this process, because no other rank will wait for it."""
    if record in _open:
        atexit.unregister(_open.pop(record).end)


def get_sys_exit_status() -> int:
    """Return the exit status that results from the last call to `sys.exit`, or 0 if it was not called."""
    reported = _reported[0]
    return 0 if reported is None else reported & 0xFF if isinstance(reported, int) else 1


def _stop_reporting_in_child() -> None:
    """Stop reporting in a forked child, which is not a rank."""
    for record in list(_open):
        unregister_exit_report(record)


def _wrap_sys_exit(former: Callable[..., Any]) -> Callable[..., Any]:
    """Return a version of `sys.exit` that records its status, because Python does not pass the status to exit
    handlers."""

    def exit_and_note(status: Any = None, /) -> Any:
        _reported[0] = status
        former(status)

    return exit_and_note


def _wrap_os_exit_to_abort_ranks(former: Callable[..., Any]) -> Callable[..., Any]:
    """Return a version of `os._exit` that first aborts all ranks.

    `os._exit` runs no exit handlers, and if a rank calls it with status 0, MPICH's mpiexec may take this for the normal
    end of the job."""
    process = os.getpid()

    def exit_and_abort(status: int) -> Any:
        concerned = [one for one in _open.values() if one.abort is not None]
        _open.clear()
        if concerned and os.getpid() == process:
            code, rank = status or RANK_EXITED, concerned[0].rank
            hooks.notify_exit_listeners(status)
            flush_and_write_stderr(
                f"fsdpx: rank {rank} calls os._exit({status}) while others may wait for it: all end with {code}\n"
            )
            time.sleep(SECONDS_TO_PASS_ON)
            for one in concerned:
                if one.abort is not None:
                    one.abort(code)
        former(status)

    return exit_and_abort


hooks.register_process_hooks(
    hooks.Hook(sys, "exit", _wrap_sys_exit), hooks.Hook(os, "_exit", _wrap_os_exit_to_abort_ranks)
)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_stop_reporting_in_child)


def get_process_state(process: int) -> str:
    """Return the state of a process on this host as the letter that Linux uses, such as "R" for running or "T" for
    stopped. Return "" if the process has ended, and "?" if its state is unknown."""
    try:
        stat = Path(f"/proc/{process}/stat").read_text()
    except OSError:
        return "" if Path("/proc/self/stat").exists() else "?"
    state = stat.rpartition(")")[2].split()[0]
    return "" if state in "ZX" else state


def has_rank_ended(flight: FlightRecord) -> bool:
    """Return whether the script or the process of a rank on this host has ended."""
    return flight.exit_status is not None or get_process_state(flight.process) == ""


def have_all_scripts_ended(record_paths: Collection[Path]) -> bool:
    """Return whether the scripts of all ranks with these flight records have ended. If a record is unreadable, the
    script of its rank counts as ended."""
    return all(flight is None or flight.exit_status is not None for flight in map(_read_record_head, record_paths))


def have_all_ranks_ended(record_paths: Collection[Path]) -> bool:
    """Return True if every rank has ended, according to its flight record. A rank has ended if its script or its
    process has ended."""
    return all(flight is None or has_rank_ended(flight) for flight in map(_read_record_head, record_paths))


def find_awaited_ended_rank(
    own_record: FlightRecorder, waited_seconds: float, other_records: Collection[Path], all_ranks_local: bool
) -> FlightRecord | None:
    """Find a rank on this host that has ended although this rank still needs it. Return the flight record (the log of
    the last actions) of the ended rank, or None if there is no such rank.

    An ended rank is still needed if it has begun fewer collective calls than this rank, because it will never reach the
    current call. It is also needed if it ended in the middle of an action, because it will never finish this action.
    Finally, it is presumed to be needed if all living ranks have been waiting for a long time, because then no rank can
    make progress. `own_record` is the record of this rank, which has waited for `waited_seconds`. `other_records` are
    the paths of the records of the other ranks on this host, and `all_ranks_local` says whether the job has no ranks on
    other hosts."""
    if waited_seconds < EARLY_SECONDS:
        return None
    flights = [flight for flight in map(_read_record_head, other_records) if flight is not None]
    for flight in filter(has_rank_ended, flights):
        never = flight.calls < own_record.calls or _has_unfinished_action(flight, other_records)
        if never or (
            all_ranks_local
            and waited_seconds >= LATE_SECONDS
            and all(_has_waited_long(f) or has_rank_ended(f) for f in flights)
        ):
            return flight
    return None


def find_diverged_calls(record_paths: Collection[Path]) -> dict[int, str]:
    """Return a dict from rank to collective call if ranks wait for each other in different calls, else {}.

    The result is {} until all ranks have waited for LATE_SECONDS. All ranks must make the same collective calls in the
    same order. If ranks have made equally many calls but are in different calls, no rank is merely late: the script is
    wrong."""
    flights = [flight for flight in map(_read_record_head, record_paths) if flight is not None]
    if not flights or not all(_has_waited_long(flight) and not has_rank_ended(flight) for flight in flights):
        return {}
    # how many calls all ranks have begun; some ranks may already have begun the next call
    common = min(flight.calls for flight in flights)
    calls = {flight.rank: flight.call if flight.calls == common else flight.before for flight in flights}
    late = max(flight.calls for flight in flights) > common + 1
    return {} if late or len({*calls.values()}) < 2 else calls


def describe_rank_end(flight: FlightRecord) -> str:
    """Return a description of how a rank ended, and after which call."""
    how = f"has ended with status {flight.exit_status}" if flight.exit_status else "has come to the end of its script"
    if flight.exit_status is None:
        how = f"is gone (process {flight.process} has ended)"
    after = f"after its call {flight.calls}, {flight.call}" if flight.calls else "before its first call"
    return f"rank {flight.rank} {how}, {after}"


def _read_record_head(place: Path) -> FlightRecord | None:
    return read_record(place, whole=False)


def _has_waited_long(flight: FlightRecord) -> bool:
    return 0 < flight.since < time.time() - LATE_SECONDS + EARLY_SECONDS


def _has_unfinished_action(flight: FlightRecord, record_paths: Collection[Path]) -> bool:
    """Return whether the last action that a rank recorded has not ended."""
    for place in record_paths:
        whole = read_record(place)
        if whole is not None and whole.rank == flight.rank:
            return whole.last_action is not None and whole.last_action.end == 0
    return False
