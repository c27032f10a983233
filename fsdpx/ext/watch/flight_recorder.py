"""The flight recorder: keeps a rank's last actions in a file that other processes can still read when the rank is dead
or stopped."""

from __future__ import annotations

import mmap
import os
import struct
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fsdpx.core.base import safe_files
from fsdpx.core.base.dataclass import dataclass
from fsdpx.core.engine.observer import Observer
from fsdpx.errors import CommTimeout

if TYPE_CHECKING:  # the launcher only reads records, so it need not import the engine
    from fsdpx.core.engine.operations import ExecutableAction
    from fsdpx.core.program import Program
    from fsdpx.core.state.train_state import TrainState

__all__ = [
    "MAX_ACTIONS", "FlightAction", "FlightRecord", "FlightRecorder", "encode_truncated_utf8", "format_records",
    "read_all_records", "read_record",
]  # fmt: skip

MAX_ACTIONS = 512
"""Maximum number of actions that a record holds; older ones are overwritten."""

_MAGIC = b"fsdpx f2"
_HEADER = struct.Struct("<8sqqqd64s")  # fields: magic, rank, ranks, process id, wall clock minus perf_counter, host
_PROGRAM = struct.Struct("<q24s")  # fields: step, kind of program
_BEAT = struct.Struct("<d")  # field: time (perf_counter) at which the watchdog last polled
# fields: start of the wait (0: not waiting), time of the last progress, what the rank waits for (if not waiting: its
# script line and stack)
_NOTE = struct.Struct("<dd3056s")
_CALL = struct.Struct("<q56s56s")  # fields: number of collective calls, names of the last two calls
_LEFT = struct.Struct("<qq")  # fields: whether the script has ended, exit status
_PROGRAM_AT, _BEAT_AT, _CALL_AT, _LEFT_AT, _NOTE_AT, _START = 128, 192, 512, 640, 1024, 4096
_RECORD = struct.Struct("<qdd112s120s")  # fields: number, start, end (0: not ended), action, what it waits for
_END = struct.Struct("<d")
_END_AT = 16
_WAITS = struct.Struct("<120s")
_WAITS_AT = 136
_SIZE = _START + MAX_ACTIONS * _RECORD.size


@lru_cache(maxsize=4096)
def encode_truncated_utf8(text: str, width: int = 112) -> bytes:
    """Encode `text` as UTF-8, truncated to `width` bytes."""
    return _encode_truncated(text, width)


def _encode_truncated(text: str, width: int) -> bytes:
    return text.encode(errors="replace")[:width].decode(errors="ignore").encode()


class FlightRecorder(Observer):
    """Records the actions and waits of one rank in a memory-mapped file. Recording an action takes half a microsecond
    and makes no system calls.

    Attributes
    ----------
    thread : id of the thread that runs the program; the watchdog reads the stack of this thread
    serial : number of actions begun so far
    calls : number of collective calls begun so far
    used_at : time in seconds (`time.perf_counter`) when a collective call or a program last began
    """

    __slots__ = ("_at", "_before", "_buffer", "_path", "calls", "ended", "serial", "thread", "timed_out", "used_at")

    def __init__(
        self, path: Path, rank: int, ranks: int, host: str, timed_out: Callable[[], None] = lambda: None
    ) -> None:
        """Create the record file. `timed_out` is called when a wait of this rank has timed out."""
        self._path, self.timed_out = path, timed_out
        path.unlink(missing_ok=True)
        file = safe_files.create_file(path)
        try:
            os.ftruncate(file, _SIZE)
            self._buffer = mmap.mmap(file, _SIZE)
        finally:
            os.close(file)
        self._at, self.serial, self.ended, self.thread, self.calls = _START, 0, 0, 0, 0
        self._before, self.used_at = b"", 0.0
        clock = time.time() - time.perf_counter()
        _HEADER.pack_into(self._buffer, 0, _MAGIC, rank, ranks, os.getpid(), clock, encode_truncated_utf8(host, 64))

    def on_collective_call(self, call: str) -> None:
        """Record that the collective call named `call` begins."""
        self.calls, self.used_at = self.calls + 1, time.perf_counter()
        kept, before = encode_truncated_utf8(call, 56), self._before
        _CALL.pack_into(self._buffer, _CALL_AT, self.calls, kept, before)
        self._before = kept

    def record_end(self, status: int) -> None:
        """Record that the script has ended, and the status with which the process will exit."""
        _LEFT.pack_into(self._buffer, _LEFT_AT, 1, status)

    def on_program_begin(self, program: Program, state: TrainState) -> None:
        """Record which program (the list of actions of a step) begins, and at which step."""
        self.thread, self.used_at = threading.get_ident(), time.perf_counter()
        _PROGRAM.pack_into(self._buffer, _PROGRAM_AT, state.steps, encode_truncated_utf8(program.kind, 24))

    def on_action_begin(self, action: str, now: float) -> None:
        """Record that an action begins at time `now`, in seconds, as read from `time.perf_counter`."""
        self.serial = number = self.serial + 1
        self._at = at = _START + number % MAX_ACTIONS * 256
        _RECORD.pack_into(self._buffer, at, number, now, 0.0, encode_truncated_utf8(action), b"")

    def on_wait(self, what: str) -> None:
        """Record what the current action is waiting for."""
        _WAITS.pack_into(self._buffer, self._at + _WAITS_AT, encode_truncated_utf8(what))

    def on_action_end(
        self, planned: ExecutableAction, begin: float, ready: float, end: float, nbytes: int, values: Sequence[Any]
    ) -> None:
        """Record when the current action ended."""
        self.ended = self.serial
        _END.pack_into(self._buffer, self._at + _END_AT, end)

    def on_action_failed(self, words: str, error: Exception) -> None:
        """If an action failed because a wait timed out, call `timed_out`. `words` describes the action."""
        if isinstance(error, CommTimeout):
            self.timed_out()

    def record_heartbeat(self, now: float) -> None:
        """Record that the watchdog of this rank is alive at time `now`, in seconds, as read from `time.perf_counter`.
        """
        _BEAT.pack_into(self._buffer, _BEAT_AT, now)

    def record_current_wait(self, since: float, what: str, moved: float = 0.0) -> None:
        """Record what this rank is now waiting for, inside or outside of an action.

        `since` is the time when the wait began. If the rank is not waiting, `since` is 0, and `what` is the current
        line of the script, followed by the stack. `moved` is the time of the rank's last progress."""
        _NOTE.pack_into(self._buffer, _NOTE_AT, since, moved, _encode_truncated(what, 3056))

    def remove_file(self) -> None:
        """Remove this rank's record after a normal end. The last rank also removes the folder."""
        self._path.unlink(missing_ok=True)
        with suppress(OSError):  # the folder cannot be removed while other ranks have records in it
            self._path.parent.rmdir()


assert _RECORD.size == 256


@dataclass(frozen=True)
class FlightAction:
    """An action in a flight record.

    Attributes
    ----------
    number : number of the action, counted from the start of the rank
    begin, end : times in seconds since 1970; end is 0 if the action had not ended
    action : the action as text
    waits : what the action waited for, or ""
    """

    number: int
    begin: float
    end: float
    action: str
    waits: str


@dataclass(frozen=True)
class FlightRecord:
    """The contents of a rank's flight record. Times are in seconds since 1970, or 0 if unknown.

    Attributes
    ----------
    rank, ranks, process, host : the rank, the number of ranks, and the rank's process id and host name
    step, program : number of the step, and kind of the program that ran last
    beat : time at which the watchdog of the rank last polled
    moved : time at which the watchdog last saw the rank make progress
    since : time at which the current wait began; 0 if the rank is not waiting
    what : what the rank is waiting for or, if it is not waiting, the current line of its script, followed by the stack
    calls : number of collective calls begun
    call, before : name of the last collective call, and name of the call before it
    exit_status : the exit status if the script has ended, else None
    entries : the last actions, oldest first
    """

    rank: int
    ranks: int
    process: int
    host: str
    step: int
    program: str
    beat: float
    moved: float
    since: float
    what: str
    calls: int
    call: str
    before: str
    exit_status: int | None
    entries: tuple[FlightAction, ...]

    @property
    def last_action(self) -> FlightAction | None:
        return self.entries[-1] if self.entries else None

    def describe_latest_action(self, now: float) -> str:
        """Return a description of the current or last action of the rank. `now` is in seconds since 1970."""
        last = self.last_action
        if last is None:
            return "outside any action, before the first"
        if last.end == 0:
            waits = f", needs {last.waits}" if last.waits else ""
            return f"in action {last.action}{waits}, for {now - last.begin:.1f} s"
        return f"outside any action for {now - last.end:.1f} s, after {last.action}"


def read_record(path: Path, whole: bool = True) -> FlightRecord | None:
    """Read a flight record from a file. Return None if the file is incomplete or does not belong to this user.

    If `whole` is False, the list of actions is not read, and `entries` is empty."""
    size = _SIZE if whole else _START
    try:
        with safe_files.open_file(path, _SIZE) as file:
            data = file.read(size)
    except safe_files.Untrusted as error:
        safe_files.warn_file_ignored(error)
        return None
    except OSError:
        return None
    if len(data) != size or not data.startswith(_MAGIC):
        return None
    _, rank, ranks, process, clock, host = _HEADER.unpack_from(data)
    step, kind = _PROGRAM.unpack_from(data, _PROGRAM_AT)
    (beat,), (since, moved, what) = _BEAT.unpack_from(data, _BEAT_AT), _NOTE.unpack_from(data, _NOTE_AT)
    beat, moved, since = (when and when + clock for when in (beat, moved, since))
    calls, call, before = _CALL.unpack_from(data, _CALL_AT)
    left, status = _LEFT.unpack_from(data, _LEFT_AT)
    entries = tuple(sorted(_iterate_actions(data, clock), key=lambda entry: entry.number)) if whole else ()
    return FlightRecord(
        rank, ranks, process, _decode_text(host), step, _decode_text(kind), beat, moved, since, _decode_text(what),
        calls, _decode_text(call), _decode_text(before), status if left else None, entries,
    )  # fmt: skip


def read_all_records(folder: Path) -> dict[int, FlightRecord]:
    """Return all flight records in a folder, as a dict keyed by rank."""
    found = (read_record(path) for path in sorted(folder.glob("rank-*.flight")))
    return {flight.rank: flight for flight in found if flight is not None}


def format_records(flights: dict[int, FlightRecord]) -> str:
    """Return flight records as text, with a heading for each rank, and one line for each action: its start (in seconds
    since 1970), duration and name."""
    lines = []
    for flight in flights.values():
        head = f"rank {flight.rank} of {flight.ranks}, process {flight.process} on {flight.host}"
        lines.append(f"{head}, step {flight.step}, program {flight.program or '-'}")
        if flight.since:
            lines.append(f"  waits for {flight.what} since {flight.since:.6f}")
        for e in flight.entries:
            took = f"{1e3 * (e.end - e.begin):12.3f} ms" if e.end else "      under way"
            lines.append(f"  {e.begin:.6f} {took}  {e.action}" + (f"  needs {e.waits}" if e.waits else ""))
    return "\n".join(lines) + "\n"


def _iterate_actions(data: bytes, clock: float) -> Iterator[FlightAction]:
    for place in range(MAX_ACTIONS):
        number, begin, end, action, waits = _RECORD.unpack_from(data, _START + place * _RECORD.size)
        if number:
            yield FlightAction(
                number, begin + clock, end + clock if end else 0.0, _decode_text(action), _decode_text(waits)
            )


def _decode_text(data: bytes) -> str:
    return data.rstrip(b"\0").decode(errors="replace")
