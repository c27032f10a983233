"""Call runners. They run a trainer's methods on the ranks that take part, and check that all ranks make the same calls
with the same arguments. A call runner also holds state that outlives a change of ranks, such as a background save."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial, wraps
from inspect import Parameter, signature
from os import PathLike
from time import perf_counter
from typing import Any, ClassVar, Concatenate, ParamSpec, TypeVar, cast

import numpy as np

from fsdpx.core.base.arguments import require_arguments_match_type_hints
from fsdpx.core.base.dataclass import dataclass
from fsdpx.core.base.name_hints import require_known_options
from fsdpx.core.checkpoint.atomic_commit import run_on_rank0
from fsdpx.core.checkpoint.load import load
from fsdpx.core.checkpoint.local_shards import ByteCounter
from fsdpx.core.checkpoint.save import BackgroundSave, SaveChoices, create_empty_checkpoint_files, save
from fsdpx.core.checkpoint.scalars import CheckpointScalars
from fsdpx.core.comm.communicator import Communicator
from fsdpx.core.engine.clock import LOADING, SAVING, WAITING
from fsdpx.core.engine.engine import Engine
from fsdpx.core.engine.run import GradientScale
from fsdpx.core.state.placement import Placement
from fsdpx.core.state.step_inputs import StepInputs
from fsdpx.core.trainer import batch as batches
from fsdpx.core.trainer.recipe import Recipe
from fsdpx.core.trainer.session import Session
from fsdpx.errors import ConfigError, RankLost

__all__ = [
    "KEEPS_FOR_LATER", "ON_EVERY_RANK", "READS_STATE", "REPLACES_STATE", "SAVE", "STEP", "WAIT", "CallRunner",
    "CallRunnerChoice", "FixedRanks", "LastUpdate", "raise_option_name_errors_on_all_ranks", "reporting_block_time",
    "require_valid_weights_choice", "route_through_call_runner", "wrap_to_agree_on_argument_errors",
]  # fmt: skip

STEP, READS_STATE, REPLACES_STATE, KEEPS_FOR_LATER, ON_EVERY_RANK = "step", "reads", "replaces", "keeps", "every"
"""Effects of a call: STEP performs the next step; READS_STATE returns a result and changes nothing; REPLACES_STATE
replaces the trainer's state; KEEPS_FOR_LATER stores something for a later call; ON_EVERY_RANK is for calls that every
rank makes, including ranks that do not train."""

SAVE, WAIT = "save", "wait_for_background_save"
"""Names of the calls that save a checkpoint and that wait for a background save. Call runners may handle these calls
specially."""

P = ParamSpec("P")
T = TypeVar("T")
F = TypeVar("F", bound=Callable[..., Any])


def route_through_call_runner(
    effect: str, name: str = ""
) -> Callable[[Callable[Concatenate[Any, P], T]], Callable[Concatenate[Any, P], T]]:
    """Return a decorator for trainer methods that routes each call through the trainer's call runner.

    Parameters
    ----------
    effect : effect of the call: STEP, READS_STATE, REPLACES_STATE, KEEPS_FOR_LATER or ON_EVERY_RANK
    name : name of the call (default: the method's name)
    """

    def decorate(method: Callable[Concatenate[Any, P], T]) -> Callable[Concatenate[Any, P], T]:
        called = name or method.__name__

        @wraps(method)
        def run_call(self: Any, *given: P.args, **options: P.kwargs) -> T:
            call_runner = self._call_runner
            # fast path if the ranks never change: `CallRunner.run_call` would only call the method
            if call_runner.fixed:
                return method(self, *given, **options)
            result: T = call_runner.run_call(effect, called, partial(method, self), *given, **options)
            return result

        return run_call

    return decorate


def wrap_to_agree_on_argument_errors(
    method: Callable[Concatenate[Any, P], T], hints: bool = True, unchecked: str = ""
) -> Callable[Concatenate[Any, P], T]:
    """Wrap a collective method of a trainer so that, if the arguments on one rank are invalid, all ranks raise the
    error.

    Parameters
    ----------
    method : the method, or a function whose first argument is the trainer
    hints : if True, also check the arguments against the type hints; if False, the method checks its arguments itself
    unchecked : name of an argument that is not checked against its type hint (default: check all)
    """
    name, parameters = method.__name__, signature(method).parameters
    known = [one for one in parameters if one not in ("self", "trainer")]
    positional = [one for one in known if parameters[one].kind is Parameter.POSITIONAL_OR_KEYWORD]

    @wraps(method)
    def run_call(self: Any, *given: P.args, **options: P.kwargs) -> T:
        with self.call_runner.raising_errors_on_all_ranks(name):
            require_known_options(name, options, known)
            if hints:
                named = {**dict(zip(positional, given, strict=False)), **options}
                named.pop(unchecked, None)
                require_arguments_match_type_hints(method, (), named, name)
        return method(self, *given, **options)

    return run_call


def raise_option_name_errors_on_all_ranks(method: F) -> F:
    """Wrap a method like `wrap_to_agree_on_argument_errors`, but check only the names of its keyword arguments, because
    the method checks the values itself."""
    return cast(F, wrap_to_agree_on_argument_errors(method, hints=False))


def require_valid_weights_choice(weights: Any) -> None:
    """Raise ConfigError unless `weights` is "parameters" or "average"."""
    if not isinstance(weights, str) or weights not in ("parameters", "average"):
        raise ConfigError(f"weights={weights!r}: choose parameters or average")


@dataclass(frozen=True)
class LastUpdate:
    """Loss, gradient norm and learning rate of the last update.

    Attributes
    ----------
    loss : global mean loss
    norm : global gradient norm; nan if the step does not need it
    lr : learning rate
    skipped : True if the update was skipped
    """

    loss: float
    norm: float
    lr: float
    skipped: bool

    @classmethod
    def from_loss_and_scale(cls, loss: float, scale: GradientScale) -> LastUpdate:
        """Return the record of an update. `loss` is the global mean loss; `scale` holds the gradient norm, the learning
        rate, and whether the update was skipped."""
        return cls(loss, scale.norm, scale.rate, scale.skip)


class CallRunner(ABC):
    """Runs the methods of a trainer on its ranks. It owns the communicators of these ranks, and performs all collective
    operations except those of training. A trainer's call runner is `trainer.call_runner`.

    Parameters
    ----------
    session : session of the ranks that are currently training

    Attributes
    ----------
    last_update : record of the last update; None before the first update
    ignored_position : path of the loaded checkpoint if it contains a data position but no loader was given; otherwise
        ""
    loss_weight : denominator of the mean loss of the last `evaluate`: the number of samples, or the number of tokens or
        cells if the loss counts them
    background_save : the background save in progress; None if there is none
    closed : True once the trainer is closed and can no longer be used
    """

    __slots__ = ("background_save", "closed", "ignored_position", "last_update", "loss_weight", "session")
    fixed = False
    """True if the set of ranks never changes. Each call then runs exactly once."""

    def __init__(self, session: Session) -> None:
        self.session = session
        self.last_update: LastUpdate | None = None
        self.ignored_position: str | PathLike[str] = ""
        self.loss_weight = 0.0
        self.background_save: BackgroundSave | None = None
        self.closed = False

    @property
    @abstractmethod
    def world(self) -> Communicator:
        """Communicator of all ranks of this trainer."""

    @property
    @abstractmethod
    def data_group(self) -> Communicator:
        """Communicator of the ranks that pass different samples of the global batch."""

    @property
    def rank(self) -> int:
        """The rank of this process in `world`."""
        return int(self.world.rank)

    @property
    def placement(self) -> Placement:
        """This rank's placement (model, layout, mesh, dtypes and options), which stays fixed until the set of ranks
        changes."""
        return self.session.placement

    @property
    def batch_part_count(self) -> int:
        """Number of parts into which the global batch is split: one per data rank."""
        return self.data_group.size

    @property
    def is_training(self) -> bool:
        """True if this rank trains; False on an idle rank."""
        return True

    @property
    def has_own_speed(self) -> bool:
        """True in asynchronous training, where each rank steps at its own speed and `step` is not collective."""
        return self.placement.sync_policy.own_speed

    @property
    def is_in_sync(self) -> bool:
        """True if the last step synchronized all ranks. With local SGD, only some steps synchronize them."""
        return self.placement.sync_policy.is_sync_step(self.session.state.steps)

    @abstractmethod
    def run_call(self, effect: str, name: str, function: Callable[..., T], *given: Any, **options: Any) -> T:
        """Run a call of the trainer on the ranks that take part in it, and return its result.

        Parameters
        ----------
        effect : effect of the call: STEP, READS_STATE, REPLACES_STATE, KEEPS_FOR_LATER or ON_EVERY_RANK
        name : name of the call, compared between ranks and shown in error messages
        function : function that makes the call on this rank
        given, options : arguments of `function`

        Returns
        -------
        object : the result of `function`, also on idle ranks
        """

    @abstractmethod
    def agree_on_batch_and_make_microbatches(self, x: Any, y: Any, kind: str, training: bool = True) -> StepInputs:
        """Check this rank's batch, compare it with the batches of the other ranks, and split it into microbatches.
        Collective.

        Parameters
        ----------
        x : the model's inputs: an array, a tuple, or a dict keyed by name; samples are along dim 0
        y : the target; None if the program takes no target
        kind : kind of the program that will run, such as "step" or "predict"
        training : whether layers such as dropout run in training mode

        Returns
        -------
        StepInputs : the inputs of the program

        Raises
        ------
        DataError : on all ranks, if the batch of any rank is not valid
        """

    @abstractmethod
    def gather_output_for_samples_of_caller(self, output: Any) -> Any:
        """Return the model's output for the samples that the caller passed. If each rank passes the global batch but
        computes only a part of it, the output is gathered. Collective.

        Parameters
        ----------
        output : an array, or a tuple of arrays, with this rank's samples along dim 0

        Returns
        -------
        array or tuple : the output for the samples that this rank passed
        """

    @abstractmethod
    def run_on_rank0(self, call: str, function: Callable[[], T]) -> T:
        """Run `function` on rank 0 and return its result on every rank. Collective.

        Parameters
        ----------
        call : name of the call, for error messages
        function : function that takes no arguments

        Raises
        ------
        CheckpointError : on every rank, if `function` raises it on rank 0
        """

    @abstractmethod
    def all_reduce_max(self, values: np.ndarray, call: str) -> np.ndarray:
        """Return the elementwise maximum of `values` over all ranks. Collective.

        Parameters
        ----------
        values : 1-d array, float64 or int64, of the same size and dtype on every rank
        call : name of the call, for error messages

        Returns
        -------
        array : same shape and dtype as `values`
        """

    @abstractmethod
    def agree_on_end_of_batches(self) -> None:
        """Tell the other ranks that this rank's data loader has no more batches. A rank without a batch makes this call
        instead of `step`. Collective.

        Raises
        ------
        DataError : on all ranks, if some ranks still have a batch
        """

    @abstractmethod
    def copy_weights_and_get_restorer(self, trainer: Any) -> Callable[[], None]:
        """Copy the trainer's weights and running statistics, and return a function that restores them. The optimizer
        state is neither copied nor restored.

        Parameters
        ----------
        trainer : the trainer of this call runner

        Returns
        -------
        callable : function that takes no arguments and restores the weights; calling it is collective
        """

    @abstractmethod
    def close(self) -> None:
        """Free shared memory and communicators of this trainer. Collective."""

    def require_open(self, call: str) -> None:
        """Raise ConfigError if the trainer is closed.

        Parameters
        ----------
        call : name of the call, for the error message
        """
        if self.closed:
            raise ConfigError(f"{call}: this trainer is closed")

    def raising_errors_on_all_ranks(self, call: str) -> AbstractContextManager[None]:
        """Return a context manager for argument checks. If a check fails on one rank, all ranks raise the error (see
        `batch.raising_errors_on_all_ranks`). If ranks may change, or if each rank steps at its own speed, the context
        manager does nothing.

        Parameters
        ----------
        call : name of the collective call that follows
        """
        return (
            batches.raising_errors_on_all_ranks(self.world, call)
            if self.fixed and not self.has_own_speed
            else nullcontext()
        )

    def agree_on_arguments(self, call: str, arguments: Mapping[str, Any]) -> None:
        """Raise ConfigError on all ranks if ranks pass different arguments. Collective. If ranks may change, or if each
        rank steps at its own speed, this method does nothing.

        Parameters
        ----------
        call : name of the call
        arguments : maps argument names to values; values are compared as text
        """
        if self.fixed and not self.has_own_speed:
            batches.agree_on_call(self.world, call, {name: str(value) for name, value in arguments.items()})

    def agree_on_call(self, call: str) -> None:
        """Wait until all ranks have reached this call. Collective.

        Parameters
        ----------
        call : name of the call

        Raises
        ------
        DesyncError : on all ranks, if some ranks have made a different call
        """
        self.require_open(call)
        self.session.agree_on_call(call)

    def wait_for_last_step(self) -> None:
        """In asynchronous training, wait until all ranks have finished their last step; otherwise return immediately.
        This method is called at the end of `fit` and at the start of each collective call. It does not wait for dead
        ranks."""
        self.require_open("wait_for_last_step")
        self.session.wait_for_last_step()

    def save_checkpoint(
        self,
        path: str | PathLike[str],
        choices: SaveChoices,
        loader: Any,
        fit: Mapping[str, Any] | None,
        background: bool = False,
    ) -> None:
        """Write a checkpoint for `Trainer.save`. Collective.

        Parameters
        ----------
        path : folder of the checkpoint
        choices : dtype, file size, number of checkpoints to keep, and which weights to save
        loader : a `data.DataLoader` whose position is saved; if None, no position is saved
        fit : state that `fit` needs to resume; None outside of `fit`
        background : if True, copy the state, write the copy in a thread, and return before the checkpoint is complete
        """

        def save_on_training_ranks() -> None:
            self.agree_on_call("save" + ", in the background" * background)
            self.wait_for_save_within_call()
            # with local SGD, each replica saves its own parameters, and later resumes with them; asynchronous ranks
            # save the parameters that are common to all ranks
            state, plain = self.session.state, choices.weights == "parameters" and not self.has_own_speed
            put = nullcontext() if plain else self.using_weights(choices.weights)
            with (
                reporting_block_time(self.session.engine, SAVING) as count,
                self.session.swapping_in_common_parameters("slot", "average"),
                put,
            ):
                if background:
                    self.background_save = BackgroundSave(
                        state, create_empty_checkpoint_files(state, path, choices, loader, fit), count
                    )
                else:
                    save(state, path, choices, loader, fit, count)

        self.run_call(READS_STATE, SAVE, save_on_training_ranks)

    def load_checkpoint(
        self, path: str | PathLike[str], loader: Any, convert: bool = False, verify: bool = True
    ) -> CheckpointScalars:
        """Load a checkpoint for `Trainer.load`, so that training continues from it. Collective.

        Parameters
        ----------
        path : folder of the checkpoint
        loader : a `data.DataLoader` that is set to the saved position; if None, ignore the saved position
        convert : if True, convert numbers that were saved in another dtype; if False, raise an error for them
        verify : if True, check the digests of all bytes first

        Returns
        -------
        CheckpointScalars : the scalars in the checkpoint, such as the number of steps
        """

        def load_on_training_ranks() -> CheckpointScalars:
            self.agree_on_call("load")
            self.wait_for_save_within_call()
            with reporting_block_time(self.session.engine, LOADING) as count:
                loaded = load(self.session.state, path, loader, convert, verify, count)
            self.session.tell_sync_policy_parameters_are_set()
            return loaded

        scalars = self.run_call(REPLACES_STATE, "load", load_on_training_ranks)
        if loader is not None and not self.is_training:
            loader.load_state_dict(scalars.data)
        self.ignored_position = path if loader is None and scalars.data is not None else ""
        return scalars

    def wait_for_background_save(self) -> None:
        """Wait until the background save is complete. Collective.

        Raises
        ------
        CheckpointError : on all ranks, if the save failed, or was abandoned because a rank died
        """

        def wait_on_training_ranks() -> None:
            self.agree_on_call(WAIT)
            self.wait_for_save_within_call()

        self.run_call(READS_STATE, WAIT, wait_on_training_ranks)

    def wait_for_save_within_call(self) -> None:
        """Wait for the background save, if there is one. Use this only inside a call that the training ranks have
        agreed on."""
        if self.background_save is None:
            return
        try:
            with reporting_block_time(self.session.engine, WAITING):
                self.background_save.wait()
        except RankLost:
            # do not discard the background save here: the code that recovers from a lost rank decides what happens to
            # it
            raise
        except BaseException:
            self.background_save = None
            raise
        self.background_save = None

    def using_weights(self, weights: str) -> AbstractContextManager[None]:
        """Return a context manager that temporarily replaces the parameters with the requested weights. Collective on
        entry and on exit; after an error each rank restores its parameters without communication.

        Parameters
        ----------
        weights : "parameters" for the parameters common to all ranks, or "average" for their average over time
        """
        require_valid_weights_choice(weights)
        if weights == "parameters":
            return self.session.swapping_in_common_parameters("master")
        from fsdpx.core.trainer.gather_full import replace_by_averages_and_get_restore

        return self.session.swapping_parameters(
            partial(replace_by_averages_and_get_restore, self.session.state), weights
        )


@contextmanager
def reporting_block_time(engine: Engine, activity: str) -> Iterator[ByteCounter]:
    """Time a `with` block, and report the block's duration and byte count to the engine's observers under the name
    `activity`. The context manager yields a counter, to which the block must add the number of bytes that it moves."""
    begin, count = perf_counter(), ByteCounter()
    try:
        yield count
    finally:
        engine.record_outside_program(activity, begin, count.nbytes)


class CallRunnerChoice(ABC):
    """Base class for values of the option `elastic`, for trainers whose set of ranks may change.

    Attributes
    ----------
    excluded : name of this choice in core/trainer/option_rules.py, which lists the options that cannot be combined with
        it
    """

    excluded: ClassVar[str] = "nothing"

    @abstractmethod
    def open_world(self, comm: Any) -> Communicator:
        """Open the communicator of all ranks of the trainer. `comm` is the argument of `distribute`. Collective."""

    @abstractmethod
    def make_call_runner(self, recipe: Recipe, world: Any) -> CallRunner:
        """Return the call runner for a trainer with the options in `recipe`. `world` is the communicator that
        `open_world` returned. Collective."""


class FixedRanks(CallRunner):
    """The call runner of a trainer whose ranks never change: all ranks that called `fsdpx.distribute` take part in
    each call."""

    __slots__ = ()
    fixed = True

    @property
    def world(self) -> Communicator:
        return self.placement.axes.world

    @property
    def data_group(self) -> Communicator:
        return self.placement.axes.samples

    def run_call(self, effect: str, name: str, function: Callable[..., T], *given: Any, **options: Any) -> T:
        return function(*given, **options)

    def agree_on_batch_and_make_microbatches(self, x: Any, y: Any, kind: str, training: bool = True) -> StepInputs:
        self.require_open(kind)
        return self.session.agree_on_batch_and_make_microbatches(x, y, kind, training)

    def gather_output_for_samples_of_caller(self, output: Any) -> Any:
        return output

    def run_on_rank0(self, call: str, function: Callable[[], T]) -> T:
        self.agree_on_call(call)
        return run_on_rank0(self.world, call, function)

    def all_reduce_max(self, values: np.ndarray, call: str) -> np.ndarray:
        self.require_open(call)
        self.session.notify_observers_and_raise_pending_error(call)
        self.session.wait_for_last_step()
        return batches.all_reduce_max(self.world, call, values)

    def agree_on_end_of_batches(self) -> None:
        self.session.notify_observers_and_raise_pending_error("step")
        if not self.has_own_speed:
            batches.agree_on_batch(self.placement.axes, "step", batches.LOADER_ENDED, 0, None)

    def copy_weights_and_get_restorer(self, trainer: Any) -> Callable[[], None]:
        from fsdpx.core.trainer.gather_full import copy_weights_and_get_restorer

        self.require_open("copy_weights_and_get_restorer")
        put_back = self.placement.sync_policy.copy_parameters_and_get_restorer()
        put_back = put_back or copy_weights_and_get_restorer(self.session.state)

        def restore_weights() -> None:
            self.agree_on_call("restore the copied weights")
            put_back()
            self.session.tell_sync_policy_parameters_are_set()

        return restore_weights

    def close(self) -> None:
        self.session.close()
