"""The trainer: what a user holds. Every call runs one program; what differs between strategies is in the programs."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from os import PathLike
from typing import TYPE_CHECKING, Any, Self, overload

import numpy as np

from fsdpx.core.base import hooks
from fsdpx.core.base.extensions import load_extension
from fsdpx.core.base.lazy_names import LazyMethod
from fsdpx.core.base.name_hints import CALLS_ELSEWHERE, parse_patterns, require_pattern_matches
from fsdpx.core.base.option_names import DtypeName, WeightsChoice
from fsdpx.core.checkpoint.load import WeightsReport, load_parameters
from fsdpx.core.checkpoint.save import SaveChoices
from fsdpx.core.comm.communicator import Communicator
from fsdpx.core.engine.clock import LOADING
from fsdpx.core.program import Program, Slot
from fsdpx.core.state.placement import Placement
from fsdpx.core.state.sample_layout import Domain
from fsdpx.core.state.step_inputs import StepInputs
from fsdpx.core.trainer import batch as batches
from fsdpx.core.trainer.call_runner import (
    KEEPS,
    LOOKS,
    REPLACES,
    STEP,
    CallRunner,
    LastUpdate,
    check_arguments_together,
    check_weights_choice,
    notify_timing,
    runs_on_host,
)
from fsdpx.core.trainer.recipe import is_incomplete, require_argument
from fsdpx.core.trainer.session import Session
from fsdpx.errors import ConfigError, DataError, warn
from fsdpx.nn.container import unwrap_single
from fsdpx.nn.gradient_accumulation import convert_input

if TYPE_CHECKING:
    from fsdpx.core.trainer import fit as fitting
    from fsdpx.core.trainer.inspect import Inspection

__all__ = ["Trainer"]

MEAN, SCALE = Slot("mean"), Slot("scale")
PIECES = "the whole global batch goes into one step; chunks are its microbatches"


class Trainer:
    """A distributed model with its loss and optimiser; made by `fsdpx.distribute`.

    Every method that moves data is collective: all ranks call it, in the same order. Arrays x and y hold this
    data-rank's part of the global batch, dim 0 is samples, and parts may differ in size."""

    # no others: an attribute that is misspelt, or that nothing reads, is an AttributeError
    __slots__ = ("__weakref__", "_absent", "_finite", "_forwarded", "_host", "_local", "_shown")

    def __init__(self, host: CallRunner) -> None:
        self._host = host
        self._absent = is_incomplete(host.session.loss, host.placement.optimizer)
        self._forwarded: StepInputs | None = None  # of the last `forward`
        self._shown: list[tuple[int, ...]] = []  # shapes of its outputs
        self._local = False
        self._finite = True  # the loss of the last step

    @property
    def call_runner(self) -> CallRunner:
        """The ranks that call this trainer, and what they do together beside training."""
        return self._host

    @property
    def inspect(self) -> Inspection:
        """What is seen of the trainer: its engine, placement and last update, its fingerprint, reports of all ranks."""
        from fsdpx.core.trainer.inspect import Inspection

        return Inspection(self._host, self.step, self.parameters)

    @property
    def _session(self) -> Session:
        return self._host.session

    @property
    def _placement(self) -> Placement:
        return self._host.session.placement

    # -- training ----------------------------------------------------------------------------------------------------

    @runs_on_host(STEP)
    def step(self, x: Any, y: Any) -> float:
        """Forward, backward and update on one global batch: its mean loss, equal on every rank.

        NumericsError if the loss or a gradient is NaN or Inf; nothing is updated then, and running statistics are as
        before. With a dynamic loss scale the update is skipped instead, with a RuntimeWarning on rank 0 at the first of
        a run of such losses."""
        if self._absent:
            require_argument("step", self._session.loss, self._placement.optimizer)
        if self._local:
            raise ConfigError("step inside no_sync: use accumulate there; step is what ends an accumulation")
        self._refuse_to_mix("accumulate")
        feed = self._host.agree_on_inputs(x, y, "step")
        loss = self._finish_update(self._host.session.run_program("step", feed))
        self._warn_of_skipping(loss)
        return loss

    @runs_on_host(KEEPS)
    def accumulate(self, x: Any, y: Any) -> float:
        """Forward and backward only; gradients add up until `step` or `update`. The loss of this batch alone.

        NumericsError if it is NaN or Inf; the gradients that were added up are forgotten then."""
        require_argument("accumulate", self._session.loss, self._placement.optimizer)
        self._placement.accumulation.require_partial_batches("accumulate", PIECES)
        self._refuse_to_mix("accumulate")
        feed = self._host.agree_on_inputs(x, y, "accumulate")
        loss = self._session.run_program("local" if self._local else "accumulate", feed)[MEAN]
        self._session.state.adding = "accumulate"
        return float(loss.value)

    @runs_on_host(KEEPS)
    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Inside, `accumulate` and `backward` keep gradients local and whole on every rank: no traffic, more memory."""
        before, self._local = self._local, True
        try:
            yield
        finally:
            self._local = before

    @runs_on_host(KEEPS)
    def forward(self, x: Any, training: bool = True) -> np.ndarray:
        """The model's output on this rank's samples, kept for one `backward`. A tuple if the model has several."""
        session = self._session
        if not isinstance(training, bool):
            with self._host.share_errors("forward"):
                raise ConfigError(f"forward(training={training!r}): True or False is needed")
        session.placement.accumulation.require_partial_batches(
            "forward", "the engine cuts the batch itself; use step, or predict for results"
        )
        session.state.empty_slots(["saved"])
        self._forwarded = feed = self._host.agree_on_inputs(x, None, "forward", training)
        outputs = unwrap_single(
            session.to_caller_arrays(session.all_gather_outputs(session.run_program("forward", feed), feed), feed)
        )
        self._shown = [tuple(o.shape) for o in (outputs if isinstance(outputs, tuple) else (outputs,))]
        return outputs

    @runs_on_host(KEEPS)
    def backward(self, dy: Any) -> np.ndarray:
        """Gradients from `dy`: of the *global mean* loss with respect to this rank's outputs of the last `forward`.

        Returns that with respect to this rank's inputs, for what made them: another trainer's `backward`, a solver. A
        tuple if the model has several inputs; None for one of whole numbers. Several forward and backward pairs before
        `update` add up."""
        session, feed = self._session, self._forwarded
        if feed is None or not session.state.list_filled("saved"):
            raise ConfigError("backward: call forward first; each forward serves one backward")
        self._refuse_to_mix("backward")
        given, compute = (dy,) if len(self._shown) == 1 else dy, session.placement.formats.compute
        from fsdpx.core.trainer.gather_full import all_gather_input_gradients, take_output_shard

        if not isinstance(given, tuple | list) or len(given) != len(self._shown):
            raise DataError(f"backward: the model has {len(self._shown)} outputs: dy must be a tuple of as many arrays")
        arrays = tuple(convert_input(batches.to_device_array(session.placement, d), "numbers", compute) for d in given)
        for array, shape in zip(arrays, self._shown, strict=True):
            if tuple(array.shape) != shape:
                raise DataError(f"backward: dy has shape {tuple(array.shape)}, the output of forward has {shape}")
        arrays = tuple(session.placement.sample_layout.to_model_output(array, "dy") for array in arrays)
        if session.placement.stage.scores:
            session.state.store[Slot("seed", None, 0)] = tuple(
                take_output_shard(session.placement, array) for array in arrays
            )
        if not self._local:
            session.agree_on_call("backward")
        (batch,) = feed.batch
        assert batch is not None
        loss_or_gradients = session.run_program("backward", feed, local=self._local)
        session.state.adding = "backward"
        dx = all_gather_input_gradients(session.placement, loss_or_gradients, batch, session.state.scaler.value)
        return unwrap_single(session.to_caller_arrays(dx, feed))

    @runs_on_host(KEEPS)
    def update(self) -> float:
        """Reduce what is still local, then update; the global gradient norm if clipping asks for one, else nan."""
        require_argument("update", optimizer=self._placement.optimizer)
        if not self._session.state.adding:
            raise ConfigError("update: there are no gradients; call accumulate or backward first")
        self._host.agree_on_call("update")
        self._finish_update(self._session.run_program("update", StepInputs()))
        assert self._host.last is not None
        return self._host.last.norm

    @runs_on_host(KEEPS)
    def zero_grad(self) -> None:
        """Forget the gradients that `accumulate` or `backward` have added up. All ranks call it; it moves nothing."""
        self._host.require_open("zero_grad")
        self._session.state.zero_grad()

    @runs_on_host(KEEPS)
    @check_arguments_together
    def freeze(self, *patterns: str) -> None:
        """Freeze the parameters whose names match a pattern (fnmatch): from now on they get no gradient and no update,
        and keep their optimizer state. Collective.

        Call it between updates, not while gradients add up. Checkpoints do not store it. `distribute(frozen=...)`
        freezes for good, and saves memory."""
        self._host.require_open("freeze")
        self._session.freeze(patterns)

    @runs_on_host(KEEPS)
    @check_arguments_together
    def unfreeze(self, *patterns: str) -> None:
        """Train frozen parameters again, as PyTorch does after `requires_grad_(True)`. Collective.

        Updates that they have missed do not count as theirs: Adam corrects the bias of their means by their own number
        of updates."""
        self._host.require_open("unfreeze")
        self._session.freeze(patterns, undo=True)

    @runs_on_host(LOOKS)
    def evaluate(self, x: Any, y: Any, weights: WeightsChoice = "parameters") -> float:
        """Mean loss of the global batch, without dropout; changes nothing. weights: "parameters", or their "average"
        over time (docs: optimisers)."""
        require_argument("evaluate", self._session.loss)
        if not (isinstance(weights, str) and weights == "parameters"):
            with self._host.share_errors("evaluate"):
                check_weights_choice(weights)
        feed = self._host.agree_on_inputs(x, y, "evaluate", training=False)
        with self._host.use_weights(weights), self._session.set_gradients_aside():
            loss = self._session.run_program("evaluate", feed)[MEAN]
        self._host.weight = loss.weight
        return float(loss.value)

    @runs_on_host(LOOKS)
    def predict(self, x: Any, weights: WeightsChoice = "parameters") -> np.ndarray:
        """The model's output on this rank's samples, without dropout; keeps nothing. weights: as in `evaluate`."""
        session = self._session
        plain = isinstance(weights, str) and weights == "parameters"
        if plain and (outputs := session.predict_directly(x)) is not None:
            return unwrap_single(outputs)
        if not plain:
            with self._host.share_errors("predict"):
                check_weights_choice(weights)
        feed = self._host.agree_on_inputs(x, None, "predict", training=False)
        with self._host.use_weights(weights), session.set_gradients_aside():
            return self._host.all_gather_output(unwrap_single(session.predict(x, feed)))

    @overload
    def generate(
        self, prompt: Sequence[int] | np.ndarray, max_new_tokens: int = ..., *, temperature: float = ...,
        top_k: int | None = ..., top_p: float | None = ..., repetition_penalty: float = ...,
        stop: int | Collection[int] = ..., seed: int = ..., stream: Callable[[int, int], object] | None = ...,
        cache: bool = ...,
    ) -> np.ndarray: ...  # fmt: skip

    @overload
    def generate(
        self, prompt: Sequence[Sequence[int] | np.ndarray], max_new_tokens: int = ..., *, temperature: float = ...,
        top_k: int | None = ..., top_p: float | None = ..., repetition_penalty: float = ...,
        stop: int | Collection[int] = ..., seed: int = ..., stream: Callable[[int, int], object] | None = ...,
        cache: bool = ...,
    ) -> list[np.ndarray]: ...  # fmt: skip

    @runs_on_host(LOOKS)  # type: ignore[misc]  # a decorated method takes no `self` by name
    @check_arguments_together
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
        """The tokens that go on after a prompt, or after each of several (docs: generation). Collective: all ranks
        give the same prompts and get the same tokens. Prompts are shared out among data ranks.

        Parameters
        ----------
        prompt : tokens, whole numbers; or a list of such prompts, which may differ in length
        max_new_tokens : of each prompt
        temperature, top_k, top_p, repetition_penalty, seed : how a token is chosen, see `Sampling`; by default it is
            the most likely one
        stop : a token, or several, that end a text; it is the last one returned
        stream : called on every rank with the number of the prompt and the token, for each new token
        cache : keep keys and values; False: recompute the whole text for each token, which any causal model can

        Returns
        -------
        int64 array of new tokens, or a list of them if several prompts were given
        """
        self._host.require_open("generate")
        sampling = temperature, top_k, top_p, repetition_penalty, seed
        generate = load_extension("trainer", "generate")
        return generate(self._host, prompt, max_new_tokens, stop, sampling, stream, cache)

    if TYPE_CHECKING:
        fit = fitting.fit
    else:
        fit = LazyMethod("fsdpx.core.trainer.fit:fit")

    # -- parameters --------------------------------------------------------------------------------------------------

    @runs_on_host(LOOKS)
    @check_arguments_together
    def parameters(
        self, weights: WeightsChoice = "parameters", names: Collection[str] | None = None
    ) -> dict[str, np.ndarray]:
        """All parameters and state by dotted name, full, on every rank's host; tied ones under their first name.
        weights: as in `evaluate`. names: these alone, the same on all ranks; no more than what lies with them is
        sent."""
        self._host.require_open("parameters")
        with self._host.share_errors("parameters"):
            check_weights_choice(weights)
            if names is not None:
                names = parse_patterns("names", names)
                require_pattern_matches("parameters(names=)", names, self._placement.layout.specs, fits=operator.eq)
        pace_parameters = self._placement.sync_policy.read_common_parameters() if weights == "parameters" else None
        if pace_parameters is None:
            self._host.agree_on_call("parameters" if names is None else f"parameters(names={sorted(names)})")
            with self._host.use_weights(weights):
                from fsdpx.core.trainer.gather_full import all_gather_parameters, all_gather_statistics

                pace_parameters = all_gather_parameters(self._session.state, names) | all_gather_statistics(
                    self._session.state
                )
        return {n: pace_parameters[n] for n in self._placement.layout.specs if names is None or n in names}

    @runs_on_host(KEEPS)
    def gradients(self) -> dict[str, np.ndarray]:
        """Gradients of the global mean loss gathered so far by `accumulate` or `backward`, full, on every rank."""
        place, state = self._placement, self._session.state
        if not state.adding:
            raise ConfigError("gradients: there are none; call accumulate or backward first")
        self._host.agree_on_call("gradients")
        here = state.store.get(Slot("weight"), 0.0) if place.counts_loss else 0.0
        weight = math.fsum(row[0] for row in place.all_gather_numbers([here], "gradients (weight)"))
        scale = 1.0 / ((weight or 1.0) * state.scaler.value)
        from fsdpx.core.trainer.gather_full import all_gather_gradients

        gathered_gradients = all_gather_gradients(state)
        return {name: gathered_gradients[name] * scale for name in place.layout.specs if name in gathered_gradients}

    # -- checkpoints -------------------------------------------------------------------------------------------------

    @partial(check_arguments_together, hints=False)
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
        """Write a checkpoint into the folder `path`, all ranks at once. Collective; docs: checkpoints.

        Inside are `model.safetensors`, one standard file with the bits of `parameters()`, and what `load` needs to go
        on exactly. An older checkpoint at `path` stays until the new one is whole. Extra memory: two blocks of 4 MiB,
        in the background also this rank's part.

        Parameters
        ----------
        path : folder of the checkpoint
        loader : a `data.DataLoader`, whose place in the data is saved
        dtype : of the weights in the file: "bf16", "float16", "float32" or "float64" (default: the trainer's)
        shard_bytes : cut the weights into files of up to this many bytes, with an index, as Hugging Face does
        keep : after saving FOLDER/step-30, remove all but the last `keep` of FOLDER/step-* up to 30; links, and what
            they point at, stay
        background : write a copy in a thread while training goes on; `host.wait_for_background_save()` or the next
            save tells how it went
        weights : "average" writes the average of the parameters over time, and the weights alone

        Raises
        ------
        CheckpointError : the same on all ranks, if it cannot be written; the older one is then as it was
        """
        with self._host.share_errors("save"):
            check_weights_choice(weights)
            if not isinstance(background, bool):
                raise ConfigError(f"save(background={background!r}): True or False is needed")
            if weights != "parameters" and loader is not None:
                raise ConfigError(
                    f"save(weights={weights!r}): weights alone have no place in the data; leave loader out"
                )
            choices = SaveChoices(dtype, shard_bytes, keep, weights=weights)
        self._host.save_checkpoint(path, choices, loader, None, background)

    @partial(check_arguments_together, but="path")
    def load(
        self, path: str | PathLike[str], *, loader: Any = None, convert: bool = False, verify: bool = True
    ) -> None:
        """Go on exactly where `save` wrote `path`, at any number of ranks, strategy and mesh. Collective.

        Random numbers go on with the seed of the checkpoint. Extra memory: three blocks of 4 MiB.

        Parameters
        ----------
        path : folder of the checkpoint
        loader : is put to its place in the data
        convert : round or widen numbers that were saved in another format
        verify : look at the digests of all bytes first, each rank at a part of them

        Raises
        ------
        CheckpointError : before anything changes, if names, shapes, formats, sizes or digests do not fit
        """
        self._host.load_checkpoint(path, loader, convert, verify)

    @runs_on_host(REPLACES)
    @partial(check_arguments_together, but="source")
    def load_parameters(
        self,
        source: str | PathLike[str] | Mapping[str, Any],
        *,
        strict: bool = True,
        rename: Mapping[str, str] | None = None,
        convert: bool | None = None,
    ) -> WeightsReport:
        """Load parameters, without optimizer state, from arrays, a checkpoint or safetensors files of others.
        Collective.

        Shapes must fit. Tied parameters may have any of their names, running statistics may be missing; names that
        PyTorch gives to what the model's layers have are known (`Layer.aliases`).

        Parameters
        ----------
        source : a checkpoint, a safetensors file, a folder with `model.safetensors` or with several files and their
            index; or name -> full array, the same on every rank
        strict : every parameter must be there, and nothing else; False: take those that are there, leave the rest
        rename : pattern of names in the source -> pattern of names here; what a * stands for goes to the other *
        convert : round or widen floats of another format (default: those of arrays, not those of files)

        Returns
        -------
        WeightsReport : names that were taken, missing, extra, renamed

        Raises
        ------
        CheckpointError : the same on all ranks, before anything changes
        """
        self._host.agree_on_call("load_parameters")
        options: Any = {
            "strict": strict,
            "rename": rename,
            "convert": isinstance(source, Mapping) if convert is None else convert,
        }
        with notify_timing(self._session.engine, LOADING) as count:
            report = load_parameters(self._session.state, source, count=count, **options)
        self._placement.sync_policy.on_loaded(self._session.state)
        self._session.publish_parameters()
        return report

    # -- looking in --------------------------------------------------------------------------------------------------

    @property
    def program(self) -> Program:
        """The step as a program, begun with nothing left over; `print(trainer.program)` shows the step as text. Of
        local training, the step at the end of a round."""
        return self._session.program

    @property
    def data_group(self) -> Communicator:
        """The ranks that hold different samples: give this to `data.DataLoader` and `data.DistributedSampler`.

        Ranks of one pipe or tensor line share a rank here, and train on the same samples; so do those that have parts
        of the same fields (`parts`). With `elastic`, this rank by itself: batches are whole."""
        return self._host.data_group

    @property
    def domain_group(self) -> Communicator:
        """The ranks that hold parts of the same samples, with `domain`; without it this rank by itself."""
        return self._session.placement.axes.parts

    @property
    def output_grid(self) -> Domain:
        """How the model's result is cut, with `domain`: as its input, where both have as many cells.

        `offsets`, `own`, `local`, and `gather` are those of results and targets. It follows from the layers, before
        anything has been predicted.

        Raises
        ------
        ConfigError : samples are whole
        """
        return self._session.placement.sample_layout.get_output_space()

    @property
    def global_step(self) -> int:
        """Updates made so far."""
        return self._session.state.steps

    def report(self) -> Any:
        """Bytes and calls by collective and axis, memory by kind, time by verb, on this rank since the last `reset`: a
        `Report`."""
        return load_extension("trainer", "report")(self._session.engine, self._session.round)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: object, trace: object) -> None:
        """`with model.as_distributed(...) as trainer:` closes it when all is well; after an exception the job ends."""
        if kind is None:
            self.close()

    def close(self) -> None:
        """Free the memory shared with other ranks and the communicators that were made for this trainer. Collective.

        The trainer cannot be used any more; take what `parameters()` returns before."""
        if not self._host.closed:
            self._close_collectively()
            self._host.closed = True
            self._host.close()
            hooks.release_hooks(self)

    # -- inside ------------------------------------------------------------------------------------------------------

    @runs_on_host(LOOKS, "close")
    def _close_collectively(self) -> None:
        self._host.agree_on_call("close")
        self._host.wait_for_save()

    if not TYPE_CHECKING:  # a type checker would take any name for one of a trainer

        def __getattr__(self, name: str) -> Any:
            hint = f"; use {CALLS_ELSEWHERE[name]}" if name in CALLS_ELSEWHERE else ""
            raise AttributeError(f"'Trainer' object has no attribute {name!r}{hint}", name=name, obj=self)

    def _finish_update(self, results: Mapping[Slot, Any]) -> float:
        loss = self._placement.sync_policy.get_loss(results)
        self._host.last = LastUpdate.from_scale(loss, results[SCALE])
        self._session.finish_update(results[MEAN], results[SCALE])
        return loss

    def _warn_of_skipping(self, loss: float) -> None:
        """Warn at once when the loss of a step that is skipped becomes NaN or Inf: once for a row of such losses, and
        once for all ranks."""
        before, self._finite = self._finite, math.isfinite(loss)
        if before and not self._finite and self._placement.axes.world.rank == 0:
            assert self._host.last is not None
            warn(
                f"the loss of step {self.global_step + self._host.last.skipped} is {loss}, and the update was skipped: "
                "distribute(..., check_finite=True) names its origin",
            )

    def _refuse_to_mix(self, how: str) -> None:
        """Gradients of a loss and of the caller are weighed differently and cannot be mixed in one update."""
        if self._session.state.adding not in ("", how):
            raise ConfigError(
                "accumulate (or step) and backward before one update: use one of them; call update between, or "
                "zero_grad where the gradients were not meant for this trainer"
            )
