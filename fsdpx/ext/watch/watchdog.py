"""The watchdog: a thread that notices when ranks wait in vain, says which ranks wait for which, and ends the job."""

from __future__ import annotations

import math
import os
import platform
import secrets
import signal
import sys
import tempfile
import threading
import time
import traceback
import weakref
from collections.abc import Iterable, Sequence
from contextlib import suppress
from os import _exit  # the original, before leaving.py wraps it to report exits that others wait behind
from pathlib import Path
from typing import Any

from fsdpx.core.base import environment, safe_files
from fsdpx.core.base.messages import last_words
from fsdpx.core.comm.calls import frames_of, waits
from fsdpx.core.comm.communicator import unwrapped
from fsdpx.core.comm.desync_check import grouped
from fsdpx.core.comm.mpi.start import clear
from fsdpx.ext.watch import report
from fsdpx.ext.watch.flight_recorder import LENGTH, FlightRecord, FlightRecorder, log, read, read_all
from fsdpx.ext.watch.rank_exits import (
    EARLY,
    LATE,
    LEFT,
    all_gone,
    all_left,
    ended,
    leaving,
    missed,
    parted,
    state_of,
    status,
    stays,
)
from fsdpx.ext.watch.report import HUNG

__all__ = ["HUNG", "Watchdog", "watch"]

PATIENCE = 10.0
"""While a watchdog watches and other ranks move, a single wait may last this many times the timeout."""
SILENT = 0.5
"""Seconds without a look, or four looks if those are more, after which a watchdog has stopped."""
UNHEARD = 3.0
"""Seconds after which another rank says why the job ends, if the one whose turn it was did not end it."""
STACK = 12
"""Lines of a stack that are kept."""
_PREFIX = "fsdpx-flight-"
_OWN = f"{Path(__file__).parents[2]}{os.sep}"
_PYTHON = (f"{Path(os.__file__).parent}{os.sep}", "<frozen ")


def watch(comm: Any, *also: Any, timeout: float | None = None, patient: bool = True) -> Watchdog | None:
    """The watchdog of this rank on `comm`, begun with the first call; None where its record cannot be made. Collective.

    also: communicators made from `comm`. timeout: by default that of `comm` (FSDPX_TIMEOUT); waits on all of these may
    then last PATIENCE times as long, for a rank that waits is not stuck while others move, if patient."""
    base = unwrapped(comm)
    watchdog: Watchdog | None = base.watched_by
    token = secrets.token_hex(8) if watchdog is None else ""
    mine = (token, platform.node(), str(environment.read().run or ""))
    tokens, hosts, runs = zip(*base.all_gather_plain(mine), strict=True)  # always: all ranks do the same
    if watchdog is None:
        try:
            here = [rank for rank, host in enumerate(hosts) if host == hosts[base.rank]]
            number = list(dict.fromkeys(hosts)).index(hosts[base.rank])
            watchdog = base.watched_by = Watchdog(base, _folder(tokens[0], runs[here[0]]), timeout, here, number)
        except OSError as error:
            print(f"fsdpx: rank {base.rank} has no watchdog: {error}", file=sys.stderr, flush=True)
    base.all_gather_plain(None)  # a rank that ended before others had records would pass for the last one
    if watchdog is None:
        return None
    for one in (comm, *also) if patient else ():
        if hasattr(one := unwrapped(one), "wait_up_to"):  # an axis of one rank never waits
            one.wait_up_to(watchdog.timeout * PATIENCE)
    return watchdog


class Watchdog:
    """One per rank and communicator. Looks at its rank and at the records of the others; makes no MPI call but abort.

    timeout: seconds without any progress of any rank of this host, after which a rank that waits does so in vain.
    Progress is an action that begins or ends, or a wait that begins or ends. The lowest rank
    that waits says why the job ends; the others follow one after the other, in case it is not heard."""

    def __init__(
        self, comm: Any, folder: Path, timeout: float | None = None, here: Sequence[int] = (), number: int = 0
    ) -> None:
        """here: the ranks of this host, which is host `number` of those that the ranks are on."""
        self.folder, self.timeout = folder, float(comm.timeout if timeout is None else timeout)
        self.rank, self.host = comm.rank, platform.node()
        safe_files.folder(folder)
        self.record = FlightRecorder(self._place(self.rank), comm.rank, comm.size, self.host, self.ask)
        self.record.thread = threading.get_ident()
        self._comm = weakref.ref(comm)
        self._every = min(1.0, self.timeout / 20)
        self._stop, self._asked = threading.Event(), threading.Event()
        self._here, self._number = [self._place(rank) for rank in here], number
        self._there: set[int] = set()  # ranks of this host that had a record at the last look
        self._fewer = -math.inf  # when one of them had none any more
        self._found = math.inf  # when it was found that this rank waits in vain
        weak, outlived = self._comm, getattr(comm, "survives", False)
        stays(self.record, self.rank, self._leave, None if outlived else lambda code: _end_all(weak(), code))
        threading.Thread(target=self._run, name="fsdpx watchdog", daemon=True).start()

    def let_go(self, comm: Any) -> None:
        """No rank waits on this communicator any more. `bury` is still for ranks that died before they had let go."""
        self.stop()
        self.bury(comm.lost() if hasattr(comm, "lost") else ())

    def stop(self) -> None:
        """No rank waits for this one here any more: its record is removed."""
        if not self._stop.is_set():
            self._stop.set()
            leaving(self.record)
            self.record.remove()

    def _leave(self) -> None:
        """The script has come to its end. The folder is removed with the last rank of this host: until then others may
        find that they wait for a rank that has left."""
        self._stop.set()
        self.record.leave(status())
        while self._outlived() and not all_gone(self._here):
            time.sleep(0.02)  # MPI may finalize without waiting: ranks that miss this one have time to find it here
        if all_left(self._here):
            safe_files.remove(self.folder)

    def bury(self, dead: Iterable[int]) -> None:
        """Remove the records of dead ranks, and the folder with the last one; `fsdpx run` reads them first."""
        if environment.read().run is None:
            for rank in dead:
                self._place(rank).unlink(missing_ok=True)
            with suppress(OSError):  # others are still there
                self.folder.rmdir()

    def ask(self) -> None:
        """Have the report made now, and wait a moment for the end of the job: this rank's wait has failed."""
        self._asked.set()
        self._stop.wait(2 * self.timeout if self.timeout < 5 else 10.0)

    def _outlived(self) -> bool:
        """Whether the other ranks live on when one dies."""
        return bool(getattr(self._comm(), "survives", False))

    def _place(self, rank: int) -> Path:
        return self.folder / f"rank-{rank:05}.flight"

    # -- the thread --------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        before: Any = None
        since, spoken, what = time.perf_counter(), 0.0, ""
        while not self._stop.wait(self._every):
            if self._comm() is None:
                return  # no rank to wait for; the record stays, for this may be the end of a failed script
            wait, asked = waits.get(self.record.thread), self._asked.is_set()
            progress = (self.record.serial, self.record.ended, wait)
            if progress != before and not asked:  # who has asked says what it waited for last
                before, since, what = progress, time.perf_counter(), "" if wait is None else str(wait)
                self._found = math.inf
            now = time.perf_counter()
            still = now - since
            self.record.beat(now)
            self.record.note(since if what else 0.0, what or self._stands(still), since)
            if not self.folder.exists() and not self._outlived():
                self._follow()
            if self.rank == 0 and still >= report.FIRST_WORD < self.timeout:
                spoken = self._say(spoken)
            if what and (still >= min(EARLY, self.timeout / 2) or asked):
                self._judge(still, what)

    def _stands(self, still: float) -> str:
        """The line of the script at which this rank stands since `still` seconds, and its stack; "" if it moves."""
        if still < 2 * self._every:
            return ""
        frames = reversed(frames_of(self.record.thread))
        stack = "".join(traceback.StackSummary.extract(frames).format()) or "  the thread has ended"
        return "\n".join([line_of_script(self.record.thread, time.time() - still), *stack.splitlines()[-STACK:]])

    def _say(self, last: float) -> float:
        """Say who waits where, if a wait that began after `last` lasts long; when that was said last."""
        now, heads = time.time(), [read(place, whole=False) for place in self._here]
        if not report.overdue([flight for flight in heads if flight is not None], last, now):
            return last
        comm, flights = self._comm(), read_all(self.folder)
        ranks = len(flights) if comm is None else comm.size
        last_words(report.first_word(flights, ranks, self.timeout, now, self.host))
        return now

    def _judge(self, waited: float, what: str) -> None:
        """This rank waits since `waited` seconds for `what`: end the job if it does so in vain."""
        flights = {flight.rank: flight for place in self._here if (flight := read(place, whole=False)) is not None}
        now, comm = time.perf_counter(), self._comm()
        if self._there - flights.keys():
            self._fewer = now
        self._there = set(flights)
        others = [place for place in self._here if place != self._place(self.rank)]
        gone = missed(self.record, waited, others, comm is not None and len(self._here) == comm.size)
        if gone is not None and self._outlived() and not state_of(gone.process):
            gone = None  # MPI tells who waits for it
        calls = parted(self._here) if waited >= LATE and not self._outlived() else {}
        hung = self._hangs(flights, waited)
        if gone is None and not calls and not hung:
            self._found = math.inf
            return
        self._found = min(self._found, now)
        lower = sum(f.rank < self.rank and f.since > 0 and not self._silent(f) for f in flights.values())
        if now - self._found < UNHEARD * min(lower if gone or calls else lower + self._number, 4):
            return
        if gone is not None:
            self._miss(gone, what)
        elif calls:
            self._part(calls)
        elif not self._evict(flights):
            self._end(flights)

    def _silent(self, flight: FlightRecord) -> bool:
        """Whether the watchdog of a rank has stopped."""
        return flight.rank != self.rank and time.time() - flight.beat >= max(4 * self._every, SILENT)

    def _hangs(self, flights: dict[int, FlightRecord], waited: float) -> bool:
        """Whether this rank, which waits since `waited` seconds, does so in vain: no rank of this host has moved."""
        if self._asked.is_set():
            return True
        if waited < self.timeout or time.perf_counter() - self._fewer < self.timeout:
            return False  # a rank has ended, or was killed here: others have yet to hear of it
        late = [f for f in flights.values() if self._silent(f) and state_of(f.process) not in ("", "T")]
        if late and waited < self.timeout + max(30 * self._every, 4.0):
            return False  # on a busy machine, a watchdog may come late
        return all(time.time() - f.moved >= self.timeout for f in flights.values() if f.rank != self.rank)

    # -- ends ---------------------------------------------------------------------------------------------------------

    def _miss(self, left: FlightRecord, what: str) -> None:
        """A rank has ended that others wait for: the job ends, or, where others outlive it, the process does."""
        waits = f"rank {self.rank} waits for it in call {self.record.calls} for {what}"
        if not self._outlived():
            code = left.left or LEFT
            self._abort(code, f"fsdpx watchdog: {ended(left)}, and {waits}: the job ends with status {code}\n")
        else:
            last_words(f"fsdpx watchdog: {ended(left)}, and {waits}: it counts as dead\n")
            os.kill(left.process, signal.SIGKILL)

    def _follow(self) -> None:
        """Another rank of this host has ended the job and removed all records. Where no launcher ends this rank, and
        nothing that it waits for tells it, it ends by itself."""
        if not self._stop.wait(self._every):
            self._abort(LEFT, f"fsdpx watchdog: another rank ended the job, see its report; rank {self.rank} ends\n")

    def _part(self, calls: dict[int, str]) -> None:
        """The ranks wait for each other in different calls, and none of them will come."""
        self._abort(
            HUNG,
            f"fsdpx watchdog: ranks wait for each other in different calls: {grouped(calls)}. All ranks make the "
            f"same calls, in the same order: the job ends with status {HUNG}\n",
        )

    def _evict(self, flights: dict[int, FlightRecord]) -> bool:
        """Where others outlive a rank, those of this host that do not come while others wait for them, stopped or at
        something else, are killed, which the others then see. Whether any was."""
        here = [f for f in flights.values() if state_of(f.process)]
        absent = [f for f in here if self._silent(f) or not f.since]
        if not absent or len(absent) == len(here) or not self._outlived():
            return False
        for flight in absent:
            fate = report.fate(flight, self.host) if self._silent(flight) else "does something else"
            whole = read(self._place(flight.rank)) or flight
            last_words(
                f"fsdpx watchdog: rank {flight.rank} {fate} and all wait for it since {self.timeout:g} s: it counts as "
                f"dead. It was {whole.where(time.time())}\n"
            )
            self._place(flight.rank).unlink(missing_ok=True)
            os.kill(flight.process, signal.SIGKILL)
        return True

    def _end(self, flights: dict[int, FlightRecord]) -> None:
        """Report, and end the job."""
        silent, comm = {rank for rank, flight in flights.items() if self._silent(flight)}, self._comm()
        whole = read_all(self.folder)
        ranks = len(whole) if comm is None else comm.size
        text = report.report(whole, ranks, silent, self.timeout, time.time(), self.host)
        path = _keep(self.folder, text + "\n" + log(whole))
        self._abort(HUNG, f"{text}The last {LENGTH} actions of each rank are in {path}\n")

    def _abort(self, code: int, text: str) -> None:
        """End the job."""
        last_words(text)
        if environment.read().run is None:
            _discard(self.folder)
        time.sleep(0.1)  # the launcher forwards output in a process that abort will kill
        _end_all(self._comm(), code)
        _exit(code)


def line_of_script(thread: int, since: float) -> str:
    """The line of the user's script that a thread is at; "" if there is none. since: when it last made progress."""
    side = "outside of"
    for frame, line in frames_of(thread):
        file = frame.f_code.co_filename
        if file.startswith(_OWN):
            side = "in"
        elif not file.startswith(_PYTHON) and f"-packages{os.sep}" not in file:
            clock = time.strftime("%H:%M:%S", time.localtime(since))
            return f"{side} fsdpx, at {file[-150:]}:{line} (no progress since {clock})"
    return ""


def _end_all(comm: Any, code: int) -> None:
    if comm is not None:
        comm.abort(code)


def _discard(folder: Path) -> None:
    """Others may still be writing into it: under another name they do not find it."""
    gone = folder.with_name(f"{folder.name}.gone")
    with suppress(OSError):
        folder.rename(gone)
    for _ in range(10):
        safe_files.remove(gone)
        if not gone.exists():
            return
        time.sleep(0.02)


def _folder(token: str, run: str) -> Path:
    """The folder of all ranks of this host. run: FSDPX_RUN of its first one; those of another launcher have their own.
    """
    if run:
        return Path(run) / f"flight-{token}"
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
            safe_files.write(path, text, safe_files.READABLE)
            return path.absolute()
    return Path(os.devnull)
