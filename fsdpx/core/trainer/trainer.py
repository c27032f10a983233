"""The trainer, the object that `fsdpx.distribute` returns. Each training call runs one program (list of operations);
strategies such as DDP and FSDP differ only in their programs."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from os import PathLike
from typing import TYPE_CHECKING, Any, Self, Unpack, overload

import numpy as np

from fsdpx.core.base import hooks
from fsdpx.core.base.extensions import import_declared_extension
from fsdpx.core.base.lazy_names import LazyMethod
from fsdpx.core.base.name_hints import CALLS_ELSEWHERE, parse_patterns, require_pattern_matches
from fsdpx.core.base.option_names import DtypeName, GenerateArgs, WeightsChoice
from fsdpx.core.checkpoint.load import WeightsReport, load_parameters
from fsdpx.core.checkpoint.save import SaveChoices
from fsdpx.core.comm.communicator import Communicator
from fsdpx.core.engine.clock import LOADING
from fsdpx.core.program import Program, Slot
from fsdpx.core.state.placement import Placement
from fsdpx.core.state.step_inputs import StepInputs
from fsdpx.core.trainer import batch as batches
from fsdpx.core.trainer.call_runner import (
    KEEPS_FOR_LATER,
    READS_STATE,
    REPLACES_STATE,
    STEP,
    CallRunner,
    LastUpdate,
    reporting_block_time,
    require_valid_weights_choice,
    route_through_call_runner,
    wrap_to_agree_on_argument_errors,
)
from fsdpx.core.trainer.recipe import is_loss_or_optimizer_missing, require_loss_and_optimizer
from fsdpx.core.trainer.session import Session
from fsdpx.errors import ConfigError, DataError, warn
from fsdpx.nn.container import unwrap_single
from fsdpx.nn.gradient_accumulation import cast_input_to_dtype_of_readers

if TYPE_CHECKING:
    from fsdpx.core.trainer import fit as fitting
    from fsdpx.core.trainer.inspect import Inspection

__all__ = ["Trainer"]

MEAN, SCALE = Slot("mean"), Slot("scale")
PIECES = "the whole global batch goes into one step; chunks are its microbatches"


class Trainer:
    """A distributed model with its loss and optimizer, as returned by `fsdpx.distribute`.

    Every method that moves data is collective: all ranks call the methods in the same order. The arrays x and y hold
    this data rank's samples of the global batch along dim 0; data ranks may have different numbers of samples."""

    # with __slots__, setting a misspelled attribute raises AttributeError
    __slots__ = (
        "__weakref__",
        "_call_runner",
        "_finite",
        "_forward_inputs",
        "_forward_version",
        "_is_incomplete",
        "_local",
        "_output_shapes",
    )

    def __init__(self, call_runner: CallRunner) -> None:
        self._call_runner = call_runner
        self._is_incomplete = is_loss_or_optimizer_missing(call_runner.session.loss, call_runner.placement.optimizer)
        self._forward_inputs: StepInputs | None = None  # inputs of the last `forward`
        self._forward_version = 0  # version of the domain when `forward` last ran
        self._output_shapes: list[tuple[int, ...]] = []  # output shapes of the last `forward`
        self._local = False
        self._finite = True  # whether the loss of the last step was finite

    @property
    def call_runner(self) -> CallRunner:
        """The object that runs this trainer's calls. It owns the communicators, and performs all collective operations
        except those of training."""
        return self._call_runner

    @property
    def inspect(self) -> Inspection:
        """Read-only view of the trainer's internals: engine, placement, last update, fingerprint, and reports of all
        ranks."""
        from fsdpx.core.trainer.inspect import Inspection

        return Inspection(self._call_runner, self.step, self.parameters)

    @property
    def _session(self) -> Session:
        return self._call_runner.session

    @property
    def _placement(self) -> Placement:
        return self._call_runner.session.placement

    @route_through_call_runner(STEP)
    def step(self, x: Any, y: Any) -> float:
        """Run forward, backward and update on one global batch. Return its mean loss, the same value on every rank.
        Collective, unless ranks step at their own speed (docs: asynchronous).

        With a dynamic loss scale, NaN or Inf does not raise an error: the update is skipped. Rank 0 issues a
        RuntimeWarning, but only about the first of several consecutive losses that are NaN or Inf.

        Parameters
        ----------
        x : the model's inputs: an array, a tuple of arrays, or a dict of arrays keyed by input name
        y : the target

        Returns
        -------
        float : mean loss of the global batch

        Raises
        ------
        NumericsError : if the loss or a gradient is NaN or Inf; parameters and running statistics are then left
            unchanged
        DataError : on all ranks, if the batch of one rank is invalid
        """
        if self._is_incomplete:
            require_loss_and_optimizer("step", self._session.loss, self._placement.optimizer)
        if self._local:
            raise ConfigError("step inside no_sync: use accumulate there; step is what ends an accumulation")
        self._refuse_mixed_gradient_sources("accumulate")
        feed = self._call_runner.agree_on_batch_and_make_microbatches(x, y, "step")
        loss = self._record_update_and_get_loss(self._call_runner.session.run_program("step", feed))
        self._warn_of_skipped_update(loss)
        return loss

    @route_through_call_runner(KEEPS_FOR_LATER)
    def accumulate(self, x: Any, y: Any) -> float:
        """Run forward and backward, and return the mean loss of this batch. Add the gradients to those accumulated so
        far; the next `step` or `update` uses the sum. Collective.

        Parameters
        ----------
        x, y : the batch, as for `step`

        Returns
        -------
        float : mean loss of the global batch

        Raises
        ------
        NumericsError : if the loss is NaN or Inf; the accumulated gradients are then dropped
        """
        require_loss_and_optimizer("accumulate", self._session.loss, self._placement.optimizer)
        self._placement.accumulation.require_partial_batch_support("accumulate", PIECES)
        self._refuse_mixed_gradient_sources("accumulate")
        feed = self._call_runner.agree_on_batch_and_make_microbatches(x, y, "accumulate")
        loss = self._session.run_program("local" if self._local else "accumulate", feed)[MEAN]
        self._session.state.gradient_source = "accumulate"
        return float(loss.value)

    @route_through_call_runner(KEEPS_FOR_LATER)
    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Return a context manager in which `accumulate` and `backward` do not communicate gradients. This needs more
        memory, because each rank keeps its full local gradients until the next `step` or `update`."""
        before, self._local = self._local, True
        try:
            yield
        finally:
            self._local = before

    @route_through_call_runner(KEEPS_FOR_LATER)
    def forward(self, x: Any, training: bool = True) -> np.ndarray:
        """Return the model's output for this rank's samples, and keep the data that one call of `backward` needs. The
        caller may change x and the output before it calls `backward`. Collective.

        Parameters
        ----------
        x : the model's inputs, as for `step`
        training : whether layers such as dropout run in training mode

        Returns
        -------
        array or tuple : output with this rank's samples along dim 0; a tuple if the model has several outputs
        """
        session = self._session
        if not isinstance(training, bool):
            with self._call_runner.raising_errors_on_all_ranks("forward"):
                raise ConfigError(f"forward(training={training!r}): True or False is needed")
        session.placement.accumulation.require_partial_batch_support(
            "forward", "the engine cuts the batch itself; use step, or predict for results"
        )
        session.state.clear_slots(["saved"])
        self._forward_version = session.placement.sample_layout.domain_version
        self._forward_inputs = feed = self._call_runner.agree_on_batch_and_make_microbatches(
            x, None, "forward", training
        )
        full_outputs = session.gather_outputs_over_tensor_and_pipeline(session.run_program("forward", feed), feed)
        outputs = session.to_caller_arrays(full_outputs, feed)
        self._output_shapes = [tuple(o.shape) for o in outputs]
        # layers may keep their results for `backward`, so the caller gets copies, which it may change
        return unwrap_single(tuple([o.copy("K") for o in outputs]))

    @route_through_call_runner(KEEPS_FOR_LATER)
    def backward(self, dy: Any) -> np.ndarray:
        """Backpropagate through the last `forward`, and return the gradient with respect to its inputs. Collective.

        If `forward` and `backward` are called several times before one `update`, the parameter gradients add up. Pass
        the returned gradient to whatever computed the inputs: another trainer's `backward`, or a solver.

        Parameters
        ----------
        dy : gradient of the *global mean* loss with respect to this rank's output, with the shape of that output; a
            tuple if the model has several outputs

        Returns
        -------
        array or tuple : gradient with respect to this rank's input; a tuple if the model has several inputs, with None
            for integer inputs

        Raises
        ------
        ConfigError : if `forward` was not called first, or the edges of a `Partition` were replaced after `forward`
        DataError : if the number or the shapes of the arrays in `dy` are wrong
        """
        session, feed = self._session, self._forward_inputs
        if feed is None or not session.state.list_indices_of_filled_slots("saved"):
            raise ConfigError("backward: call forward first; each forward serves one backward")
        if session.placement.sample_layout.domain_version != self._forward_version:
            raise ConfigError("backward: the edges of the mesh were replaced after forward: call forward again first")
        self._refuse_mixed_gradient_sources("backward")
        given, compute = (dy,) if len(self._output_shapes) == 1 else dy, session.placement.formats.compute
        from fsdpx.core.trainer.gather_full import all_reduce_model_input_gradients, take_output_gradient_shard

        if not isinstance(given, tuple | list) or len(given) != len(self._output_shapes):
            raise DataError(
                f"backward: the model has {len(self._output_shapes)} outputs: dy must be a tuple of as many arrays"
            )
        arrays = tuple(
            cast_input_to_dtype_of_readers(batches.to_device_array(session.placement, d), "numbers", compute)
            for d in given
        )
        for array, shape in zip(arrays, self._output_shapes, strict=True):
            if tuple(array.shape) != shape:
                raise DataError(f"backward: dy has shape {tuple(array.shape)}, the output of forward has {shape}")
        layout = session.placement.sample_layout
        arrays = tuple(layout.to_model_output_gradients(arrays, feed.batched))
        if session.placement.stage.has_loss:
            session.state.store[Slot("seed", None, 0)] = tuple(
                take_output_gradient_shard(session.placement, array) for array in arrays
            )
        if not self._local:
            session.agree_on_call("backward")
        (batch,) = feed.batch
        assert batch is not None
        loss_or_gradients = session.run_program("backward", feed, local=self._local)
        session.state.gradient_source = "backward"
        dx = all_reduce_model_input_gradients(session.placement, loss_or_gradients, batch, session.state.scaler.value)
        return unwrap_single(layout.all_reduce_caller_input_gradients(dx, feed.batched))

    @route_through_call_runner(KEEPS_FOR_LATER)
    def update(self) -> float:
        """Reduce gradients that are still local, update the parameters, and return the global gradient norm. The norm
        is nan unless it is needed, for example for clipping. Collective."""
        require_loss_and_optimizer("update", optimizer=self._placement.optimizer)
        if not self._session.state.gradient_source:
            raise ConfigError("update: there are no gradients; call accumulate or backward first")
        self._call_runner.agree_on_call("update")
        self._record_update_and_get_loss(self._session.run_program("update", StepInputs()))
        assert self._call_runner.last_update is not None
        return self._call_runner.last_update.norm

    @route_through_call_runner(KEEPS_FOR_LATER)
    def zero_grad(self) -> None:
        """Drop the gradients that `accumulate` or `backward` have added up. All ranks must call this method, although
        it does not communicate."""
        self._call_runner.require_open("zero_grad")
        self._session.state.zero_grad()

    @route_through_call_runner(KEEPS_FOR_LATER)
    @wrap_to_agree_on_argument_errors
    def freeze(self, *patterns: str) -> None:
        """Freeze the parameters whose names match a pattern: from now on, they receive no gradients or updates, but
        keep their optimizer state. Collective.

        Call this method between updates, not while gradients accumulate. Checkpoints do not store which parameters are
        frozen. `distribute(frozen=...)` freezes permanently and saves memory.

        Parameters
        ----------
        patterns : name patterns (fnmatch)

        Raises
        ------
        ConfigError : if a pattern matches no parameter, or gradients are being accumulated
        """
        self._call_runner.require_open("freeze")
        self._session.freeze(patterns)

    @route_through_call_runner(KEEPS_FOR_LATER)
    @wrap_to_agree_on_argument_errors
    def unfreeze(self, *patterns: str) -> None:
        """Train frozen parameters again, like `requires_grad_(True)` in PyTorch. Collective.

        Updates that a parameter missed while frozen do not count. For example, Adam's bias correction uses the number
        of updates that each parameter has received.

        Parameters
        ----------
        patterns : name patterns (fnmatch)
        """
        self._call_runner.require_open("unfreeze")
        self._session.freeze(patterns, undo=True)

    @route_through_call_runner(READS_STATE)
    def evaluate(self, x: Any, y: Any, weights: WeightsChoice = "parameters") -> float:
        """Return the mean loss of the global batch, computed without dropout. The state of the trainer does not change.
        Collective.

        Parameters
        ----------
        x, y : the batch, as for `step`
        weights : "parameters" for the current parameters, or "average" for their average over time (docs: optimizers)

        Returns
        -------
        float : mean loss of the global batch
        """
        require_loss_and_optimizer("evaluate", self._session.loss)
        if not (isinstance(weights, str) and weights == "parameters"):
            with self._call_runner.raising_errors_on_all_ranks("evaluate"):
                require_valid_weights_choice(weights)
        feed = self._call_runner.agree_on_batch_and_make_microbatches(x, y, "evaluate", training=False)
        with self._call_runner.using_weights(weights), self._session.hiding_accumulated_gradients():
            loss = self._session.run_program("evaluate", feed)[MEAN]
        self._call_runner.loss_weight = loss.weight
        return float(loss.value)

    @route_through_call_runner(READS_STATE)
    def predict(self, x: Any, weights: WeightsChoice = "parameters") -> np.ndarray:
        """Run the model without dropout, and return its output for this rank's samples. Keep nothing for backward.
        Collective.

        Parameters
        ----------
        x : the model's inputs, as for `step`
        weights : "parameters" for the current parameters, or "average" for their average over time (docs: optimizers)

        Returns
        -------
        array or tuple : output with this rank's samples along dim 0; a tuple if the model has several outputs
        """
        session = self._session
        plain = isinstance(weights, str) and weights == "parameters"
        if plain and (outputs := session.try_predict_directly(x)) is not None:
            return unwrap_single(outputs)
        if not plain:
            with self._call_runner.raising_errors_on_all_ranks("predict"):
                require_valid_weights_choice(weights)
        feed = self._call_runner.agree_on_batch_and_make_microbatches(x, None, "predict", training=False)
        with self._call_runner.using_weights(weights), session.hiding_accumulated_gradients():
            return self._call_runner.gather_output_for_samples_of_caller(unwrap_single(session.predict(x, feed)))

    @overload
    def generate(
        self, prompt: Sequence[int] | np.ndarray, max_new_tokens: int = ..., **options: Unpack[GenerateArgs]
    ) -> np.ndarray: ...
    @overload
    def generate(
        self, prompt: Sequence[Sequence[int] | np.ndarray], max_new_tokens: int = ..., **options: Unpack[GenerateArgs]
    ) -> list[np.ndarray]: ...
    @route_through_call_runner(READS_STATE)  # type: ignore[misc]  # a decorated method takes no `self` by name
    @wrap_to_agree_on_argument_errors
    def generate(
        self,
        prompt: Any,
        max_new_tokens: int = 128,
        *,
        temperature: float = 0.0,
        top_k: int | None = None,
        top_p: float | None = None,
        repetition_penalty: float = 1.0,
        stop: int | Collection[int] = (),
        seed: int = 0,
        stream: Callable[[int, int], object] | None = None,
        cache: bool = True,
    ) -> Any:
        """Return the tokens that continue one or more prompts (docs: generation). Collective: all ranks pass the same
        prompts and get the same tokens; the work is distributed over the data ranks.

        Parameters
        ----------
        prompt : a sequence of integer tokens, or a list of such sequences, which may differ in length
        max_new_tokens : maximum number of new tokens for each prompt
        temperature, top_k, top_p, repetition_penalty, seed : how the next token is chosen; see `Sampling` (default: the
            most likely token)
        stop : token or tokens that end a text; the stop token is the last token returned
        stream : function called on every rank, as stream(prompt_index, token), for each new token
        cache : if True, keep the keys and values of attention layers; if False, process the whole text again for each
            new token, which works with any causal model

        Returns
        -------
        array or list : int64 array of new tokens; a list of such arrays if several prompts were given
        """
        self._call_runner.require_open("generate")
        sampling = temperature, top_k, top_p, repetition_penalty, seed
        generate = import_declared_extension("trainer", "generate")
        return generate(self._call_runner, prompt, max_new_tokens, stop, sampling, stream, cache)

    if TYPE_CHECKING:
        fit = fitting.fit
    else:
        fit = LazyMethod("fsdpx.core.trainer.fit:fit")

    @route_through_call_runner(READS_STATE)
    @wrap_to_agree_on_argument_errors
    def parameters(
        self, weights: WeightsChoice = "parameters", names: Collection[str] | None = None
    ) -> dict[str, np.ndarray]:
        """Return all full parameters and running statistics on every rank, as a dict keyed by dotted name; tied
        parameters appear under the first of their names. Collective.

        Parameters
        ----------
        weights : "parameters" for the current parameters, or "average" for their average over time (docs: optimizers)
        names : exact names of the arrays to return, the same on all ranks; only pages (flat buffers) that contain one
            of them are sent (default: all)

        Returns
        -------
        dict : maps names to NumPy arrays
        """
        self._call_runner.require_open("parameters")
        with self._call_runner.raising_errors_on_all_ranks("parameters"):
            require_valid_weights_choice(weights)
            if names is not None:
                names = parse_patterns("names", names)
                require_pattern_matches("parameters(names=)", names, self._placement.layout.specs, fits=operator.eq)
        parameters = self._placement.sync_policy.read_common_parameters() if weights == "parameters" else None
        if parameters is None:
            self._call_runner.agree_on_call("parameters" if names is None else f"parameters(names={sorted(names)})")
            with self._call_runner.using_weights(weights):
                from fsdpx.core.trainer.gather_full import all_gather_parameters, all_gather_running_statistics

                parameters = all_gather_parameters(self._session.state, names) | all_gather_running_statistics(
                    self._session.state
                )
        return {n: parameters[n] for n in self._placement.layout.specs if names is None or n in names}

    @route_through_call_runner(KEEPS_FOR_LATER)
    def gradients(self) -> dict[str, np.ndarray]:
        """Return the gradients accumulated so far by `accumulate` or `backward`, as a dict that maps dotted names to
        full NumPy arrays. All ranks get the same result. They are gradients of the global mean loss. Raise ConfigError
        if there are none. Collective.
        """
        place, state = self._placement, self._session.state
        if not state.gradient_source:
            raise ConfigError("gradients: there are none; call accumulate or backward first")
        self._call_runner.agree_on_call("gradients")
        here = state.store.get(Slot("weight"), 0.0) if place.counts_loss else 0.0
        weight = math.fsum(row[0] for row in place.all_gather_numbers([here], "gradients (weight)"))
        scale = 1.0 / ((weight or 1.0) * state.scaler.value)
        from fsdpx.core.trainer.gather_full import all_gather_gradients

        gathered_gradients = all_gather_gradients(state)
        return {name: gathered_gradients[name] * scale for name in place.layout.specs if name in gathered_gradients}

    @partial(wrap_to_agree_on_argument_errors, hints=False)
    def save(
        self,
        path: str | PathLike[str],
        *,
        loader: Any = None,
        dtype: DtypeName | None = None,
        shard_bytes: int | None = None,
        keep: int | None = None,
        background: bool = False,
        weights: WeightsChoice = "parameters",
    ) -> None:
        """Write a checkpoint into the folder `path`; all ranks write at the same time (docs: checkpoints). Collective.

        The checkpoint contains `model.safetensors`, a single standard file whose values are bitwise equal to those of
        `parameters()`, and everything that `load` needs to resume exactly. An older checkpoint at `path` is kept until
        the new one is complete. Saving needs 8 MiB of extra memory. With `background`, it also needs memory for a copy
        of this rank's share of the state.

        Parameters
        ----------
        path : folder of the checkpoint
        loader : a `data.DataLoader` whose position in the data is saved as well
        dtype : dtype of the weights in the file: "bf16", "float16", "float32" or "float64" (default: the trainer's
            dtype)
        shard_bytes : split the weights into files of at most this many bytes each, and add an index file in the format
            of Hugging Face
        keep : number of newest checkpoints to keep. Saving FOLDER/step-30 removes older checkpoints FOLDER/step-*.
            Checkpoints with a higher number, links, and targets of links are never removed
        background : if True, write a copy in a thread while training continues. If writing fails,
            `call_runner.wait_for_background_save()` or the next save raises the error
        weights : if "average", save only the average of the weights over time

        Raises
        ------
        CheckpointError : on all ranks, if the checkpoint cannot be written; an older checkpoint then remains unchanged
        """
        with self._call_runner.raising_errors_on_all_ranks("save"):
            require_valid_weights_choice(weights)
            if not isinstance(background, bool):
                raise ConfigError(f"save(background={background!r}): True or False is needed")
            if weights != "parameters" and loader is not None:
                raise ConfigError(
                    f"save(weights={weights!r}): weights alone have no position in the data; leave loader out"
                )
            choices = SaveChoices(dtype, shard_bytes, keep, weights=weights)
        self._call_runner.save_checkpoint(path, choices, loader, None, background)

    @partial(wrap_to_agree_on_argument_errors, unchecked="path")
    def load(
        self, path: str | PathLike[str], *, loader: Any = None, convert: bool = False, verify: bool = True
    ) -> None:
        """Load a checkpoint that `save` wrote, so that training resumes exactly, with any number of ranks, strategy
        and mesh. Collective.

        Random numbers continue with the seed of the checkpoint. Loading needs 12 MiB of extra memory.

        Parameters
        ----------
        path : folder of the checkpoint
        loader : a `data.DataLoader`, which is set to its saved position. Without a loader, the first step warns if the
            checkpoint contains a saved position
        convert : if True, round or widen numbers that were saved in another dtype; if False, raise an error for them
        verify : if True, check the digests of all bytes first; each rank checks some of them

        Raises
        ------
        CheckpointError : if names, shapes, dtypes, sizes or digests do not match; the trainer then remains unchanged
        """
        self._call_runner.load_checkpoint(path, loader, convert, verify)

    @route_through_call_runner(REPLACES_STATE)
    @partial(wrap_to_agree_on_argument_errors, unchecked="source")
    def load_parameters(
        self,
        source: str | PathLike[str] | Mapping[str, Any],
        *,
        strict: bool = True,
        rename: Mapping[str, str] | None = None,
        convert: bool | None = None,
    ) -> WeightsReport:
        """Load parameters without optimizer state from arrays, a checkpoint, or safetensors files of other libraries,
        and return a report. Collective.

        Shapes must match. A tied parameter may appear under any of its names, and running statistics may be missing.
        PyTorch's names for the parameters of a layer are also accepted (`Layer.aliases`).

        Parameters
        ----------
        source : path of a checkpoint, of a safetensors file, or of a folder with `model.safetensors` or with several
            files and their index; or a dict that maps names to full arrays, the same on every rank
        strict : if True, require every parameter, and nothing else; if False, load the parameters that the source has,
            and leave the others unchanged
        rename : dict from name patterns in the source to name patterns in the model; the text that each * matches
            replaces the corresponding * in the model's pattern
        convert : if True, convert floats of other dtypes by rounding or widening (default: True for arrays, False for
            files)

        Returns
        -------
        WeightsReport : names of the loaded, missing, extra and renamed tensors

        Raises
        ------
        CheckpointError : on all ranks, if the weights do not fit the model; the trainer then remains unchanged
        """
        self._call_runner.agree_on_call("load_parameters")
        options: Any = {
            "strict": strict,
            "rename": rename,
            "convert": isinstance(source, Mapping) if convert is None else convert,
        }
        with reporting_block_time(self._session.engine, LOADING) as count:
            report = load_parameters(self._session.state, source, count=count, **options)
        self._placement.sync_policy.on_loaded(self._session.state)
        self._session.tell_sync_policy_parameters_are_set()
        return report

    @property
    def program(self) -> Program:
        """The program of a step that begins without accumulated gradients; `print(trainer.program)` shows it as text.
        With local SGD, only some steps synchronize replicas; the result is the program of a synchronizing step."""
        return self._session.program

    @property
    def data_group(self) -> Communicator:
        """Communicator of the ranks that hold different samples; pass it to `data.DataLoader` and
        `data.DistributedSampler`.

        Some ranks train on the same samples: ranks that differ only along the pipeline or tensor axis, and ranks that
        hold parts of the same fields (`domain_group`). Each of these ranks has its own data group, and they all have
        the same rank within their groups. With `elastic`, the communicator contains only this rank, because every rank
        passes the global batch."""
        return self._call_runner.data_group

    @property
    def domain_group(self) -> Communicator:
        """Communicator of the ranks that hold different parts of the same samples (spatial domain decomposition).
        Without `domain` it contains only this rank."""
        return self._session.placement.axes.parts

    @property
    def output_grid(self) -> Any:
        """How the model's output is partitioned over ranks (option `domain`), as a `Grid`. For a model with several
        outputs, the value is a tuple of grids, with None for scalar outputs. If output and input have the same number
        of cells, they have the same partition.

        The grid's `offsets`, `local_shape`, `take_local` and `gather` apply to outputs and targets. The grid is derived
        from the layers, so it is known before the first prediction.

        Raises
        ------
        ConfigError : if the output is not partitioned, for example without `domain`
        """
        return self._session.placement.sample_layout.get_output_domain()

    @property
    def global_step(self) -> int:
        """Number of updates so far."""
        return self._session.state.steps

    def report(self) -> Any:
        """Return a `Report` for this rank, covering the time since the last `reset_counters`: bytes and calls per
        collective and axis, memory per kind, and time per operation."""
        return import_declared_extension("trainer", "report")(self._session.engine, self._session.round_programs)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: object, trace: object) -> None:
        """Close the trainer at the end of `with model.as_distributed(...) as trainer:`. After an exception the trainer
        is not closed, because the job is about to end."""
        if kind is None:
            self.close()

    def close(self) -> None:
        """Free the memory shared with other ranks and the communicators made for this trainer. Collective.

        The trainer cannot be used afterwards; to keep the parameters, call `parameters()` first."""
        if not self._call_runner.closed:
            self._agree_on_close_and_wait_for_save()
            self._call_runner.closed = True
            self._call_runner.close()
            hooks.release_hooks_of_owner(self)

    @route_through_call_runner(READS_STATE, "close")
    def _agree_on_close_and_wait_for_save(self) -> None:
        self._call_runner.agree_on_call("close")
        self._call_runner.wait_for_save_within_call()

    if not TYPE_CHECKING:  # hidden from type checkers, which would otherwise accept any attribute name

        def __getattr__(self, name: str) -> Any:
            hint = f"; use {CALLS_ELSEWHERE[name]}" if name in CALLS_ELSEWHERE else ""
            raise AttributeError(f"'Trainer' object has no attribute {name!r}{hint}", name=name, obj=self)

    def _record_update_and_get_loss(self, results: Mapping[Slot, Any]) -> float:
        loss = self._placement.sync_policy.get_loss(results)
        self._call_runner.last_update = LastUpdate.from_loss_and_scale(loss, results[SCALE])
        self._session.finish_update(results[MEAN], results[SCALE])
        if self._call_runner.ignored_position:
            self._warn_of_ignored_position()
        return loss

    def _warn_of_ignored_position(self) -> None:
        """Warn on rank 0 that training resumes from a checkpoint, but that the data loader starts from the
        beginning."""
        path, self._call_runner.ignored_position = self._call_runner.ignored_position, ""
        if self._placement.axes.world.rank == 0:
            warn(
                f"{path} has the position of a loader in the data, but load was given no loader, so the data start "
                "from the beginning: load(path, loader=loader) restores the position",
            )

    def _warn_of_skipped_update(self, loss: float) -> None:
        """Warn on rank 0 if an update was skipped because the loss is NaN or Inf. Only the first of several consecutive
        losses that are NaN or Inf causes a warning."""
        before, self._finite = self._finite, math.isfinite(loss)
        if before and not self._finite and self._placement.axes.world.rank == 0:
            assert self._call_runner.last_update is not None
            step = self.global_step + self._call_runner.last_update.skipped
            warn(
                f"the loss of step {step} is {loss}, and the update was skipped: "
                "distribute(..., check_finite=True) names its origin",
            )

    def _refuse_mixed_gradient_sources(self, source: str) -> None:
        """Raise ConfigError if one update would mix gradients from `accumulate` with gradients from `backward`, because
        the two are weighted differently. `source` is the method that is about to add gradients."""
        if self._session.state.gradient_source not in ("", source):
            raise ConfigError(
                "accumulate (or step) and backward before one update: use one of them; call update between, or "
                "zero_grad where the gradients were not meant for this trainer"
            )
