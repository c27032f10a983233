"""The trainer: what a user holds. Every call runs one program; what differs between strategies is in the programs."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from os import PathLike
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from fsdpx.core.base import hooks
from fsdpx.core.base.extensions import load_extension
from fsdpx.core.base.lazy_names import LazyMethod
from fsdpx.core.base.name_hints import CALLS, demand_match, patterns_of
from fsdpx.core.checkpoint.load import WeightsReport, load_weights
from fsdpx.core.checkpoint.save import Choices
from fsdpx.core.comm.communicator import Communicator
from fsdpx.core.engine.clock import LOADING
from fsdpx.core.program import Program, Slot
from fsdpx.core.state.placement import Placement
from fsdpx.core.state.sample_layout import Space
from fsdpx.core.state.step_inputs import Feed
from fsdpx.core.trainer import batch as batches
from fsdpx.core.trainer.call_runner import (
    KEEPS,
    LOOKS,
    REPLACES,
    STEP,
    LastUpdate,
    TrainerHost,
    check_which,
    checked_together,
    hosted,
    timed,
)
from fsdpx.core.trainer.recipe import demand, lacks
from fsdpx.core.trainer.session import Session
from fsdpx.errors import ConfigError, DataError, warn
from fsdpx.nn.container import one_or_all
from fsdpx.nn.gradient_accumulation import as_taken

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

    def __init__(self, host: TrainerHost) -> None:
        self._host = host
        self._absent = lacks(host.session.loss, host.place.optimizer)
        self._forwarded: Feed | None = None  # of the last `forward`
        self._shown: list[tuple[int, ...]] = []  # shapes of its outputs
        self._local = False
        self._finite = True  # the loss of the last step

    @property
    def host(self) -> TrainerHost:
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
    def _place(self) -> Placement:
        return self._host.session.place

    # -- training ----------------------------------------------------------------------------------------------------

    @hosted(STEP)
    def step(self, x: Any, y: Any) -> float:
        """Forward, backward and update on one global batch: its mean loss, equal on every rank.

        NumericsError if the loss or a gradient is NaN or Inf; nothing is updated then, and running statistics are as
        before. With a dynamic loss scale the update is skipped instead, with a RuntimeWarning on rank 0 at the first of
        a run of such losses."""
        if self._absent:
            demand("step", self._session.loss, self._place.optimizer)
        if self._local:
            raise ConfigError("step inside no_sync: use accumulate there; step is what ends an accumulation")
        self._refuse_to_mix("accumulate")
        feed = self._host.feed(x, y, "step")
        loss = self._updated(self._host.session.run("step", feed))
        self._warn_of_skipping(loss)
        return loss

    @hosted(KEEPS)
    def accumulate(self, x: Any, y: Any) -> float:
        """Forward and backward only; gradients add up until `step` or `update`. The loss of this batch alone.

        NumericsError if it is NaN or Inf; the gradients that were added up are forgotten then."""
        demand("accumulate", self._session.loss, self._place.optimizer)
        self._place.accumulation.demand_pieces("accumulate", PIECES)
        self._refuse_to_mix("accumulate")
        feed = self._host.feed(x, y, "accumulate")
        found = self._session.run("local" if self._local else "accumulate", feed)[MEAN]
        self._session.state.adding = "accumulate"
        return float(found.value)

    @hosted(KEEPS)
    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Inside, `accumulate` and `backward` keep gradients local and whole on every rank: no traffic, more memory."""
        before, self._local = self._local, True
        try:
            yield
        finally:
            self._local = before

    @hosted(KEEPS)
    def forward(self, x: Any, training: bool = True) -> Any:
        """The model's output on this rank's samples, kept for one `backward`. A tuple if the model has several."""
        session = self._session
        if not isinstance(training, bool):
            with self._host.share_errors("forward"):
                raise ConfigError(f"forward(training={training!r}): True or False is needed")
        session.place.accumulation.demand_pieces(
            "forward", "the engine cuts the batch itself; use step, or predict for results"
        )
        session.state.discard(["saved"])
        self._forwarded = feed = self._host.feed(x, None, "forward", training)
        outputs = one_or_all(session.leaving(session.outputs(session.run("forward", feed), feed), feed))
        self._shown = [tuple(o.shape) for o in (outputs if isinstance(outputs, tuple) else (outputs,))]
        return outputs

    @hosted(KEEPS)
    def backward(self, dy: Any) -> Any:
        """Gradients from `dy`: of the *global mean* loss with respect to this rank's outputs of the last `forward`.

        Returns that with respect to this rank's inputs, for what made them: another trainer's `backward`, a solver. A
        tuple if the model has several inputs; None for one of whole numbers. Several forward and backward pairs before
        `update` add up."""
        session, feed = self._session, self._forwarded
        if feed is None or not session.state.holding("saved"):
            raise ConfigError("backward: call forward first; each forward serves one backward")
        self._refuse_to_mix("backward")
        given, compute = (dy,) if len(self._shown) == 1 else dy, session.place.formats.compute
        from fsdpx.core.trainer.gather_full import cut_output, input_gradients

        if not isinstance(given, tuple | list) or len(given) != len(self._shown):
            raise DataError(f"backward: the model has {len(self._shown)} outputs: dy must be a tuple of as many arrays")
        arrays = tuple(as_taken(batches.array_of(session.place, d), "numbers", compute) for d in given)
        for array, shape in zip(arrays, self._shown, strict=True):
            if tuple(array.shape) != shape:
                raise DataError(f"backward: dy has shape {tuple(array.shape)}, the output of forward has {shape}")
        arrays = tuple(session.place.sample_layout.enter_output(array, "dy") for array in arrays)
        if session.place.stage.scores:
            session.state.store[Slot("seed", None, 0)] = tuple(cut_output(session.place, array) for array in arrays)
        if not self._local:
            session.begin("backward")
        (batch,) = feed.batch
        assert batch is not None
        found = session.run("backward", feed, local=self._local)
        session.state.adding = "backward"
        dx = input_gradients(session.place, found, batch, session.state.scaler.value)
        return one_or_all(session.leaving(dx, feed))

    @hosted(KEEPS)
    def update(self) -> float:
        """Reduce what is still local, then update; the global gradient norm if clipping asks for one, else nan."""
        demand("update", optimizer=self._place.optimizer)
        if not self._session.state.adding:
            raise ConfigError("update: there are no gradients; call accumulate or backward first")
        self._host.begin("update")
        self._updated(self._session.run("update", Feed()))
        assert self._host.last is not None
        return self._host.last.norm

    @hosted(KEEPS)
    def zero_grad(self) -> None:
        """Forget the gradients that `accumulate` or `backward` have added up. All ranks call it; it moves nothing."""
        self._host.demand_open("zero_grad")
        self._session.state.zero_grad()

    @hosted(KEEPS)
    @checked_together
    def freeze(self, *patterns: str, undo: bool = False) -> None:
        """From now on leave the parameters alone that name patterns (fnmatch) match: they get no gradient and no
        update, and keep their optimiser state. Between updates, not within an accumulation; checkpoints do not keep it.
        `distribute(frozen=...)` freezes for good, and saves memory. undo: train them again, as PyTorch does after
        `requires_grad_(True)`: the updates they have missed do not count as theirs, so Adam corrects the bias of their
        means by their own number of updates. Collective."""
        self._host.demand_open("freeze")
        self._session.freeze(patterns, undo)

    @hosted(LOOKS)
    def evaluate(self, x: Any, y: Any, with_: str = "parameters") -> float:
        """Mean loss of the global batch, without dropout; changes nothing. with_: "parameters", or their "average" over
        time (docs: optimisers)."""
        demand("evaluate", self._session.loss)
        if not (isinstance(with_, str) and with_ == "parameters"):
            with self._host.share_errors("evaluate"):
                check_which(with_)
        feed = self._host.feed(x, y, "evaluate", training=False)
        with self._host.having(with_), self._session.aside():
            found = self._session.run("evaluate", feed)[MEAN]
        self._host.weight = found.weight
        return float(found.value)

    @hosted(LOOKS)
    def predict(self, x: Any, with_: str = "parameters") -> Any:
        """The model's output on this rank's samples, without dropout; keeps nothing. with_: as in `evaluate`."""
        session = self._session
        plain = isinstance(with_, str) and with_ == "parameters"
        if plain and (found := session.direct(x)) is not None:
            return one_or_all(found)
        if not plain:
            with self._host.share_errors("predict"):
                check_which(with_)
        feed = self._host.feed(x, None, "predict", training=False)
        with self._host.having(with_), session.aside():
            return self._host.joined(one_or_all(session.predict(x, feed)))

    @hosted(LOOKS)
    @checked_together
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
        self._host.demand_open("generate")
        sampling = temperature, top_k, top_p, repetition_penalty, seed
        generate = load_extension("trainer", "generate")
        return generate(self._host, prompt, max_new_tokens, stop, sampling, stream, cache)

    if TYPE_CHECKING:
        fit = fitting.fit
    else:
        fit = LazyMethod("fsdpx.core.trainer.fit:fit")

    # -- parameters --------------------------------------------------------------------------------------------------

    @hosted(LOOKS)
    @checked_together
    def parameters(self, with_: str = "parameters", names: Collection[str] | None = None) -> dict[str, np.ndarray]:
        """All parameters and state by dotted name, full, on every rank's host; tied ones under their first name.
        with_: as in `evaluate`. names: these alone, the same on all ranks; no more than what lies with them is sent."""
        self._host.demand_open("parameters")
        with self._host.share_errors("parameters"):
            check_which(with_)
            if names is not None:
                names = patterns_of("names", names)
                demand_match("parameters(names=)", names, self._place.layout.specs, fits=operator.eq)
        found = self._place.pace.parameters() if with_ == "parameters" else None
        if found is None:
            self._host.begin("parameters" if names is None else f"parameters(names={sorted(names)})")
            with self._host.having(with_):
                from fsdpx.core.trainer.gather_full import whole_parameters, whole_state

                found = whole_parameters(self._session.state, names) | whole_state(self._session.state)
        return {n: found[n] for n in self._place.layout.specs if names is None or n in names}

    @hosted(REPLACES)
    @partial(checked_together, hints=False)
    def load_parameters(self, values: Mapping[str, Any]) -> None:
        """Set all parameters from full arrays by name, the same on every rank; see `load_weights`. Collective."""
        self._host.begin("load_parameters")
        with timed(self._session.engine, LOADING) as count:
            load_weights(self._session.state, values, "load_parameters", convert=True, count=count)
        self._place.pace.loaded(self._session.state)
        self._session.placed()

    @hosted(KEEPS)
    def gradients(self) -> dict[str, np.ndarray]:
        """Gradients of the global mean loss gathered so far by `accumulate` or `backward`, full, on every rank."""
        place, state = self._place, self._session.state
        if not state.adding:
            raise ConfigError("gradients: there are none; call accumulate or backward first")
        self._host.begin("gradients")
        here = state.store.get(Slot("weight"), 0.0) if place.counts_loss else 0.0
        weight = math.fsum(row[0] for row in place.everyone([here], "gradients (weight)"))
        scale = 1.0 / ((weight or 1.0) * state.scaler.value)
        from fsdpx.core.trainer.gather_full import whole_gradients

        found = whole_gradients(state)
        return {name: found[name] * scale for name in place.layout.specs if name in found}

    # -- checkpoints -------------------------------------------------------------------------------------------------

    @partial(checked_together, hints=False)
    def save(
        self,
        path: str | PathLike[str],
        *,
        loader: Any = None,
        dtype: str | None = None,
        shard_bytes: int | None = None,
        keep: int | None = None,
        background: bool = False,
        with_: str = "parameters",
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
            links of FOLDER point at, stay
        background : write a copy in a thread while training goes on; `host.wait_saved()` or the next save tells how it
            went
        with_ : "average" writes the average of the parameters over time, and the weights alone

        Raises
        ------
        CheckpointError : the same on all ranks, if it cannot be written; the older one is then as it was
        """
        with self._host.share_errors("save"):
            check_which(with_)
            if not isinstance(background, bool):
                raise ConfigError(f"save(background={background!r}): True or False is needed")
            if with_ != "parameters" and loader is not None:
                raise ConfigError(f"save(with_={with_!r}): weights alone have no place in the data; leave loader out")
            choices = Choices(dtype, shard_bytes, keep, with_=with_)
        self._host.checkpoint(path, choices, loader, None, background)

    @partial(checked_together, but="path")
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
        self._host.resume(path, loader, convert, verify)

    @hosted(REPLACES)
    @partial(checked_together, but="source")
    def load_weights(
        self,
        source: str | PathLike[str] | Mapping[str, Any],
        *,
        strict: bool = True,
        rename: Mapping[str, str] | None = None,
        convert: bool = False,
    ) -> WeightsReport:
        """Take the weights alone, from a checkpoint, from files of others or from arrays, and say what fitted.

        Shapes must fit. Tied parameters may have any of their names, running statistics may be missing; names that
        PyTorch gives to what the model's layers have are known (`Layer.aliases`). Collective.

        Parameters
        ----------
        source : a checkpoint, a safetensors file, a folder with `model.safetensors` or with several files and their
            index; or name -> full array, the same on every rank
        strict : every parameter must be there, and nothing else; False: take those that are there, leave the rest
        rename : pattern of names in the source -> pattern of names here; what a * stands for goes to the other *
        convert : round or widen floats of another format

        Returns
        -------
        WeightsReport : names that were taken, missing, extra, renamed

        Raises
        ------
        CheckpointError : the same on all ranks, before anything changes
        """
        self._host.begin("load_weights")
        options: Any = {"strict": strict, "rename": rename, "convert": convert}
        with timed(self._session.engine, LOADING) as count:
            report = load_weights(self._session.state, source, count=count, **options)
        self._place.pace.loaded(self._session.state)
        self._session.placed()
        return report

    # -- looking in --------------------------------------------------------------------------------------------------

    @property
    def program(self) -> Program:
        """The step as a program, begun with nothing left over; `print(trainer.program)` shows the step as text. Of
        local training, the step at the end of a round."""
        return self._session.program

    @property
    def data(self) -> Communicator:
        """The ranks that hold different samples: give this to `data.DataLoader` and `data.DistributedSampler`.

        Ranks of one pipe or tensor line share a rank here, and train on the same samples; so do those that have parts
        of the same fields (`parts`). With `elastic`, this rank by itself: batches are whole."""
        return self._host.data

    @property
    def parts(self) -> Communicator:
        """The ranks that hold parts of the same samples, with `space`; without it this rank by itself."""
        return self._session.place.axes.parts

    @property
    def output_grid(self) -> Space:
        """How the model's result is cut, with `space`: as its input, where both have as many cells.

        `offsets`, `own`, `local`, and `gather` are those of results and targets. It follows from the layers, before
        anything has been predicted.

        Raises
        ------
        ConfigError : samples are whole
        """
        return self._session.place.sample_layout.output_space()

    @property
    def steps(self) -> int:
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
            self._end()
            self._host.closed = True
            self._host.close()
            hooks.release(self)

    # -- inside ------------------------------------------------------------------------------------------------------

    @hosted(LOOKS, "close")
    def _end(self) -> None:
        self._host.begin("close")
        self._host.saved()

    if not TYPE_CHECKING:  # a type checker would take any name for one of a trainer

        def __getattr__(self, name: str) -> Any:
            hint = f"; use {CALLS[name]}" if name in CALLS else ""
            raise AttributeError(f"'Trainer' object has no attribute {name!r}{hint}", name=name, obj=self)

    def _updated(self, results: Mapping[Slot, Any]) -> float:
        loss = self._place.pace.loss(results)
        self._host.last = LastUpdate.of(loss, results[SCALE])
        self._session.updated(results[MEAN], results[SCALE])
        return loss

    def _warn_of_skipping(self, loss: float) -> None:
        """Warn at once when the loss of a step that is skipped becomes NaN or Inf: once for a row of such losses, and
        once for all ranks."""
        before, self._finite = self._finite, math.isfinite(loss)
        if before and not self._finite and self._place.axes.world.rank == 0:
            assert self._host.last is not None
            warn(
                f"the loss of step {self.steps + self._host.last.skipped} is {loss}, and the update was skipped: "
                "distribute(..., check_finite=True) names its origin",
            )

    def _refuse_to_mix(self, how: str) -> None:
        """Gradients of a loss and of the caller are weighed differently and cannot be mixed in one update."""
        if self._session.state.adding not in ("", how):
            raise ConfigError(
                "accumulate (or step) and backward before one update: use one of them; call update between, or "
                "zero_grad where the gradients were not meant for this trainer"
            )
