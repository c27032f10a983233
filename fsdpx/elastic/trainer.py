"""A trainer that goes on when ranks die, leave or join: all ranks agree on every step before it counts."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import numpy as np

from fsdpx.array.namespace import to_host
from fsdpx.checkpoint.save import Choices
from fsdpx.checkpoint.state import State, restore
from fsdpx.comm.communicator import Communicator
from fsdpx.comm.local import single
from fsdpx.comm.survivors import Survivor
from fsdpx.elastic.batches import Batch, Recent, arrays_of, part_of
from fsdpx.elastic.crew import Crew, Recovery
from fsdpx.elastic.options import Elastic
from fsdpx.engine.operations import Mean, Scale
from fsdpx.errors import CheckpointError, ConfigError, FsdpxError, RankLost
from fsdpx.nn.sort import sort
from fsdpx.trainer.batch import sum_of
from fsdpx.trainer.recipe import Recipe
from fsdpx.trainer.trainer import Step, Trainer

__all__ = ["ElasticTrainer"]

T = TypeVar("T")


class ElasticTrainer(Trainer):
    """What `fsdpx.distribute(..., elastic=True)` returns. Batches are whole global batches, the same on every rank.

    Ranks that the mesh cannot use, or that were asked to leave, are idle: they make the same calls, get the same
    results, and may train again later. See docs/elastic.md.
    """

    def __init__(self, recipe: Recipe, control: Survivor, elastic: Elastic) -> None:
        """Collective over `control`, all ranks of the job."""
        self._crew = Crew(recipe, control, elastic)
        self._recent = Recent()
        self._given_up = False  # a save in the background, since the last one that went well
        self._adopt()

    def _adopt(self) -> None:
        """Become the trainer of the crew's engine."""
        crew = self._crew
        crew.engine.commit = self._commit
        mesh, recipe = crew.engine.axes.mesh, crew.recipe
        last, weight = getattr(self, "last", None), getattr(self, "weight", 0.0)
        super().__init__(
            crew.engine, sort(recipe.model), recipe.loss, recipe.microbatches_on(mesh), crew.built.dog
        )  # fmt: skip
        self.last, self.weight = last, weight

    # -- what every trainer does ---------------------------------------------------------------------------------------

    def step(self, x: Any, y: Any) -> float:
        """Train on one global batch, given whole on every rank: its mean loss, equal on every rank."""
        self._open("step")
        self._recent.add(x, y)
        self._catch_up()
        assert self.last is not None
        return self.last.loss

    def evaluate(self, x: Any, y: Any) -> float:
        """Mean loss of the global batch, given whole on every rank, without dropout; changes nothing."""

        def mine() -> tuple[float, float]:
            return Trainer.evaluate(self, *self._parts(x, y)), self.weight

        loss, self.weight = self._together("evaluate", mine)
        return loss

    def predict(self, x: Any) -> Any:
        """The model's output for the whole batch, on every rank."""

        def mine() -> Any:
            output = Trainer.predict(self, *self._parts(x))
            host = tuple(map(to_host, output)) if isinstance(output, tuple) else to_host(output)
            parts = self.engine.axes.data.all_gather_object(host)
            if isinstance(host, tuple):
                return tuple(np.concatenate(arrays) for arrays in zip(*parts, strict=True))
            return np.concatenate(parts)

        return self._together("predict", mine)

    def parameters(self) -> dict[str, np.ndarray]:
        return self._together("parameters", lambda: Trainer.parameters(self))

    def load_parameters(self, values: Mapping[str, Any]) -> None:
        self._replaced("load_parameters", lambda: Trainer.load_parameters(self, values))

    def load_weights(self, path: Any, *, convert: bool = False) -> None:
        self._replaced("load_weights", lambda: Trainer.load_weights(self, path, convert=convert))

    def wait_saved(self) -> None:
        """Return when a save in the background is whole; CheckpointError if it cannot be, or was given up because a
        rank died. Collective."""

        def mine() -> None:
            self._end_saving()
            if any(self.engine.axes.world.all_gather_object(self._given_up)):
                raise CheckpointError("a save in the background was given up when a rank died: save again")

        try:
            self._together("wait_saved", mine)
        finally:
            self._given_up = False

    def _save(
        self, path: Path, choices: Choices, loader: Any, fit: Mapping[str, Any] | None, background: bool = False
    ) -> None:
        def mine() -> None:
            self._crew.say("saving")
            Trainer._save(self, path, choices, loader, fit, background)

        self._together("save", mine)
        self._given_up = False

    def _resume(self, path: Path, loader: Any, convert: bool = False, verify: bool = True) -> State:
        state: State = self._replaced("load", lambda: Trainer._resume(self, path, loader, convert, verify))
        if loader is not None and not self.trains:
            loader.load_state_dict(state.data)
        return state

    def no_batch(self) -> None:
        """Nothing to compare: all ranks have the same batches."""

    @property
    def world(self) -> Communicator:
        """All living ranks."""
        return self._crew.control

    @property
    def parts(self) -> int:
        return 1

    @property
    def data(self) -> Communicator:
        """One rank by itself: loaders give whole global batches on every rank."""
        return single()

    def alone(self, what: str, do: Callable[[], T]) -> T:
        return self._until_all(lambda: Trainer.alone(self, what, do))

    def most(self, values: np.ndarray, what: str) -> np.ndarray:
        return self._until_all(lambda: Trainer.most(self, values, what))

    def close(self) -> None:
        """All ranks have come to the end: free the communicators. Collective."""
        if not self._closed:
            self._together("close", self._end_saving)
            self._closed = True
            self._programs.clear()
            self._crew.close()

    # -- what only this one does ---------------------------------------------------------------------------------------

    @property
    def trains(self) -> bool:
        """Whether this rank trains; else it is idle and follows."""
        return self._crew.trains

    @property
    def training_ranks(self) -> int:
        """How many ranks train."""
        return len(self._crew.built.training)

    @property
    def recoveries(self) -> list[Recovery]:
        """What happened so far, oldest first; changes of size included."""
        return self._crew.recoveries

    def resize(self, ranks: int) -> None:
        """Train on that many ranks from now on, as far as there are so many and the mesh can use them. Collective."""
        if type(ranks) is not int or ranks < 1:
            raise ConfigError(f"resize({ranks!r}): a number of ranks, 1 or more")
        self._open("resize")
        while True:
            try:
                self._resize(ranks)
            except RankLost as error:
                self._recover(error)
                self._catch_up()
            else:
                return

    def _resize(self, ranks: int | None) -> None:
        if self.trains:
            try:
                self._end_saving()  # it speaks on communicators that are closed now
            except CheckpointError:
                self._given_up = True
        self._crew.resize(ranks)
        self._adopt()

    # -- inside --------------------------------------------------------------------------------------------------------

    def _catch_up(self) -> None:
        """Make the steps whose batches are here and that do not count, or do not count any more."""
        while self._crew.step < self._recent.last:
            try:
                self._attempt(self._recent[self._crew.step + 1])
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
            self._told(lambda: Trainer.step(self, *self._parts(*batch)))
        else:
            step, self.engine.steps, scale = self._crew.hear()
            self.engine.scaler.restore(*scale)
            self._crew.commit()
            self.last = step
        self._crew.committed()
        self._recent.forget(self._crew.kept)

    def _commit(self, mean: Mean, scale: Scale) -> None:
        """In the program, between what needs other ranks and the update of this rank's shard."""
        engine = self.engine
        step = Step(float(mean.value), scale.norm, scale.rate, scale.skip)
        self._crew.tell((step, engine.steps + (not scale.skip), engine.scaler.state()[:2]))
        self._crew.commit()
        self.last = step

    def _resize_if_asked(self) -> None:
        """Asked again with the next step, if a rank is lost now."""
        try:
            wanted = self._crew.request() if self._crew.asked else None
            if wanted is not None:
                self._resize(wanted)
        except RankLost as error:
            self._recover(error)

    def _together(self, what: str, mine: Callable[[], T], after: Callable[[T], None] | None = None) -> T:
        """What the ranks that train find together, on all ranks; begun again if one is lost on the way. after: done by
        all ranks with it."""
        self._open(what)

        def one() -> T:
            if self.trains:
                found = self._told(mine)
                self._crew.tell(found)
            else:
                found = self._crew.hear()
            if after is not None:
                after(found)
            return found

        return self._until_all(one)

    def _replaced(self, what: str, mine: Callable[[], T]) -> T:
        """The same, where it gives the trainer another state, of which there are copies when it ends."""

        def secure(found: T) -> None:
            if isinstance(found, State) and not self.trains:
                restore(self.engine, found)
            self._crew.secure()

        found = self._together(what, mine, secure)
        self._crew.replaced()
        self._recent.restart(self._crew.step)
        return found

    def _until_all(self, do: Callable[[], T]) -> T:
        while True:
            try:
                found = do()
                self._crew.agree()
                return found
            except RankLost as error:
                self._recover(error)
                self._catch_up()

    def _told(self, run: Callable[[], T]) -> T:
        """Errors that the ranks that train raise together are told to the others."""
        try:
            return run()
        except RankLost:
            raise
        except FsdpxError as error:
            self._crew.tell_of_failure(error)
            raise

    def _recover(self, error: RankLost) -> None:
        if self._saving is not None:
            self._saving.abandon()
            self._given_up = True
        self._crew.recover(error)
        self._adopt()

    def _parts(self, *values: Any) -> tuple[Any, ...]:
        """This rank's samples of a whole batch."""
        data = self.engine.axes.data
        self._whole = sum_of(array if hasattr(array, "dtype") else np.asarray(array) for array in arrays_of(values))
        return tuple(part_of(value, data.rank, data.size, self.engine.options.chunks) for value in values)

    def _features(self, arrays: Sequence[Any]) -> str:
        return f"{super()._features(arrays)} of the whole batch number {self._whole:08x}"

    # -- what keeps gradients between two calls ----------------------------------------------------------------------

    def accumulate(self, x: Any, y: Any) -> float:
        return self._refuse("accumulate")

    def no_sync(self) -> Any:
        return self._refuse("no_sync")

    def forward(self, x: Any, training: bool = True) -> Any:
        return self._refuse("forward")

    def backward(self, dy: Any) -> None:
        self._refuse("backward")

    def update(self) -> float:
        return self._refuse("update")

    def gradients(self) -> dict[str, np.ndarray]:
        return self._refuse("gradients")

    def measure(self, x: Any, y: Any, steps: int = 5) -> Any:
        return self._refuse("measure")

    def _refuse(self, what: str) -> NoReturn:
        raise ConfigError(
            f"{what}: an elastic trainer makes whole steps, since what a rank holds between two calls would die with "
            "it; microbatches=... cuts large batches"
        )
