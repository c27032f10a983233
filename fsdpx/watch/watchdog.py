"""The watchdog: a thread that notices when ranks wait in vain, says which ranks wait for which, and ends the job."""

from __future__ import annotations

import math
import os
import platform
import re
import secrets
import signal
import sys
import tempfile
import threading
import time
import traceback
import weakref
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import suppress
from os import _exit  # the original, before leaving.py wraps it to report exits that others wait behind
from pathlib import Path
from types import FrameType
from typing import Any

from fsdpx import environment, files
from fsdpx.comm.guarded import grouped
from fsdpx.comm.mesh import Axes
from fsdpx.comm.start import clear
from fsdpx.comm.steps import Progress, progress_of, spin
from fsdpx.watch.flight import LENGTH, FlightRecord, FlightRecorder, log, read, read_all
from fsdpx.watch.leaving import LATE, LEFT, all_gone, all_left, ended, leaving, missed, parted, state_of, status, stays

__all__ = ["HUNG", "Watchdog", "first_word", "note", "overdue", "report", "unwatch", "watch", "watch_axes"]

HUNG = 124
"""Exit status of a job that a watchdog ended, as of timeout(1)."""
PATIENCE = 10.0
"""While a watchdog watches and other ranks move, a single wait may last this many times the timeout."""
FIRST_WORD = 60.0
"""Seconds of a wait after which rank 0 says who waits where, once; the job goes on."""
_PREFIX = "fsdpx-flight-"
_OWN = f"{Path(__file__).parents[1]}{os.sep}"
_PYTHON = (f"{Path(os.__file__).parent}{os.sep}", "<frozen ")

_watchdogs: weakref.WeakKeyDictionary[Any, Watchdog] = weakref.WeakKeyDictionary()


def watch(comm: Any, *also: Any, timeout: float | None = None, patient: bool = True) -> Watchdog | None:
    """The watchdog of this rank on `comm`, begun with the first call. Collective.

    None for a single rank, for thread ranks, which find missing ranks themselves, and with FSDPX_WATCH=0. also:
    communicators made from `comm`. timeout: by default that of `comm` (FSDPX_TIMEOUT); waits on all of these may then
    last PATIENCE times as long, for a rank that waits is not stuck while others move, if patient."""
    base = _base(comm)
    if base.size == 1 or not hasattr(base, "timeout") or not environment.read().watch:
        return None
    watchdog = _watchdogs.get(base)
    token = secrets.token_hex(8) if watchdog is None else ""
    tokens, hosts = zip(*base.all_gather_plain((token, platform.node())), strict=True)  # always: all ranks do the same
    if watchdog is None:
        try:
            watchdog = _watchdogs[base] = Watchdog(
                base, _folder(tokens[0]), timeout, [r for r, host in enumerate(hosts) if host == hosts[base.rank]]
            )
        except OSError as error:
            print(f"fsdpx: rank {base.rank} has no watchdog: {error}", file=sys.stderr, flush=True)
    base.all_gather_plain(None)  # a rank that ended before others had records would pass for the last one
    if watchdog is None:
        return None
    for one in (comm, *also) if patient else ():
        if hasattr(one := _base(one), "wait_up_to"):  # an axis of one rank never waits
            one.wait_up_to(watchdog.timeout * PATIENCE)
    return watchdog


def watch_axes(axes: Axes, timeout: float | None = None) -> FlightRecorder | None:
    """The same for all communicators of a mesh; the record that the engine of this rank keeps."""
    watchdog = watch(axes.world, axes.replica, axes.shard, axes.data, axes.pipe, axes.tensor, timeout=timeout)
    return None if watchdog is None else watchdog.record


def note(comm: Any, call: str) -> None:
    """This rank has come to `call`, which all ranks of `comm` make: said in its record, if it has one already."""
    watchdog = _watchdogs.get(_base(comm))
    if watchdog is not None:
        watchdog.record.call(call)


def unwatch(comm: Any) -> Watchdog | None:
    """Let go of `comm`, which is given up: no rank waits there any more. Its watchdog can still `bury` ranks that died
    before they had let go themselves."""
    comm = _base(comm)
    watchdog = _watchdogs.pop(comm, None)
    if watchdog is not None:
        (watchdog.folder / "alarm").unlink(missing_ok=True)
        watchdog.stop()
        watchdog.bury(comm.lost() if hasattr(comm, "lost") else ())
    return watchdog


class Watchdog:
    """One per rank and communicator. Looks at its rank and at the records of the others; makes no MPI call but abort.

    timeout: seconds without any progress of any rank of this host, after which a rank that waits does so in vain.
    Progress is an action that begins or ends, a wait that ends, a transfer that takes its next step."""

    def __init__(self, comm: Any, folder: Path, timeout: float | None = None, here: Sequence[int] = ()) -> None:
        """here: the ranks of this host."""
        self.folder, self.timeout = folder, float(comm.timeout if timeout is None else timeout)
        self.rank, self.host = comm.rank, platform.node()
        files.folder(folder)
        self.record = FlightRecorder(self._place(self.rank, "flight"), comm.rank, comm.size, self.host, self.ask)
        self.record.thread = threading.get_ident()
        self._comm = weakref.ref(comm)
        self._progress: Progress = progress_of(comm)
        self._every = min(1.0, self.timeout / 20)
        self._stop = threading.Event()
        self._asked = threading.Event()
        self._seen: dict[int, tuple[int, float]] = {}
        self._alarmed = 0.0  # when there was no alarm yet
        self._there: set[int] = set()  # ranks of this host that had a record at the last look
        self._left = -math.inf  # when one of them had none any more
        self._here = [self._place(rank, "flight") for rank in here]
        weak = self._comm
        stays(
            self.record, self._leave, None if getattr(comm, "survives", False) else lambda code: _end_all(weak(), code)
        )
        threading.Thread(target=self._run, name="fsdpx watchdog", daemon=True).start()

    def stop(self) -> None:
        """No rank waits for this one here any more: its files in the folder are removed."""
        if not self._stop.is_set():
            self._stop.set()
            leaving(self.record)
            self._forget(self.rank)
            self.record.remove()

    def _leave(self) -> None:
        """The script has come to its end. The folder is removed with the last rank of this host: until then others may
        find that they wait for a rank that has left."""
        self._stop.set()
        self.record.leave(status())
        while getattr(self._comm(), "survives", False) and not all_gone(self._here):
            time.sleep(0.02)  # MPI may finalize without waiting: ranks that miss this one have time to find it here
        if all_left(self._here):
            files.remove(self.folder)

    def bury(self, dead: Iterable[int]) -> None:
        """Remove the files of dead ranks, and the folder with the last record; `fsdpx run` reads them first."""
        if environment.read().run is None:
            for rank in dead:
                self._forget(rank)
            with suppress(OSError):  # others are still there
                self.folder.rmdir()

    def ask(self) -> None:
        """Have the report made now, and wait a moment for the end of the job: this rank's wait has failed."""
        self._asked.set()
        self._stop.wait(2 * self.timeout if self.timeout < 5 else 10.0)

    # -- the thread --------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        token: Any = None
        since, spoken = time.perf_counter(), 0.0
        while not self._stop.wait(self._every):
            if self._comm() is None:
                return  # no rank to wait for; the record stays, for this may be the end of a failed script
            waiting = waiting_in(self.record.thread)
            now = (self.record.serial, self.record.ended, waiting and waiting[0], _moving(self._progress))
            if not _same(now, token):  # what is waited for is compared itself: a number of it could be used again
                token, since = now, time.perf_counter()
            still = time.perf_counter() - since
            waited = still if waiting else 0.0
            what = waiting[1] if waiting else _stands(self.record.thread, time.time() - still)
            self.record.note(since if waiting else 0.0, what)
            self.record.beat(self._asked.is_set() or waited >= self.timeout)
            comm = self._comm()
            if not self.folder.exists() and not getattr(comm, "survives", False):
                self._follow()
            others = [place for place in self._here if place != self._place(self.rank, "flight")]
            left = missed(self.record, waited, others, comm is not None and len(self._here) == comm.size)
            if left is not None:
                self._miss(left, waiting[1] if waiting else "")
            if waited >= LATE and not getattr(comm, "survives", False) and (calls := parted(self._here)):
                self._part(calls)
            if self.rank == 0 and still >= FIRST_WORD < self.timeout:
                spoken = self._say(spoken)
            if waited >= self.timeout or self._asked.is_set() or (self.folder / "alarm").exists():
                with suppress(OSError):  # the folder goes when another rank has reported
                    self._look()
            else:
                self._alarmed = time.monotonic()

    def _say(self, last: float) -> float:
        """Say who waits where, if a wait that began after `last` lasts long; when that was said last."""
        now, heads = time.time(), [read(place, whole=False) for place in self._here]
        if not overdue([flight for flight in heads if flight is not None], last, now):
            return last
        comm, flights = self._comm(), read_all(self.folder)
        sys.stderr.write(first_word(flights, len(flights) if comm is None else comm.size, self.timeout, now, self.host))
        sys.stderr.flush()
        return now

    def _look(self) -> None:
        """Some rank waits in vain, unless ranks still move. The lowest rank that lives reports; one report per job."""
        flights = {r: f for r, f in read_all(self.folder).items() if f.host == self.host}
        now = time.monotonic()
        for rank, flight in flights.items():
            if self._seen.get(rank, (-1, 0.0))[0] != flight.beats:
                self._seen[rank] = (flight.beats, now)
        alarm = self.folder / "alarm"
        if self._there - flights.keys():
            self._left = now
        self._there = set(flights)
        if now - self._left < self.timeout and not self._asked.is_set():
            alarm.unlink(missing_ok=True)  # a rank has ended, or was killed here: others have yet to hear of it
            return
        if not alarm.exists():
            self._alarmed = now
            if self._asked.is_set() or not self._others_move(flights):
                files.mark(alarm)
            return
        self._write_stack()
        alarmed, patience = now - self._alarmed, max(6 * self._every, 0.8)
        if alarmed < patience:
            return  # until then all living ranks have seen it
        awake = {r: f for r, f in flights.items() if r not in self._silent()}
        if alarmed < 5 * patience and not all(self._place(rank, "stack").exists() for rank in awake):
            return  # on a busy machine, not all have written where they stand
        if not any(f.vain for f in awake.values()) or (self._others_move(flights) and not self._asked.is_set()):
            alarm.unlink(missing_ok=True)  # late, but it came
        elif self.rank == min(awake, default=self.rank) and (self._claim() or self._unheard(alarmed, patience)):
            self._end()

    def _silent(self) -> set[int]:
        """Ranks whose watchdogs have stopped."""
        now = time.monotonic()
        return {r for r, (_, when) in self._seen.items() if now - when >= max(4 * self._every, 0.5)}

    def _others_move(self, flights: dict[int, FlightRecord]) -> bool:
        """Whether any rank of this host did anything within the timeout."""
        now = time.time()
        for flight in flights.values():
            last = flight.last
            done = max(last.begin, last.end) if last else 0.0
            if flight.rank != self.rank and now - max(done, flight.since) < self.timeout:
                return True
        return False

    def _claim(self, what: str = "claimed") -> bool:
        """Whether this rank is the first of its host to do it."""
        with suppress(OSError):  # the folder is gone
            return files.mark(self.folder / what)
        return False

    def _unheard(self, alarmed: float, patience: float) -> bool:
        """Whether this rank reports though another has: on a host that cannot be heard, where hosts share the folder
        and the network between them is cut."""
        return alarmed > 7 * patience and self._claim(f"claimed-{self.host}")

    def _miss(self, left: FlightRecord, what: str) -> None:
        """A rank has ended that others wait for: the job ends, or, where others outlive it, the process does."""
        waits = f"rank {self.rank} waits for it in call {self.record.calls} for {what}"
        if getattr(self._comm(), "survives", False):
            if state_of(left.process) and self._claim(f"rank-{left.rank:05}.missed"):
                sys.stderr.write(f"fsdpx watchdog: {ended(left)}, and {waits}: it counts as dead\n")
                sys.stderr.flush()
                os.kill(left.process, signal.SIGKILL)
        elif self._claim():
            code = left.left or LEFT
            self._abort(code, f"fsdpx watchdog: {ended(left)}, and {waits}: the job ends with status {code}\n")

    def _follow(self) -> None:
        """Another rank of this host has ended the job and removed all records. Where no launcher ends this rank, and
        nothing that it waits for tells it, it ends by itself."""
        if not self._stop.wait(self._every):
            self._abort(LEFT, f"fsdpx watchdog: another rank ended the job, see its report; rank {self.rank} ends\n")

    def _part(self, calls: dict[int, str]) -> None:
        """The ranks wait for each other in different calls, and none of them will come."""
        if self._claim():
            self._abort(
                HUNG,
                f"fsdpx watchdog: ranks wait for each other in different calls: {grouped(calls)}. All ranks make the "
                f"same calls, in the same order: the job ends with status {HUNG}\n",
            )

    def _abort(self, code: int, text: str) -> None:
        """End the job."""
        sys.stdout.flush()
        sys.stderr.write(text)
        sys.stderr.flush()
        if environment.read().run is None:
            _discard(self.folder)
        time.sleep(0.1)  # the launcher forwards output in a process that abort will kill
        _end_all(self._comm(), code)
        _exit(code)

    def _write_stack(self) -> None:
        frame = sys._current_frames().get(self.record.thread)
        text = "".join(traceback.format_stack(frame)) if frame else "the thread has ended\n"
        files.write(self._place(self.rank, "stack"), text)  # the reporting rank reads all of it or nothing

    def _place(self, rank: int, what: str) -> Path:
        return self.folder / f"rank-{rank:05}.{what}"

    def _forget(self, rank: int) -> None:
        for what in ("flight", "stack", "missed"):
            self._place(rank, what).unlink(missing_ok=True)

    def _evict(self, flights: dict[int, FlightRecord], silent: set[int]) -> bool:
        """Where others outlive a rank, those of this host that do not come while others wait for them, stopped or at
        something else, are killed, which the others then see. Whether any was."""
        here = [f for f in flights.values() if f.host == self.host and state_of(f.process)]
        absent = [f for f in here if f.rank in silent or not f.since]
        if not absent or len(absent) == len(here) or not getattr(self._comm(), "survives", False):
            return False
        for flight in absent:
            fate = _fate(flight, self.host) if flight.rank in silent else "does something else"
            sys.stderr.write(
                f"fsdpx watchdog: rank {flight.rank} {fate} and all wait for it since {self.timeout:g} s: it counts as "
                f"dead. It was {flight.where(time.time())}\n"
            )
            self._forget(flight.rank)
            self._seen.pop(flight.rank, None)
        sys.stderr.flush()
        for name in ("alarm", "claimed"):
            (self.folder / name).unlink(missing_ok=True)
        for flight in sorted(absent, key=lambda flight: flight.rank == self.rank):  # this one last, if it is among them
            os.kill(flight.process, signal.SIGKILL)
        return True

    def _end(self) -> None:
        flights = read_all(self.folder)
        comm = self._comm()
        silent = self._silent()
        if self._evict(flights, silent):
            return
        kept = {rank: files.believed(self._place(rank, "stack")) for rank in flights}
        stacks = {rank: text.decode(errors="replace") for rank, text in kept.items() if text is not None}
        ranks = comm.size if comm is not None else len(flights)
        text = report(flights, ranks, silent, stacks, self.timeout, time.time(), self.host)
        path = _keep(self.folder, text + "\n" + log(flights))
        self._abort(HUNG, f"{text}The last {LENGTH} actions of each rank are in {path}\n")


def _end_all(comm: Any, code: int) -> None:
    if comm is not None:
        comm.abort(code)


def _discard(folder: Path) -> None:
    """Others may still be writing into it: under another name they do not find it."""
    gone = folder.with_name(f"{folder.name}.gone")
    with suppress(OSError):
        folder.rename(gone)
    for _ in range(10):
        files.remove(gone)
        if not gone.exists():
            return
        time.sleep(0.02)


def overdue(flights: Collection[FlightRecord], last: float, now: float) -> bool:
    """Whether a wait has lasted for FIRST_WORD seconds, and all waits began after the last word, at `last`."""
    begun = min((flight.since for flight in flights if flight.since and flight.left is None), default=math.inf)
    return last < begun <= now - FIRST_WORD


def first_word(flights: dict[int, FlightRecord], ranks: int, timeout: float, now: float, host: str) -> str:
    """Which ranks wait for which tensor, in which call, and where the others stand; arguments as of `report`. It may
    be a healthy job, in which a rank compiles or reads for long."""
    alike: dict[str, list[int]] = {}
    for rank in range(ranks):
        flight = flights.get(rank)
        if flight is None:
            text = f"no record on {host} (ended, or on another host)"
        elif flight.left is not None or (flight.host == host and state_of(flight.process) in ("", "T")):
            text = _fate(flight, host)
        elif flight.since:
            text = f"waiting {_waits(flight)}" + (f", in call {flight.calls}, {flight.call}" if flight.calls else "")
        elif flight.what and (flight.last is None or flight.last.end):
            text = flight.what
        else:
            text = flight.where(now) + (f", {flight.what}" if flight.what else "")
        alike.setdefault(text, []).append(rank)
    head = f"fsdpx watchdog: still waiting after {FIRST_WORD:g} s; the job goes on, and ends if nothing moves for "
    return "\n  ".join([f"{head}{timeout:g} s", *(f"{_named(group)}: {text}" for text, group in alike.items())]) + "\n"


def report(
    flights: dict[int, FlightRecord],
    ranks: int,
    silent: set[int],
    stacks: dict[int, str],
    timeout: float,
    now: float,
    host: str,
) -> str:
    """Which ranks wait in which action for which tensor, and which are elsewhere. Times in seconds; now: since 1970.
    silent: ranks whose watchdogs have stopped. stacks: of the others, as text."""
    lines = [f"fsdpx watchdog: no rank has made progress for {timeout:g} s; the job ends with status {HUNG}"]
    waiting: dict[str, list[FlightRecord]] = {}
    for flight in flights.values():
        if flight.since and flight.rank not in silent:
            waiting.setdefault(_waits(flight), []).append(flight)
    for what, group in waiting.items():
        longest = max(now - flight.since for flight in group)
        verb = "wait" if len(group) > 1 else "waits"
        lines.append(f"  {_named([f.rank for f in group])} {verb} {what}, for {longest:.1f} s")
    for flight in flights.values():
        if flight.rank in silent:
            lines.append(f"  rank {flight.rank} {_fate(flight, host)}; it was {flight.where(now)}")
        elif not flight.since:
            lines.append(f"  rank {flight.rank} is {flight.where(now)}; it stands at")
            lines += ["      " + line for line in stacks.get(flight.rank, "no stack\n").splitlines()[-12:]]
    missing = [rank for rank in range(ranks) if rank not in flights]
    if missing:
        lines.append(f"  {_named(missing)}: no record on {host} (ended, or on another host)")
    return "\n".join(lines) + "\n"


def _waits(flight: FlightRecord) -> str:
    what = re.sub(r" on rank \d+ of \d+$", "", flight.what)
    last = flight.last
    if last is None or last.end:
        return f"outside any action for {what}"
    return f"in action {last.action} for {what}"


def _fate(flight: FlightRecord, host: str) -> str:
    if flight.host != host:
        return f"on {flight.host} says nothing any more"
    if flight.left is not None:
        return "has come to the end of its script"
    state = state_of(flight.process)
    if state == "":
        return f"is gone (process {flight.process} has ended)"
    if state == "T":
        return f"is stopped (process {flight.process} got SIGSTOP)"
    return f"does not answer (process {flight.process} is in native code that lets no other thread run)"


def waiting_in(thread: int) -> tuple[Any, str] | None:
    """The object that a thread waits for at this moment, and its description, if it is inside a wait of fsdpx."""
    for frame in _frames(sys._current_frames().get(thread)):
        if frame.f_code is spin.__code__ and frame.f_back is not None:
            waits = frame.f_back.f_locals.get("self")
            has_text = type(waits).__str__ is not object.__str__
            return waits, str(waits) if has_text else f"{type(waits).__name__}.{frame.f_back.f_code.co_name}"
    return None


def _stands(thread: int, since: float) -> str:
    """The line of the user's script that a thread is at; "" if there is none. since: when it last made progress."""
    side = "outside of"
    for frame in _frames(sys._current_frames().get(thread)):
        file = frame.f_code.co_filename
        if file.startswith(_OWN):
            side = "in"
        elif not file.startswith(_PYTHON) and f"-packages{os.sep}" not in file:
            clock = time.strftime("%H:%M:%S", time.localtime(since))
            return f"{side} fsdpx, at {file[-150:]}:{frame.f_lineno} (no progress since {clock})"
    return ""


def _frames(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back


def _moving(progress: Progress) -> tuple[Any, ...]:
    """Changes when a transfer under way takes a step."""
    return tuple((id(getattr(h, "_current", h)), getattr(h, "_stage", 0)) for h in tuple(progress.pending))


def _same(a: Any, b: Any) -> bool:
    return b is not None and a[2] is b[2] and (a[0], a[1], a[3]) == (b[0], b[1], b[3])


def _base(comm: Any) -> Any:
    """The communicator inside its counting or guarding wrappers."""
    while hasattr(comm, "comm"):
        comm = comm.comm
    return comm


def _named(ranks: list[int]) -> str:
    """ "rank 3" or "ranks 0-2, 5"."""
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    words = ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)
    return f"rank{'s' if len(ranks) > 1 else ''} {words}"


def _folder(token: str) -> Path:
    run = environment.read().run
    if run is not None:
        return run / f"flight-{token}"
    temporary = Path(tempfile.gettempdir())
    clear(temporary.glob(_PREFIX + "*"), _abandoned)
    return temporary / (_PREFIX + token)


def _abandoned(folder: Path) -> bool:
    """Whether the ranks that have left records in `folder` were all of this host and are no more."""
    flights, here = read_all(folder).values(), platform.node()
    return bool(flights) and all(f.host == here and state_of(f.process) == "" for f in flights)


def _keep(folder: Path, text: str) -> Path:
    """The file with all records: in FSDPX_RUN, else where the job was started, else with other temporary files."""
    run = environment.read().run
    places = [run] if run is not None else [Path.cwd(), Path(tempfile.gettempdir())]
    for place in places:
        path = place / f"{folder.name.replace('flight-', 'flight-of-') if run is None else folder.name}.txt"
        with suppress(OSError):
            files.write(path, text, files.READABLE)
            return path.absolute()
    return Path(os.devnull)
