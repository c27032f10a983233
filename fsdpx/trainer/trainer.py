"""The trainer: what a user holds. Every call runs one program; what differs between strategies is in the programs."""

from __future__ import annotations

import hashlib
import inspect
import math
import operator
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import update_wrapper
from os import PathLike
from typing import Any, Self, TypeVar

import numpy as np

from fsdpx.checkpoint.background import Background
from fsdpx.checkpoint.commit import alone
from fsdpx.checkpoint.load import load
from fsdpx.checkpoint.save import Choices, prepare, save
from fsdpx.checkpoint.state import Scalars
from fsdpx.checkpoint.weights import WeightsReport, load_weights
from fsdpx.comm.communicator import Communicator
from fsdpx.config import python_number
from fsdpx.engine.engine import Engine
from fsdpx.engine.workspace import GradientScale
from fsdpx.errors import ConfigError, DataError, RankLost
from fsdpx.generation.texts import Sampling, Stream, is_one
from fsdpx.nn.marks import paths
from fsdpx.nn.moe import CutMoE, MoE
from fsdpx.observe.measure import Measured, measure
from fsdpx.optim import rate
from fsdpx.program import Program, Slot
from fsdpx.state.feed import Feed
from fsdpx.state.placement import Placement
from fsdpx.trainer import batch as batches
from fsdpx.trainer import calls
from fsdpx.trainer.absent import demand
from fsdpx.trainer.choices import demand_known
from fsdpx.trainer.fit import fit, settings_of
from fsdpx.trainer.generate import generate
from fsdpx.trainer.report import Report, Summary, report
from fsdpx.trainer.routing import Routing, routing_of, together
from fsdpx.trainer.series import History
from fsdpx.trainer.session import Session
from fsdpx.trainer.whole import (
    common_parameters,
    cut_output,
    input_gradients,
    put_averages,
    put_outer,
    remember,
    whole_gradients,
    whole_parameters,
    whole_state,
)
from fsdpx.watch.preempt import Preemption
from fsdpx.words import demand_match, patterns_of

__all__ = ["LastUpdate", "Trainer"]

T = TypeVar("T")
MEAN, SCALE, SHARE = Slot("mean"), Slot("scale"), Slot("share")
PIECES = "the whole global batch goes into one step; chunks are its microbatches"


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


class Trainer:
    """A distributed model with its loss and optimiser; made by `fsdpx.distribute`.

    Every method that moves data is collective: all ranks call it, in the same order. Arrays x and y hold this
    data-rank's part of the global batch, dim 0 is samples, and parts may differ in size."""

    # no others: an attribute that is misspelt, or that nothing reads, is an AttributeError
    __slots__ = (
        "_closed", "_finite", "_forwarded", "_local", "_saving", "_session", "_shown", "last", "weight",
    )  # fmt: skip

    def __init__(self, session: Session) -> None:
        self._session = session
        self.last: LastUpdate | None = None
        self.weight = 0.0  # what the last `evaluate` averaged over
        self._forwarded: Feed | None = None  # of the last `forward`
        self._shown: list[tuple[int, ...]] = []  # shapes of its outputs
        self._local = False
        self._finite = True  # the loss of the last step
        self._closed = False
        self._saving: Background | None = None

    @property
    def engine(self) -> Engine:
        """The engine that runs the programs of this rank."""
        return self._session.engine

    @property
    def placement(self) -> Placement:
        """The fixed choices of this rank: layout, mesh, formats, options."""
        return self._session.place

    # -- training ----------------------------------------------------------------------------------------------------

    def step(self, x: Any, y: Any) -> float:
        """Forward, backward and update on one global batch: its mean loss, equal on every rank.

        RuntimeWarning, on rank 0, at the first of a run of losses that are NaN or Inf."""
        self._demand("step")
        if self._local:
            raise ConfigError("step inside no_sync: use accumulate there; step is what ends an accumulation")
        self._refuse_to_mix("accumulate")
        feed = self._feed(x, y, "step")
        self._session.state.add("accumulate")
        loss = self._updated(self._session.run("step", feed))
        self._demand_finite(loss)
        return loss

    def accumulate(self, x: Any, y: Any) -> float:
        """Forward and backward only; gradients add up until `step` or `update`. The loss of this batch alone."""
        self._demand("accumulate")
        self.placement.accumulation.demand_pieces("accumulate", PIECES)
        self._refuse_to_mix("accumulate")
        feed = self._feed(x, y, "accumulate")
        self._session.state.add("accumulate")
        return float(self._session.run("local" if self._local else "accumulate", feed)[MEAN].value)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Inside, `accumulate` and `backward` keep gradients local and whole on every rank: no traffic, more memory."""
        before, self._local = self._local, True
        try:
            yield
        finally:
            self._local = before

    def forward(self, x: Any, training: bool = True) -> Any:
        """The model's output on this rank's samples, kept for one `backward`. A tuple if the model has several."""
        session = self._session
        session.place.accumulation.demand_pieces(
            "forward", "the engine cuts the batch itself; use step, or predict for results"
        )
        session.state.discard(["saved"])
        self._forwarded = feed = self._feed(x, None, "forward", training)
        outputs = _one(session.outputs(session.run("forward", feed), feed))
        self._shown = [tuple(o.shape) for o in (outputs if isinstance(outputs, tuple) else (outputs,))]
        return outputs

    def backward(self, dy: Any) -> Any:
        """Gradients from `dy`: of the *global mean* loss with respect to this rank's outputs of the last `forward`.

        Returns that with respect to this rank's inputs, for what made them: another trainer's `backward`, a solver. A
        tuple if the model has several inputs; None for one of whole numbers. Several forward and backward pairs before
        `update` add up."""
        session, feed = self._session, self._forwarded
        if feed is None or not session.state.holding("saved"):
            raise ConfigError("backward: call forward first; each forward serves one backward")
        self._refuse_to_mix("backward")
        given = tuple(dy) if len(session.place.stage.outputs) > 1 else (dy,)
        arrays = tuple(batches.array_of(session.place, d) for d in given)
        for array, shape in zip(arrays, self._shown, strict=True):
            if tuple(array.shape) != shape:
                raise DataError(f"backward: dy has shape {tuple(array.shape)}, the output of forward has {shape}")
        if session.place.stage.scores:
            session.state.store[Slot("seed", None, 0)] = tuple(cut_output(session.place, array) for array in arrays)
        session.state.add("backward")
        if not self._local:
            session.begin("backward")
        (batch,) = feed.batch
        assert batch is not None
        found = session.run("backward", feed, local=self._local)
        return _one(input_gradients(session.place, found, batch, session.state.scaler.value))

    def update(self) -> float:
        """Reduce what is still local, then update; the global gradient norm if clipping asks for one, else nan."""
        demand("update", optimizer=self.placement.optimizer)
        if not self._session.state.adding:
            raise ConfigError("update: there are no gradients; call accumulate or backward first")
        self._begin("update")
        self._updated(self._session.run("update", Feed()))
        assert self.last is not None
        return self.last.norm

    def zero_grad(self) -> None:
        """Forget the gradients that `accumulate` or `backward` have added up. All ranks call it; it moves nothing."""
        self._open("zero_grad")
        self._session.state.zero_grad()

    def freeze(self, *patterns: str) -> None:
        """From now on leave the parameters alone that name patterns (fnmatch) match: they get no gradient and no
        update, and keep their optimiser state. Between updates, not within an accumulation; checkpoints do not keep it.
        `distribute(frozen=...)` freezes for good, and saves memory. Collective."""
        self._session.freeze(patterns, "freeze", frozenset.union)

    def unfreeze(self, *patterns: str) -> None:
        """Train the parameters again that name patterns match and `freeze` has frozen. Collective."""
        self._session.freeze(patterns, "unfreeze", frozenset.difference)

    def evaluate(self, x: Any, y: Any, with_: str = "parameters") -> float:
        """Mean loss of the global batch, without dropout; changes nothing. with_: "parameters", or their "average" over
        time (docs/optimisers.md)."""
        demand("evaluate", self._session.loss)
        feed = self._feed(x, y, "evaluate", training=False)
        with self._with(with_), self._session.aside():
            found = self._session.run("evaluate", feed)[MEAN]
        self.weight = found.weight
        return float(found.value)

    def predict(self, x: Any, with_: str = "parameters") -> Any:
        """The model's output on this rank's samples, without dropout; keeps nothing. with_: as in `evaluate`."""
        session = self._session
        if with_ == "parameters" and (found := session.direct(x)) is not None:
            return _one(found)
        feed = self._feed(x, None, "predict", training=False)
        with self._with(with_), session.aside():
            return _one(session.predict(x, feed))

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
        stream: Stream | None = None,
        cache: bool = True,
    ) -> Any:
        """The tokens that go on after a prompt, or after each of several (docs/generation.md). Collective: all ranks
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
        sampling = Sampling(temperature, top_k, top_p, repetition_penalty, seed)
        several = not is_one(prompt)
        with self._with("parameters"), self._session.aside():
            found = generate(
                self._session, prompt if several else [prompt], max_new_tokens, stop, sampling, stream, cache
            )
        return found if several else found[0]

    def fit(self, loader: Any, **options: Any) -> History:
        demand_known("fit", options, list(inspect.signature(fit).parameters)[2:])
        self._demand("fit")
        options = {n: v if isinstance(v, tuple | list | dict) else python_number(v) for n, v in options.items()}
        preempt = options.pop("preempt", None)
        if preempt is None and options.get("checkpoints") is not None:
            preempt = Preemption(signals=("USR1", "TERM", "INT"))  # Ctrl-C loses nothing either
        with preempt or nullcontext():
            return fit(self, loader, preempt=preempt or None, **options)

    def no_batch(self) -> None:
        """Say that this rank has no more batches; DataError on all ranks if others go on. Collective, like `step`."""
        self._session.note("step")
        if not self.placement.imaginary and self.placement.apart is None:
            batches.agree(self.placement.axes, "step", batches.ENDED, 0, None)

    # -- parameters --------------------------------------------------------------------------------------------------

    def parameters(self, with_: str = "parameters", names: Collection[str] | None = None) -> dict[str, np.ndarray]:
        """All parameters and state by dotted name, full, on every rank's host; tied ones under their first name.
        with_: as in `evaluate`. names: these alone, the same on all ranks; no more than what lies with them is sent."""
        if names is not None:
            names = patterns_of("names", names)
            demand_match("parameters(names=)", names, self.placement.layout.specs, fits=operator.eq)
        exchange = self._session.state.exchange
        if exchange is not None and with_ == "parameters":
            self._open("parameters")
            found = common_parameters(self._session.state, exchange)
        else:
            self._begin("parameters")
            with self._with(with_):
                found = whole_parameters(self._session.state, names) | whole_state(self._session.state)
        return {n: found[n] for n in self.placement.layout.specs if names is None or n in names}

    def _with(self, which: str) -> AbstractContextManager[None]:
        """Inside, the parameters are what was asked for. After an error each rank puts them back by itself."""
        if which not in ("parameters", "average"):
            raise ConfigError(f"with_={which!r}: choose parameters or average")
        if which == "parameters" and self.placement.rounds is None:
            return self._session.common("master")
        return self._put(which)

    @contextmanager
    def _put(self, which: str) -> Iterator[None]:
        self._begin(f"with {which}")
        put_back = (put_outer if which == "parameters" else put_averages)(self._session.state)
        try:
            yield
            self._begin(f"without {which}")
        finally:
            put_back()

    def load_parameters(self, values: Mapping[str, Any]) -> None:
        """Set all parameters from full arrays by name, the same on every rank; see `load_weights`. Collective."""
        self._begin("load_parameters")
        load_weights(self._session.state, values, "load_parameters", convert=True)
        self._session.state.begin_round()
        self._session.placed()

    def remember(self) -> Callable[[], None]:
        """Copy this rank's part of the weights and running statistics; what is returned, called on all ranks, puts them
        back. The optimiser's state stays what it is."""
        self._open("remember")
        exchange = self._session.state.exchange
        put_back = remember(self._session.state) if exchange is None else exchange.remember()

        def restore() -> None:
            self._begin("restore")
            put_back()
            self._session.placed()

        return restore

    def gradients(self) -> dict[str, np.ndarray]:
        """Gradients of the global mean loss gathered so far by `accumulate` or `backward`, full, on every rank."""
        place, state = self.placement, self._session.state
        if not state.adding:
            raise ConfigError("gradients: there are none; call accumulate or backward first")
        self._begin("gradients")
        here = state.store.get(Slot("weight"), 0.0) if place.counts_loss else 0.0
        weight = math.fsum(row[0] for row in place.everyone([here], "gradients (weight)"))
        scale = 1.0 / ((weight or 1.0) * state.scaler.value)
        found = whole_gradients(state)
        return {name: found[name] * scale for name in place.layout.specs if name in found}

    def fingerprint(self) -> str:
        """SHA-256 over names, formats, shapes and bytes of all parameters: equal if and only if all bits are."""
        digest = hashlib.sha256()
        for name, array in sorted(self.parameters().items()):
            digest.update(f"{name} {array.dtype} {array.shape}\n".encode())
            digest.update(np.ascontiguousarray(array).tobytes())
        return digest.hexdigest()

    # -- checkpoints -------------------------------------------------------------------------------------------------

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
        """Write a checkpoint into the folder `path`, all ranks at once. Collective; see docs/checkpoints.md.

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
        background : write a copy in a thread while training goes on; `wait_saved` or the next save tells how it went
        with_ : "average" writes the average of the parameters over time, and the weights alone

        Raises
        ------
        CheckpointError : the same on all ranks, if it cannot be written; the older one is then as it was
        """
        if with_ != "parameters" and loader is not None:
            raise ConfigError(f"save(with_={with_!r}): weights alone have no place in the data; leave loader out")
        self.checkpoint(path, Choices(dtype, shard_bytes, keep, with_=with_), loader, None, background)

    def save_pretrained(self, folder: str | PathLike[str], *, dtype: str | None = None) -> None:
        """Write the weights of a model of `fsdpx.models.from_pretrained` as the folder that transformers opens, all
        ranks at once: names and files as they were, `config.json` and the tokenizer copied. Collective.

        Parameters
        ----------
        folder : not there yet, or empty
        dtype : of the weights: "bf16", "float16", "float32" or "float64" (default: that of the files that were read)

        Raises
        ------
        CheckpointError : the same on all ranks, if it cannot be written; nothing is left then
        """
        from fsdpx.models.writing import save_pretrained  # few need it: a first step is sooner without

        self._begin("save_pretrained")
        with self._with("parameters"):
            save_pretrained(self._session.state, folder, dtype)

    def wait_saved(self) -> None:
        """Return when a save in the background is whole; CheckpointError on all ranks if it cannot be. Collective."""
        self._begin("wait_saved")
        self._end_saving()

    def _end_saving(self) -> None:
        if self._saving is None:
            return
        try:
            self._saving.wait()
        except RankLost:
            raise  # the code that recovers decides what becomes of the save
        except BaseException:
            self._saving = None
            raise
        self._saving = None

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
        self.resume(path, loader, convert, verify)

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
        self._begin("load_weights")
        report = load_weights(self._session.state, source, strict=strict, rename=rename, convert=convert)
        self._session.state.begin_round()
        self._session.placed()
        return report

    def checkpoint(
        self,
        path: str | PathLike[str],
        choices: Choices,
        loader: Any,
        fit: Mapping[str, Any] | None,
        background: bool = False,
    ) -> None:
        self._begin("save")
        self._end_saving()
        state = self._session.state
        plain = choices.with_ == "parameters" and self.placement.apart is None
        with self._session.common("slot", "average"), nullcontext() if plain else self._with(choices.with_):
            if background:
                self._saving = Background(state, prepare(state, path, choices, loader, fit))
            else:
                save(state, path, choices, loader, fit)

    def resume(self, path: str | PathLike[str], loader: Any, convert: bool = False, verify: bool = True) -> Scalars:
        self._begin("load")
        self._end_saving()
        found = load(self._session.state, path, loader, convert, verify)
        self._session.placed()
        return found

    # -- looking in --------------------------------------------------------------------------------------------------

    @property
    def program(self) -> Program:
        """The step as a program, begun with nothing left over; `print(trainer.program)` shows the step as text. Of
        local training, the step at the end of a round."""
        return self._session.program

    @property
    def data(self) -> Communicator:
        """The ranks that hold different samples: give this to `data.DataLoader` and `data.DistributedSampler`.

        Ranks of one pipe or tensor line share a rank here, and train on the same samples."""
        return self.placement.axes.data

    @property
    def steps(self) -> int:
        """Updates made so far."""
        return self._session.state.steps

    @property
    def met(self) -> bool:
        """Whether all ranks came together in the last step; not always in local training."""
        rounds = self.placement.rounds
        return not self.apart and (rounds is None or bool(rounds.at(self.steps).deltas))

    @property
    def lr(self) -> float:
        """The learning rate of the next update. It is the optimiser's: a rate that changes is a function of the step,
        `optim.SGD(lr=lambda step: 0.1 / step)`."""
        return rate(self.placement.optimizer, self.steps + 1)

    @lr.setter
    def lr(self, value: float) -> None:
        raise ConfigError(
            f"trainer.lr = {value!r}: the rate belongs to the optimiser and is the same on all ranks; give it a "
            "function of the step, optim.SGD(lr=lambda step: ...), or one of optim.schedules"
        )

    def settings(self) -> dict[str, str]:
        """The settings that results depend on beside seed and data, as text: layers, loss, optimiser, current learning
        rate."""
        return settings_of(self._session.model, self._session.loss, self.placement, self.lr)

    @property
    def rank(self) -> int:
        return int(self.world.rank)

    @property
    def world(self) -> Communicator:
        """All ranks that call this trainer."""
        return self.placement.axes.world

    @property
    def parts(self) -> int:
        """How many different parts the global batch is given in: one from each data rank."""
        return self.placement.axes.data.size

    @property
    def apart(self) -> bool:
        """Whether ranks step at their own speed, and meet only where they must."""
        return self.placement.apart is not None

    def finish(self) -> None:
        """Return when all ranks have made their last step, where they step at their own speed; at once where they step
        together. `fit` ends with it, and calls that are collective begin with it. Ranks that have died are not waited
        for."""
        self._open("finish")
        self._session.meet()

    def alone(self, what: str, do: Callable[[], T]) -> T:
        """The result of `do` on rank 0, given to every rank; its CheckpointError, too. Collective."""
        self._begin(what)
        return alone(self.world, what, do)

    def most(self, values: np.ndarray, what: str) -> np.ndarray:
        """The largest of each number over all ranks, float64 or int64. Collective; `what` names it in errors."""
        self._open(what)
        self._session.note(what)
        self._session.meet()
        return calls.largest(self.world, what, values)

    def report(self) -> Report:
        """Bytes and calls by collective and axis, memory by kind, time by verb, on this rank since the last `reset`."""
        return report(self.engine, self._session.round)

    def summary(self) -> Summary:
        """The reports of all ranks, with the same numbers: time by verb over ranks, bandwidth, overlap, imbalance, and
        memory at its most beside the plan. Printed, a table. Collective."""
        self._begin("summary")
        return Summary(tuple(self.world.all_gather_plain(self.report().measured())))

    @property
    def routes(self) -> bool:
        """Whether the model has layers with experts."""
        layers = (layer for node in self.placement.model.nodes for _, layer in paths(node.layer))
        return any(isinstance(layer, MoE | CutMoE) for layer in layers)

    def routing(self) -> dict[str, Routing]:
        """How the load of experts was in training, by the path of their layer, over all ranks since the last `reset`.
        Collective."""
        self._begin("routing")
        return together(self.world.all_gather_plain(routing_of(self.placement.axes.counters.tallies)))

    def measure(self, x: Any, y: Any, steps: int = 5) -> Measured:
        """Train some steps and keep time of every action, on all ranks of the pipe; see `fsdpx.observe.measure`."""
        return measure(self.engine, lambda: self.step(x, y), steps)

    def save_trace(self) -> None:
        """Write the last steps into the folder of `distribute(trace=...)`, one file per rank; `fit` and `close` do so,
        too. Nothing where no trace is kept. Collective."""
        self._open("save_trace")
        if self._session.tracer is not None:
            self._begin("save_trace")
            self._session.save_trace()

    def reset(self) -> None:
        """Restart counting traffic and time."""
        self.engine.reset()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: object, trace: object) -> None:
        """`with model.as_distributed(...) as trainer:` closes it when all is well; after an exception the job ends."""
        if kind is None:
            self.close()

    def close(self) -> None:
        """Free the memory shared with other ranks and the communicators that were made for this trainer. Collective.

        The trainer cannot be used any more; take what `parameters()` returns before."""
        if not self._closed:
            self._begin("close")
            self._end_saving()
            self._closed = True
            self._session.close()

    def _open(self, what: str) -> None:
        if self._closed:
            raise ConfigError(f"{what}: this trainer is closed")

    def _begin(self, call: str) -> None:
        """All ranks have come to this call."""
        self._open(call)
        self._session.begin(call)

    # -- inside ------------------------------------------------------------------------------------------------------

    def _feed(self, x: Any, y: Any, kind: str, training: bool = True) -> Feed:
        """A batch, checked, agreed on and cut."""
        self._open(kind)
        return self._session.feed(x, y, kind, training)

    def _demand(self, call: str) -> None:
        """ConfigError where a loss or an optimiser is missing that this call needs."""
        demand(call, self._session.loss, self.placement.optimizer)

    def _updated(self, results: Mapping[Slot, Any]) -> float:
        found = results.get(SHARE)
        loss = float(results[MEAN].value if found is None else found.loss)
        self.last = LastUpdate.of(loss, results[SCALE])
        self._session.updated(results[MEAN], results[SCALE])
        return loss

    def _demand_finite(self, loss: float) -> None:
        """Warn at once when a loss becomes NaN or Inf: once for a row of such losses, and once for all ranks."""
        before, self._finite = self._finite, math.isfinite(loss)
        if before and not self._finite and self.placement.axes.world.rank == 0:
            assert self.last is not None
            done = "the update was skipped" if self.last.skipped else "the parameters are updated with it"
            warnings.warn(
                f"the loss of step {self.steps + self.last.skipped} is {loss}, and {done}: "
                "distribute(..., check_finite=True) names its origin",
                RuntimeWarning,
                stacklevel=3,
            )

    def _refuse_to_mix(self, how: str) -> None:
        """Gradients of a loss and of the caller are weighed differently and cannot be mixed in one update."""
        if self._session.state.adding not in ("", how):
            raise ConfigError(
                "accumulate (or step) and backward before one update: use one of them; call update between, or "
                "zero_grad where the gradients were not meant for this trainer"
            )


update_wrapper(Trainer.fit, fit, assigned=["__doc__"])  # help(trainer.fit) shows every option


def _one(values: Sequence[Any]) -> Any:
    """A single output as it is, several as a tuple."""
    return values[0] if len(values) == 1 else tuple(values)
