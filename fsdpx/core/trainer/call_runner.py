"""Hosts: which ranks make a trainer's calls, what they agree on between calls, and what outlasts a session."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial, wraps
from inspect import Parameter, signature
from os import PathLike
from time import perf_counter
from typing import Any, Concatenate, ParamSpec, TypeVar, cast

import numpy as np

from fsdpx.core.base.arguments import demand_arguments
from fsdpx.core.base.name_hints import demand_known
from fsdpx.core.checkpoint.atomic_commit import alone
from fsdpx.core.checkpoint.load import load
from fsdpx.core.checkpoint.local_shards import ByteCount
from fsdpx.core.checkpoint.save import Background, Choices, prepare, save
from fsdpx.core.checkpoint.scalars import Scalars
from fsdpx.core.comm.communicator import Communicator
from fsdpx.core.engine.clock import LOADING, SAVING, WAITING
from fsdpx.core.engine.engine import Engine
from fsdpx.core.engine.run import GradientScale
from fsdpx.core.state.placement import Placement
from fsdpx.core.state.step_inputs import Feed
from fsdpx.core.trainer import batch as batches
from fsdpx.core.trainer.session import Session
from fsdpx.errors import ConfigError, RankLost

__all__ = [
    "EVERY", "KEEPS", "LOOKS", "REPLACES", "SAVE", "STEP", "WAIT", "FixedRanks", "LastUpdate", "TrainerHost",
    "check_which", "checked_together", "hosted", "shared_errors", "timed",
]  # fmt: skip

STEP, LOOKS, REPLACES, KEEPS, EVERY = "step", "looks", "replaces", "keeps", "every"
"""What a call does: it makes the next step; it finds a result and changes nothing; it gives the trainer another state;
it keeps something for a later call; it is one that every rank makes, also one that does not train."""

SAVE, WAIT = "save", "wait_saved"
"""Names of calls of which an elastic host does more."""

P = ParamSpec("P")
T = TypeVar("T")
F = TypeVar("F", bound=Callable[..., Any])


def hosted(how: str, name: str = "") -> Callable[[Callable[Concatenate[Any, P], T]], Callable[Concatenate[Any, P], T]]:
    """Declare that a method of a trainer is a call that its host runs.

    Parameters
    ----------
    how : one of the words above
    name : of the call, if it is not that of the method
    """

    def declare(method: Callable[Concatenate[Any, P], T]) -> Callable[Concatenate[Any, P], T]:
        called = name or method.__name__

        @wraps(method)
        def call(self: Any, *given: P.args, **options: P.kwargs) -> T:
            host = self._host
            if host.fixed:  # by far the most: one call less
                return method(self, *given, **options)
            found: T = host.run(how, called, partial(method, self), *given, **options)
            return found

        return call

    return declare


def checked_together(
    method: Callable[Concatenate[Any, P], T], hints: bool = True, but: str = ""
) -> Callable[Concatenate[Any, P], T]:
    """Check the arguments of a call that all ranks make: an error of one is raised on all ranks.

    hints: by their type hints, too; otherwise the call looks at them itself. but: at the argument of this name, too."""
    name, parameters = method.__name__, signature(method).parameters
    known = [one for one in parameters if one not in ("self", "trainer")]
    positional = [one for one in known if parameters[one].kind is Parameter.POSITIONAL_OR_KEYWORD]

    @wraps(method)
    def call(self: Any, *given: P.args, **options: P.kwargs) -> T:
        with self.host.share_errors(name):
            demand_known(name, options, known)
            if hints:
                named = {**dict(zip(positional, given, strict=False)), **options}
                named.pop(but, None)
                demand_arguments(method, (), named, name)
        return method(self, *given, **options)

    return call


def shared_errors(method: F) -> F:
    """Like `checked_together`, for a call that looks at type hints itself."""
    return cast(F, checked_together(method, hints=False))


def check_which(which: Any) -> None:
    """ConfigError for another `with_` than those that there are."""
    if not isinstance(which, str) or which not in ("parameters", "average"):
        raise ConfigError(f"with_={which!r}: choose parameters or average")


@dataclass(frozen=True)
class LastUpdate:
    """The last update: global mean loss, global gradient norm (nan if not asked for), learning rate."""

    loss: float
    norm: float
    rate: float
    skipped: bool

    @classmethod
    def of(cls, loss: float, scale: GradientScale) -> LastUpdate:
        return cls(loss, scale.norm, scale.rate, scale.skip)


class TrainerHost(ABC):
    """The ranks of a trainer, as `trainer.host`: who they are, and what all of them do together beside training.

    session: of the ranks that train now. last: the last update. weight: what the last `evaluate` averaged over. saving:
    a save in the background. closed: the trainer cannot be used any more."""

    __slots__ = ("closed", "last", "saving", "session", "weight")
    fixed = False
    """Whether the ranks stay the same, so that each call runs once."""

    def __init__(self, session: Session) -> None:
        self.session = session
        self.last: LastUpdate | None = None
        self.weight = 0.0
        self.saving: Background | None = None
        self.closed = False

    # -- ranks ---------------------------------------------------------------------------------------------------------

    @property
    @abstractmethod
    def world(self) -> Communicator:
        """All ranks that call this trainer."""

    @property
    @abstractmethod
    def data(self) -> Communicator:
        """The ranks that are given different samples."""

    @property
    def rank(self) -> int:
        """This rank among all that call this trainer."""
        return int(self.world.rank)

    @property
    def place(self) -> Placement:
        """The fixed choices of this rank."""
        return self.session.place

    @property
    def parts(self) -> int:
        """How many different parts the global batch is given in: one from each data rank."""
        return self.data.size

    @property
    def trains(self) -> bool:
        """Whether this rank trains; else it is idle and follows."""
        return True

    @property
    def apart(self) -> bool:
        """Whether ranks step at their own speed, and meet only where they must."""
        return self.place.pace.own_speed

    @property
    def met(self) -> bool:
        """Whether all ranks came together in the last step; not always in local training."""
        return self.place.pace.met(self.session.state.steps)

    # -- calls ---------------------------------------------------------------------------------------------------------

    @abstractmethod
    def run(self, how: str, what: str, do: Callable[..., T], *given: Any, **options: Any) -> T:
        """The result of a call, which was given these arguments. how: what it does, one of the words of this file."""

    @abstractmethod
    def feed(self, x: Any, y: Any, kind: str, training: bool = True) -> Feed:
        """A batch as the caller gave it, checked, agreed on and cut into microbatches of this rank. Collective."""

    @abstractmethod
    def joined(self, output: Any) -> Any:
        """The model's output as the caller sees it, from that on this rank's samples. Collective."""

    @abstractmethod
    def alone(self, what: str, do: Callable[[], T]) -> T:
        """The result of `do` on rank 0, given to every rank; its CheckpointError, too. Collective."""

    @abstractmethod
    def most(self, values: np.ndarray, what: str) -> np.ndarray:
        """The largest of each number over all ranks, float64 or int64. Collective; `what` names it in errors."""

    @abstractmethod
    def no_batch(self) -> None:
        """Say that this rank has no more batches; DataError on all ranks if others go on. Collective, like `step`."""

    @abstractmethod
    def remember(self, trainer: Any) -> Callable[[], None]:
        """Copy the weights and running statistics of a trainer; what is returned, called on all ranks, puts them back.
        The optimiser's state stays what it is."""

    @abstractmethod
    def close(self) -> None:
        """Free what the trainer has in common with other ranks. Collective."""

    def demand_open(self, what: str) -> None:
        """ConfigError if the trainer is closed."""
        if self.closed:
            raise ConfigError(f"{what}: this trainer is closed")

    def share_errors(self, call: str) -> AbstractContextManager[None]:
        """Inside, an error about the arguments of one rank is raised on all ranks; see `batch.share_errors`."""
        return batches.share_errors(self.world, call) if self.fixed and not self.apart else nullcontext()

    def agree_on_arguments(self, call: str, arguments: Mapping[str, Any]) -> None:
        """ConfigError on all ranks if some give other arguments. Collective, where ranks make each call together."""
        if self.fixed and not self.apart:
            batches.begin(self.world, call, {name: str(value) for name, value in arguments.items()})

    def begin(self, call: str) -> None:
        """All ranks have come to this call."""
        self.demand_open(call)
        self.session.begin(call)

    def finish(self) -> None:
        """Return when all ranks have made their last step, where they step at their own speed; at once where they step
        together. `fit` ends with it, and calls that are collective begin with it. Ranks that have died are not waited
        for."""
        self.demand_open("finish")
        self.session.meet()

    def checkpoint(
        self,
        path: str | PathLike[str],
        choices: Choices,
        loader: Any,
        fit: Mapping[str, Any] | None,
        background: bool = False,
    ) -> None:
        """Write a checkpoint, see `Trainer.save`. fit: what `fit` needs to go on. Collective."""

        def mine() -> None:
            self.begin("save" + ", in the background" * background)
            self.saved()
            # replicas that train by themselves go on from their own parameters, and save these
            state, plain = self.session.state, choices.with_ == "parameters" and not self.apart
            put = nullcontext() if plain else self.having(choices.with_)
            with timed(self.session.engine, SAVING) as count, self.session.common("slot", "average"), put:
                if background:
                    self.saving = Background(state, prepare(state, path, choices, loader, fit), count)
                else:
                    save(state, path, choices, loader, fit, count)

        self.run(LOOKS, SAVE, mine)

    def resume(self, path: str | PathLike[str], loader: Any, convert: bool = False, verify: bool = True) -> Scalars:
        """Go on where a checkpoint was written, see `Trainer.load`: its scalars. Collective."""

        def mine() -> Scalars:
            self.begin("load")
            self.saved()
            with timed(self.session.engine, LOADING) as count:
                found = load(self.session.state, path, loader, convert, verify, count)
            self.session.placed()
            return found

        scalars = self.run(REPLACES, "load", mine)
        if loader is not None and not self.trains:
            loader.load_state_dict(scalars.data)
        return scalars

    def wait_saved(self) -> None:
        """Return when a save in the background is whole; CheckpointError on all ranks if it cannot be, or was given up
        because a rank died. Collective."""

        def mine() -> None:
            self.begin(WAIT)
            self.saved()

        self.run(LOOKS, WAIT, mine)

    def saved(self) -> None:
        """The same on the ranks that train, within a call."""
        if self.saving is None:
            return
        try:
            with timed(self.session.engine, WAITING):
                self.saving.wait()
        except RankLost:
            raise  # the code that recovers decides what becomes of the save
        except BaseException:
            self.saving = None
            raise
        self.saving = None

    def having(self, which: str) -> AbstractContextManager[None]:
        """Inside, the parameters are what was asked for, "parameters" that all have in common or their "average". After
        an error each rank puts them back by itself. Collective."""
        check_which(which)
        if which == "parameters":
            return self.session.common("master")
        from fsdpx.core.trainer.gather_full import put_averages

        return self.session.having(partial(put_averages, self.session.state), which)


@contextmanager
def timed(engine: Engine, what: str) -> Iterator[ByteCount]:
    """Tell the observers of an engine when this began and ended, and the bytes that were counted meanwhile."""
    begin, count = perf_counter(), ByteCount()
    try:
        yield count
    finally:
        engine.outside(what, begin, count.nbytes)


class FixedRanks(TrainerHost):
    """The ranks that `fsdpx.distribute` was called on: all of them make each call, once."""

    __slots__ = ()
    fixed = True

    @property
    def world(self) -> Communicator:
        return self.place.axes.world

    @property
    def data(self) -> Communicator:
        return self.place.axes.samples

    def run(self, how: str, what: str, do: Callable[..., T], *given: Any, **options: Any) -> T:
        return do(*given, **options)

    def feed(self, x: Any, y: Any, kind: str, training: bool = True) -> Feed:
        self.demand_open(kind)
        return self.session.feed(x, y, kind, training)

    def joined(self, output: Any) -> Any:
        return output

    def alone(self, what: str, do: Callable[[], T]) -> T:
        self.begin(what)
        return alone(self.world, what, do)

    def most(self, values: np.ndarray, what: str) -> np.ndarray:
        self.demand_open(what)
        self.session.note(what)
        self.session.meet()
        return batches.largest(self.world, what, values)

    def no_batch(self) -> None:
        self.session.note("step")
        if not self.apart:
            batches.agree(self.place.axes, "step", batches.ENDED, 0, None)

    def remember(self, trainer: Any) -> Callable[[], None]:
        from fsdpx.core.trainer.gather_full import remember

        self.demand_open("remember")
        put_back = self.place.pace.remember() or remember(self.session.state)

        def restore() -> None:
            self.begin("restore")
            put_back()
            self.session.placed()

        return restore

    def close(self) -> None:
        self.session.close()
