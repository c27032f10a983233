"""The trainer: what a user holds. Every call runs one program; what differs between strategies is in the programs."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from fsdpx.array.namespace import from_host
from fsdpx.checkpoint.agree import alone
from fsdpx.checkpoint.background import Background
from fsdpx.checkpoint.commit import place
from fsdpx.checkpoint.load import load, load_weights
from fsdpx.checkpoint.save import Choices, prepare, save
from fsdpx.checkpoint.state import State
from fsdpx.comm.communicator import Communicator, ReduceOp
from fsdpx.engine.engine import Clock, Engine
from fsdpx.engine.finite import demand_finite
from fsdpx.engine.interpreter import Bound
from fsdpx.errors import ConfigError, DataError, FsdpxError, RankLost
from fsdpx.nn.sort import Sorted, infer
from fsdpx.program import Program, Request, compile, one_by_one
from fsdpx.trainer import batch as batches
from fsdpx.trainer.fit import History, fit
from fsdpx.trainer.measure import Measured, measure
from fsdpx.trainer.outputs import cut_output, whole_outputs
from fsdpx.trainer.report import Report, report
from fsdpx.trainer.whole import put, whole_gradients, whole_parameters, whole_state
from fsdpx.watch.preempt import Preemption
from fsdpx.watch.watchdog import Watchdog

__all__ = ["Trainer"]

T = TypeVar("T")


@dataclass(frozen=True)
class Step:
    """What the last update was: global mean loss, global gradient norm (nan if not asked for), learning rate."""

    loss: float
    norm: float
    rate: float
    skipped: bool


class Trainer:
    """A distributed model with its loss and optimiser; made by `fsdpx.distribute`.

    Every method that moves data is collective: all ranks call it, in the same order. Arrays x and y hold this
    data-rank's part of the global batch, dim 0 is samples, and parts may differ in size.
    """

    def __init__(
        self, engine: Engine, model: Sorted, loss: Any, microbatches: int, dog: Watchdog | None = None
    ) -> None:
        """model, loss: as one process has them, to check batches against. dog: looks after this rank, if anybody."""
        self.engine = engine
        self.microbatches = microbatches
        self.last: Step | None = None
        self.weight = 0.0  # what the last `evaluate` averaged over
        self._forwarded: tuple[list[Any], bool] = ([], True)  # batch and mode of the last `forward`
        self._largest: batches.Microbatch | None = None  # as large as any of any rank, where there is a budget
        self._again: dict[Any, frozenset[int]] = {}  # batch sizes seen -> units that run again
        self._shown: list[tuple[int, ...]] = []  # shapes of its outputs
        self._model, self._loss = model, loss
        self._programs: dict[tuple[Request, frozenset[str]], Bound] = {}
        self._fits: dict[tuple[Any, ...], list[tuple[int, ...]]] = {}  # batch shapes seen -> output shapes
        self._local = False
        self._closed = False
        self._dog = dog
        self._saving: Background | None = None

    # -- training ----------------------------------------------------------------------------------------------------

    def step(self, x: Any, y: Any) -> float:
        """Forward, backward and update on one global batch: its mean loss, equal on every rank."""
        if self._local:
            raise ConfigError("step inside no_sync: use accumulate there; step is what ends an accumulation")
        self._refuse_to_mix("accumulate")
        self._load(x, y, "step")
        self.engine.adding = "accumulate"
        return self._update(self._run("step"))

    def accumulate(self, x: Any, y: Any) -> float:
        """Forward and backward only; gradients add up until `step` or `update`. The loss of this batch alone."""
        if self.engine.options.chunks is not None:
            raise ConfigError(
                "accumulate: with chunks the whole global batch goes into one step; chunks are its microbatches"
            )
        self._refuse_to_mix("accumulate")
        self._load(x, y, "accumulate")
        self.engine.adding = "accumulate"
        return float(self._run("local" if self._local else "accumulate")["mean"].value)

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
        if self.engine.options.chunks is not None:
            raise ConfigError("forward: with chunks the engine cuts the batch itself; use step, or predict for results")
        self._discard("saved")
        self._load(x, None, "forward")
        self.engine.training = training
        self._forwarded = (self.engine.batch, training)
        outputs = self._outputs(self._run("forward"))
        self._shown = [tuple(o.shape) for o in (outputs if isinstance(outputs, tuple) else (outputs,))]
        return outputs

    def backward(self, dy: Any) -> None:
        """Gradients from `dy`: of the *global mean* loss with respect to this rank's outputs of the last `forward`.

        Several forward and backward pairs before `update` add up.
        """
        engine = self.engine
        if not any(slot.startswith("saved") for slot in engine.store):
            raise ConfigError("backward: call forward first; each forward serves one backward")
        self._refuse_to_mix("backward")
        given = tuple(dy) if len(engine.stage.outputs) > 1 else (dy,)
        arrays = tuple(batches.array_of(engine, d) for d in given)
        for array, shape in zip(arrays, self._shown, strict=True):
            if tuple(array.shape) != shape:
                raise DataError(f"backward: dy has shape {tuple(array.shape)}, the output of forward has {shape}")
        if engine.stage.scores:
            engine.store["seed.0"] = tuple(cut_output(engine, array) for array in arrays)
        engine.batch, engine.training = self._forwarded
        engine.adding = "backward"
        self._run("backward", microbatches=1)

    def update(self) -> float:
        """Reduce what is still local, then update; the global gradient norm if clipping asks for one, else nan."""
        if not self.engine.adding:
            raise ConfigError("update: there are no gradients; call accumulate or backward first")
        self._update(self._run("update"))
        assert self.last is not None
        return self.last.norm

    def evaluate(self, x: Any, y: Any) -> float:
        """Mean loss of the global batch, without dropout; changes nothing."""
        self._load(x, y, "evaluate")
        self.engine.training = False
        with self._aside():
            found = self._run("evaluate")["mean"]
        self.weight = found.weight
        return float(found.value)

    def predict(self, x: Any) -> Any:
        """The model's output on this rank's samples, without dropout; keeps nothing."""
        self._load(x, None, "predict")
        self.engine.training = False
        with self._aside():
            return self._outputs(self._run("predict"))

    def fit(self, loader: Any, **options: Any) -> History:
        """Train on batches from `loader`; see `fsdpx.trainer.fit.fit` for epochs, validation, patience and progress."""
        preempt = options.pop("preempt", None)
        if preempt is None and options.get("checkpoints") is not None:
            preempt = Preemption()
        with preempt or nullcontext():
            return fit(self, loader, preempt=preempt or None, **options)

    def no_batch(self) -> None:
        """Say that this rank has no more batches; DataError on all ranks if others go on. Collective, like `step`."""
        if not getattr(self.engine.xp, "holds_no_data", False):
            batches.agree(self.engine.axes, batches.ENDED, 0, None)

    # -- parameters --------------------------------------------------------------------------------------------------

    def parameters(self) -> dict[str, np.ndarray]:
        """All parameters and state by dotted name, full, on every rank's host; tied ones under their first name."""
        self._open("parameters")
        found = whole_parameters(self.engine) | whole_state(self.engine)
        return {name: found[name] for name in self.engine.layout.specs}

    def load_parameters(self, values: Mapping[str, Any]) -> None:
        """Set all parameters (and state, if given) from full arrays by name; each rank takes what it owns."""
        self._open("load_parameters")
        xp = self.engine.xp
        values = self._checked(values)
        self.engine.axes.world.barrier(what="load_parameters").wait()  # others may still read what we share with them
        put(self.engine, values)
        for name, array in self.engine.state.items():
            if name in values:
                array[...] = from_host(xp, np.asarray(values[name]).astype(array.dtype, copy=False))
        self._discard("full")
        self.engine.kinds.discard("updated")

    def gradients(self) -> dict[str, np.ndarray]:
        """Gradients of the global mean loss gathered so far by `accumulate` or `backward`, full, on every rank."""
        engine = self.engine
        if not engine.adding:
            raise ConfigError("gradients: there are none; call accumulate or backward first")
        here = engine.store.get("weight", 0.0) if engine.counts_loss else 0.0
        weight = math.fsum(row[0] for row in engine.everyone([here], "gradients (weight)"))
        scale = 1.0 / ((weight or 1.0) * engine.scaler.value)
        found = whole_gradients(engine)
        return {name: found[name] * scale for name in engine.layout.specs if name in found}

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
    ) -> None:
        """Write a checkpoint into the folder `path`, all ranks at once. Collective; see docs/checkpoints.md.

        Inside are `model.safetensors`, one standard file with the bits of `parameters()`, and what `load` needs to go
        on exactly: the optimiser's state, steps, loss scale, seed, and the place of `loader` in the data.
        dtype: "bf16", "float16", "float32" or "float64" for the weights in the file (default: the trainer's).
        shard_bytes: cut the weights into files of up to that many bytes, with an index, as Hugging Face does.
        keep: after saving FOLDER/step-30, remove all but the last `keep` of FOLDER/step-*.
        background: copy what this rank writes and write it in a thread while training goes on; `wait_saved`, or the
        next save or load, says whether that went well.
        An older checkpoint at `path` stays until the new one is whole. CheckpointError, the same on all ranks, if it
        cannot be written; then the older one is as it was. Extra memory: two blocks of 4 MiB, in the background also
        this rank's part.
        """
        self._save(place(path), Choices(dtype, shard_bytes, keep), loader, None, background)

    def wait_saved(self) -> None:
        """Return when a save in the background is whole; CheckpointError on all ranks if it cannot be. Collective."""
        self._end_saving()

    def _end_saving(self) -> None:
        if self._saving is None:
            return
        try:
            self._saving.wait()
        except RankLost:
            raise  # who comes back from that decides what becomes of the save
        except BaseException:
            self._saving = None
            raise
        self._saving = None

    def load(
        self, path: str | PathLike[str], *, loader: Any = None, convert: bool = False, verify: bool = True
    ) -> None:
        """Go on exactly where `save` wrote `path`, at any number of ranks, strategy and mesh. Collective.

        loader: is put to its place in the data. convert: round or widen numbers saved in another format. verify: look
        at the digests of all bytes first, each rank at a part of them. Names, shapes, formats, sizes and digests are
        checked before anything changes; CheckpointError, the same on all ranks, names what does not fit.
        Random numbers go on with the seed of the checkpoint. Extra memory: three blocks of 4 MiB.
        """
        self._resume(place(path), loader, convert, verify)

    def load_weights(self, path: str | PathLike[str], *, convert: bool = False) -> None:
        """Take the weights alone from a checkpoint, from a safetensors file, or from a folder with `model.safetensors`
        or several files and their index. Names, shapes and formats must fit; running statistics may be missing, tied
        parameters may have any of their names. Collective."""
        self._open("load_weights")
        load_weights(self.engine, place(path), convert)

    def _save(
        self, path: Path, choices: Choices, loader: Any, fit: Mapping[str, Any] | None, background: bool = False
    ) -> None:
        self._open("save")
        self._end_saving()
        if background:
            self._saving = Background(self.engine, prepare(self.engine, path, choices, loader, fit))
        else:
            save(self.engine, path, choices, loader, fit)

    def _resume(self, path: Path, loader: Any, convert: bool = False, verify: bool = True) -> State:
        self._open("load")
        self._end_saving()
        return load(self.engine, path, loader, convert, verify)

    # -- looking in --------------------------------------------------------------------------------------------------

    @property
    def program(self) -> Program:
        """The step as a program, begun with nothing left over; `print(trainer.program)` is the step in words."""
        return compile(self._request("step", self._step_microbatches(), {}))

    @property
    def data(self) -> Communicator:
        """The ranks that hold different samples: give this to `data.DataLoader` and `data.DistributedSampler`.

        Ranks of one pipe or tensor line share a rank here, and train on the same samples.
        """
        return self.engine.axes.data

    @property
    def steps(self) -> int:
        """Updates made so far."""
        return self.engine.steps

    @property
    def rank(self) -> int:
        return int(self.world.rank)

    @property
    def world(self) -> Communicator:
        """All ranks that call this trainer."""
        return self.engine.axes.world

    @property
    def parts(self) -> int:
        """How many different parts the global batch is given in: one from each data rank."""
        return self.engine.axes.data.size

    def alone(self, what: str, do: Callable[[], T]) -> T:
        """What `do` gives on rank 0, on every rank; its CheckpointError, too. Collective."""
        return alone(self.world, what, do)

    def most(self, values: np.ndarray, what: str) -> np.ndarray:
        """The largest of each number over all ranks, float64 or int64. Collective; `what` names it in errors."""
        found = np.array(values)
        self.world.all_reduce(found, ReduceOp.MAX, what=what).wait()
        return found

    def report(self) -> Report:
        """Bytes and calls by collective and axis, memory by kind, time by verb, on this rank since the last `reset`."""
        return report(self.engine, self.program)

    def measure(self, x: Any, y: Any, steps: int = 5) -> Measured:
        """Train some steps and keep time of every action, on all ranks of the pipe; see `fsdpx.trainer.measure`."""
        return measure(self, x, y, steps)

    def reset(self) -> None:
        """Start counting anew: traffic and time."""
        self.engine.counters.clear()
        self.engine.clock = Clock()

    def close(self) -> None:
        """Free the memory shared with other ranks and the communicators that were made for this trainer. Collective.

        The trainer cannot be used any more; take what `parameters()` returns before.
        """
        if not self._closed:
            self.wait_saved()
            self._closed = True
            self._programs.clear()
            self.engine.close()

    def _open(self, what: str) -> None:
        if self._closed:
            raise ConfigError(f"{what}: this trainer is closed")

    # -- inside ------------------------------------------------------------------------------------------------------

    def _load(self, x: Any, y: Any, kind: str) -> None:
        """Put a checked and agreed batch before the engine, cut into microbatches; training on unless told else."""
        self._open(kind)
        engine = self.engine
        engine.training = True
        error: FsdpxError | None = None
        inputs: tuple[Any, ...] = ()
        target, features, rows = None, "", 0
        try:
            inputs = batches.inputs_of(engine, x)
            rows = int(inputs[0].shape[0])
            if kind in ("step", "accumulate", "evaluate"):
                target = batches.target_of(engine, y, rows)
            arrays = [*inputs, *([] if target is None else [target])]
            features = self._features(arrays)
            if engine.axes.data.size < engine.axes.world.size:  # several ranks work on the same samples
                features += batches.digest_of(arrays)
            self._validate(inputs, target)
        except FsdpxError as problem:
            error = problem
        if not getattr(engine.xp, "holds_no_data", False):
            everyone = batches.agree(engine.axes, features, rows, error)
        elif error is not None:
            raise error
        else:
            everyone = batches.imagined_rows(engine, rows)
        trains = kind in ("step", "accumulate", "forward")
        before = 0 if kind in ("step", "accumulate") and not engine.adding else engine.rows
        row = sum(everyone[: engine.axes.data.rank]) + (before if trains else 0)
        part = batches.Part(inputs, target, everyone, row)
        whole = kind in ("forward", "predict") or (kind == "evaluate" and not batches.fits_chunks(engine, everyone))
        engine.batch = batches.cut(engine, part, 1 if kind in ("forward", "predict") else self.microbatches, not whole)
        if trains:
            engine.rows = before + sum(everyone)
            if engine.recompute.budget is not None:
                self._largest = batches.largest(engine, inputs, everyone, self.microbatches)

    def _features(self, arrays: Sequence[Any]) -> str:
        """What must be alike in the parts of all ranks, in words."""
        return batches.features_of(arrays)

    def _validate(self, inputs: tuple[Any, ...], target: Any) -> None:
        """What can be known before any communication: shapes through the whole model, labels, finite inputs."""
        engine = self.engine
        from fsdpx.array.shapes import ShapeArray

        key = tuple((a.shape, str(a.dtype)) for a in inputs)
        shapes = self._fits.get(key)
        if shapes is None:
            outputs = infer(self._model, [ShapeArray(a.shape, a.dtype) for a in inputs], engine.dtype)
            if engine.axes.tensor.size > 1:  # what is cut must divide
                engine.message(0, batches.largest(engine, inputs, (inputs[0].shape[0],), 1))
            shapes = self._fits[key] = [tuple(o.shape) for o in outputs]
        if target is not None:
            self._loss.validate(shapes[0] if len(shapes) == 1 else tuple(shapes), target)
        if engine.options.check_finite:
            for name, array in zip(engine.layout.inputs, inputs, strict=True):
                demand_finite(engine, array, f"input {name!r}")

    def _run(self, kind: str, microbatches: int | None = None) -> dict[str, Any]:
        return self._bound(kind, microbatches).run()

    def _bound(self, kind: str, microbatches: int | None) -> Bound:
        count = len(self.engine.batch) if microbatches is None else microbatches
        request = self._request(kind, count, self.engine.store)
        # memory that ranks share is made together: what they ran before is the same, what it left may not be
        key = (request, frozenset(self.engine.kinds))
        if key not in self._programs:
            self._programs[key] = Bound(self.engine, request, self._dog)
        self.engine.kinds.add(kind)
        return self._programs[key]

    def _request(self, kind: str, microbatches: int, store: Mapping[str, Any]) -> Request:
        """What to compile: the placement, and what earlier programs left in the store."""
        engine = self.engine

        def pages(slot: str) -> frozenset[int]:
            return frozenset(p for p in engine.pages if f"{slot}{p}" in store)

        steps = kind in ("step", "accumulate", "local")
        order = engine.pipe.order(microbatches, engine.axes.pipe.rank) if steps else None

        return Request(
            kind,
            engine.stage,
            microbatches,
            keep_full=engine.keep_full,
            reduce_each=engine.reduce_each and not (kind == "backward" and self._local),
            ahead=engine.sharding.ahead,
            resident=pages("full"),
            grads=pages("grad"),
            parts=pages("part"),
            weighed="weight" in store,
            order=order,
            recompute=self._recomputed(microbatches) if steps else frozenset(),
            commit=engine.commit is not None,
        )

    def _recomputed(self, microbatches: int) -> frozenset[int]:
        """The same for every step with batches of one size; a budget takes a forward on shapes to find them."""
        engine, batch = self.engine, self._largest
        key = (microbatches, None if batch is None else tuple((a.shape, str(a.dtype)) for a in batch.inputs))
        if key not in self._again:
            orders = [engine.pipe.order(microbatches, r) or one_by_one(microbatches) for r in range(engine.pipe.width)]
            self._again[key] = engine.recompute.units(engine, orders, batch)
        return self._again[key]

    def _step_microbatches(self) -> int:
        chunks = self.engine.options.chunks
        return self.microbatches if chunks is None else batches.most_chunks(chunks, self.engine.axes.data.size)

    def _update(self, results: dict[str, Any]) -> float:
        engine, scale = self.engine, results["scale"]
        loss = float(results["mean"].value) if "mean" in results else math.nan
        self.last = Step(loss, scale.norm, scale.rate, scale.skip)
        engine.steps += not scale.skip
        engine.rows, engine.adding = 0, ""
        engine.kinds.clear()
        engine.kinds.add("updated")
        engine.drop_local()
        return loss

    def _refuse_to_mix(self, how: str) -> None:
        """Gradients of a loss and of the caller are weighed differently and cannot be mixed in one update."""
        if self.engine.adding not in ("", how):
            raise ConfigError(
                "accumulate (or step) and backward before one update: use one of them; call update between"
            )

    def _outputs(self, results: dict[str, Any]) -> Any:
        (batch,) = self.engine.batch
        assert batch is not None
        shapes = self._fits[tuple((a.shape, str(a.dtype)) for a in batch.inputs)]
        values = whole_outputs(self.engine, tuple(results.values()), shapes)
        return values[0] if len(values) == 1 else values

    @contextmanager
    def _aside(self) -> Iterator[None]:
        """Run without seeing or touching gradients that are being accumulated."""
        engine = self.engine
        store, adding = engine.store, engine.adding
        kept = {slot: store.pop(slot) for slot in list(store) if not slot.startswith(("shard", "full"))}
        try:
            yield
        finally:
            store.update(kept)
            engine.adding = adding

    def _discard(self, kind: str) -> None:
        store = self.engine.store
        for slot in [slot for slot in store if slot.startswith(kind)]:
            del store[slot]

    def _checked(self, values: Mapping[str, Any]) -> dict[str, Any]:
        layout = self.engine.layout
        given = {layout.canonical(name): value for name, value in values.items()}
        missing = [n for n, spec in layout.specs.items() if n not in given and not spec.state]
        unknown = [n for n in given if n not in layout.specs]
        wrong = [
            f"{n} is {tuple(np.shape(given[n]))} instead of {spec.shape}"
            for n, spec in layout.specs.items()
            if n in given and tuple(np.shape(given[n])) != spec.shape
        ]
        for what, names in (("missing", missing), ("not in the model", unknown), ("of the wrong shape", wrong)):
            if names:
                more = f" and {len(names) - 5} more" if len(names) > 5 else ""
                raise ConfigError(f"load_parameters: {what}: {', '.join(names[:5])}{more}")
        return given
