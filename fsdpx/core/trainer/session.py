"""A session runs a model on a fixed set of ranks: it checks batches, compiles programs for them, and runs the programs.
Whenever the set of ranks changes, a trainer gets a new session."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from time import perf_counter
from typing import Any, NamedTuple

import numpy as np

from fsdpx.core.array.shapes import ShapeArray
from fsdpx.core.base.dataclass import dataclass, replace
from fsdpx.core.base.name_hints import parse_patterns
from fsdpx.core.comm.communicator import Communicator
from fsdpx.core.comm.mesh import make_single_rank_axes
from fsdpx.core.engine.clock import BATCHES
from fsdpx.core.engine.engine import DirectPrediction, Engine
from fsdpx.core.engine.not_finite import require_finite
from fsdpx.core.engine.operations import Executable
from fsdpx.core.engine.run import GradientScale, LossMean
from fsdpx.core.program import (
    PROGRAM_KINDS,
    Program,
    ProgramRequest,
    Slot,
    Stage,
    SyncRules,
    compile,
    order_sequentially,
)
from fsdpx.core.state.batch_samples import get_digest_of_first_recorded_array
from fsdpx.core.state.placement import Placement
from fsdpx.core.state.step_inputs import Microbatch, StepInputs, list_targets
from fsdpx.core.state.train_state import TrainState
from fsdpx.core.trainer import batch as batches
from fsdpx.core.trainer.batch import DuplicateBatchDetector
from fsdpx.core.trainer.uncoordinated_predict import UncoordinatedPrediction
from fsdpx.errors import ConfigError, FsdpxError, warn
from fsdpx.nn.cache import KeyValueCache
from fsdpx.nn.gradient_accumulation import has_integer_dtype
from fsdpx.nn.layer_list import LayerList
from fsdpx.nn.shape_inference import output_shapes

__all__ = ["Session"]

Commit = Callable[[Any, Any], None]
STEP_KINDS = frozenset({"step", "accumulate", "forward", "backward", "update"})
"""Calls that belong to a step. In a synchronous step, all ranks compare these calls. If replicas train independently,
only ranks of the same replica compare them."""


TRAINS = ("step", "accumulate")
"""Kinds of programs that run forward and backward on samples and targets."""
NO_GRADIENT, WRONG_SHARDING = "no gradient reaches some", "how samples are cut"
MAX_SHAPES = 16
"""Maximum number of `DirectPrediction` objects to keep, one for each shape and dtype of batches."""
READ_ONLY_KINDS = ("evaluate", "predict")
"""Kinds of programs that change no state. During training, besides the number of microbatches, only two things change
how these programs are compiled: which parameters are frozen, and which values, such as gradients, earlier programs left
behind."""


class BatchComparison(NamedTuple):
    """How ranks compare their batches before they run a program. The comparison is chosen before the batch is checked.

    Attributes
    ----------
    ranks : communicator of the ranks that compare batches; None if this rank runs the program without comparing
    can_start_uncoordinated : whether this rank may start the program without comparing its batch, as long as each
        rank's batch has the same shape and dtype as its previous one
    digests : whether ranks also compare checksums of their samples: True if some ranks must hold the same samples, or
        if data ranks may hold the same samples by mistake
    may_have_duplicates : whether data ranks may, by mistake, have the same samples instead of different ones
    """

    ranks: Communicator | None
    can_start_uncoordinated: bool
    digests: bool
    may_have_duplicates: bool


@dataclass
class CheckedBatch:
    """This rank's batch after it has been checked.

    Attributes
    ----------
    inputs : inputs of the model; empty if a check failed before they were made
    target : the target; None if there is none
    rows : number of samples
    features : text that ranks compare: shapes and dtypes, and sometimes a digest of the values
    batched : whether the caller's arrays have a sample dimension
    error : error raised by the check that failed; None if the batch is valid
    """

    inputs: tuple[Any, ...] = ()
    target: Any = None
    rows: int = 0
    features: str = ""
    batched: bool = True
    error: FsdpxError | None = None

    @property
    def arrays(self) -> list[Any]:
        """The arrays of the batch: all inputs, then the targets if there are any."""
        return [*self.inputs, *list_targets(self.target)]


class Session:
    """Runs the model of one placement (layout, mesh, number formats): checks batches, compiles programs for them, and
    runs the programs.

    Parameters
    ----------
    engine : runs the programs of this rank
    model, loss : unsharded model and loss, as on a single process, used to check batches
    microbatches : configured number of microbatches per step
    commit : function called before each update with the step's mean loss and update scale; if None, no function is
        called

    Attributes
    ----------
    make_out_of_memory_error : function that turns a MemoryError raised by a program into an error that names options
        that would let the program fit into memory; if None, the MemoryError itself is raised
    """

    def __init__(
        self, engine: Engine, model: LayerList, loss: Any, microbatches: int, commit: Commit | None = None
    ) -> None:
        self.engine = engine
        self.commit = commit
        # numbers of microbatches: (as configured, as used for the last batch)
        self._microbatch_counts = microbatches, microbatches
        self.model, self.loss = model, loss
        self._duplicates = DuplicateBatchDetector(self.placement.axes)
        # if all ranks hold parts of the same samples, `predict` waits only for neighbors, not for all ranks
        together = self.placement.sample_layout.has_one_group
        self._uncoordinated = (
            UncoordinatedPrediction(self.placement.axes.world, self._predict_on_zeros_after_error) if together else None
        )
        # compiled programs; each key contains the program request, or the values that determine this request, and the
        # set of program kinds that had already run
        self._executables: dict[tuple[Any, ...], Executable] = {}
        # for each kind of program, the entry of `_executables` that was used last, as (request, kinds that had run,
        # program)
        self._last_executables: dict[str, tuple[ProgramRequest, frozenset[str], Executable]] = {}
        self._output_shapes: dict[tuple[Any, ...], list[tuple[int, ...]]] = {}  # keyed by the shapes of the batch
        self._warned: set[str] = set()
        # largest microbatch of any rank; set only if `recompute` is a memory budget
        self._largest_microbatch: Microbatch | None = None
        # recomputed units (groups of layers), keyed by batch size
        self._recomputed: dict[Any, frozenset[int]] = {}
        # variants of this rank's stage, keyed by (names of frozen parameters, indices of inputs that get gradients)
        self._stages: dict[tuple[frozenset[str], frozenset[int]], Stage] = {}
        self.make_out_of_memory_error: Callable[[MemoryError, StepInputs], Exception] | None = None

    @property
    def placement(self) -> Placement:
        """This rank's placement (model, layout, mesh, dtypes and options), which stays fixed until the set of ranks
        changes."""
        return self.engine.placement

    @property
    def state(self) -> TrainState:
        """What persists from step to step: parameters, optimizer state, running statistics and counters."""
        return self.engine.state

    def notify_observers_and_raise_pending_error(self, call: str) -> None:
        """Tell the observers, such as the watchdog, that this rank makes `call`. If another rank has reported an error
        in `predict`, raise that error on this rank."""
        for enter in self.engine.hooks.on_collective_call:
            enter(call)
        if (
            self._uncoordinated is not None
            and call != "predict"
            and (error := self._uncoordinated.take_error_from_other_rank())
            and call != "close"
        ):
            raise error

    def agree_on_call(self, call: str) -> None:
        """Wait until all ranks have reached `call`. Raise DesyncError on all ranks if some ranks have made a different
        call. If replicas train independently, a call other than a step also waits for pending transfers between
        replicas. Collective."""
        self.notify_observers_and_raise_pending_error(call)
        self.wait_for_last_step()
        if call == "close" and self.placement.sync_policy.get_failed_ranks():
            return  # do not wait for dead ranks; the remaining ranks can close on their own
        batches.agree_on_call(self._get_agreement_group(call), call)
        if call not in STEP_KINDS:
            self.state.wait_for_transfers()

    def _get_agreement_group(self, call: str) -> Communicator:
        """Return the communicator of the ranks that make `call` together. In a step that does not synchronize replicas,
        these are the ranks of this replica; otherwise, they are all ranks."""
        axes = self.placement.axes
        if axes.group is axes.world or call not in STEP_KINDS:
            return axes.world
        return (
            axes.world
            if call in ("step", "update") and self.placement.sync_policy.is_sync_step(self.state.steps + 1)
            else axes.group
        )

    def wait_for_last_step(self) -> None:
        """In asynchronous training, wait until all ranks have finished their last step. Until then, other ranks may
        read and change this rank's parameters. Ranks that are still training do not wait for this rank."""
        self.placement.sync_policy.wait_for_last_step()

    def tell_sync_policy_parameters_are_set(self) -> None:
        """Tell the synchronization policy that the parameters and the step count have been set on this rank, for
        example from a checkpoint. In asynchronous training, this method is collective and waits for all ranks, so that
        no rank reads values that another rank has not set yet."""
        self.placement.sync_policy.on_parameters_set(self.state.steps)
        if self.placement.sync_policy.own_speed:
            self.agree_on_call("begin to step apart")

    def swapping_in_common_parameters(self, *kinds: str) -> AbstractContextManager[None]:
        """Return a context manager that does nothing if all ranks train the same parameters. If they train different
        parameters, as in local SGD, the context manager temporarily replaces this rank's arrays with the arrays that
        are common to all ranks. `kinds` lists which arrays to replace: "master" (parameters), "slot" (optimizer state)
        or "average" (averages of parameters)."""
        put = self.placement.sync_policy.read_common_state_and_get_setter(self.state, kinds)
        return nullcontext() if put is None else self.swapping_parameters(put, "the common model")

    @contextmanager
    def swapping_parameters(self, set_parameters: Callable[[], Callable[[], None]], what: str) -> Iterator[None]:
        """Return a context manager that replaces the parameters within its block. Collective on entry and on exit.

        Parameters
        ----------
        set_parameters : function that sets the temporary parameters, and returns a function that restores the
            parameters of this rank
        what : name of the temporary parameters, for error messages
        """
        self.agree_on_call(f"with {what}")
        put_back = set_parameters()
        self.state.invalidate_full_parameters()
        try:
            yield
            self.agree_on_call(f"without {what}")
        finally:
            put_back()
            self.state.invalidate_full_parameters()

    def agree_on_batch_and_make_microbatches(
        self, x: Any, y: Any, kind: str, training: bool, also: str = ""
    ) -> StepInputs:
        """Check this rank's batch, compare it with the batches of the other ranks, and split it into microbatches. If
        the batch of one rank is invalid, all ranks raise the same error. Collective.

        Parameters
        ----------
        x, y : inputs and target, as the caller passed them
        kind : kind of the program, such as "step" or "predict"
        training : whether layers such as dropout run in training mode
        also : additional text that must be the same on all ranks
        """
        begin = perf_counter()
        self.notify_observers_and_raise_pending_error(kind)
        comparison = self._choose_batch_comparison(kind)
        also += ", training=False" * (kind == "forward" and not training)
        checked = self._check_and_describe_batch(x, y, kind, comparison, also)
        everyone = self._agree_on_sample_counts(comparison, checked, kind)
        if kind in TRAINS and WRONG_SHARDING not in self._warned:
            self._check_sharding_of_batch(checked, get_digest_of_first_recorded_array((x, y)))
        microbatches = self._make_microbatches_and_count_samples(checked.inputs, checked.target, everyone, kind)
        self.engine.record_outside_program(BATCHES, begin)
        return StepInputs(microbatches, training, self.commit, batched=checked.batched)

    def _choose_batch_comparison(self, kind: str) -> BatchComparison:
        """Return how ranks compare their batches before a program of this kind, such as "step" or "predict"."""
        axes, own_speed = self.placement.axes, self.placement.sync_policy.own_speed and kind == "step"
        doubted = (
            kind in TRAINS
            and self._duplicates.may_have_duplicates
            and self.placement.sample_layout.has_complete_samples
        )
        if own_speed or not axes.world.has_peers:
            return BatchComparison(None, False, digests=False, may_have_duplicates=doubted)
        digests = doubted or axes.data.size < axes.world.size
        return BatchComparison(
            self._get_agreement_group(kind), kind == "predict" and self._uncoordinated is not None, digests, doubted
        )

    def _check_and_describe_batch(
        self, x: Any, y: Any, kind: str, comparison: BatchComparison, also: str
    ) -> CheckedBatch:
        """Check this rank's batch as far as possible without communication. Return the batch, together with its
        description and, if it is invalid, the error. The description, which includes the text `also`, must be the same
        on all ranks."""
        place, checked = self.placement, CheckedBatch()
        layout = place.sample_layout
        try:
            batches.require_batch_usable_on_device(place, x, y)
            # the caller may change the arrays that it passed to `forward` before it calls `backward`
            checked.inputs = tuple([a.copy("K") if kind == "forward" else a for a in batches.prepare_inputs(place, x)])
            checked.batched = layout.has_complete_samples or batches.has_sample_dim(place, x)
            checked.rows = int(checked.inputs[0].shape[0])
            if kind in (*TRAINS, "evaluate"):
                checked.target = batches.check_and_partition_target(place, y, checked.rows, checked.batched)
            if place.axes.world.size > 1:
                checked.features = ", ".join(map(layout.describe_array, checked.arrays)) + also
            if comparison.digests:
                checked.features += f"{batches.DIGEST_SEPARATOR}{batches.checksum_arrays(checked.arrays)}"
            self._validate_batch(checked.inputs, checked.target)
        except FsdpxError as problem:
            checked.error = batches.add_given_dtype_to_error(problem, x, y)
        return checked

    def _agree_on_sample_counts(self, comparison: BatchComparison, checked: CheckedBatch, kind: str) -> tuple[int, ...]:
        """Return the number of samples of each data rank. If the batch of one rank is invalid, raise the same error on
        all ranks that compare batches. Warn if data ranks train on the same samples."""
        place, about = self.placement, (checked.features, checked.rows)
        if comparison.ranks is None:
            if checked.error is not None:
                raise batches.add_rank_to_error(checked.error, place.axes.world.rank)
            return place.accumulation.estimate_samples_per_rank(checked.rows)
        uncoordinated = self._uncoordinated if comparison.can_start_uncoordinated else None
        if uncoordinated is not None and uncoordinated.can_start_without_agreement(about, checked.error):
            return (checked.rows,) * place.axes.data.size
        self.wait_for_last_step()
        everyone, alike = batches.agree_on_batch(place.axes, kind, *about, checked.error, comparison.ranks)
        if comparison.may_have_duplicates and comparison.ranks is place.axes.world:
            self._duplicates.count_samples_of_equal_batch_and_warn(alike, checked.arrays)
        place.sample_layout.require_equal_sample_counts(everyone)
        if uncoordinated is not None:
            uncoordinated.record_agreed_batch(about, _get_shapes_and_dtypes(checked.inputs))
        return everyone

    def make_predict_inputs_from_tokens(self, tokens: Any, row: int, cache: KeyValueCache | None) -> StepInputs:
        """Return the inputs of the program `predict` for tokens that all ranks have already checked.

        Parameters
        ----------
        tokens : int array of shape (texts, positions)
        row : index of the first of these texts among all texts
        cache : key-value cache; None if the tokens are complete texts
        """
        inputs = batches.prepare_inputs(self.placement, tokens)
        self._validate_batch(inputs, None)
        return StepInputs([Microbatch(inputs, None, row)], training=False, cache=cache)

    def _make_microbatches_and_count_samples(
        self, inputs: tuple[Any, ...], target: Any, rows: tuple[int, ...], kind: str
    ) -> list[Microbatch | None]:
        """Split this rank's samples into microbatches, and count the samples trained on since the last update. `rows`
        holds the number of samples of each data rank."""
        place, state, whole = self.placement, self.state, kind in ("forward", "predict")
        if kind == "predict":
            return [Microbatch(inputs, None, sum(place.list_sample_counts_of_earlier_groups(rows)))]
        trains = kind in ("step", "accumulate", "forward")
        before = 0 if kind in TRAINS and not state.gradient_source else state.samples
        row = sum(place.list_sample_counts_of_earlier_groups(rows)) + (before if trains else 0)
        part = batches.LocalBatch(inputs, target, rows, row)
        evenly = whole or (kind == "evaluate" and not place.accumulation.can_split_batch(rows))
        count = self._choose_microbatch_count(rows)
        microbatches = batches.split_into_microbatches(place, part, 1 if whole else count, evenly)
        if trains:
            state.samples = before + sum(place.sample_layout.count_samples_per_group(rows))
            if place.options.recompute.budget is not None:
                self._largest_microbatch = batches.make_shape_only_microbatch(place, inputs, rows, count)
        return microbatches

    @property
    def microbatches(self) -> int:
        """Configured number of microbatches per step."""
        return self._microbatch_counts[0]

    def _choose_microbatch_count(self, rows: Sequence[int]) -> int:
        """Return the number of microbatches for a batch, and store it. `rows` holds the number of samples of each data
        rank.

        Let n be the largest number of samples on any data rank, rounded up to a multiple of the number of pipeline
        ranks. The result is the configured number of microbatches, but at most n, because additional microbatches would
        be empty."""
        width = self.placement.axes.pipe.size
        self._microbatch_counts = self.microbatches, min(self.microbatches, max(-(-max(rows) // width), 1) * width)
        return self._microbatch_counts[1]

    def _validate_batch(self, inputs: tuple[Any, ...], target: Any) -> None:
        """Check a batch without communication: its shapes must fit all layers, labels must be valid, and inputs must
        be finite if the user asked for this check. Store the shapes of the outputs."""
        place, key = self.placement, _get_shapes_and_dtypes(inputs)
        shapes = self._output_shapes.get(key)
        if shapes is None:
            layout = place.sample_layout
            given = [ShapeArray(layout.compute_full_input_shape(a.shape, i), a.dtype) for i, a in enumerate(inputs)]
            outputs = output_shapes(self.model, given, place.formats.compute, make_single_rank_axes())
            if place.axes.tensor.size > 1:  # check that the tensor axis can split all dimensions
                largest = batches.make_shape_only_microbatch(place, inputs, (inputs[0].shape[0],), 1)
                place.value_shapes.shape_of(0, largest)
            local_shapes = place.sample_layout.compute_local_output_shapes([tuple(o.shape) for o in outputs])
            shapes = self._output_shapes[key] = list(local_shapes)
        if target is not None:
            loss: Any = place.sample_layout.bind_loss(self.loss)
            loss.validate(shapes[0] if len(shapes) == 1 else tuple(shapes), target)
        if place.options.check_finite:
            for name, array in zip(place.layout.inputs, inputs, strict=True):
                require_finite(place, array, f"input {name!r}")

    def require_logits_and_get_vocab_size(self, tokens: Any) -> int:
        """Return the vocabulary size of a language model. Raise ConfigError unless the model returns a vector of
        logits for each token."""
        inputs = batches.prepare_inputs(self.placement, tokens)
        self._validate_batch(inputs, None)
        shape, *more = self._output_shapes[_get_shapes_and_dtypes(inputs)]
        if more or len(shape) != 3 or shape[:2] != inputs[0].shape:
            got = ", ".join(map(str, [shape, *more]))
            raise ConfigError(f"generate: for tokens {inputs[0].shape} the model gives {got}, not logits of each")
        return shape[2]

    def freeze(self, patterns: Sequence[str], undo: bool = False) -> None:
        """Freeze the parameters that match the patterns, or unfreeze them if `undo` is true. Collective: ranks compare
        the patterns."""
        call = "unfreeze" if undo else "freeze"
        if self.state.gradient_source:
            raise ConfigError(f"{call}: gradients are being added up; call update or zero_grad first")
        self.placement.sync_policy.require_synchronized_replicas(self.state.steps)
        parse_patterns(call, patterns)
        self.agree_on_call(f"{call}({', '.join(map(repr, patterns))})")
        names = frozenset[str]().union(
            *(self.placement.layout.find_parameter_names_matching(pattern, call) for pattern in patterns)
        )
        (self.state.freezing.unfreeze if undo else self.state.freezing.freeze)(names)

    def run_program(self, kind: str, feed: StepInputs, local: bool = False) -> dict[Slot, Any]:
        """Run a program and return its results, keyed by slot (name of a value in the program). If `local` is true,
        gradients are not reduced over ranks."""
        try:
            executable = self._get_or_prepare_executable(kind, feed, local)
            self.state.ran.add(kind)
            results = self.engine.run_program(executable, feed)
            if kind == "predict" and self._uncoordinated is not None:
                # preparing a program is collective, so prepare the program of the next `predict` now; the next call of
                # `predict` then waits only for neighboring ranks
                self._get_or_prepare_executable(kind, feed, local)
        except MemoryError as error:
            if self.make_out_of_memory_error is None:
                raise
            raise self.make_out_of_memory_error(error, feed) from error
        if self.state.idle and NO_GRADIENT not in self._warned:
            self._warn_of_parameters_without_gradient()
        return results

    def _get_or_prepare_executable(self, kind: str, feed: StepInputs, local: bool) -> Executable:
        """Return the compiled program for the inputs `feed`; compile it on first use."""
        if kind in READ_ONLY_KINDS:
            state = self.state
            key = kind, len(feed.batch), state.frozen, frozenset(state.store), frozenset(state.ran)
            executable = self._executables.get(key)
            if executable is None:
                executable = self._executables[key] = self._get_or_prepare_executable_of_request(
                    self.make_program_request(kind, len(feed.batch))
                )
            return executable
        request = self.make_program_request(kind, len(feed.batch), local)
        if kind in ("forward", "backward"):
            (batch,) = feed.batch
            request = replace(request, stage=self._get_current_stage(batch))
        return self._get_or_prepare_executable_of_request(request)

    def _get_or_prepare_executable_of_request(self, request: ProgramRequest) -> Executable:
        # Preparing a program is collective, because it allocates shared memory. All ranks must therefore prepare a
        # program in the same call. If the key were only the request, some ranks might find a program while others have
        # to prepare it, because the request depends on values left by earlier programs, and these may differ between
        # ranks. The key therefore also contains the kinds of programs that have run, which are the same on all ranks.
        last = self._last_executables.get(request.kind)
        # comparing is faster than hashing, because most attributes are the same objects as in the last request
        if last is not None and last[0] == request and last[1] == self.state.ran:
            return last[2]
        key = (request, frozenset(self.state.ran))
        if key not in self._executables:
            self._executables[key] = self.engine.prepare_program(request)
        self._last_executables[request.kind] = (*key, self._executables[key])
        return self._executables[key]

    def _warn_of_parameters_without_gradient(self) -> None:
        """Warn once about parameters that receive no gradient. In each pipeline stage, only the rank with data rank 0
        and tensor rank 0 warns."""
        names, axes = list(self.state.idle), self.placement.axes
        self._warned.add(NO_GRADIENT)
        if axes.data.rank == axes.tensor.rank == 0:
            more = f" and {len(names) - 6} more" if len(names) > 6 else ""
            warn(
                f"no gradient reaches {', '.join(names[:6])}{more}: the loss does not depend on them, so they are "
                "trained with a gradient of zero: weight decay and momentum still move them, where PyTorch leaves them "
                "alone; leave their layers out, or freeze them (frozen=[...])",
            )

    def _check_sharding_of_batch(self, checked: CheckedBatch, samples: int | None) -> None:
        """Warn once if inputs or targets seem to be partitioned wrongly, for example if the ranks' parts of a field
        overlap. Raise DataError if ranks pass parts of different samples; `samples` is a digest of the indices of this
        rank's samples, or None. Collective if all ranks step together; otherwise this method does nothing."""
        axes, text = self.placement.axes, ""
        if self._get_agreement_group("step") is axes.world:
            targets = list_targets(checked.target)
            text = self.placement.sample_layout.gather_sharding_warning(checked.inputs, targets, samples)
        self._warned.add(WRONG_SHARDING)
        if text and axes.world.rank == 0:
            warn(text)

    def finish_update(self, mean: LossMean, scale: GradientScale) -> None:
        """Update step counters and loss scale after an update, and drop cached views of the old parameters."""
        self.state.finish_update(scale.skip, scale.scaler, mean.shared)
        self.engine.drop_stale_views()

    @contextmanager
    def hiding_accumulated_gradients(self) -> Iterator[None]:
        """Return a context manager inside which programs run as if there were no accumulated gradients."""
        state, gradient_source = self.state, self.state.gradient_source
        kept = state.pop_values_of_earlier_programs()
        try:
            yield
        finally:
            state.store.update(kept)
            state.gradient_source = gradient_source

    def make_program_request(
        self, kind: str, microbatches: int, local: bool = False, fresh: bool = False
    ) -> ProgramRequest:
        """Return the input of the compiler for a program of this kind. It contains the placement's options, and says
        which values, such as gradients, earlier programs left in the store. If `fresh` is true, assume that they left
        none. If `local` is true, gradients are not reduced over ranks."""
        place, policy = self.placement, self.placement.sync_policy
        holding = (lambda kind: frozenset[int]()) if fresh else self.state.list_indices_of_filled_slots
        steps = kind in ("step", "accumulate", "local")
        kind = policy.get_program_kind(kind)
        # if ranks may change (`commit` is set), compute the gradient norm, so that all ranks learn of NaN or Inf; if
        # only one rank raised an error, the other ranks would assume that it has died
        normed = place.options.clip_norm is not None or self.state.scaler.dynamic or self.commit is not None
        return ProgramRequest(
            kind,
            self._get_current_stage(),
            microbatches,
            keep_full=place.keeps_full_parameters and not policy.own_speed,
            reduce_each=place.reduces_each_microbatch and not local,
            ahead=place.sharding.prefetch,
            resident=holding("full"),
            grads=holding("grad"),
            parts=holding("part"),
            has_loss_weight=not fresh and Slot("weight") in self.state.store,
            order=place.pipe.get_actions_of_rank(microbatches, place.axes.pipe.rank) if steps else None,
            recompute=self._choose_recomputed_units(microbatches) if steps else frozenset(),
            scales=("NORM" if normed else "SCALE", *(["COMMIT"] if self.commit is not None else [])),
            sync=policy.get_sync_rules(self.state.steps + 1) if PROGRAM_KINDS[kind].updates else SyncRules(),
            choices=place.step_choices,
        )

    def _get_current_stage(self, batch: Microbatch | None = None) -> Stage:
        """Return the pipeline stage of this rank, adjusted to the parameters that are currently frozen. If `batch` is
        not None, gradients of its floating-point inputs are also computed."""
        place, frozen = self.placement, self.state.frozen
        inputs = () if batch is None else batch.inputs
        key = (frozen, frozenset(v for v, x in enumerate(inputs) if not has_integer_dtype(x)))
        if key not in self._stages:
            trainable, constant = (
                place.layout.list_trainable_page_flags(frozen),
                place.layout.find_values_without_gradient(*key),
            )
            self._stages[key] = replace(place.stage, trainable=trainable, constant=constant)
        return self._stages[key]

    @property
    def program(self) -> Program:
        """The program of a step that begins without accumulated gradients and without gathered parameters. With local
        SGD, only some steps synchronize replicas; the result is the program of a synchronizing step."""
        return self.round_programs[-1][0]

    @property
    def round_programs(self) -> list[tuple[Program, int]]:
        """Programs of one round (the steps from one synchronization of the ranks to the next), as (program, number of
        runs) pairs. Usually there is only one pair; with local SGD, there is one pair for each distinct program."""
        request = self.make_program_request(
            "step", self.placement.accumulation.count_microbatches(self._microbatch_counts[1]), fresh=True
        )
        return [
            (compile(replace(request, sync=sync)), times)
            for sync, times in self.placement.sync_policy.count_steps_per_sync_rules()
        ]

    def _choose_recomputed_units(self, microbatches: int) -> frozenset[int]:
        """Return the indices of the units (groups of layers) whose forward pass is recomputed in the backward pass. The
        choice is the same for all batches of one size. If `recompute` is a memory budget, the units are chosen by
        running them on arrays that have shapes but no data."""
        pipe, batch, wanted = self.placement.pipe, self._largest_microbatch, self.placement.options.recompute
        if wanted.budget is None and not wanted.every:
            return frozenset()
        key = (microbatches, None if batch is None else _get_shapes_and_dtypes(batch.inputs))
        if key not in self._recomputed:
            from fsdpx.core.trainer.recompute_budget import choose_recomputed_units

            orders = [
                pipe.get_actions_of_rank(microbatches, r) or order_sequentially(microbatches) for r in range(pipe.width)
            ]
            self._recomputed[key] = choose_recomputed_units(self.placement, orders, batch)
        return self._recomputed[key]

    def predict(self, x: Any, feed: StepInputs) -> tuple[Any, ...]:
        """Run the model on the prepared inputs `feed` and return its outputs. `x` is the batch as the caller passed
        it."""
        outputs = self.gather_outputs_over_tensor_and_pipeline(self.run_program("predict", feed), feed)
        if self._uncoordinated is not None:
            self._uncoordinated.mark_call_returned_or_raise_peer_error()
        (batch,) = feed.batch
        if batch is not None and batch.inputs[0] is x and self.placement.sample_layout.has_complete_samples:
            known = self.engine.direct
            if len(known) >= MAX_SHAPES:
                known.clear()
            known[x.shape, x.dtype] = DirectPrediction.from_last_program_run(
                self.engine, self._get_or_prepare_executable("predict", feed, False), x
            )
        return self.to_caller_arrays(outputs, feed)

    def _predict_on_zeros_after_error(self, shapes: tuple[Any, ...]) -> None:
        """Run a prediction on zeros of these shapes and dtypes, so that other ranks can finish their predictions after
        an error."""
        zeros = tuple(self.placement.xp.zeros(shape, dtype=dtype) for shape, dtype in shapes)
        with self.hiding_accumulated_gradients():
            self.run_program("predict", StepInputs([Microbatch(zeros, None, 0)], False, self.commit))

    def to_caller_arrays(self, arrays: Sequence[Any], feed: StepInputs) -> tuple[Any, ...]:
        """Convert the model's output arrays to the layout of the caller's batch."""
        leave = self.placement.sample_layout.to_caller_layout
        return tuple([None if a is None else leave(a, feed.batched) for a in arrays])

    def try_predict_directly(self, x: Any) -> tuple[Any, ...] | None:
        """Return the outputs for `x` by calling the layers without a program, which is faster. Return None if
        prediction needs communication, or if no batch of this shape and dtype has been predicted before."""
        known = self.engine.direct.get((x.shape, x.dtype)) if type(x) is np.ndarray else None
        try:
            return None if known is None else known(x)
        except MemoryError:  # the program then raises an error that names options
            return None

    def gather_outputs_over_tensor_and_pipeline(self, results: Mapping[Slot, Any], feed: StepInputs) -> tuple[Any, ...]:
        """Return the full outputs of the model on every rank that works on the same samples. Collective over these
        ranks."""
        values, axes = tuple(results.values()), self.placement.axes
        if axes.tensor.size == axes.pipe.size == 1:
            return values
        (batch,) = feed.batch
        assert batch is not None
        from fsdpx.core.trainer.gather_full import gather_outputs_over_tensor_and_pipeline

        shapes = self._output_shapes[_get_shapes_and_dtypes(batch.inputs)]
        return gather_outputs_over_tensor_and_pipeline(self.placement, values, shapes, batch)

    def save_trace(self) -> None:
        """Write the files of all observers, such as a trace. Collective."""
        for write in self.engine.hooks.write_files:
            write()

    def close(self) -> None:
        """Write the files of the observers, and free shared memory and communicators of the engine. Collective."""
        self.save_trace()
        self._executables.clear()
        self._last_executables.clear()
        if self._uncoordinated is not None:
            self._uncoordinated.close()
        self.engine.close()


def _get_shapes_and_dtypes(inputs: Sequence[Any]) -> tuple[Any, ...]:
    return tuple([(a.shape, a.dtype) for a in inputs])
