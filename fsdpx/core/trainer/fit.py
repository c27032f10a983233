"""`fit`: its settings, what fits into memory, and the loop over epochs."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from os import PathLike
from time import perf_counter
from traceback import clear_frames
from typing import Any, Literal
from zlib import crc32

import numpy as np

from fsdpx.core.array.arena import give_back
from fsdpx.core.array.shapes import ShapeArray
from fsdpx.core.array.shapes.array import Meter, metered
from fsdpx.core.base.arguments import demand_arguments
from fsdpx.core.base.config import python_number
from fsdpx.core.base.hooks import STOP_SIGNALS
from fsdpx.core.base.messages import bytes_text, say, table
from fsdpx.core.comm.backend import FakeCommunicator, FakeNode
from fsdpx.core.comm.communicator import Communicator
from fsdpx.core.comm.desync_check import grouped
from fsdpx.core.comm.init import carrier_of, node_of
from fsdpx.core.state.footprint import memory_limits
from fsdpx.core.state.step_inputs import Feed
from fsdpx.core.state.train_state import TrainState
from fsdpx.core.state.tuning import Tuning
from fsdpx.core.trainer.assemble import session_of
from fsdpx.core.trainer.call_runner import TrainerHost, checked_together
from fsdpx.core.trainer.callbacks import EPOCHS, Events, Limits, Log, Metric, Metrics, ProgressBar
from fsdpx.core.trainer.fit_checkpoints import Checkpoints, History, Saves
from fsdpx.core.trainer.recipe import NoOptimizer, Recipe, demand
from fsdpx.core.trainer.report import METRICS, Watched, routes
from fsdpx.core.trainer.session import Session
from fsdpx.data.dataset import digest_of_first
from fsdpx.data.loader import DataLoader
from fsdpx.errors import ConfigError, DataError, FsdpxError, NumericsError, OutOfMemory, warn
from fsdpx.ext.watch.preempt import Preemption

__all__ = ["ENOUGH", "cheaper", "fit", "made", "passing", "remedies"]

STRATEGIES = ("ddp", "zero1", "zero2", "fsdp")
"""From most memory to least."""

NOT_KNOWN = -(2**62)
"""Below all numbers that ranks compare."""

ENOUGH = 0.99
"""A choice that leaves more than this of the bytes is none."""


def made(recipe: Recipe, world: Communicator, tuning: Tuning | None = None, **options: Any) -> Session:
    """The `session_of` a recipe, which says what to do when memory is too small, then and later."""
    try:
        session = session_of(recipe, world, tuning, **options)
    except MemoryError as error:
        raise _short(recipe, world, None, error, None) from error

    session.short = partial(_short, recipe, world, session)
    return session


def remedies(now: Mapping[str, Any], count: Callable[[dict[str, Any]], int], limit: int | None, rows: int = 0) -> str:
    """Choices that take less memory, each with those before that helped, up to the first that fits: a table.

    now: those of the plan, of which `strategy`, `recompute`, `microbatches` and `precision` are looked at. count: the
    bytes of the plan with these choices instead. limit: what fits. rows: samples of a rank, 0 if they are not known."""
    changed, least = dict[str, Any](), count({})
    lines: list[tuple[str, ...]] = [("what would take less", "bytes", "")]
    for name, value in cheaper(now, rows):
        try:
            nbytes = count({**changed, name: value})
        except FsdpxError:  # not a choice for this model and these ranks
            continue
        if nbytes < ENOUGH * least:
            changed, least = {**changed, name: value}, nbytes
            fits = limit is not None and nbytes <= limit
            words = ", ".join(f"{name}={value!r}" for name, value in changed.items())
            lines.append((words, bytes_text(nbytes), "fits" * fits))
            if fits:
                return table(lines)
    more = "take more ranks, a smaller model or batch, or offload=fsdpx.Offload(...)"
    found = [table(lines)] if len(lines) > 1 else []
    return "\n".join([*found, f"none of the choices that fsdpx knows fits: {more}" if limit is not None else more])


def cheaper(now: Mapping[str, Any], rows: int) -> Iterator[tuple[str, Any]]:
    """Options that may take less memory than those of now, of which several may have one name."""
    strategy = now.get("strategy")
    strategies = STRATEGIES if strategy in STRATEGIES else ("hybrid", "fsdp") if strategy == "hybrid" else (strategy,)
    yield from (("strategy", name) for name in strategies[strategies.index(strategy) + 1 :])
    if now.get("recompute") is None:
        yield "recompute", "all"
    pieces = (now.get("microbatches") or 1) * 2
    while pieces <= rows:
        yield "microbatches", pieces
        pieces *= 2
    if now.get("precision") in (None, "float32"):
        yield from (("precision", name) for name in ("bf16", "bf16-true"))


def passing(state: TrainState, meter: Meter) -> int:
    """Most bytes of arrays without data that were alive beside those of the arena, which stay."""
    slab = [] if state.arena.slab is None else [state.arena.slab]
    buffers = (*state.arena.kept.values(), *state.ledger.arrays.values(), *slab)
    return meter.peak - sum({id(buffer.root): buffer.root.nbytes for buffer in buffers}.values())


def _short(
    recipe: Recipe, world: Communicator, session: Session | None, error: MemoryError, feed: Feed | None
) -> OutOfMemory:
    """The error that says all that. session: if there is one already. feed: of the step in which it happened."""
    clear_frames(error.__traceback__)  # they hold what the plan has got so far
    give_back()
    node, held = node_of(world), 0 if session is None else sum(session.state.nbytes().values())
    here = len(node.machine) if node is not None else world.size if carrier_of(world) is None else 1
    there, most = memory_limits(held, here)
    notes = "".join(f"\n{note}" for note in getattr(error, "__notes__", ()))
    head = f"rank {world.rank} of {world.size} has too little memory: {error}{notes}"
    fake: Communicator = FakeCommunicator(world.rank, world.size)
    if node is not None:
        hosts = {rank: number for number, ranks in enumerate(node.machines) for rank in ranks}
        fake = FakeNode(world.rank, [hosts[rank] for rank in range(world.size)])
    try:
        text = _counted(recipe, fake, feed, most)
    except Exception as problem:  # beside what has happened it is a detail
        text = f"what would fit could not be counted: {problem!r}"
    return OutOfMemory(f"{head}\n\nmemory that there is: {there}\n\n{text}")


def _counted(recipe: Recipe, fake: Communicator, feed: Feed | None, most: int | None) -> str:
    """The plan by kind, and remedies."""
    bare, batch = recipe.without_data(), _shapes(feed)
    plan = _planned(bare, fake, batch)
    lines = [("plan of this rank", "bytes"), *((kind, bytes_text(n)) for kind, n in sorted(plan.items()))]
    lines += [("in all", bytes_text(sum(plan.values())))]

    def count(changes: dict[str, Any]) -> int:
        return sum(_planned(bare.changed(changes), fake, batch).values())

    now = {**vars(bare.training), **vars(bare.distribution), **vars(bare.machinery)}
    return f"{table(lines)}\n\n{remedies(now, count, most, 0 if batch is None else len(batch[1]))}"


def _planned(recipe: Recipe, fake: Communicator, batch: tuple[Any, Any] | None) -> dict[str, int]:
    """Bytes by kind: of a step on a batch, else of what a rank holds between and during steps of any batch."""
    with metered() as meter:
        session = session_of(recipe, fake, initial=False)
        state = session.state
        if batch is not None:
            feed = session.feed(*batch, "step", training=True)
            meter.peak = meter.live  # checking the batch made shapes, too
            session.run("step", feed)
            parts = sum(row.nbytes for row in state.ledger if row.passing)  # lie where activations were
            return {**state.nbytes(), "activations": max(passing(state, meter) - parts, 0)}
        pieces = session.place.accumulation.microbatches(session.microbatches)
        kind = "predict" if isinstance(session.place.optimizer, NoOptimizer) else "step"
        state.arena.lend(session.engine.prepare(session.request(kind, pieces)).workspace.plan)
        return state.nbytes()


def _shapes(feed: Feed | None) -> tuple[Any, Any] | None:
    """The batch of a step, without its data; None if it is not known."""
    found = [] if feed is None else [batch for batch in feed.batch if batch is not None]
    if not found or found[0].target is None:
        return None
    rows, one = sum(len(batch.target) for batch in found), found[0]
    *inputs, target = (ShapeArray((rows, *a.shape[1:]), a.dtype) for a in (*one.inputs, one.target))
    return tuple(inputs) if len(inputs) > 1 else inputs[0], target


_END = object()  # a loader may give None, which is an error and no end


NUMBERS = ("epochs", "steps", "every", "patience")
KINDS_ALONE = (
    "validation", "metrics", "restore_best", "callbacks", "log", "tensorboard", "progress", "count", "unit",
)  # fmt: skip
"""Arguments of `fit` of which nothing but the kind is checked."""


@partial(checked_together, hints=False)
def fit(
    trainer: Any,
    loader: Iterable[Any],
    *,
    epochs: int | None = 1,
    steps: int | None = None,
    validation: Iterable[Any] | None = None,
    metrics: Mapping[str, Metric] | None = None,
    every: int = 50,
    patience: int | None = None,
    restore_best: bool | None = None,
    stop: Callable[[History], bool] | None = None,
    callbacks: Callable[..., Any] | Sequence[Any] = (),
    log: str | PathLike[str] | None = None,
    tensorboard: bool | None = None,
    progress: bool = True,
    count: Callable[[Any], int] | None = None,
    unit: str = "samples",
    checkpoints: Checkpoints | str | PathLike[str] | None = None,
    preempt: Preemption | Literal[False] | None = None,
) -> History:
    """Train on (x, y) batches. Collective.

    Parameters
    ----------
    loader : batches of this data rank, as `DataLoader(comm=trainer.data)` gives; if it has `set_epoch`, that is called
        for each epoch
    epochs, steps : whichever ends first; epochs=None: steps alone
    validation : batches whose mean loss is taken every `every` steps and at the end
    metrics : by name, functions of a validation batch: (output, target), NumPy arrays of this rank's samples, to an
        array with a value per sample, or to (sum, count); their mean is over the samples of all ranks. A loss is one,
        too, as `nn.VRMSE()`
    every : steps between two validations
    patience : end after this many validations without a new best
    restore_best : end with the weights of the best validation (default: with patience)
    stop : asked after each validation, or `every` steps; if it is true on any rank, all ranks end together
    callbacks : functions (trainer, history), called after each step, or objects with some of the methods
        on_train_begin, on_step_end, on_validation_end, on_save, on_epoch_end, on_train_end; called on all ranks; none
        where a finished run is started again
    log : folder for metrics.csv, metrics.jsonl, log.txt (what is said here) and TensorBoard's events
    tensorboard : write these events, or an error if tensorboardX is missing; False: none (default: if it is there)
    progress : show on rank 0 how it goes: a bar on a terminal, else a line every few seconds
    count : what a batch counts as in rates (default: its samples), times the data ranks
    unit : the word for what is counted
    checkpoints : `fsdpx.Checkpoints(...)` or its folder: where to save; started again, an interrupted run goes on where
        it was, and a finished one stays as it is
    preempt : `fsdpx.Preemption(...)`: save and end when a signal asks; made where there are checkpoints, unless False
    """
    host = trainer.host
    limits, saved = _check_arguments(host, locals())
    asked = preempt or None
    if preempt is None and checkpoints is not None:
        asked = Preemption(signals=(*STOP_SIGNALS, "INT"))  # Ctrl-C loses nothing either
    _demand_shares(host, loader, validation)
    history = History()
    best = patience is not None if restore_best is None else restore_best
    saves = Saves(trainer, loader, saved, history, best)
    listeners = [
        *([ProgressBar(unit, _total(loader, limits), limits.epochs, history)] if progress else []),
        *([] if log is None else [Log(log, (*(metrics or ()), *(METRICS if routes(host.place) else ())), tensorboard)]),
    ]
    with host.share_errors("fit"):
        events = Events(trainer, history, listeners, callbacks)
    loop = _Loop(
        trainer, loader, limits, history, saves,
        _Validation(trainer, validation, loader, metrics or {}, history, Watched()),
        events, count or _samples, asked,
    )  # fmt: skip
    with asked or nullcontext():
        return loop.run()


def _check_arguments(host: TrainerHost, given: Mapping[str, Any]) -> tuple[Limits, Checkpoints | None]:
    """When a run ends and where it saves, from the arguments of `fit`; ConfigError, the same on all ranks, for those
    that cannot be, or that differ between ranks. Collective."""
    with host.share_errors("fit"):
        demand_arguments(fit, (), {name: given[name] for name in KINDS_ALONE}, "fit")
        demand("fit", host.session.loss, host.place.optimizer)
        epochs, steps, every, patience = (python_number(given[name]) for name in NUMBERS)
        limits = Limits(epochs, steps, every, patience, given["stop"])
        limits.demand(given["validation"], given["metrics"], given["restore_best"])
        loader, checkpoints = given["loader"], given["checkpoints"]
        if not isinstance(loader, Iterable) or getattr(loader, "shape", None) == ():
            raise ConfigError(f"fit: a loader of (x, y) batches is needed, such as data.DataLoader, not {loader!r}")
        saved, preempt = None if checkpoints is None else Checkpoints.of(checkpoints), given["preempt"]
        if not (preempt is None or preempt is False or isinstance(preempt, Preemption)):
            raise ConfigError(f"fit(preempt={preempt!r}): fsdpx.Preemption(...), or False, is needed")
    said = {name: "None" if given[name] is None else "given" for name in ("validation", "log", "checkpoints")}
    numbers = {name: getattr(limits, name) for name in NUMBERS}
    host.agree_on_arguments("fit", said | numbers | {"metrics": sorted(given["metrics"] or ())})
    return limits, saved


@dataclass(frozen=True)
class _Loop:
    trainer: Any
    loader: Any
    limits: Limits
    history: History
    saves: Saves
    validation: _Validation
    events: Events
    count: Callable[[Any], int]
    preempt: Preemption | None

    def run(self) -> History:
        history, saves, limits = self.history, self.saves, self.limits
        ended = limits.over(history, getattr(self.loader, "epoch", 0) - saves.first, saves.finished)
        if ended:
            at = history.checkpoint
            say(self.trainer.host, f"finished: {limits.words(ended)} at {at}; nothing is trained or saved")
        else:
            with self.events:  # from here on, messages are in the log as well
                saves.say_begun()
                ended = self._epochs()
                self.trainer.host.finish()
                self.trainer.inspect.save_trace()
                if saves.last(ended):
                    self.events.tell("on_save")
        history.reason = limits.words(ended)
        saves.restore()
        return history

    def _epochs(self) -> str:
        """Why it ended."""
        epochs, first = self.limits.epochs, getattr(self.loader, "epoch", 0)
        epoch = first
        while epochs is None or epoch < self.saves.first + epochs:
            if hasattr(self.loader, "set_epoch"):
                self.loader.set_epoch(epoch)
            before = len(self.history.losses)
            for x, y in self._batches():
                self._step(x, y)
                if ended := self._after_step():
                    return ended
            if len(self.history.losses) == before:
                once = "; a generator or iterator serves one epoch only" if isinstance(self.loader, Iterator) else ""
                raise DataError(f"fit: the loader gives no batch in epoch {self.history.epochs + 1}{once}")
            self.history.epochs += 1
            self.events.tell("on_epoch_end")
            epoch += 1
        if self.validation.run():
            self.events.tell("on_validation_end")
        return EPOCHS

    def _batches(self) -> Iterator[Any]:
        """Batches until all ranks together have none; DataError on all of them if only some have one."""
        batches = iter(self.loader)
        while True:
            begin = perf_counter()
            batch = next(batches, _END)
            if batch is _END:
                self.trainer.host.no_batch()
            self.history.seconds += perf_counter() - begin
            if batch is _END:
                return
            with self.trainer.host.share_errors("step"):
                pair = _pair("", batch)
            yield pair

    def _step(self, x: Any, y: Any) -> None:
        begin = perf_counter()
        loss = self.trainer.step(x, y)
        self.history.seconds += perf_counter() - begin
        if not math.isfinite(loss):
            raise NumericsError(
                f"the loss is {loss} at step {self.trainer.steps}: distribute(..., check_finite=True) names its origin"
            )
        self.history.losses.append(loss)
        self.history.seen += self.count(x) * self.trainer.host.parts

    def _after_step(self) -> str:
        """Why it ends here, if it does."""
        history, ended, better = self.history, "", False
        self.events.tell("on_step_end")
        if self.limits.validates(history):
            if self.validation.run():
                better = history.best_step == history.steps
                self.events.tell("on_validation_end")
            ended = self.limits.reached(self.trainer.host, history)
        saved = not ended and self.saves.step(better)
        if saved:
            self.events.tell("on_save")
        if not ended and self.preempt is not None and (saved or self.trainer.host.met):
            self.preempt.check(self.trainer, also=self.saves.last)
        return ended


@dataclass(frozen=True)
class _Validation:
    trainer: Any
    batches: Any
    training: Any
    metrics: Mapping[str, Metric]
    history: History
    watched: Watched

    def run(self) -> bool:
        """The mean of the batches' mean losses, each weighed by its weight, and metrics, those of experts too; False if
        there is nothing to do."""
        history, metrics = self.history, Metrics(self.metrics, self.trainer.host.place)
        if self.batches is None or (history.validation and history.validation[-1][0] == history.steps):
            return False
        losses, weights = [], []
        same = self.batches is self.training and isinstance(self.batches, DataLoader)
        batches = self.batches.aside() if same else self.batches
        for batch in batches:
            with self.trainer.host.share_errors("evaluate"):
                x, y = _pair("validation ", batch)
            losses.append(self.trainer.evaluate(x, y))
            weights.append(self.trainer.inspect.weight)
            if self.metrics:
                metrics.add(self.trainer.predict(x), y)
        if not losses:
            raise ConfigError("fit: the validation loader gives no batch")
        value = math.fsum(a * w for a, w in zip(losses, weights, strict=True)) / math.fsum(weights)
        history.validation.append((history.steps, value))
        found = metrics.mean(self.trainer.host.data) if self.metrics else {}
        if routes(self.trainer.host.place):
            found |= self.watched.since(self.trainer.inspect.routing())
        for name, mean in found.items():
            history.metrics.setdefault(name, []).append((history.steps, mean))
        return True


def _pair(which: str, batch: Any) -> Any:
    """A batch, if it is (x, y)."""
    if not isinstance(batch, tuple | list) or len(batch) != 2:
        several = isinstance(batch, tuple | list)
        what = f"{len(batch)} values" if several else "None" if batch is None else type(batch).__name__
        raise DataError(f"fit: the {which}loader gives a batch that is {what} and not (x, y)")
    return batch


def _demand_shares(host: TrainerHost, *loaders: Any) -> None:
    """An error on all ranks if a DataLoader cuts batches for other ranks than the trainer's, or if datasets that are
    cut differ in length; a warning if they have the same length and begin with other samples. Collective."""
    place = host.data.rank, host.data.size
    compared = host.world.size > 1 and host.place.field is None  # parts of a field differ
    samplers = [loader.sampler for loader in loaders if isinstance(loader, DataLoader)]
    wrong = [s.size for s in samplers if (s.rank, s.size) != place and not s.presharded]
    rows = [1 + host.rank if wrong else 0, max(wrong, default=0)]
    for loader in loaders:
        rows += _span(_amount(loader, place[1])) + _span(_digest(loader) if compared else None)
        rows += _span(_order(loader, place[1]))
    rank, size, *spans = host.most(np.array(rows, np.int64), "fit").tolist()
    if rank:
        raise ConfigError(
            f"fit: the DataLoader of rank {rank - 1} shares each batch among {size} ranks, which are not the "
            f"{place[1]} data ranks of the trainer: DataLoader(..., comm=trainer.data)"
        )
    for sampler in samplers:
        sampler.uneven = sampler.presharded and place[1] > 1
    for i, loader in enumerate(loaders):
        high, low, last, first, one, other = spans[6 * i : 6 * i + 6]
        if high + low > 0:
            _refuse_lengths(host, loader)
        if one + other > 0:
            raise ConfigError(
                "fit: the DataLoaders of the ranks take samples in different orders: batch_size, shuffle, seed, "
                "drop_last and chunks must be the same on all ranks"
            )
        if last + first > 0:
            _warn_of_first(host, loader)


def _span(value: int | None) -> list[int]:
    """What `most` finds the largest value of all ranks from, and the smallest, negated. None: not known here."""
    return [NOT_KNOWN, NOT_KNOWN] if value is None else [value, -value]


def _amount(loader: Any, size: int) -> int | None:
    """Twice what must be the same on all ranks: the samples of a dataset that is cut, or the batches of one that each
    rank has cut, and then 1 more."""
    if not isinstance(loader, DataLoader):
        return None
    return 2 * len(loader) + 1 if loader.sampler.presharded and size > 1 else 2 * len(loader.dataset)


def _digest(loader: Any) -> int | None:
    """The digest of the first sample of a dataset that is cut, if it is known."""
    return digest_of_first(loader.dataset) if isinstance(loader, DataLoader) and not loader.sampler.presharded else None


def _order(loader: Any, size: int) -> int | None:
    """What tells orders of samples apart that must be the same on all ranks."""
    if not isinstance(loader, DataLoader) or (loader.sampler.presharded and size > 1):
        return None
    s = loader.sampler
    return crc32(repr((s.batch, s.shuffle, s.seed, s.drop_last, s.chunks)).encode())


def _refuse_lengths(host: TrainerHost, loader: Any) -> None:
    """DataError that says what each rank has. Collective."""
    everyone = np.zeros(host.world.size, np.int64)
    everyone[host.rank] = _amount(loader, host.data.size) or 0
    found = host.most(everyone, "fit").tolist()
    words = {r: f"{n // 2} {'batches of its own' if n % 2 else 'samples'}" for r, n in enumerate(found) if n}
    raise DataError(
        f"fit: the datasets of the ranks differ in length: {grouped(words)}. DataLoader(comm=trainer.data) takes the "
        "whole dataset on every rank and cuts it; where each rank has its own part already, DataLoader(dataset, "
        "samples of this rank, rank=0, size=1) takes that as it is, and must give as many batches on every rank"
    )


def _warn_of_first(host: TrainerHost, loader: Any) -> None:
    """Warn on rank 0, unless a sample differs each time that it is read. Collective."""
    changes = _digest(loader) != _digest(loader)
    if not host.most(np.array([int(changes)]), "fit")[0] and host.rank == 0:
        warn(
            f"fsdpx: the datasets of the ranks have {len(loader.dataset)} samples each and differ in the first one, "
            "and each rank trains on its share of its own dataset alone: give all ranks the same dataset, or, where "
            "each has its own part already, say DataLoader(dataset, samples of this rank, rank=0, size=1)",
        )


def _total(loader: Any, limits: Limits) -> int | None:
    """Steps since the very start, if that is known before."""
    found = [] if limits.steps is None else [limits.steps]
    if limits.epochs is not None and hasattr(loader, "__len__"):
        found.append(limits.epochs * len(loader))
    return min(found, default=None)


def _samples(x: Any) -> int:
    return len(next(iter(x.values())) if isinstance(x, dict) else x[0] if isinstance(x, tuple) else x)
