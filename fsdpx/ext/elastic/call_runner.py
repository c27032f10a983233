"""The call runner of an elastic trainer: all ranks agree on every step before it counts, and the surviving ranks
repeat a call that the loss of a rank interrupted."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, NamedTuple, TypeVar

import numpy as np

from fsdpx.core.array.namespace import to_host
from fsdpx.core.checkpoint.atomic_commit import run_on_rank0
from fsdpx.core.checkpoint.scalars import CheckpointScalars, restore_scalars
from fsdpx.core.comm.communicator import Communicator, ReduceOp, SurvivorCommunicator
from fsdpx.core.comm.local import make_single_rank_communicator
from fsdpx.core.engine.run import GradientScale, LossMean
from fsdpx.core.state.accumulation import Accumulation
from fsdpx.core.state.step_inputs import StepInputs
from fsdpx.core.trainer.batch import checksum_arrays
from fsdpx.core.trainer.call_runner import (
    KEEPS_FOR_LATER,
    ON_EVERY_RANK,
    REPLACES_STATE,
    SAVE,
    STEP,
    WAIT,
    CallRunner,
    LastUpdate,
)
from fsdpx.core.trainer.recipe import Recipe
from fsdpx.errors import CheckpointError, ConfigError, FsdpxError, RankLost
from fsdpx.ext.elastic.config import ElasticConfig
from fsdpx.ext.elastic.coordinator import Coordinator, Recovery

__all__ = ["BatchPair", "ElasticRunner", "RecentBatches", "iterate_arrays", "take_samples_of_rank"]


class BatchPair(NamedTuple):
    x: Any
    y: Any


class RecentBatches:
    """Copies of the most recent batches, keyed by step number (from 1). With these copies, the steps can be repeated.

    Copies are needed because the caller may reuse its arrays."""

    def __init__(self) -> None:
        self._batches: deque[BatchPair] = deque()
        self._first = 1

    def __getitem__(self, number: int) -> BatchPair:
        assert number >= self._first, f"the batch of step {number} is forgotten"
        return self._batches[number - self._first]

    def __len__(self) -> int:
        return len(self._batches)

    @property
    def last_number(self) -> int:
        """Step number of the newest batch."""
        return self._first + len(self._batches) - 1

    def copy_and_add_batch(self, x: Any, y: Any) -> None:
        """Store a copy of the batch (x, y) of the next step."""
        self._batches.append(BatchPair(_map_arrays(x, _copy_array), _map_arrays(y, _copy_array)))

    def drop_newest(self) -> None:
        """Drop the newest batch, because its step failed."""
        self._batches.pop()

    def drop_up_to(self, number: int) -> None:
        """Drop the batches up to step `number`, because these steps will not be repeated."""
        while self._batches and self._first <= number:
            self._batches.popleft()
            self._first += 1

    def clear_and_restart_after(self, number: int) -> None:
        """Drop all batches, and number the next batch `number` + 1, because steps up to `number` will not be
        repeated."""
        self._batches.clear()
        self._first = number + 1


def take_samples_of_rank(value: Any, rank: int, accumulation: Accumulation) -> Any:
    """Return the samples of a global batch that belong to data rank `rank`: depending on `accumulation`, an equal share
    of the samples or complete chunks of the batch.

    `value` is an array, or a tuple or dict of arrays, with samples along dim 0."""

    def take_rows(array: Any) -> Any:
        if np.ndim(array) == 0:
            return array  # a scalar is invalid; the later check of all batches raises the error
        mine = accumulation.get_sample_indices_of_rank(len(array), rank)
        return array[mine.start : mine.stop]

    return _map_arrays(value, take_rows)


def _copy_array(array: Any) -> Any:
    return array.copy() if hasattr(array, "copy") and hasattr(array, "dtype") else np.array(array)


def iterate_arrays(value: Any) -> Iterator[Any]:
    """Yield the arrays of a batch in an order that is the same on all ranks: dicts sorted by key, tuples by position.
    """
    if isinstance(value, Mapping):
        for name in sorted(value):
            yield from iterate_arrays(value[name])
    elif isinstance(value, tuple):
        for one in value:
            yield from iterate_arrays(one)
    else:
        yield value


def _map_arrays(value: Any, function: Callable[[Any], Any]) -> Any:
    if isinstance(value, list) and value and hasattr(value[0], "dtype"):
        value = tuple(value)  # a list of arrays means that the model has several inputs
    if isinstance(value, Mapping):
        return {name: function(array) for name, array in value.items()}
    return tuple(map(function, value)) if isinstance(value, tuple) else function(value)


T = TypeVar("T")


class ElasticRunner(CallRunner):
    """The call runner of the trainer that `fsdpx.distribute(..., elastic=True)` returns. Every rank passes the full
    global batch.

    Ranks that the mesh cannot use, or that were asked to leave, are idle: they make the same calls, get the same
    results, and may train again later."""

    __slots__ = ("_batch_checksum", "_coordinator", "_recent", "_save_abandoned", "_train")

    def __init__(self, recipe: Recipe, control: SurvivorCommunicator, elastic: ElasticConfig) -> None:
        """Start an elastic run. Collective over `control`, the communicator of all ranks of the job."""
        self._coordinator = Coordinator(recipe, control, elastic, self._send_loss_to_idle_and_commit_step)
        self._recent = RecentBatches()
        self._train: Callable[[Any, Any], object] | None = None
        self._save_abandoned = False
        self._batch_checksum = 0
        super().__init__(self._coordinator.assembly.session)

    def _switch_to_current_session(self) -> None:
        """Switch to the training session of the current assembly of ranks, after a start, recovery or resize."""
        self.session = self._coordinator.assembly.session
        self.background_save = None

    @property
    def world(self) -> Communicator:
        """Communicator of all living ranks, including idle ranks."""
        return self._coordinator.assembly.control

    @property
    def data_group(self) -> Communicator:
        """A communicator of this rank alone, because data loaders yield the full global batch on every rank."""
        return make_single_rank_communicator()

    @property
    def is_training(self) -> bool:
        return self._coordinator.assembly.is_training

    def run_call(self, effect: str, name: str, function: Callable[..., T], *given: Any, **options: Any) -> T:
        self.require_open(name)
        if effect == KEEPS_FOR_LATER:
            raise ConfigError(
                f"{name}: an elastic trainer makes whole steps, since what a rank holds between two calls would die "
                "with it; microbatches=... cuts large batches"
            )
        if effect == STEP:
            self._train = function
            self._recent.copy_and_add_batch(*given, **options)
            self._run_pending_steps()
            assert self.last_update is not None
            return self.last_update.loss  # type: ignore[return-value]  # the result of a step is its loss
        mine = partial(function, *given, **options)
        if effect == ON_EVERY_RANK:
            return self._retry_until_agreed(mine)
        try:
            found = self._retry_until_agreed(lambda: self._run_on_training_ranks_and_broadcast(effect, name, mine))
        finally:
            self._save_abandoned = self._save_abandoned and name not in (SAVE, WAIT)
        if effect == REPLACES_STATE:
            self._coordinator.count_new_state_as_step()
            self._recent.clear_and_restart_after(self._coordinator.last_step)
        return found

    def agree_on_batch_and_make_microbatches(self, x: Any, y: Any, kind: str, training: bool = True) -> StepInputs:
        self.require_open(kind)
        values, place = (x,) if y is None else (x, y), self.placement
        self._batch_checksum = checksum_arrays(
            array if hasattr(array, "dtype") else np.asarray(array) for array in iterate_arrays(values)
        )
        mine, *target = (take_samples_of_rank(value, place.axes.data.rank, place.accumulation) for value in values)
        also = f" of the whole batch number {self._batch_checksum:08x}"
        return self.session.agree_on_batch_and_make_microbatches(
            mine, target[0] if target else None, kind, training, also
        )

    def gather_output_for_samples_of_caller(self, output: Any) -> Any:
        host = tuple(map(to_host, output)) if isinstance(output, tuple) else to_host(output)
        parts = self.placement.axes.data.all_gather_value(host)
        if isinstance(host, tuple):
            return tuple(np.concatenate(arrays) for arrays in zip(*parts, strict=True))
        return np.concatenate(parts)

    def run_on_rank0(self, call: str, function: Callable[[], T]) -> T:
        def run_once() -> T:
            self.agree_on_call(call)
            return run_on_rank0(self.world, call, function)

        return self._retry_until_agreed(run_once)

    def all_reduce_max(self, values: np.ndarray, call: str) -> np.ndarray:
        def all_reduce_once() -> np.ndarray:
            self.agree_on_call(call)
            found = np.array(values)
            self.world.all_reduce(found, ReduceOp.MAX, what=call).wait()
            return found

        return self._retry_until_agreed(all_reduce_once)

    def agree_on_end_of_batches(self) -> None:
        """Do nothing: in elastic training, all ranks have the same batches, so all ranks reach the end of the data at
        the same step."""

    def copy_weights_and_get_restorer(self, trainer: Any) -> Callable[[], None]:
        """Copy the current weights of `trainer`, and return a function that restores them. Collective.

        Every rank copies the full weights, because ranks and their shards may change before the weights are restored.

        Parameters
        ----------
        trainer : the trainer to copy from and to restore

        Returns
        -------
        function
            function that takes no arguments and restores the weights; all ranks must call it
        """
        values = trainer.parameters()
        return lambda: trainer.load_parameters(values)

    def close(self) -> None:
        self._coordinator.close()

    @property
    def training_ranks(self) -> int:
        """Number of ranks that are currently training; the others are idle."""
        return len(self._coordinator.assembly.training)

    @property
    def recoveries(self) -> list[Recovery]:
        """All changes of ranks so far (losses and resizes), oldest first."""
        return self._coordinator.recoveries

    def resize_to(self, ranks: int) -> None:
        """Change the number of ranks that train. Collective.

        Parameters
        ----------
        ranks : number of ranks, at least 1. If fewer ranks exist, or if the mesh cannot use so many ranks, the largest
            possible number of ranks trains

        Raises
        ------
        ConfigError
            if `ranks` is not an integer of at least 1
        """
        if type(ranks) is not int or ranks < 1:
            raise ConfigError(f"resize({ranks!r}): a number of ranks, 1 or more")
        while True:
            try:
                self.agree_on_call("resize")
                self._resize_now(ranks)
            except RankLost as error:
                self._recover_from_loss(error)
                self._run_pending_steps()
            else:
                return

    def _resize_now(self, ranks: int | None) -> None:
        if self.is_training:
            try:
                self.wait_for_save_within_call()  # a background save uses communicators that the resize will close
            except CheckpointError:
                self._save_abandoned = True
        self._coordinator.resize_to(ranks)
        self._switch_to_current_session()

    def _run_pending_steps(self) -> None:
        """Run all steps that have a stored batch but are not committed. These steps are either new or were undone by a
        recovery."""
        while self._coordinator.last_step < self._recent.last_number:
            try:
                self._run_step_or_raise_rank_lost(self._recent[self._coordinator.last_step + 1])
            except RankLost as error:
                self._recover_from_loss(error)
            except BaseException:
                self._recent.drop_newest()
                raise
            else:
                self._resize_if_requested()

    def _run_step_or_raise_rank_lost(self, batch: BatchPair) -> None:
        """Run the next step on `batch`. Raises RankLost if a rank was lost, in which case the step does not count."""
        if self.is_training:
            assert self._train is not None
            self._run_and_send_errors_to_idle_ranks(partial(self._train, *batch))
        else:
            self.session.notify_observers_and_raise_pending_error("step")
            step, steps, scale = self._coordinator.recv_result_on_idle_rank("step")
            self.session.state.set_counters_from_other_ranks(steps, *scale)
            self._coordinator.commit_step()
            self.last_update = step
        self._coordinator.count_step_and_start_due_copy()
        self._recent.drop_up_to(self._coordinator.newest_copied_step)

    def _send_loss_to_idle_and_commit_step(self, mean: LossMean, scale: GradientScale) -> None:
        """Send the loss of the step to the idle ranks, and commit the step with all ranks.

        The training program calls this after its gradients are reduced and before this rank updates its shard."""
        step, scaler = LastUpdate.from_loss_and_scale(float(mean.value), scale), scale.scaler
        self._coordinator.send_result_to_idle_ranks(
            "step", (step, self.session.state.steps + (not scale.skip), (scaler.value, scaler.steps_since_change))
        )
        self._coordinator.commit_step()
        self.last_update = step

    def _resize_if_requested(self) -> None:
        """Change the number of ranks if a change was requested. If a rank is lost during the change, try again after
        the next step."""
        try:
            wanted = self._coordinator.agree_on_requested_rank_count() if self._coordinator.asked else None
            if wanted is not None:
                self._resize_now(wanted)
        except RankLost as error:
            self._recover_from_loss(error)

    def _run_on_training_ranks_and_broadcast(self, effect: str, what: str, mine: Callable[[], T]) -> T:
        """Run the collective call `mine` on the training ranks, and return its result on all ranks, including idle
        ranks.

        `what` is the name of the call, and `effect` says what the call changes. If the call replaces the trainer's
        state, for example by loading a checkpoint, this method also waits until ranks hold copies of each other's new
        state."""
        if self.is_training:
            found = self._run_and_send_errors_to_idle_ranks(partial(self._run_and_raise_abandoned_save, what, mine))
            self._coordinator.send_result_to_idle_ranks(what, (found, self.loss_weight))
        else:
            self.session.notify_observers_and_raise_pending_error(what)
            found, self.loss_weight = self._coordinator.recv_result_on_idle_rank(what)
        if effect == REPLACES_STATE:
            if isinstance(found, CheckpointScalars) and not self.is_training:
                restore_scalars(self.session.state, found)
            self._coordinator.replicate_state_to_ranks_and_wait()
        return found

    def _run_and_raise_abandoned_save(self, what: str, function: Callable[[], T]) -> T:
        """Run `function`, which carries out the call named `what`, on this training rank. Raises CheckpointError if the
        call waits for a background save that was abandoned."""
        if what == SAVE:
            self._coordinator.report_to_observers("saving")
        found = function()
        if what == WAIT and any(self.placement.axes.world.all_gather_value(self._save_abandoned)):
            raise CheckpointError("a save in the background was given up when a rank died: save again")
        return found

    def _retry_until_agreed(self, function: Callable[[], T]) -> T:
        while True:
            try:
                found = function()
                self._coordinator.agree_that_no_rank_is_lost()
                return found
            except RankLost as error:
                self._recover_from_loss(error)
                self._run_pending_steps()

    def _run_and_send_errors_to_idle_ranks(self, run: Callable[[], T]) -> T:
        """Run the function `run` on the training ranks. If it raises an error, send the error to the idle ranks."""
        try:
            return run()
        except RankLost:
            raise
        except FsdpxError as error:
            self._coordinator.send_error_to_idle_ranks(error)
            raise

    def _recover_from_loss(self, error: RankLost) -> None:
        if self.background_save is not None:
            self.background_save.abandon()
            self._save_abandoned = True
        self._coordinator.recover_from_loss(error)
        self._switch_to_current_session()
