"""The coordinator of an elastic run: lets all ranks agree on each step, and rebuilds the run when ranks change."""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable
from math import ceil, log2
from statistics import median
from time import perf_counter
from typing import Any

import numpy as np

from fsdpx import errors
from fsdpx.core.base import environment
from fsdpx.core.base.dataclass import dataclass, replace
from fsdpx.core.base.safe_files import read_file
from fsdpx.core.checkpoint.scalars import CheckpointScalars, collect_checkpoint_scalars
from fsdpx.core.comm.communicator import SurvivorCommunicator
from fsdpx.core.comm.watched import detach_and_return_watchdog
from fsdpx.core.state.ledger import LedgerKey
from fsdpx.core.state.tuning import agree_on_tuning
from fsdpx.core.trainer.batch import describe_different_calls
from fsdpx.core.trainer.recipe import Recipe
from fsdpx.errors import CheckpointError, ConfigError, DataError, DesyncError, FsdpxError, MeshError, RankLost
from fsdpx.ext.elastic.assembly import (
    Assembler,
    Assembly,
    Member,
    find_largest_mesh_for_ranks,
    recv_object_from_rank,
    send_value_to_ranks,
)  # fmt: skip
from fsdpx.ext.elastic.config import ElasticConfig
from fsdpx.ext.elastic.copies import StateGeneration
from fsdpx.ext.elastic.reshard import (
    drain_transfers_for_limited_time,
    iterate_state_changed_before_agreement,
    iterate_up_to_date_shards,
)  # fmt: skip
from fsdpx.ext.watch.watchdog import Watchdog

__all__ = ["Coordinator", "Recovery"]

NO_LOSS, COPIES_ARRIVED, SIZE_UNCHANGED = 1, 2, 4
"""Flags that a rank sets at each agreement. If all ranks set NO_LOSS, no rank was lost; if all set COPIES_ARRIVED, all
pending copies have arrived; if all set SIZE_UNCHANGED, no change of the number of ranks is requested."""
INTERVAL_SHIFT, MAX_INTERVAL_LOG2 = 3, 10
"""The flags from bit INTERVAL_SHIFT upward stand for copy intervals of 1, 2, 4, ... 2^MAX_INTERVAL_LOG2 steps. A rank
sets a flag if it finds the interval cheap enough. Ranks use the shortest interval for which all of them set the
flag."""
MAX_COPY_TIME_SHARE = 0.01
"""Maximum share of the training time that copies may take, if the user does not set the interval."""
SEND_COST_FACTOR = 3.0
"""Sending and receiving a copy is assumed to delay training by this many times the time that it takes to create the
copy."""


@dataclass(frozen=True)
class Recovery:
    """A change of ranks between two steps, caused by a loss or a resize.

    Attributes
    ----------
    step : number of the last step that the change did not undo
    lost : ranks that died, numbered as at the start of the job
    ranks : number of ranks that train from now on
    replayed : number of steps that had to be repeated
    seconds : time from when this rank noticed the loss until it continued, excluding the repeated steps
    """

    step: int
    lost: tuple[int, ...]
    ranks: int
    replayed: int
    seconds: float

    def __str__(self) -> str:
        who = f"lost rank{'s' * (len(self.lost) > 1)} {', '.join(map(str, self.lost))}; " if self.lost else ""
        repeated = f", {self.replayed} made again" if self.replayed else ""
        now = "1 rank trains" if self.ranks == 1 else f"{self.ranks} ranks train"
        return f"{who}{now} on from step {self.step}{repeated} ({1000 * self.seconds:.0f} ms)"


class AgreementRefused(RankLost):
    """Raised when an agreement of all living ranks reports the loss of a rank. All living ranks then know of the
    loss."""


@dataclass(frozen=True)
class TrainingFailure:
    """An error on the training ranks, in the form that is sent to idle ranks. `agreed` is true if
    the training ranks have agreed on the error, so that all of them raise it."""

    kind: str
    text: str
    agreed: bool


class CopyInterval:
    """Decides how often ranks copy their state to other ranks. `every` is the number of steps from one copy to the
    next."""

    def __init__(self, elastic: ElasticConfig) -> None:
        self._elastic = elastic
        self.every = elastic.every or 1
        self.restart_timing()

    def restart_timing(self) -> None:
        """Discard the measured times of steps and copies, because the speed changes when the set of ranks changes."""
        self._last, self._takes = perf_counter(), 0
        self._steps: deque[float] = deque(maxlen=9)  # duration of each of the most recent steps, in seconds

    def record_step(self) -> None:
        """Record the duration of the step that has just ended."""
        now = perf_counter()
        self._steps.append(now - self._last)
        self._last = now

    def record_copy(self) -> None:
        """Count one more copy of the state."""
        self._takes += 1

    def compute_cheap_interval_bitmask(self, copy_seconds: float) -> int:
        """Return the copy intervals that are cheap enough on this rank, as a bit mask in which bit k stands for an
        interval of 2^k steps.

        An interval is cheap enough if copying takes at most MAX_COPY_TIME_SHARE of the time. `copy_seconds` is how
        long the last copy took."""
        least = 1.0
        # the times of the first copies are ignored, because they include the allocation of buffers
        if self._takes > 2 and self._steps:
            cost = copy_seconds * (1 + SEND_COST_FACTOR * self._elastic.copies)
            least = max(cost / (MAX_COPY_TIME_SHARE * median(self._steps)), 1.0)
        level = min(ceil(log2(least)), MAX_INTERVAL_LOG2)
        return (1 << MAX_INTERVAL_LOG2 + 1) - (1 << level)

    def set_smallest_common_interval(self, common_bits: int) -> None:
        """Set the interval to the smallest one that is cheap enough on all ranks. `common_bits` is the bitwise AND of
        the masks of all ranks. In each mask, bit i is set if an interval of 2^i steps is cheap enough."""
        self.every = self._elastic.every or common_bits & -common_bits


@dataclass(frozen=True)
class StepUndoPoint:
    """The progress of a run, and the data that are needed to undo its next step.

    Attributes
    ----------
    step : number of the last step that all ranks committed
    secure_step : newest step that will never be repeated, because its state has been copied
    scalars : copy of the scalars, such as the loss scale, made before the next step
    before : copies of the running statistics and of the codec memory, made before the next step. They are needed
        because a step changes these arrays before all ranks have agreed that the step counts
    under_way : number of the step after which the pending copies were taken; None if no copies are pending
    updating : whether all ranks have agreed on a step whose update this rank has not finished
    """

    step: int
    secure_step: int
    scalars: CheckpointScalars
    before: dict[LedgerKey, Any]
    under_way: int | None = None
    updating: bool = False


class Coordinator:
    """Coordinates all living ranks of an elastic run.

    Attributes
    ----------
    ranks : number of ranks that should train; None for all
    asked : whether a different number of ranks was requested
    assembly : the current ranks and their training session
    recoveries : the changes of ranks so far, each caused by a loss or a resize
    """

    def __init__(
        self, recipe: Recipe, control: SurvivorCommunicator, elastic: ElasticConfig, commit: Callable[[Any, Any], None]
    ) -> None:
        """Assemble the ranks for the start of a run. Collective over `control`.

        `commit` is called before each update (see `StepInputs`)."""
        tune = recipe.runtime.tune
        tuning = agree_on_tuning(control, environment.read_environment().tune if tune is None else tune, np)
        self.elastic, self.ranks = elastic, elastic.ranks
        self.recoveries: list[Recovery] = []
        self.asked = False
        self._assembler = Assembler(recipe, tuning, elastic, commit)
        self._initial_rank = control.rank
        self._refused: int | None = None  # last requested number of ranks for which there is no mesh
        self._abandoned: list[tuple[SurvivorCommunicator, Watchdog]] = []
        self._copy_interval = CopyInterval(elastic)
        self._set_current_assembly(self._assembler.build_initial_assembly(control, self.ranks))

    def _set_current_assembly(self, assembly: Assembly) -> None:
        self.assembly, self.asked = assembly, False
        self._position = self._make_step_undo_point(assembly.step, assembly.step)
        if assembly.copied:
            self.assembly.copies.promote_generation()
        self._copy_interval.restart_timing()

    def _make_step_undo_point(self, step: int, secure_step: int, under_way: int | None = None) -> StepUndoPoint:
        state = self.assembly.session.state
        before = (
            {key: array.copy() for key, array in iterate_state_changed_before_agreement(state)}
            if self.assembly.is_training
            else {}
        )
        return StepUndoPoint(step, secure_step, collect_checkpoint_scalars(state, None, None), before, under_way)

    @property
    def last_step(self) -> int:
        """Number of the last step that all ranks agreed on."""
        return self._position.step

    @property
    def newest_copied_step(self) -> int:
        """Number of the newest step that will never be repeated, because its state has been copied."""
        return self._position.secure_step

    def agree_that_no_rank_is_lost(self) -> None:
        """Wait for all living ranks. If a rank was lost before all ranks had arrived, raise RankLost on all living
        ranks. Collective.

        In this agreement, ranks also tell each other whether copies have arrived, whether a resize is requested, and
        how often to copy."""
        flags = NO_LOSS | (COPIES_ARRIVED if self.assembly.copies.progress_and_test_transfers() else 0)
        flags |= SIZE_UNCHANGED if self._read_requested_rank_count_on_rank0() in (self.ranks, self._refused) else 0
        common = self.assembly.control.agree_on_flags(
            flags
            | self._copy_interval.compute_cheap_interval_bitmask(self.assembly.copies.copy_seconds) << INTERVAL_SHIFT
        )
        if not common & NO_LOSS:
            raise AgreementRefused("a rank was lost before all ranks reached the agreement")
        if common & COPIES_ARRIVED and self._position.under_way is not None:
            self._position = replace(self._position, secure_step=self._position.under_way, under_way=None)
            self.assembly.copies.promote_generation()
        self.asked = not common & SIZE_UNCHANGED
        self._copy_interval.set_smallest_common_interval(common >> INTERVAL_SHIFT)

    def commit_step(self) -> None:
        """Agree with all ranks to commit a step. After that, this rank can update its shard independently.
        Collective."""
        self.agree_that_no_rank_is_lost()
        self._position = replace(self._position, updating=True)

    def count_step_and_start_due_copy(self) -> None:
        """Count a finished step, and start to copy the state if a copy is due.

        This method does not wait for other ranks, because a rank that has just learned that another rank was lost might
        not call it. All ranks still make the same decision about the copy, because it follows from the last
        agreement."""
        self._copy_interval.record_step()
        at = self._make_step_undo_point(self.last_step + 1, self.newest_copied_step, self._position.under_way)
        if not self.assembly.copies.needed:
            at = replace(at, secure_step=at.step)
        elif at.under_way is None and at.step - at.secure_step >= self._copy_interval.every:
            at = replace(at, under_way=at.step)
            self._copy_interval.record_copy()
            self.assembly.copies.start_copying_to_buddies(at.scalars, at.step)
        self._position = at

    def _read_requested_rank_count_on_rank0(self) -> int | None:
        """Return the number of ranks that should train. Rank 0 reads it from the request file; other ranks return the
        current number."""
        if self.elastic.resize is None or self.assembly.control.rank > 0:
            return self.ranks
        try:
            return max(int(read_file(self.elastic.resize, ours=False)), 1)
        except (OSError, ValueError):  # the number stays unchanged while the request file is missing or being written
            return self.ranks

    def agree_on_requested_rank_count(self) -> int | None:
        """Return the requested number of ranks, the same on all ranks. Return None if no mesh fits on that many ranks.
        Collective."""
        found: int | None = self.assembly.control.all_gather_value(self._read_requested_rank_count_on_rank0())[0]
        where, size = self._assembler.recipe.distribution, self.assembly.control.size
        try:
            find_largest_mesh_for_ranks(where.mesh, where.strategy_within_replica(size), min(found or size, size))
        except MeshError as error:
            self._refused = found
            if self.assembly.control.rank == 0:
                print(f"fsdpx: {self.elastic.resize} asks for {found} ranks: {error}", file=sys.stderr, flush=True)
            return None
        return found

    def replicate_state_to_ranks_and_wait(self) -> None:
        """Copy the state to other ranks, and wait until the copies have arrived. This is needed when the state was
        replaced, for example by a checkpoint. Collective."""
        if self.assembly.copies.needed:
            self.assembly.copies.abandon_generation()
            self._position = replace(self._position, under_way=self.last_step + 1)
            self.assembly.copies.start_copying_to_buddies(
                collect_checkpoint_scalars(self.assembly.session.state, None, None), self.last_step + 1
            )
            self.assembly.copies.wait_for_copies()

    def count_new_state_as_step(self) -> None:
        """Count the replacement of the state as a step of its own. This step will never be repeated."""
        self._position = self._make_step_undo_point(self.last_step + 1, self.last_step + 1)

    def send_result_to_idle_ranks(self, call: str, value: Any) -> None:
        """Send the result of a call from the lowest training rank to the idle ranks. On other ranks, do nothing."""
        training = self.assembly.training
        if self.assembly.control.rank == training[0]:
            send_value_to_ranks(
                self.assembly.control,
                [r for r in range(self.assembly.control.size) if r not in training],
                (call, value),
            )

    def recv_result_on_idle_rank(self, call: str) -> Any:
        """Receive the result of a call on an idle rank, or raise the error that the training ranks raised.

        Raises DesyncError if the training ranks made a different call."""
        source = self.assembly.training[0]
        heard, value = recv_object_from_rank(self.assembly.control, source)
        if isinstance(value, TrainingFailure):
            if value.agreed:
                self.agree_that_no_rank_is_lost()
            raise getattr(errors, value.kind, FsdpxError)(value.text)
        if heard != call:
            raise DesyncError(describe_different_calls({source: heard, self.assembly.control.rank: call}))
        return value

    def send_error_to_idle_ranks(self, error: FsdpxError) -> None:
        """Send an error of the training ranks to the idle ranks.

        If all training ranks have the same error, this call first checks on all ranks that no rank was lost, because
        the loss of a rank must be handled instead of the error. An error of a single rank ends the job."""
        agreed = isinstance(error, ConfigError | DataError | CheckpointError)
        self.send_result_to_idle_ranks("", TrainingFailure(type(error).__name__, str(error), agreed))
        if agreed:
            self.agree_that_no_rank_is_lost()

    def recover_from_loss(self, error: RankLost) -> Recovery:
        """Recover from the loss of a rank. Collective over the living ranks.

        Abandons pending transfers, shrinks the communicator to the living ranks, and restores the state from the
        copies in their memory."""
        begin, before, members = perf_counter(), self.last_step, self.assembly.initial_ranks
        self.report_to_observers("recovery: begins")
        self.assembly.control.revoke()
        # agree, so that all ranks learn of the loss; after AgreementRefused, they already know of it
        if not isinstance(error, AgreementRefused):
            self.assembly.control.agree_on_flags(0)
        self._drain_transfers_and_abandon_copies()
        control, generations, tried = self.assembly.control, self._list_snapshots_in_memory(), []
        while True:
            control = control.shrink()
            self.report_to_observers("recovery: the others are found")
            assembly = None
            try:
                assembly = self._rebuild_assembly(control, generations, self.ranks)
            except RankLost:
                control.revoke()
            if control.agree_on_flags(NO_LOSS if assembly else 0):
                break
            control.revoke()
            tried.append(control)
        assert assembly is not None
        for one in (self.assembly.control, *tried):
            self._stop_watching_communicator(one)
        return self._switch_assembly_and_make_recovery(assembly, begin, before, members)

    def close(self) -> None:
        """End the run on all ranks. Collective.

        A barrier ensures that all ranks know of the end; otherwise, a rank that ends early would count as lost."""
        try:
            self.assembly.control.barrier(what="close").wait()
        except RankLost:
            self.assembly.control.revoke()
        self._stop_watching_communicator(self.assembly.control)
        self.assembly.close()
        self.assembly.control.close()

    def resize_to(self, ranks: int | None) -> Recovery:
        """Change the number of ranks that train, between two steps. Collective.

        Raises RankLost if a rank was lost since the last step or during this call."""
        begin, before = perf_counter(), self.last_step
        assembly = self._rebuild_assembly(self.assembly.control, self._list_snapshots_in_memory(), ranks)
        self.agree_that_no_rank_is_lost()
        self.ranks = ranks
        return self._switch_assembly_and_make_recovery(assembly, begin, before, self.assembly.initial_ranks)

    def _stop_watching_communicator(self, control: SurvivorCommunicator) -> None:
        """Detach the watchdog from a communicator that is no longer used.

        A rank may die before it has detached its own watchdog. In that case, the next call of this function removes
        the record of the dead rank."""
        if (watchdog := detach_and_return_watchdog(control)) is not None:
            self._abandoned.append((control, watchdog))
        for before, watchdog in self._abandoned:
            watchdog.remove_dead_records(before.get_failed_ranks())

    def _rebuild_assembly(
        self, control: SurvivorCommunicator, generations: list[StateGeneration], ranks: int | None
    ) -> Assembly:
        training_rank = self.assembly.training.index(self.assembly.control.rank) if self.assembly.is_training else None
        member = Member(self._initial_rank, training_rank, self.newest_copied_step == 0, [])
        timeout = None if self.assembly.watchdog is None else self.assembly.watchdog.timeout
        return self._assembler.rebuild_after_change(
            control, member, generations, ranks, self.report_to_observers, timeout
        )

    def _switch_assembly_and_make_recovery(
        self, assembly: Assembly, begin: float, before: int, members: list[int]
    ) -> Recovery:
        old = self.assembly
        for observer in old.session.engine.added_observers:
            assembly.session.engine.add_observer(observer)
        self._set_current_assembly(assembly)
        if assembly.control is old.control:
            old.close()
        lost, steps = tuple(sorted(set(members) - set(assembly.initial_ranks))), self.assembly.session.state.steps
        done = Recovery(steps, lost, len(assembly.training), before - self.last_step, perf_counter() - begin)
        self.recoveries.append(done)
        if self.assembly.control.rank == 0:
            print(f"fsdpx: {done}", file=sys.stderr, flush=True)
        return done

    def _list_snapshots_in_memory(self) -> list[StateGeneration]:
        """Return the snapshots of the state in this rank's memory: the rank's current state, unless this state is
        partly updated, and the in-memory checkpoints."""
        found = self.assembly.copies.list_complete_snapshots()
        if self.assembly.is_training and not self._position.updating:
            parts = list(iterate_up_to_date_shards(self.assembly.session.state, self._position.before))
            found.insert(0, StateGeneration(self.last_step, self._position.scalars, parts))
        return found

    def _drain_transfers_and_abandon_copies(self) -> None:
        """Drop unfinished copies, and wait until the transfers of the interrupted step have ended, because the buffers
        of these transfers will be reused."""
        drain_transfers_for_limited_time(self.assembly.session.engine.abandon_transfers())
        self.assembly.copies.abandon_generation()
        self.assembly.copies.drop_old_generations()

    def report_to_observers(self, what: str) -> None:
        """Pass `what`, a line of text about the progress of a recovery or save, to the observers of the engine's
        actions."""
        for look in self.assembly.session.engine.hooks.on_action_done:
            look(what)  # type: ignore[arg-type]
