"""The host of a trainer whose ranks die, leave or join: all ranks agree on every step before it counts, and a call that
met a loss is run again by those that are left."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, NamedTuple, TypeVar

import numpy as np

from fsdpx.core.array.namespace import to_host
from fsdpx.core.base.config import Elastic
from fsdpx.core.checkpoint.atomic_commit import alone
from fsdpx.core.checkpoint.scalars import Scalars, restore
from fsdpx.core.comm.communicator import Communicator, ReduceOp, Survivor
from fsdpx.core.comm.local import single
from fsdpx.core.engine.run import GradientScale, Mean
from fsdpx.core.state.accumulation import Accumulation
from fsdpx.core.state.step_inputs import Feed
from fsdpx.core.trainer.batch import sum_of
from fsdpx.core.trainer.call_runner import EVERY, KEEPS, REPLACES, SAVE, STEP, WAIT, LastUpdate, TrainerHost
from fsdpx.core.trainer.recipe import Recipe
from fsdpx.errors import CheckpointError, ConfigError, FsdpxError, RankLost
from fsdpx.ext.elastic.coordinator import Coordinator, Recovery

__all__ = ["Batch", "ElasticRanks", "Recent", "arrays_of", "part_of"]


class Batch(NamedTuple):
    x: Any
    y: Any


class Recent:
    """Copies of the batches of the last steps, by number from 1: a caller may use its arrays again."""

    def __init__(self) -> None:
        self._batches: deque[Batch] = deque()
        self._first = 1

    def __getitem__(self, number: int) -> Batch:
        assert number >= self._first, f"the batch of step {number} is forgotten"
        return self._batches[number - self._first]

    def __len__(self) -> int:
        return len(self._batches)

    @property
    def last(self) -> int:
        """The number of the newest one."""
        return self._first + len(self._batches) - 1

    def add(self, x: Any, y: Any) -> None:
        """Keep the batch of the next step."""
        self._batches.append(Batch(_each(x, _copy), _each(y, _copy)))

    def drop(self) -> None:
        """Drop the newest one: its step failed."""
        self._batches.pop()

    def forget(self, number: int) -> None:
        """Steps up to this one will not be made again."""
        while self._batches and self._first <= number:
            self._batches.popleft()
            self._first += 1

    def restart(self, number: int) -> None:
        """The next step is the one after `number`, and none before is made again."""
        self._batches.clear()
        self._first = number + 1


def part_of(value: Any, rank: int, accumulation: Accumulation) -> Any:
    """The samples of a data rank, in the order of ranks: an even part, or whole chunks.

    value: an array, or a tuple or dict of them; dim 0 is samples."""

    def take(array: Any) -> Any:
        if np.ndim(array) == 0:
            return array  # refused where all batches are
        mine = accumulation.share(len(array), rank)
        return array[mine.start : mine.stop]

    return _each(value, take)


def _copy(array: Any) -> Any:
    return array.copy() if hasattr(array, "copy") and hasattr(array, "dtype") else np.array(array)


def arrays_of(value: Any) -> Iterator[Any]:
    """The arrays of a batch, in order."""
    if isinstance(value, Mapping):
        for name in sorted(value):
            yield from arrays_of(value[name])
    elif isinstance(value, tuple):
        for one in value:
            yield from arrays_of(one)
    else:
        yield value


def _each(value: Any, do: Callable[[Any], Any]) -> Any:
    if isinstance(value, list) and value and hasattr(value[0], "dtype"):
        value = tuple(value)  # inputs, not numbers
    if isinstance(value, Mapping):
        return {name: do(array) for name, array in value.items()}
    return tuple(map(do, value)) if isinstance(value, tuple) else do(value)


T = TypeVar("T")


class ElasticRanks(TrainerHost):
    """The host of the trainer that `fsdpx.distribute(..., elastic=True)` returns. Batches are global and whole on every
    rank.

    Ranks that the mesh cannot use, or that were asked to leave, are idle: they make the same calls, get the same
    results, and may train again later. Docs: elastic."""

    __slots__ = ("_coordinator", "_given_up", "_recent", "_train", "_whole")

    def __init__(self, recipe: Recipe, control: Survivor, elastic: Elastic) -> None:
        """Collective over `control`, all ranks of the job."""
        self._coordinator = Coordinator(recipe, control, elastic, self._commit)
        self._recent = Recent()
        self._train: Callable[[Any, Any], object] | None = None  # a step of the trainer on the ranks that train
        self._given_up = False  # a save in the background, since the last one that went well
        self._whole = 0  # tells the last whole batch from others
        super().__init__(self._coordinator.assembly.session)

    def _adopt(self) -> None:
        """Go on with the session of the ranks that are here now."""
        self.session = self._coordinator.assembly.session
        self.saving = None

    # -- common to every host ------------------------------------------------------------------------------------------

    @property
    def world(self) -> Communicator:
        """All living ranks."""
        return self._coordinator.assembly.control

    @property
    def data(self) -> Communicator:
        """One rank by itself: loaders give whole global batches on every rank."""
        return single()

    @property
    def trains(self) -> bool:
        return self._coordinator.assembly.trains

    def run(self, how: str, what: str, do: Callable[..., T], *given: Any, **options: Any) -> T:
        self.demand_open(what)
        if how == KEEPS:
            raise ConfigError(
                f"{what}: an elastic trainer makes whole steps, since what a rank holds between two calls would die "
                "with it; microbatches=... cuts large batches"
            )
        if how == STEP:
            self._train = do
            self._recent.add(*given, **options)
            self._catch_up()
            assert self.last is not None
            return self.last.loss  # type: ignore[return-value]  # a step is its loss
        mine = partial(do, *given, **options)
        if how == EVERY:
            return self._until_all(mine)
        try:
            found = self._until_all(lambda: self._together(how, what, mine))
        finally:
            self._given_up = self._given_up and what not in (SAVE, WAIT)
        if how == REPLACES:
            self._coordinator.replaced()
            self._recent.restart(self._coordinator.step)
        return found

    def feed(self, x: Any, y: Any, kind: str, training: bool = True) -> Feed:
        self.demand_open(kind)
        values, place = (x,) if y is None else (x, y), self.place
        self._whole = sum_of(array if hasattr(array, "dtype") else np.asarray(array) for array in arrays_of(values))
        mine, *target = (part_of(value, place.axes.data.rank, place.accumulation) for value in values)
        also = f" of the whole batch number {self._whole:08x}"
        return self.session.feed(mine, target[0] if target else None, kind, training, also)

    def joined(self, output: Any) -> Any:
        host = tuple(map(to_host, output)) if isinstance(output, tuple) else to_host(output)
        parts = self.place.axes.data.all_gather_plain(host)
        if isinstance(host, tuple):
            return tuple(np.concatenate(arrays) for arrays in zip(*parts, strict=True))
        return np.concatenate(parts)

    def alone(self, what: str, do: Callable[[], T]) -> T:
        def one() -> T:
            self.begin(what)
            return alone(self.world, what, do)

        return self._until_all(one)

    def most(self, values: np.ndarray, what: str) -> np.ndarray:
        def largest() -> np.ndarray:
            self.begin(what)
            found = np.array(values)
            self.world.all_reduce(found, ReduceOp.MAX, what=what).wait()
            return found

        return self._until_all(largest)

    def no_batch(self) -> None:
        """Nothing to compare: all ranks have the same batches."""

    def remember(self, trainer: Any) -> Callable[[], None]:
        """Whole on every rank, since ranks and their parts may change."""
        values = trainer.parameters()
        return lambda: trainer.load_parameters(values)

    def close(self) -> None:
        self._coordinator.close()

    # -- only here -----------------------------------------------------------------------------------------------------

    @property
    def training_ranks(self) -> int:
        """How many ranks train."""
        return len(self._coordinator.assembly.training)

    @property
    def recoveries(self) -> list[Recovery]:
        """The recoveries so far, oldest first; changes of size included."""
        return self._coordinator.recoveries

    def resize(self, ranks: int) -> None:
        """Train on that many ranks from now on, or on as many as there are and the mesh can use. Collective."""
        if type(ranks) is not int or ranks < 1:
            raise ConfigError(f"resize({ranks!r}): a number of ranks, 1 or more")
        while True:
            try:
                self.begin("resize")
                self._resize(ranks)
            except RankLost as error:
                self._recover(error)
                self._catch_up()
            else:
                return

    def _resize(self, ranks: int | None) -> None:
        if self.trains:
            try:
                self.saved()  # it uses communicators that are closed now
            except CheckpointError:
                self._given_up = True
        self._coordinator.resize(ranks)
        self._adopt()

    # -- steps ---------------------------------------------------------------------------------------------------------

    def _catch_up(self) -> None:
        """Make the steps whose batches are here and that do not count, or do not count any more."""
        while self._coordinator.step < self._recent.last:
            try:
                self._attempt(self._recent[self._coordinator.step + 1])
            except RankLost as error:
                self._recover(error)
            except BaseException:
                self._recent.drop()
                raise
            else:
                self._resize_if_asked()

    def _attempt(self, batch: Batch) -> None:
        """The step after the last one that counts; RankLost if it does not come to count."""
        if self.trains:
            assert self._train is not None
            self._telling(partial(self._train, *batch))
        else:
            self.session.note("step")
            step, steps, scale = self._coordinator.hear("step")
            self.session.state.follow(steps, *scale)
            self._coordinator.commit()
            self.last = step
        self._coordinator.committed()
        self._recent.forget(self._coordinator.kept)

    def _commit(self, mean: Mean, scale: GradientScale) -> None:
        """In the program, between what needs other ranks and the update of this rank's shard."""
        step, scaler = LastUpdate.of(float(mean.value), scale), scale.scaler
        self._coordinator.tell("step", (step, self.session.state.steps + (not scale.skip), (scaler.value, scaler.good)))
        self._coordinator.commit()
        self.last = step

    def _resize_if_asked(self) -> None:
        """Asked again with the next step, if a rank is lost now."""
        try:
            wanted = self._coordinator.request() if self._coordinator.asked else None
            if wanted is not None:
                self._resize(wanted)
        except RankLost as error:
            self._recover(error)

    # -- other calls ---------------------------------------------------------------------------------------------------

    def _together(self, how: str, what: str, mine: Callable[[], T]) -> T:
        """The result that the training ranks compute together, on all ranks. Where it is another state of the trainer,
        copies of that have been made when this ends."""
        if self.trains:
            found = self._telling(partial(self._mine, what, mine))
            self._coordinator.tell(what, (found, self.weight))
        else:
            self.session.note(what)
            found, self.weight = self._coordinator.hear(what)
        if how == REPLACES:
            if isinstance(found, Scalars) and not self.trains:
                restore(self.session.state, found)
            self._coordinator.secure()
        return found

    def _mine(self, what: str, do: Callable[[], T]) -> T:
        """On a rank that trains."""
        if what == SAVE:
            self._coordinator.report("saving")
        found = do()
        if what == WAIT and any(self.place.axes.world.all_gather_plain(self._given_up)):
            raise CheckpointError("a save in the background was given up when a rank died: save again")
        return found

    def _until_all(self, do: Callable[[], T]) -> T:
        while True:
            try:
                found = do()
                self._coordinator.agree()
                return found
            except RankLost as error:
                self._recover(error)
                self._catch_up()

    def _telling(self, run: Callable[[], T]) -> T:
        """Errors that the ranks that train raise together are told to the others."""
        try:
            return run()
        except RankLost:
            raise
        except FsdpxError as error:
            self._coordinator.tell_of_failure(error)
            raise

    def _recover(self, error: RankLost) -> None:
        if self.saving is not None:
            self.saving.abandon()
            self._given_up = True
        self._coordinator.recover(error)
        self._adopt()
