"""A trainer that goes on when ranks die, leave or join: all ranks agree on every step before it counts."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from os import PathLike
from typing import Any, NoReturn, TypeVar

import numpy as np

from fsdpx.array.namespace import to_host
from fsdpx.checkpoint.save import Choices
from fsdpx.checkpoint.state import Scalars, restore
from fsdpx.checkpoint.weights import WeightsReport
from fsdpx.comm.communicator import Communicator, ReduceOp, Survivor
from fsdpx.comm.local import single
from fsdpx.elastic.batches import Batch, Recent, arrays_of, part_of
from fsdpx.elastic.coordinator import Coordinator, Recovery
from fsdpx.elastic.options import Elastic
from fsdpx.engine.workspace import GradientScale, Mean
from fsdpx.errors import CheckpointError, ConfigError, FsdpxError, RankLost
from fsdpx.state.feed import Feed
from fsdpx.trainer.batch import sum_of
from fsdpx.trainer.recipe import Recipe
from fsdpx.trainer.report import Summary
from fsdpx.trainer.routing import Routing
from fsdpx.trainer.trainer import LastUpdate, Trainer

__all__ = ["ElasticTrainer"]

T = TypeVar("T")


class ElasticTrainer(Trainer):
    """The trainer that `fsdpx.distribute(..., elastic=True)` returns. Batches are global and whole on every rank.

    Ranks that the mesh cannot use, or that were asked to leave, are idle: they make the same calls, get the same
    results, and may train again later. See docs/elastic.md."""

    __slots__ = ("_coordinator", "_given_up", "_recent", "_whole")

    def __init__(self, recipe: Recipe, control: Survivor, elastic: Elastic) -> None:
        """Collective over `control`, all ranks of the job."""
        self._coordinator = Coordinator(recipe, control, elastic, self._commit)
        self._recent = Recent()
        self._given_up = False  # a save in the background, since the last one that went well
        self._whole = 0  # tells the last whole batch from others
        super().__init__(self._coordinator.assembly.session)

    def _adopt(self) -> None:
        """Go on with the session of the ranks that are here now."""
        self._session = self._coordinator.assembly.session
        self._saving = None

    # -- common to every trainer ---------------------------------------------------------------------------------------

    def step(self, x: Any, y: Any) -> float:
        """Train on one global batch, given whole on every rank: its mean loss, equal on every rank."""
        self._open("step")
        self._demand("step")
        self._recent.add(x, y)
        self._catch_up()
        assert self.last is not None
        return self.last.loss

    def evaluate(self, x: Any, y: Any, with_: str = "parameters") -> float:
        """Mean loss of the global batch, given whole on every rank, without dropout; changes nothing."""

        def mine() -> tuple[float, float]:
            inputs, target = self._parts(x, y)
            return Trainer.evaluate(self, inputs, target, with_), self.weight

        loss, self.weight = self._together("evaluate", mine)
        return loss

    def predict(self, x: Any, with_: str = "parameters") -> Any:
        """The model's output for the whole batch, on every rank."""

        def mine() -> Any:
            (inputs,) = self._parts(x)
            output = Trainer.predict(self, inputs, with_)
            host = tuple(map(to_host, output)) if isinstance(output, tuple) else to_host(output)
            parts = self._session.place.axes.data.all_gather_plain(host)
            if isinstance(host, tuple):
                return tuple(np.concatenate(arrays) for arrays in zip(*parts, strict=True))
            return np.concatenate(parts)

        return self._together("predict", mine)

    def generate(self, prompt: Any, max_new_tokens: int = 128, **options: Any) -> Any:
        """As every trainer's; begun again if a rank is lost, and `stream` with it. Idle ranks have no `stream`."""
        return self._together("generate", lambda: Trainer.generate(self, prompt, max_new_tokens, **options))

    def parameters(self, with_: str = "parameters", names: Collection[str] | None = None) -> dict[str, np.ndarray]:
        return self._together("parameters", lambda: Trainer.parameters(self, with_, names))

    def load_parameters(self, values: Mapping[str, Any]) -> None:
        self._replaced("load_parameters", lambda: Trainer.load_parameters(self, values))

    def remember(self) -> Callable[[], None]:
        """Whole on every rank, since ranks and their parts may change."""
        values = self.parameters()
        return lambda: self.load_parameters(values)

    def load_weights(self, source: Any, **options: Any) -> WeightsReport:
        return self._replaced("load_weights", lambda: Trainer.load_weights(self, source, **options))

    def wait_saved(self) -> None:
        """Return when a save in the background is whole; CheckpointError if it cannot be, or was given up because a
        rank died. Collective."""

        def mine() -> None:
            self._begin("wait_saved")
            self._end_saving()
            if any(self._session.place.axes.world.all_gather_plain(self._given_up)):
                raise CheckpointError("a save in the background was given up when a rank died: save again")

        try:
            self._together("wait_saved", mine)
        finally:
            self._given_up = False

    def checkpoint(
        self,
        path: str | PathLike[str],
        choices: Choices,
        loader: Any,
        fit: Mapping[str, Any] | None,
        background: bool = False,
    ) -> None:
        def mine() -> None:
            self._coordinator.report("saving")
            Trainer.checkpoint(self, path, choices, loader, fit, background)

        self._together("save", mine)
        self._given_up = False

    def resume(self, path: str | PathLike[str], loader: Any, convert: bool = False, verify: bool = True) -> Scalars:
        scalars: Scalars = self._replaced("load", lambda: Trainer.resume(self, path, loader, convert, verify))
        if loader is not None and not self.trains:
            loader.load_state_dict(scalars.data)
        return scalars

    def no_batch(self) -> None:
        """Nothing to compare: all ranks have the same batches."""

    @property
    def world(self) -> Communicator:
        """All living ranks."""
        return self._coordinator.assembly.control

    @property
    def parts(self) -> int:
        return 1

    @property
    def data(self) -> Communicator:
        """One rank by itself: loaders give whole global batches on every rank."""
        return single()

    def alone(self, what: str, do: Callable[[], T]) -> T:
        return self._until_all(lambda: Trainer.alone(self, what, do))

    def summary(self) -> Summary:
        return self._until_all(lambda: Trainer.summary(self))

    def routing(self) -> dict[str, Routing]:
        return self._until_all(lambda: Trainer.routing(self))

    def most(self, values: np.ndarray, what: str) -> np.ndarray:
        def largest() -> np.ndarray:
            self._begin(what)
            found = np.array(values)
            self.world.all_reduce(found, ReduceOp.MAX, what=what).wait()
            return found

        return self._until_all(largest)

    def close(self) -> None:
        """All ranks have come to the end: free the communicators. Collective."""

        def mine() -> None:
            self._begin("close")
            self._end_saving()

        if not self._closed:
            self._together("close", mine)
            self._closed = True
            self._coordinator.close()

    # -- only on an elastic trainer ------------------------------------------------------------------------------------

    @property
    def trains(self) -> bool:
        """Whether this rank trains; else it is idle and follows."""
        return self._coordinator.assembly.trains

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
                self._begin("resize")
                self._resize(ranks)
            except RankLost as error:
                self._recover(error)
                self._catch_up()
            else:
                return

    def _resize(self, ranks: int | None) -> None:
        if self.trains:
            try:
                self._end_saving()  # it uses communicators that are closed now
            except CheckpointError:
                self._given_up = True
        self._coordinator.resize(ranks)
        self._adopt()

    # -- inside --------------------------------------------------------------------------------------------------------

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
            self._telling(lambda: Trainer.step(self, *self._parts(*batch)))
        else:
            self._session.note("step")
            step, steps, scale = self._coordinator.hear("step")
            self._session.state.follow(steps, *scale)
            self._coordinator.commit()
            self.last = step
        self._coordinator.committed()
        self._recent.forget(self._coordinator.kept)

    def _commit(self, mean: Mean, scale: GradientScale) -> None:
        """In the program, between what needs other ranks and the update of this rank's shard."""
        step, scaler = LastUpdate.of(float(mean.value), scale), scale.scaler
        self._coordinator.tell(
            "step", (step, self._session.state.steps + (not scale.skip), (scaler.value, scaler.good))
        )
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

    def _together(self, what: str, mine: Callable[[], T], after: Callable[[T], None] | None = None) -> T:
        """The result that the training ranks compute together, on all ranks; restarted if a rank is lost meanwhile.
        after: called with it on all ranks."""
        self._open(what)

        def one() -> T:
            if self.trains:
                found = self._telling(mine)
                self._coordinator.tell(what, found)
            else:
                self._session.note(what)
                found = self._coordinator.hear(what)
            if after is not None:
                after(found)
            return found

        return self._until_all(one)

    def _replaced(self, what: str, mine: Callable[[], T]) -> T:
        """The same for a call that changes the trainer's state; copies of the new state have been made when it ends."""

        def secure(found: T) -> None:
            if isinstance(found, Scalars) and not self.trains:
                restore(self._session.state, found)
            self._coordinator.secure()

        found = self._together(what, mine, secure)
        self._coordinator.replaced()
        self._recent.restart(self._coordinator.step)
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
        if self._saving is not None:
            self._saving.abandon()
            self._given_up = True
        self._coordinator.recover(error)
        self._adopt()

    def _parts(self, *values: Any) -> tuple[Any, ...]:
        """This rank's samples of a whole batch."""
        place = self._session.place
        self._whole = sum_of(array if hasattr(array, "dtype") else np.asarray(array) for array in arrays_of(values))
        return tuple(part_of(value, place.axes.data.rank, place.accumulation) for value in values)

    def _feed(self, x: Any, y: Any, kind: str, training: bool = True) -> Feed:
        self._open(kind)
        return self._session.feed(x, y, kind, training, f" of the whole batch number {self._whole:08x}")


def _refused(what: str) -> Callable[..., NoReturn]:
    def refuse(self: ElasticTrainer, *arguments: Any, **options: Any) -> NoReturn:
        raise ConfigError(
            f"{what}: an elastic trainer makes whole steps, since what a rank holds between two calls would die with "
            "it; microbatches=... cuts large batches"
        )

    return refuse


for name in "accumulate no_sync forward backward update gradients measure zero_grad freeze unfreeze".split():
    setattr(ElasticTrainer, name, _refused(name))  # what keeps something between two calls
