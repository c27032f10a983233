"""Determines why an attempt to run a job ended, based on the order in which ranks died and on the records that they
left, and decides whether the job is restarted."""

from __future__ import annotations

import math
import os
import platform
import select
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from itertools import takewhile
from pathlib import Path
from typing import Any, NamedTuple

from fsdpx.core.base.dataclass import dataclass, field
from fsdpx.core.base.messages import format_count, format_ranks
from fsdpx.core.comm.mpi.start import find_waiting_ranks
from fsdpx.ext.watch.flight_recorder import FlightRecord
from fsdpx.ext.watch.preempt import PREEMPTED_STATUS
from fsdpx.ext.watch.rank_exits import RANK_EXITED
from fsdpx.ext.watch.watchdog import HUNG_STATUS
from fsdpx.launch.rank_status import RankStatus, open_and_unlink_lifeline_pipe, read_rank_statuses

__all__ = ["EXIT_CASES", "DeathRecorder", "Evidence", "JobEnding", "RestartPlan", "record_and_decide_restart"]

_MAX_RESTART_DELAY_SECONDS = 60.0
_MAX_WAIT_IN_VAIN_SECONDS = 2.0
"""Seconds that ranks may wait in MPI_Init for a rank that has already ended. After this time, the job is ended."""
_MAX_LAUNCHER_SECONDS = 20.0
"""Seconds that the launcher may take to end after all ranks have ended. After this time, the launcher is killed."""
_DEATH_ERRORS = ("RankLost", "StateLost")
"""Errors that surviving ranks raise when another rank has died."""
_SECONDARY_ERRORS = ("Aborted", "CommError", "CommTimeout", *_DEATH_ERRORS)
"""Errors that a rank raises because another rank has failed."""


class DeathRecorder:
    """Background thread that records the order in which the ranks on this host end. The first rank to end is usually
    the cause, because its end makes the other ranks fail.

    The thread need not be fast, because epoll returns descriptors in the order in which they became ready. For each
    rank, the thread watches a named pipe (the rank's lifeline), which closes before a launcher can learn of the death
    and kill the other ranks. The thread also watches the process descriptor, which becomes ready only later. The
    descriptor is needed because named pipes may be unavailable, or a child of the rank may hold the pipe open.

    Attributes
    ----------
    order : ranks that have ended, in the order in which they ended
    missed : ranks that had ended before they could be watched
    in_vain : event that is set when ranks have waited too long in MPI_Init for a rank that has already ended, or if
        the launcher hangs
    launcher_hangs : whether all ranks ended long ago, but the launcher did not. This is noticed only if all ranks of
        the job are on this host
    """

    def __init__(self, folder: Path, ranks: int) -> None:
        self.order: list[int] = []
        self.missed: list[int] = []
        self.in_vain, self.launcher_hangs = threading.Event(), False
        self._folder, self._ranks, self._host = folder, ranks, platform.node()
        self._stop = threading.Event()
        self._living: dict[int, int] = {}  # maps descriptors of processes and named pipes to ranks
        self._thread = threading.Thread(target=self._watch_ranks, name="fsdpx run", daemon=True)
        if hasattr(os, "pidfd_open") and hasattr(select, "epoll"):
            self._thread.start()

    def close(self) -> None:
        """Stop the background thread, and wait until it has ended."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join()

    def _watch_ranks(self) -> None:
        """Body of the thread: record the order in which the ranks of this host end, until `close` is called."""
        known: set[int] = set()
        since = math.inf  # time at which a rank was first seen waiting for a rank that has ended
        all_ended = math.inf  # time at which all ranks were first seen to have ended
        with select.epoll() as deaths:
            while not self._stop.is_set():
                notes = read_rank_statuses(self._folder) if len(known) < self._ranks and not self.order else {}
                for rank in notes.keys() - known:
                    known.add(rank)
                    if notes[rank].host == self._host:
                        self._start_watching_rank(rank, notes[rank].process, deaths)
                for descriptor, _ in deaths.poll(0.1):
                    deaths.unregister(descriptor)
                    rank = self._living.pop(descriptor)
                    os.close(descriptor)
                    if rank not in self.order:
                        self.order.append(rank)
                now = time.monotonic()
                waiting = (self.order or self.missed) and find_waiting_ranks(self._folder)
                since = min(since, now) if waiting else math.inf
                ended = len(self.order) + len(self.missed) == self._ranks and not self._living
                all_ended = min(all_ended, now) if ended else math.inf
                self.launcher_hangs = now - all_ended >= _MAX_LAUNCHER_SECONDS
                if now - since >= _MAX_WAIT_IN_VAIN_SECONDS or self.launcher_hangs:
                    self.in_vain.set()
        for descriptor in self._living:
            os.close(descriptor)

    def _start_watching_rank(self, rank: int, process: int, deaths: select.epoll) -> None:
        """Watch the process and the named pipe of a rank. If the process has already ended, add the rank to
        `missed`."""
        try:
            descriptor = os.pidfd_open(process)
        except OSError:
            self.missed.append(rank)
            return
        for ready in (descriptor, open_and_unlink_lifeline_pipe(self._folder, rank)):
            if ready is not None:
                self._living[ready] = rank
                deaths.register(ready, select.EPOLLIN)


@dataclass(frozen=True)
class JobEnding:
    """How one attempt to run the job ended.

    Attributes
    ----------
    kind : "done", "preempted", "joined" (saved so that more ranks can join), "error" (a Python exception or sys.exit),
        "hung" (ended by a watchdog) or "died"
    status : exit status of `fsdpx run`
    first : number and host of the rank that ended first, if known
    step : last step that any rank had begun
    text : reason for the ending, as shown in messages
    """

    kind: str
    status: int
    first: tuple[int, str] | None = None
    step: int | None = None
    text: str = ""


@dataclass(frozen=True)
class Evidence:
    """Everything that is known about how one attempt to run the job ended.

    The methods are the conditions of the table `EXIT_CASES`. Each method returns whether its case applies or, if one
    rank caused the end, the status of that rank.

    Parameters
    ----------
    status : exit status of the launcher; 128 + signal if a signal killed it
    statuses : rank -> status, for the ranks whose status files this host can see
    flight_records : rank -> log of its last actions
    order : the ranks of this host in the order in which they ended
    waited : ranks that were waiting in MPI_Init when the job ended; empty if all ranks had completed MPI_Init
    late : whether the job was ended because a rank waited too long in MPI_Init
    ranks : number of ranks
    elastic : whether the job survives the death of ranks. If so, the statuses of the surviving ranks count instead of
        the launcher's. The launcher's status is meaningless in this case: Open MPI returns 0 even if the last rank
        aborts, and a nonzero status if the job succeeds after ranks died
    launcher : name of the launcher
    killed : name of the signal that killed the launcher, if the job was not asked to stop. Such a signal comes from
        outside the job, because ranks send no signals
    """

    status: int
    statuses: Mapping[int, RankStatus] = field(default_factory=dict)
    flight_records: Mapping[int, FlightRecord] = field(default_factory=dict)
    order: Sequence[int] = ()
    waited: Collection[int] = ()
    late: bool = False
    ranks: int | None = None
    elastic: bool = False
    launcher: str = ""
    killed: str = ""

    def have_all_ranks_reached_mpi_init(self) -> bool:
        """Return whether all ranks were in MPI_Init when the job ended. If so, one of them died there, or MPI itself
        failed."""
        return bool(self.waited) and len(self.waited) == self.ranks and not self.late

    def find_rank_ended_before_mpi_init(self) -> RankStatus | None:
        """Return the first rank that ended while other ranks waited for it in MPI_Init. Return None if there was
        none."""
        if not self.waited or self.have_all_ranks_reached_mpi_init():
            return None
        return next(
            (self.statuses[rank] for rank in self.order if rank in self.statuses and rank not in self.waited), None
        )

    def find_rank_failed_before_mpi_init(self) -> RankStatus | None:
        """Return the first rank that ended while other ranks waited for it in MPI_Init. Return None if there was none,
        or if this rank recorded no exit status."""
        first = self.find_rank_ended_before_mpi_init()
        return None if first is None or first.status is None else first

    def has_unexplained_mpi_init_wait(self) -> bool:
        """Return whether ranks waited in MPI_Init although no rank is known to have ended."""
        return bool(self.waited) and self.find_rank_ended_before_mpi_init() is None

    def has_mpi_init_timed_out(self) -> bool:
        """Return whether MPI_Init timed out because some ranks did not reach it."""
        return self.late and self.find_rank_ended_before_mpi_init() is not None

    def has_succeeded(self) -> bool:
        """Return whether the job succeeded, judged by the launcher's status or, for an elastic job, by the statuses of
        the surviving ranks."""
        if self.waited:
            return False
        numbers = {note.status for note in self.statuses.values()}
        if self.elastic and self.statuses:
            return self.status != HUNG_STATUS and 0 in numbers and numbers <= {0, None}
        return self.status == 0 and None not in numbers

    def has_been_preempted(self) -> bool:
        """Return whether the job was preempted: a rank saved a checkpoint and ended because it was asked to stop."""
        return not self.waited and PREEMPTED_STATUS in (self.status, *(note.status for note in self.statuses.values()))

    def list_failed_ranks(self) -> list[RankStatus]:
        """Return the ranks that ended with an error status. Return [] if some ranks were still waiting in MPI_Init."""
        return [] if self.waited else [note for note in self.statuses.values() if note.status not in (None, 0)]

    def find_first_failed_rank(self) -> RankStatus | None:
        """Return the first rank that ended because of an error of its own. Errors that only report the end of another
        rank do not count. Return None if there was no such rank."""
        return next((note for note in self.list_failed_ranks() if note.error not in _SECONDARY_ERRORS), None)

    def find_rank_exited_during_collective(self) -> RankStatus | None:
        """Return a rank that ended with status 0 while other ranks still waited for it in a collective. Return None if
        there was none."""
        if self.waited or self.status != RANK_EXITED or self.list_failed_ranks():
            return None
        return next((note for note in self.statuses.values() if note.status == 0), None)

    def has_hung(self) -> bool:
        """Return whether a watchdog ended the job, or a rank failed with a communication error that does not report
        the death of another rank."""
        return self.status == HUNG_STATUS or any(note.error not in _DEATH_ERRORS for note in self.list_failed_ranks())

    def find_first_killed_rank(self) -> RankStatus | None:
        """Return the first rank that was killed, which means that it ended without recording an exit status. Return
        None if there is none."""
        return next(
            (self.statuses[r] for r in self.order if r in self.statuses and self.statuses[r].status is None), None
        )

    @property
    def last_step(self) -> int | None:
        """The last step that any rank had begun; None if unknown."""
        return None if self.waited else max((f.step for f in self.flight_records.values() if f.program), default=None)

    def make_message_template_values(self, first: RankStatus | None) -> dict[str, Any]:
        """Return the values that fill the placeholders in the message templates of `EXIT_CASES`. `first` is the status
        of the rank that caused the job to end, or None."""
        step, flight = self.last_step, None if first is None else self.flight_records.get(first.rank)
        lost = any(status.error == "StateLost" for status in self.statuses.values())
        missing = self.statuses.keys() - set(self.waited)
        return {
            "rank": "" if first is None else f"rank {first.rank} on {first.host}",
            "error": "" if first is None else first.error or f"exit status {first.status}",
            "at": "" if step is None else f" in step {step + 1}",
            "where": ""
            if flight is None
            else f" in step {flight.step + 1}, {flight.describe_latest_action(time.time())}",
            "more": "; with it and others parts of the state" if lost else "",
            "status": self.status or 1,
            "launcher": self.launcher,
            "killed": self.killed,
            "waited": format_ranks(self.waited) if self.waited else "nobody",
            "missing": format_ranks(missing) if missing else "nobody",
            "one": next((f"rank {rank}" for rank in self.order if rank in self.waited), "a rank"),
        }

    def decide_ending(self) -> JobEnding:
        """Return how the attempt ended, according to the first case of `EXIT_CASES` whose condition holds."""
        for case in EXIT_CASES:
            if found := case.applies(self):
                first = found if isinstance(found, RankStatus) else None
                who = None if first is None else (first.rank, first.host)
                own = first.status if first is not None else None
                status = {LAUNCHER_STATUS: self.status or 1, RANK_STATUS: own or 1}.get(case.status, case.status)
                step = None if case.verdict == DONE else self.last_step
                text = case.text.format(**self.make_message_template_values(first))
                return JobEnding(case.verdict.kind, status, who, step, text)
        raise AssertionError("the last case always applies")


class Verdict(NamedTuple):
    """A kind of ending, and whether it leads to a restart.

    Attributes
    ----------
    kind : value of `JobEnding.kind`
    restart : condition under which the job is restarted, as long as restarts are left
    """

    kind: str
    restart: str


NEVER, AT_ONCE, UNLESS_REPEATED, ALWAYS = "no", "at once", "unless it is raised at the same step twice", "yes"
DONE = Verdict("done", NEVER)
SAVED = Verdict("preempted", NEVER)
JOINED = Verdict("joined", AT_ONCE)
ERROR = Verdict("error", UNLESS_REPEATED)
HANG = Verdict("hung", ALWAYS)
DEATH = Verdict("died", ALWAYS)
_RESTARTS = dict([DONE, SAVED, JOINED, ERROR, HANG, DEATH])

LAUNCHER_STATUS, RANK_STATUS = -1, -2
"""Placeholder values of `Case.status`: the first stands for the exit status of the launcher, and the second for the
exit status of the rank that ended first."""


class Case(NamedTuple):
    """One row of the table `EXIT_CASES`: a possible ending, and how to recognize it.

    Attributes
    ----------
    applies : function that takes the `Evidence` and tells whether this case applies
    verdict : kind of ending, and whether it leads to a restart
    status : exit status of `fsdpx run`
    text : template of `JobEnding.text`, filled by `Evidence.make_message_template_values`
    """

    applies: Callable[[Evidence], RankStatus | bool | None]
    verdict: Verdict
    status: int
    text: str


EXIT_CASES = (
    Case(Evidence.find_rank_failed_before_mpi_init, ERROR, RANK_STATUS,
        "{rank} ended with {error} before all ranks had started"),
    Case(Evidence.has_succeeded, DONE, 0, ""),
    Case(Evidence.has_been_preempted, SAVED, PREEMPTED_STATUS, "the job was asked to stop and has saved"),
    Case(Evidence.find_first_failed_rank, ERROR, LAUNCHER_STATUS, "{rank} ended with {error}{at}"),
    Case(Evidence.find_rank_exited_during_collective, ERROR, RANK_EXITED,
        "{rank} ended with status 0 while others waited for it"),
    Case(lambda evidence: bool(evidence.killed), DEATH, LAUNCHER_STATUS,
        "the launcher, {launcher}, was killed ({killed}), and its ranks with it"),
    Case(Evidence.have_all_ranks_reached_mpi_init, DEATH, 1,
        "all ranks had come to MPI's start, where {one} ended: what MPI says of it, if anything, is above"),
    Case(Evidence.has_unexplained_mpi_init_wait, HANG, HUNG_STATUS,
        "{waited} waited in MPI's start for others that did not come"),
    Case(Evidence.has_mpi_init_timed_out, HANG, HUNG_STATUS,
        "{missing} did not come to MPI's start, where {waited} waited"),
    Case(Evidence.find_rank_ended_before_mpi_init, DEATH, 1, "{rank} died before all ranks had started"),
    Case(Evidence.has_hung, HANG, HUNG_STATUS, "the job hung, see the report above"),
    Case(lambda evidence: not evidence.statuses, DEATH, LAUNCHER_STATUS,
        "the launcher ended with status {status}; no rank has left a note here"),
    Case(Evidence.find_first_killed_rank, DEATH, LAUNCHER_STATUS, "{rank} died (status {status}){where}{more}"),
    Case(lambda evidence: True, DEATH, LAUNCHER_STATUS, "a rank died (status {status}){more}"),
)  # fmt: skip
"""The possible endings of an attempt to run the job. The first case whose condition holds applies."""


@dataclass
class RestartPlan:
    """Number of ranks of the next attempt, and the limits on restarts.

    Attributes
    ----------
    ranks : number of ranks of the next attempt
    min_ranks : minimum number of ranks to start the job with
    max_restarts : maximum number of restarts
    backoff : seconds before the first restart
    endings : how each earlier attempt ended
    """

    ranks: int
    min_ranks: int
    max_restarts: int
    backoff: float = 1.0
    endings: list[JobEnding] = field(default_factory=list)

    @property
    def restart_count(self) -> int:
        """Number of restarts so far. Restarts that let more ranks join do not count."""
        return max(sum(ending.kind != "joined" for ending in self.endings) - 1, 0)


def record_and_decide_restart(plan: RestartPlan, ending: JobEnding) -> tuple[str, float | None]:
    """Add `ending` to the plan, and decide whether the job is restarted. Return the reason for the decision, and the
    seconds to wait before the restart, or None if there is no restart.

    If the same rank on the same host dies twice in a row, the next attempt has one rank fewer, but never fewer than
    `min_ranks`. If the same step raises an error twice in a row, the job is not restarted. The waiting time doubles
    after each attempt that gets no further than the previous one."""
    before, restart = plan.endings[-1] if plan.endings else None, _RESTARTS[ending.kind]
    plan.endings.append(ending)
    if restart == NEVER:
        return ending.kind, None
    if restart == AT_ONCE:
        return format_count(plan.ranks, "rank"), 0.0
    repeated = before is not None and (before.kind, before.step) == (ending.kind, ending.step)
    if restart == UNLESS_REPEATED and repeated:
        return "the same error at the same step again: another start would not help", None
    if plan.restart_count >= plan.max_restarts:
        return f"{plan.restart_count} of {plan.max_restarts} restarts are used up", None
    reason = ""
    twice = before is not None and ending.kind == before.kind == "died" and ending.first == before.first
    if twice and ending.first is not None and plan.ranks > plan.min_ranks:
        plan.ranks -= 1
        reason = f"rank {ending.first[0]} on {ending.first[1]} died twice: one rank fewer, "
    return reason + format_count(plan.ranks, "rank"), min(
        plan.backoff * 2 ** _count_attempts_without_progress(plan.endings), _MAX_RESTART_DELAY_SECONDS
    )


def _count_attempts_without_progress(endings: Sequence[JobEnding]) -> int:
    """Going backward from the last attempt to run the job, count the earlier attempts that got at least as far as the
    last one. Stop at the first attempt that did not get as far."""
    last = endings[-1].step or 0
    return sum(1 for _ in takewhile(lambda earlier: (earlier.step or 0) >= last, reversed(endings[:-1])))
