"""The watchdog: a thread that detects hangs, reports which ranks are waiting for which other ranks, and ends the job.
"""

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
from os import _exit  # the original os._exit, which rank_exits.py replaces
from pathlib import Path
from typing import Any

from fsdpx.core.base import environment, safe_files
from fsdpx.core.base.messages import flush_and_write_stderr
from fsdpx.core.comm.calls import get_thread_stack_frames, long_waits
from fsdpx.core.comm.communicator import unwrap_communicator
from fsdpx.core.comm.desync_check import format_calls_by_rank
from fsdpx.core.comm.mpi.start import remove_dead_folders
from fsdpx.ext.watch import report
from fsdpx.ext.watch.flight_recorder import (
    MAX_ACTIONS,
    FlightRecord,
    FlightRecorder,
    format_records,
    read_all_records,
    read_record,
)
from fsdpx.ext.watch.rank_exits import (
    EARLY_SECONDS,
    LATE_SECONDS,
    RANK_EXITED,
    describe_rank_end,
    find_awaited_ended_rank,
    find_diverged_calls,
    get_process_state,
    get_sys_exit_status,
    have_all_ranks_ended,
    have_all_scripts_ended,
    register_exit_report,
    unregister_exit_report,
)
from fsdpx.ext.watch.report import HUNG_STATUS

__all__ = ["HUNG_STATUS", "Watchdog", "start_watchdog"]

WAIT_FACTOR = 10.0
"""While a watchdog runs, a single wait may take this many times the timeout, as long as other ranks make progress."""
SILENT_SECONDS = 0.5
"""A watchdog counts as stopped if it has not polled for this time or for four poll intervals, whichever is longer."""
UNHEARD_SECONDS = 3.0
"""Ranks take turns to report why the job ends, and to end it. If a rank has not ended the job within this time, it is
the next rank's turn."""
MAX_STACK_LINES = 12
"""Maximum number of lines of a stack that are recorded."""
_running: list[Watchdog] = []
"""The watchdogs of this process, one for each communicator that is watched."""
_PREFIX = "fsdpx-flight-"
_OWN = f"{Path(__file__).parents[2]}{os.sep}"
_PYTHON = (f"{Path(os.__file__).parent}{os.sep}", "<frozen ")


def start_watchdog(
    comm: Any, *other_comms: Any, timeout: float | None = None, extend_waits: bool = True
) -> Watchdog | None:
    """Start the watchdog of this rank on `comm`, and return it. If one is already running, return that one; if the
    flight record cannot be created, return None. Collective.

    `other_comms` are communicators made from `comm`. `timeout` defaults to the timeout of `comm` (FSDPX_TIMEOUT). With
    `extend_waits`, a wait on any of these communicators may take WAIT_FACTOR times as long from now on, because a
    waiting rank is not stuck as long as other ranks make progress."""
    base = unwrap_communicator(comm)
    watchdog: Watchdog | None = base.watched_by
    token = secrets.token_hex(8) if watchdog is None else ""
    mine = (token, platform.node(), str(environment.read_environment().run or ""))
    tokens, hosts, runs = zip(
        *base.all_gather_value(mine), strict=True
    )  # all ranks must take part in this all-gather, even those that already have a watchdog
    if watchdog is None:
        try:
            here = [rank for rank, host in enumerate(hosts) if host == hosts[base.rank]]
            number = list(dict.fromkeys(hosts)).index(hosts[base.rank])
            watchdog = base.watched_by = Watchdog(
                base, _choose_record_folder_and_remove_dead_ones(tokens[0], runs[here[0]]), timeout, here, number
            )
        except OSError as error:
            print(f"fsdpx: rank {base.rank} has no watchdog: {error}", file=sys.stderr, flush=True)
    # wait for all records; otherwise, a rank that ends early would think it is the last and remove the folder
    base.all_gather_value(None)
    if watchdog is None:
        return None
    for one in (comm, *other_comms) if extend_waits else ():
        # the communicator of an axis with one rank never waits, so it has no timeout to extend
        if hasattr(one := unwrap_communicator(one), "set_timeout"):
            one.set_timeout(watchdog.timeout * WAIT_FACTOR)
    return watchdog


class Watchdog:
    """The watchdog of one rank on one communicator. It polls the flight records of the ranks on its host. The only MPI
    function that it calls is abort.

    A waiting rank counts as hung if no rank on its host has made progress for `timeout` seconds. Progress means that an
    action or a wait begins or ends. The lowest waiting rank reports why the job ends. If that rank does not report, the
    next waiting rank reports instead, and so on."""

    def __init__(
        self, comm: Any, folder: Path, timeout: float | None = None, here: Sequence[int] = (), number: int = 0
    ) -> None:
        """Create the flight record of this rank, and start the watchdog thread.

        `here` are the ranks on this host, and `number` is the index of this host in the job."""
        self.folder, self.timeout = folder, float(comm.timeout if timeout is None else timeout)
        self.rank, self.host = comm.rank, platform.node()
        safe_files.make_folder(folder)
        self.record = FlightRecorder(
            self._get_record_path(self.rank), comm.rank, comm.size, self.host, self.request_report_and_wait
        )
        self.record.thread = threading.get_ident()
        self._comm = weakref.ref(comm)
        self._poll_seconds = min(1.0, self.timeout / 20)
        self._stop, self._report_requested = threading.Event(), threading.Event()
        self._local_record_paths, self._host_number = [self._get_record_path(rank) for rank in here], number
        self._recorded_ranks: set[int] = set()
        self._record_gone_at = -math.inf
        self._hung_since = math.inf
        weak, outlived = self._comm, getattr(comm, "survives", False)
        register_exit_report(
            self.record,
            self.rank,
            self._record_script_end_and_clean_up,
            None if outlived else lambda code: _abort_all_ranks(weak(), code),
        )
        threading.Thread(target=self._run_watch_loop, name="fsdpx watchdog", daemon=True).start()

    def stop_watching_and_remove_records_of_dead(self, comm: Any) -> None:
        """Stop watching a communicator on which no rank is waiting anymore, and remove the flight records that dead
        ranks left behind.

        If further ranks die later, call `remove_dead_records` to remove their records."""
        self.stop_watching_and_remove_own_record()
        self.remove_dead_records(comm.get_failed_ranks() if hasattr(comm, "get_failed_ranks") else ())

    def stop_watching_and_remove_own_record(self) -> None:
        """Stop watching, and remove this rank's flight record, because no other rank will wait for it on this
        communicator."""
        if not self._stop.is_set():
            self._stop.set()
            unregister_exit_report(self.record)
            self.record.remove_file()

    def _record_script_end_and_clean_up(self) -> None:
        """Record that the script has ended. The last rank on this host also removes the folder of flight records.

        The folder must remain until then, because ranks that wait for this rank learn from it that this rank has
        ended."""
        self._stop.set()
        self.record.record_end(get_sys_exit_status())
        while self._can_others_survive() and not have_all_ranks_ended(self._local_record_paths):
            # keep this process alive until the ranks that wait for it have read its record and ended; MPI_Finalize may
            # not wait for them
            time.sleep(0.02)
        if have_all_scripts_ended(self._local_record_paths):
            safe_files.remove_user_owned_folder(self.folder)

    def remove_dead_records(self, dead: Iterable[int]) -> None:
        """Remove the flight records of dead ranks, and the folder if it is then empty. Do nothing under `fsdpx run`,
        which still has to read the records."""
        if environment.read_environment().run is None:
            for rank in dead:
                self._get_record_path(rank).unlink(missing_ok=True)
            with suppress(OSError):  # the folder cannot be removed while other ranks have records in it
                self.folder.rmdir()

    def request_report_and_wait(self) -> None:
        """Request a report immediately, because a wait failed, and give the watchdog a few seconds to end the job."""
        self._report_requested.set()
        self._stop.wait(2 * self.timeout if self.timeout < 5 else 10.0)

    def _can_others_survive(self) -> bool:
        """Return whether the other ranks can continue when a rank dies, as in elastic training."""
        return bool(getattr(self._comm(), "survives", False))

    def _get_record_path(self, rank: int) -> Path:
        return self.folder / f"rank-{rank:05}.flight"

    def _run_watch_loop(self) -> None:
        _running.append(self)
        try:
            self._poll_until_stopped()
        finally:
            _running.remove(self)

    def _poll_until_stopped(self) -> None:
        before: Any = None
        since, spoken, what = time.perf_counter(), 0.0, ""
        while not self._stop.wait(self._poll_seconds):
            if self._comm() is None:
                return  # keep the record, because the script may have failed
            wait, asked = long_waits.get(self.record.thread), self._report_requested.is_set()
            progress = (self.record.serial, self.record.ended, wait)
            # once a report is requested, the note on the last wait is no longer replaced, because the report needs it
            if progress != before and not asked:
                before, since, what = progress, time.perf_counter(), "" if wait is None else str(wait)
                self._hung_since = math.inf
            now = time.perf_counter()
            still_seconds = now - since
            self.record.record_heartbeat(now)
            self.record.record_current_wait(
                since if what else 0.0, what or self._describe_script_line_and_stack(still_seconds), since
            )
            if not self.folder.exists() and not self._can_others_survive():
                self._end_rank_after_job_end()
            if self.rank == 0 and still_seconds >= report.FIRST_REPORT_SECONDS < self.timeout:
                spoken = self._report_if_overdue(spoken)
            if what and (still_seconds >= min(EARLY_SECONDS, self.timeout / 2) or asked):
                self._end_job_if_hung(still_seconds, what)

    def _describe_script_line_and_stack(self, still_seconds: float) -> str:
        """Return a description of the line of the script where this rank has been for `still_seconds`, with the stack.
        Return "" if the rank is making progress."""
        if still_seconds < 2 * self._poll_seconds:
            return ""
        frames = reversed(get_thread_stack_frames(self.record.thread))
        stack = "".join(traceback.StackSummary.extract(frames).format()) or "  the thread has ended"
        return "\n".join(
            [
                describe_script_line(self.record.thread, time.time() - still_seconds),
                *stack.splitlines()[-MAX_STACK_LINES:],
            ]
        )

    def _report_if_overdue(self, last: float) -> float:
        """Print which ranks are waiting where, if a wait is overdue and began after the last report (at time `last`).
        Print nothing if another watchdog of this process knows more about the wait and reports it. Return the time of
        the newest report."""
        now, first = time.time(), report.FIRST_REPORT_SECONDS
        better = [one for one in self._list_better_informed_watchdogs() if one.rank == 0 and first < one.timeout]
        grace = 2 * self._poll_seconds if better else 0.0  # let watchdogs that know more poll and report first
        if not self._is_wait_overdue(last, now - grace) or any(one._is_wait_overdue(0.0, now) for one in better):
            return last
        comm, flights = self._comm(), read_all_records(self.folder)
        ranks = len(flights) if comm is None else comm.size
        flush_and_write_stderr(report.format_long_wait_report(flights, ranks, self.timeout, now, self.host))
        return now

    def _is_wait_overdue(self, last: float, now: float) -> bool:
        heads = [read_record(place, whole=False) for place in self._local_record_paths]
        return report.is_wait_report_due([flight for flight in heads if flight is not None], last, now)

    def _list_better_informed_watchdogs(self) -> list[Watchdog]:
        """Return the other watchdogs of this process whose communicators the watched thread has used more recently than
        this watchdog's communicator. Those watchdogs know more about the thread's current wait, so they report the
        wait."""
        own = self.record
        return [one for one in [*_running] if one.record.thread == own.thread and one.record.used_at > own.used_at]

    def _end_job_if_hung(self, waited_seconds: float, what: str) -> None:
        """End the job if the call `what`, for which this rank has waited `waited_seconds`, can no longer complete."""
        flights = {
            flight.rank: flight
            for place in self._local_record_paths
            if (flight := read_record(place, whole=False)) is not None
        }
        now, comm = time.perf_counter(), self._comm()
        if self._recorded_ranks - flights.keys():
            self._record_gone_at = now
        self._recorded_ranks = set(flights)
        others = [place for place in self._local_record_paths if place != self._get_record_path(self.rank)]
        gone = find_awaited_ended_rank(
            self.record, waited_seconds, others, comm is not None and len(self._local_record_paths) == comm.size
        )
        if gone is not None and self._can_others_survive() and not get_process_state(gone.process):
            gone = None  # no report is needed, because MPI itself tells waiting ranks that a rank is dead
        calls = (
            find_diverged_calls(self._local_record_paths)
            if waited_seconds >= LATE_SECONDS and not self._can_others_survive()
            else {}
        )
        hung = self._is_this_rank_hung(flights, waited_seconds)
        if gone is None and not calls and not hung:
            self._hung_since = math.inf
            return
        self._hung_since = min(self._hung_since, now)
        lower = sum(f.rank < self.rank and f.since > 0 and not self._is_watchdog_silent(f) for f in flights.values())
        turn = UNHEARD_SECONDS * min(lower if gone or calls else lower + self._host_number, 4)
        if better := self._list_better_informed_watchdogs():
            turn += 2 * self._poll_seconds if all(one._hung_since == math.inf for one in better) else UNHEARD_SECONDS
        if now - self._hung_since < turn:
            return
        if gone is not None:
            self._end_job_or_kill_ended_rank(gone, what)
        elif calls:
            self._end_job_for_different_calls(calls)
        elif not self._kill_stopped_or_busy_ranks(flights):
            self._report_and_end_job(flights)

    def _is_watchdog_silent(self, flight: FlightRecord) -> bool:
        """Return whether the watchdog of another rank has stopped polling."""
        return flight.rank != self.rank and time.time() - flight.beat >= max(4 * self._poll_seconds, SILENT_SECONDS)

    def _is_this_rank_hung(self, flights: dict[int, FlightRecord], waited_seconds: float) -> bool:
        """Return whether this rank is hung: it has waited for `waited_seconds`, and no rank on this host has made
        progress for the duration of the timeout."""
        if self._report_requested.is_set():
            return True
        if waited_seconds < self.timeout or time.perf_counter() - self._record_gone_at < self.timeout:
            return False  # not yet: a rank on this host has just ended, and other ranks may not have noticed
        late = [
            f for f in flights.values() if self._is_watchdog_silent(f) and get_process_state(f.process) not in ("", "T")
        ]
        if late and waited_seconds < self.timeout + max(30 * self._poll_seconds, 4.0):
            return False  # not yet: on a busy host, the watchdog of another rank may poll late
        return all(time.time() - f.moved >= self.timeout for f in flights.values() if f.rank != self.rank)

    def _end_job_or_kill_ended_rank(self, ended: FlightRecord, what: str) -> None:
        """End the job, because a rank that other ranks are waiting for has ended.

        In elastic training, only kill the ended rank's process, if it still exists."""
        waits = f"rank {self.rank} waits for it in call {self.record.calls} for {what}"
        if not self._can_others_survive():
            code = ended.exit_status or RANK_EXITED
            self._print_and_abort_job(
                code, f"fsdpx watchdog: {describe_rank_end(ended)}, and {waits}: the job ends with status {code}\n"
            )
        else:
            flush_and_write_stderr(f"fsdpx watchdog: {describe_rank_end(ended)}, and {waits}: it counts as dead\n")
            os.kill(ended.process, signal.SIGKILL)

    def _end_rank_after_job_end(self) -> None:
        """End this rank, because another rank on this host has ended the job and removed all records.

        This is needed if neither the launcher nor an error in its wait has ended this rank."""
        if not self._stop.wait(self._poll_seconds):
            self._print_and_abort_job(
                RANK_EXITED, f"fsdpx watchdog: another rank ended the job, see its report; rank {self.rank} ends\n"
            )

    def _end_job_for_different_calls(self, calls: dict[int, str]) -> None:
        """End the job, because ranks are waiting for each other in different collective calls, none of which can
        complete."""
        self._print_and_abort_job(
            HUNG_STATUS,
            f"fsdpx watchdog: ranks wait for each other in different calls: {format_calls_by_rank(calls)}. All ranks "
            "make the "
            f"same calls, in the same order: the job ends with status {HUNG_STATUS}\n",
        )

    def _kill_stopped_or_busy_ranks(self, flights: dict[int, FlightRecord]) -> bool:
        """In elastic training, kill ranks on this host that are stopped or busy elsewhere while other ranks wait for
        them.

        The other ranks then notice the deaths, and can recover. Returns whether a rank was killed."""
        here = [f for f in flights.values() if get_process_state(f.process)]
        absent = [f for f in here if self._is_watchdog_silent(f) or not f.since]
        if not absent or len(absent) == len(here) or not self._can_others_survive():
            return False
        for flight in absent:
            fate = (
                report.describe_lost_rank(flight, self.host)
                if self._is_watchdog_silent(flight)
                else "does something else"
            )
            whole = read_record(self._get_record_path(flight.rank)) or flight
            flush_and_write_stderr(
                f"fsdpx watchdog: rank {flight.rank} {fate} and all wait for it since {self.timeout:g} s: it counts as "
                f"dead. It was {whole.describe_latest_action(time.time())}\n"
            )
            self._get_record_path(flight.rank).unlink(missing_ok=True)
            os.kill(flight.process, signal.SIGKILL)
        return True

    def _report_and_end_job(self, flights: dict[int, FlightRecord]) -> None:
        """Print and save a report on the hang, and end the job."""
        silent, comm = {rank for rank, flight in flights.items() if self._is_watchdog_silent(flight)}, self._comm()
        whole = read_all_records(self.folder)
        ranks = len(whole) if comm is None else comm.size
        text = report.format_hang_report(whole, ranks, silent, self.timeout, time.time(), self.host)
        path = _save_report(self.folder, text + "\n" + format_records(whole))
        self._print_and_abort_job(HUNG_STATUS, f"{text}The last {MAX_ACTIONS} actions of each rank are in {path}\n")

    def _print_and_abort_job(self, code: int, text: str) -> None:
        """Print `text`, and end all ranks with status `code`. Other watchdogs of this process then print nothing."""
        for other in [one for one in [*_running] if one is not self]:
            other._stop.set()
        flush_and_write_stderr(text)
        if environment.read_environment().run is None:
            _rename_and_remove_folder(self.folder)
        time.sleep(0.1)  # gives the launcher time to forward the output before abort kills the forwarding process
        _abort_all_ranks(self._comm(), code)
        _exit(code)


def describe_script_line(thread: int, since: float) -> str:
    """Describe the line of the user's script that a thread is executing. Return "" if there is none. `since` is the
    time of the thread's last progress."""
    side = "outside of"
    for frame, line in get_thread_stack_frames(thread):
        file = frame.f_code.co_filename
        if file.startswith(_OWN):
            side = "in"
        elif not file.startswith(_PYTHON) and f"-packages{os.sep}" not in file:
            clock = time.strftime("%H:%M:%S", time.localtime(since))
            return f"{side} fsdpx, at {file[-150:]}:{line} (no progress since {clock})"
    return ""


def _abort_all_ranks(comm: Any, code: int) -> None:
    if comm is not None:
        comm.abort(code)


def _rename_and_remove_folder(folder: Path) -> None:
    """Remove a folder that other ranks may still be writing to. The folder is renamed first, so that the ranks no
    longer find it.
    """
    gone = folder.with_name(f"{folder.name}.gone")
    with suppress(OSError):
        folder.rename(gone)
    for _ in range(10):
        safe_files.remove_user_owned_folder(gone)
        if not gone.exists():
            return
        time.sleep(0.02)


def _choose_record_folder_and_remove_dead_ones(token: str, run: str) -> Path:
    """Return the path of the folder for the flight records of this host's ranks.

    `run` is the value of FSDPX_RUN on the host's first rank. If it is not set, a temporary folder is used, and the
    temporary folders of dead jobs are removed."""
    if run:
        return Path(run) / f"flight-{token}"
    temporary = Path(tempfile.gettempdir())
    remove_dead_folders(temporary.glob(_PREFIX + "*"), _is_folder_abandoned)
    return temporary / (_PREFIX + token)


def _is_folder_abandoned(folder: Path) -> bool:
    """Return whether all ranks with flight records in `folder` ran on this host and have ended."""
    flights, here = read_all_records(folder).values(), platform.node()
    return bool(flights) and all(f.host == here and get_process_state(f.process) == "" for f in flights)


def _save_report(folder: Path, text: str) -> Path:
    """Write the report to the folder that FSDPX_RUN names. If FSDPX_RUN is not set, write it to the working directory
    or, if that fails, to the temporary folder. Return the path of the report."""
    run = environment.read_environment().run
    places = [run] if run is not None else [Path.cwd(), Path(tempfile.gettempdir())]
    for place in places:
        path = place / f"{folder.name.replace('flight-', 'flight-of-') if run is None else folder.name}.txt"
        with suppress(OSError):
            safe_files.write_file(path, text, safe_files.READABLE)
            return path.absolute()
    return Path(os.devnull)
