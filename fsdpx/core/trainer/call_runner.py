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

from fsdpx.core.base.arguments import require_arguments
from fsdpx.core.base.name_hints import require_known
from fsdpx.core.checkpoint.atomic_commit import run_on_rank0
from fsdpx.core.checkpoint.load import load
from fsdpx.core.checkpoint.local_shards import ByteCounter
from fsdpx.core.checkpoint.save import BackgroundSave, SaveChoices, prepare_save, save
from fsdpx.core.checkpoint.scalars import RunScalars
from fsdpx.core.comm.communicator import Communicator
from fsdpx.core.engine.clock import LOADING, SAVING, WAITING
from fsdpx.core.engine.engine import Engine
from fsdpx.core.engine.run import GradientScale
from fsdpx.core.state.placement import Placement
from fsdpx.core.state.step_inputs import StepInputs
from fsdpx.core.trainer import batch as batches
from fsdpx.core.trainer.session import Session
from fsdpx.errors import ConfigError, RankLost

__all__ = [
    "EVERY",
    "KEEPS",
    "LOOKS",
    "REPLACES",
    "SAVE",
    "STEP",
    "WAIT",
    "CallRunner",
    "FixedRanks",
    "LastUpdate",
    "check_arguments_together",
    "check_weights_choice",
    "notify_timing",
    "runs_on_host",
    "shared_errors",
]  # fmt: skip

STEP, LOOKS, REPLACES, KEEPS, EVERY = "step", "looks", "replaces", "keeps", "every"
"""What a call does: it makes the next step; it finds a result and changes nothing; it gives the trainer another state;
it keeps something for a later call; it is one that every rank makes, also one that does not train."""

SAVE, WAIT = "save", "wait_saved"
"""Names of calls of which an elastic host does more."""

P = ParamSpec("P")
T = TypeVar("T")
F = TypeVar("F", bound=Callable[..., Any])


def runs_on_host(
    effect: str, name: str = ""
) -> Callable[[Callable[Concatenate[Any, P], T]], Callable[Concatenate[Any, P], T]]:
    """Declare that a method of a trainer is a call that its host runs.

    Parameters
    ----------
    effect : one of the words above
    name : of the call, if it is not that of the method
    """

    def decorate(method: Callable[Concatenate[Any, P], T]) -> Callable[Concatenate[Any, P], T]:
        called = name or method.__name__

        @wraps(method)
        def run_call(self: Any, *given: P.args, **options: P.kwargs) -> T:
            host = self._host
            if host.fixed:  # by far the most: one call less
                return method(self, *given, **options)
            result: T = host.run_call(effect, called, partial(method, self), *given, **options)
            return result

        return run_call

    return decorate


def check_arguments_together(
    method: Callable[Concatenate[Any, P], T], hints: bool = True, but: str = ""
) -> Callable[Concatenate[Any, P], T]:
    """Check the arguments of a call that all ranks make: an error of one is raised on all ranks.

    hints: by their type hints, too; otherwise the call looks at them itself. but: at the argument of this name, too."""
    name, parameters = method.__name__, signature(method).parameters
    known = [one for one in parameters if one not in ("self", "trainer")]
    positional = [one for one in known if parameters[one].kind is Parameter.POSITIONAL_OR_KEYWORD]

    @wraps(method)
    def run_call(self: Any, *given: P.args, **options: P.kwargs) -> T:
        with self.call_runner.share_errors(name):
            require_known(name, options, known)
            if hints:
                named = {**dict(zip(positional, given, strict=False)), **options}
                named.pop(but, None)
                require_arguments(method, (), named, name)
        return method(self, *given, **options)

    return run_call


def shared_errors(method: F) -> F:
    """Like `checked_together`, for a call that looks at type hints itself."""
    return cast(F, check_arguments_together(method, hints=False))


def check_weights_choice(which: Any) -> None:
    """ConfigError for another `weights` than those that there are."""
    if not isinstance(which, str) or which not in ("parameters", "average"):
        raise ConfigError(f"weights={which!r}: choose parameters or average")


@dataclass(frozen=True)
class LastUpdate:
    """The last update: global mean loss, global gradient norm (nan if not asked for), learning rate."""

    loss: float
    norm: float
    rate: float
    skipped: bool

    @classmethod
    def from_scale(cls, loss: float, scale: GradientScale) -> LastUpdate:
        return cls(loss, scale.norm, scale.rate, scale.skip)


class CallRunner(ABC):
    """The ranks of a trainer, as `trainer.call_runner`: who they are, and what all of them do together beside training.

    session: of the ranks that train now. last: the last update. weight: what the last `evaluate` averaged over. saving:
    a save in the background. closed: the trainer cannot be used any more."""

    __slots__ = ("closed", "last", "saving", "session", "weight")
    fixed = False
    """Whether the ranks stay the same, so that each call runs once."""

    def __init__(self, session: Session) -> None:
        self.session = session
        self.last: LastUpdate | None = None
        self.weight = 0.0
        self.saving: BackgroundSave | None = None
        self.closed = False

    # -- ranks ---------------------------------------------------------------------------------------------------------

    @property
    @abstractmethod
    def world(self) -> Communicator:
        """All ranks that call this trainer."""

    @property
    @abstractmethod
    def data_group(self) -> Communicator:
        """The ranks that are given different samples."""

    @property
    def rank(self) -> int:
        """This rank among all that call this trainer."""
        return int(self.world.rank)

    @property
    def placement(self) -> Placement:
        """The fixed choices of this rank."""
        return self.session.placement

    @property
    def part_count(self) -> int:
        """How many different parts the global batch is given in: one from each data rank."""
        return self.data_group.size

    @property
    def is_training(self) -> bool:
        """Whether this rank trains; else it is idle and follows."""
        return True

    @property
    def has_own_speed(self) -> bool:
        """Whether ranks step at their own speed, and meet only where they must."""
        return self.placement.sync_policy.own_speed

    @property
    def is_in_sync(self) -> bool:
        """Whether all ranks came together in the last step; not always in local training."""
        return self.placement.sync_policy.is_sync_step(self.session.state.steps)

    # -- calls ---------------------------------------------------------------------------------------------------------

    @abstractmethod
    def run_call(self, how: str, what: str, do: Callable[..., T], *given: Any, **options: Any) -> T:
        """The result of a call, which was given these arguments. how: what it does, one of the words of this file."""

    @abstractmethod
    def agree_on_inputs(self, x: Any, y: Any, kind: str, training: bool = True) -> StepInputs:
        """A batch as the caller gave it, checked, agreed on and cut into microbatches of this rank. Collective."""

    @abstractmethod
    def all_gather_output(self, output: Any) -> Any:
        """The model's output as the caller sees it, from that on this rank's samples. Collective."""

    @abstractmethod
    def run_on_rank0(self, what: str, do: Callable[[], T]) -> T:
        """The result of `do` on rank 0, given to every rank; its CheckpointError, too. Collective."""

    @abstractmethod
    def all_reduce_max(self, values: np.ndarray, what: str) -> np.ndarray:
        """The largest of each number over all ranks, float64 or int64. Collective; `what` names it in errors."""

    @abstractmethod
    def agree_on_end_of_batches(self) -> None:
        """Say that this rank has no more batches; DataError on all ranks if others go on. Collective, like `step`."""

    @abstractmethod
    def copy_weights(self, trainer: Any) -> Callable[[], None]:
        """Copy the weights and running statistics of a trainer; what is returned, called on all ranks, puts them back.
        The optimiser's state stays what it is."""

    @abstractmethod
    def close(self) -> None:
        """Free what the trainer has in common with other ranks. Collective."""

    def require_open(self, what: str) -> None:
        """ConfigError if the trainer is closed."""
        if self.closed:
            raise ConfigError(f"{what}: this trainer is closed")

    def share_errors(self, call: str) -> AbstractContextManager[None]:
        """Inside, an error about the arguments of one rank is raised on all ranks; see `batch.share_errors`."""
        return batches.share_errors(self.world, call) if self.fixed and not self.has_own_speed else nullcontext()

    def agree_on_arguments(self, call: str, arguments: Mapping[str, Any]) -> None:
        """ConfigError on all ranks if some give other arguments. Collective, where ranks make each call together."""
        if self.fixed and not self.has_own_speed:
            batches.agree_on_call(self.world, call, {name: str(value) for name, value in arguments.items()})

    def agree_on_call(self, call: str) -> None:
        """All ranks have come to this call."""
        self.require_open(call)
        self.session.agree_on_call(call)

    def wait_for_last_step(self) -> None:
        """Return when all ranks have made their last step, where they step at their own speed; at once where they step
        together. `fit` ends with it, and calls that are collective begin with it. Ranks that have died are not waited
        for."""
        self.require_open("finish")
        self.session.wait_for_last_step()

    def save_checkpoint(
        self,
        path: str | PathLike[str],
        choices: SaveChoices,
        loader: Any,
        fit: Mapping[str, Any] | None,
        background: bool = False,
    ) -> None:
        """Write a checkpoint, see `Trainer.save`. fit: what `fit` needs to go on. Collective."""

        def save_on_training_ranks() -> None:
            self.agree_on_call("save" + ", in the background" * background)
            self.wait_for_save()
            # replicas that train by themselves go on from their own parameters, and save these
            state, plain = self.session.state, choices.weights == "parameters" and not self.has_own_speed
            put = nullcontext() if plain else self.use_weights(choices.weights)
            with (
                notify_timing(self.session.engine, SAVING) as count,
                self.session.use_common_parameters("slot", "average"),
                put,
            ):
                if background:
                    self.saving = BackgroundSave(state, prepare_save(state, path, choices, loader, fit), count)
                else:
                    save(state, path, choices, loader, fit, count)

        self.run_call(LOOKS, SAVE, save_on_training_ranks)

    def load_checkpoint(
        self, path: str | PathLike[str], loader: Any, convert: bool = False, verify: bool = True
    ) -> RunScalars:
        """Go on where a checkpoint was written, see `Trainer.load`: its scalars. Collective."""

        def load_on_training_ranks() -> RunScalars:
            self.agree_on_call("load")
            self.wait_for_save()
            with notify_timing(self.session.engine, LOADING) as count:
                loaded = load(self.session.state, path, loader, convert, verify, count)
            self.session.publish_parameters()
            return loaded

        scalars = self.run_call(REPLACES, "load", load_on_training_ranks)
        if loader is not None and not self.is_training:
            loader.load_state_dict(scalars.data)
        return scalars

    def wait_for_background_save(self) -> None:
        """Return when a save in the background is whole; CheckpointError on all ranks if it cannot be, or was given up
        because a rank died. Collective."""

        def wait_on_training_ranks() -> None:
            self.agree_on_call(WAIT)
            self.wait_for_save()

        self.run_call(LOOKS, WAIT, wait_on_training_ranks)

    def wait_for_save(self) -> None:
        """The same on the ranks that train, within a call."""
        if self.saving is None:
            return
        try:
            with notify_timing(self.session.engine, WAITING):
                self.saving.wait()
        except RankLost:
            raise  # the code that recovers decides what becomes of the save
        except BaseException:
            self.saving = None
            raise
        self.saving = None

    def use_weights(self, which: str) -> AbstractContextManager[None]:
        """Inside, the parameters are what was asked for, "parameters" that all have in common or their "average". After
        an error each rank puts them back by itself. Collective."""
        check_weights_choice(which)
        if which == "parameters":
            return self.session.use_common_parameters("master")
        from fsdpx.core.trainer.gather_full import put_averages

        return self.session.use_parameters(partial(put_averages, self.session.state), which)


@contextmanager
def notify_timing(engine: Engine, what: str) -> Iterator[ByteCounter]:
    """Tell the observers of an engine when this began and ended, and the bytes that were counted meanwhile."""
    begin, count = perf_counter(), ByteCounter()
    try:
        yield count
    finally:
        engine.record_outside_program(what, begin, count.nbytes)


class FixedRanks(CallRunner):
    """The ranks that `fsdpx.distribute` was called on: all of them make each call, once."""

    __slots__ = ()
    fixed = True

    @property
    def world(self) -> Communicator:
        return self.placement.axes.world

    @property
    def data_group(self) -> Communicator:
        return self.placement.axes.samples

    def run_call(self, how: str, what: str, do: Callable[..., T], *given: Any, **options: Any) -> T:
        return do(*given, **options)

    def agree_on_inputs(self, x: Any, y: Any, kind: str, training: bool = True) -> StepInputs:
        self.require_open(kind)
        return self.session.agree_on_inputs(x, y, kind, training)

    def all_gather_output(self, output: Any) -> Any:
        return output

    def run_on_rank0(self, what: str, do: Callable[[], T]) -> T:
        self.agree_on_call(what)
        return run_on_rank0(self.world, what, do)

    def all_reduce_max(self, values: np.ndarray, what: str) -> np.ndarray:
        self.require_open(what)
        self.session.record_call(what)
        self.session.wait_for_last_step()
        return batches.all_reduce_max(self.world, what, values)

    def agree_on_end_of_batches(self) -> None:
        self.session.record_call("step")
        if not self.has_own_speed:
            batches.agree_on_batch(self.placement.axes, "step", batches.LOADER_ENDED, 0, None)

    def copy_weights(self, trainer: Any) -> Callable[[], None]:
        from fsdpx.core.trainer.gather_full import copy_state

        self.require_open("remember")
        put_back = self.placement.sync_policy.copy_parameters() or copy_state(self.session.state)

        def restore_weights() -> None:
            self.agree_on_call("restore")
            put_back()
            self.session.publish_parameters()

        return restore_weights

    def close(self) -> None:
        self.session.close()
