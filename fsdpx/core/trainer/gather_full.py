"""Whole values on every rank: outputs of a model, and parameters."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from math import prod
from typing import Any

import numpy as np

from fsdpx.core.array.kernels.half import narrowed, store
from fsdpx.core.array.namespace import to_host
from fsdpx.core.comm.communicator import ReduceOp
from fsdpx.core.program import Slot
from fsdpx.core.state.flat_parameters import Page
from fsdpx.core.state.placement import Placement
from fsdpx.core.state.step_inputs import Microbatch
from fsdpx.core.state.train_state import TrainState
from fsdpx.errors import ConfigError
from fsdpx.nn import collectives
from fsdpx.nn.gradient_accumulation import is_index
from fsdpx.optim.optimizer import AVERAGE

__all__ = [
    "cut_output", "input_gradients", "put_averages", "remember", "whole_gradients",
    "whole_outputs", "whole_parameters", "whole_state",
]  # fmt: skip


def whole_outputs(
    placement: Placement, outputs: tuple[Any, ...], shapes: Sequence[tuple[int, ...]], batch: Microbatch
) -> tuple[Any, ...]:
    """Put together along the tensor axis where they are cut, then given to all ranks of the pipe. Collective there.

    outputs: of the rank of the pipe that has them, else nothing. shapes: of the whole outputs."""
    found = []
    for i, (value, shape) in enumerate(zip(placement.stage.outputs, shapes, strict=True)):
        whole = _joined(placement, outputs[i], shape) if outputs else None
        found.append(_spread(placement, whole, value, shape, batch) if placement.axes.pipe.size > 1 else whole)
    return tuple(found)


def cut_output(placement: Placement, dy: Any) -> Any:
    """This rank's part of a gradient of a whole output."""
    dim = placement.output_dim
    return dy if dim is None else collectives.cut(placement.xp, placement.axes.tensor, dy, dim)


def input_gradients(placement: Placement, found: Mapping[Slot, Any], batch: Microbatch, scale: float) -> list[Any]:
    """One for each input of the model, on every rank that works on the same samples; None for whole numbers.

    found: the gradients that this rank's stages give for the inputs that they read, as slots. Collective along the
    pipe, whose ranks add these up."""
    made: list[Any] = []
    for v, array in zip(placement.stage.inputs, batch.inputs, strict=True):
        if is_index(array):
            made.append(None)
            continue
        dx = found.get(Slot("dact", v, 0))
        dx = placement.xp.zeros(array.shape, dtype=array.dtype) if dx is None else dx
        if placement.axes.pipe.size > 1:
            flat = placement.xp.ascontiguousarray(dx).reshape(-1).copy()
            placement.axes.pipe.all_reduce(flat, ReduceOp.SUM, what="gradient of the inputs").wait()
            dx = flat.reshape(array.shape)
        made.append(dx if scale == 1.0 else dx / scale)
    return made


def _joined(placement: Placement, own: Any, shape: tuple[int, ...]) -> Any:
    dim = placement.output_dim
    if dim is None:
        return own
    return collectives.join(placement.xp, placement.axes.tensor, own, dim, shape[dim], what="outputs")


def _spread(placement: Placement, whole: Any, value: int, shape: tuple[int, ...], batch: Microbatch) -> Any:
    """From the rank of the pipe that has it."""
    xp = placement.xp
    dtype = placement.shapes.of(value, batch).dtype
    flat = xp.empty((prod(shape),), dtype=dtype) if whole is None else xp.ascontiguousarray(whole).reshape(-1)
    placement.axes.pipe.broadcast(flat, placement.layout.spread.home[-1], what="outputs").wait()
    return flat.reshape(shape)


BLOCK = 1 << 16
"""Elements of an average that are made at once."""


def whole_parameters(state: TrainState, names: Collection[str] | None = None) -> dict[str, np.ndarray]:
    """Canonical name -> full array, on every rank's host. names: pages without any of them are left out. Collective."""

    def flat(page: Page) -> Any:
        return _over_shards(state, page, state.ledger.array("master", page.index))

    return _everywhere(state, flat, trained=False, names=names)


def whole_gradients(state: TrainState) -> dict[str, np.ndarray]:
    """The same of the gradients in the store, not yet divided by the weight. Collective."""

    def flat(page: Page) -> Any:
        p, total = page.index, state.placement.xp.zeros((page.size,), dtype=state.placement.formats.gradients)
        if (part := state.store.get(Slot("part", p))) is not None:
            total = _over_shards(state, page, part)
            state.placement.axes.replica.all_reduce(total, ReduceOp.SUM, what="gradients").wait()
        if (gradient := state.store.get(Slot("grad", p))) is not None:
            local = gradient.at(0).copy()
            state.placement.axes.data.all_reduce(local, ReduceOp.SUM, what="gradients").wait()
            total = total + local
        if page.partial:
            state.placement.axes.tensor.all_reduce(total, ReduceOp.SUM, what="gradients").wait()
        return total

    return _everywhere(state, flat, trained=True)


def whole_state(state: TrainState) -> dict[str, np.ndarray]:
    """Running statistics, from the rank of the pipe whose layer moves them. Collective."""
    found = {}
    for name in state.placement.layout.state:
        flat = np.array(to_host(state.statistic(name).reshape(-1)))
        state.placement.axes.pipe.broadcast(flat, state.placement.statistics_home[name], what=f"state {name}").wait()
        found[name] = flat.reshape(state.placement.layout.specs[name].shape)
    return found


def remember(state: TrainState) -> Callable[[], None]:
    """Copies of what this rank has of parameters and statistics, as a function that puts them back: on all ranks, once
    all of them have come to it, since others may still read what they share."""
    state.land()
    kinds = ("master", "outer", "statistic")
    copies = [(array, array.copy()) for row, array in state.ledger.saved() if row.key.kind in kinds]

    def restore() -> None:
        for array, copy in copies:
            array[...] = copy
        state.replaced()

    return restore


def put_averages(state: TrainState) -> Callable[[], None]:
    """Put the averages that the optimiser keeps where the parameters are, as a function that puts these back: both on
    all ranks, once all of them have come to it."""
    place = state.placement
    if AVERAGE not in place.kept:
        raise ConfigError("with_='average': no average is kept; say distribute(..., average=fsdpx.EMA(0.999))")
    if place.pace.owner == "replica":
        raise ConfigError("with_='average': in local training each replica has another one; leave with_ out")
    put_back = remember(state)
    for p in place.stage.trained:
        master, kept = state.ledger.array("master", p), state.ledger.array("average", p, AVERAGE)
        for at in (slice(start, start + BLOCK) for start in range(0, master.size, BLOCK)):
            x, difference = (narrowed(place.xp, array[at], place.formats.gradients) for array in (master, kept))
            x += difference
            store(place.xp, x, master[at])
    state.replaced()
    return put_back


def _everywhere(
    state: TrainState, flat: Callable[[Page], Any], trained: bool, names: Collection[str] | None = None
) -> dict[str, np.ndarray]:
    """flat: this rank's line of the tensor axis' elements of a page, for pages of this rank of the pipe."""
    found: dict[str, np.ndarray] = {}
    dtype = state.placement.formats.gradients if trained else state.placement.formats.master
    homes = {p: stage.rank for stage in reversed(state.placement.stages) for p in stage.pages}
    for page in state.placement.layout.pages:
        if trained and not page.trainable:
            continue
        if names is not None and not any(f.source in names for f in page.fields):
            continue
        parts = page.named(to_host(flat(page))) if page.index in state.placement.pages else None
        for f in page.fields:
            full = _over_tensor(state, f.source, None if parts is None else parts[f.name], dtype)
            state.placement.axes.pipe.broadcast(full.reshape(-1), homes[page.index], what=f"parameter {f.name}").wait()
            found[f.source] = full + found[f.source] if trained and f.source in found else full
    return found


def _over_shards(state: TrainState, page: Page, shard: Any) -> Any:
    place, here = state.placement, state.placement.pages[page.index]
    full = place.xp.empty((page.size,), dtype=shard.dtype)
    own = full[here.mine.start : here.mine.stop]
    own[...] = shard[: own.size]
    place.axes.shard.all_gather(own, full, here.counts, what=f"page {place.name(page.index)}").wait()
    return full


def _over_tensor(state: TrainState, name: str, local: np.ndarray | None, dtype: np.dtype) -> np.ndarray:
    """The full array from what the ranks of the tensor axis hold; on other stages room for it."""
    spec, tensor = state.placement.layout.specs[name], state.placement.axes.tensor
    if local is None:
        return np.empty(spec.shape, dtype)
    if spec.cut is None or tensor.size == 1:
        return np.array(local)
    shapes = [spec.cut.local(spec.shape, rank, tensor.size) for rank in range(tensor.size)]
    counts = [prod(shape) for shape in shapes]
    every = np.empty(sum(counts), local.dtype)
    first = sum(counts[: tensor.rank])
    every[first : first + local.size] = local.reshape(-1)
    tensor.all_gather(every[first : first + local.size], every, counts, what=f"parameter {name}").wait()
    full = np.empty(spec.shape, local.dtype)
    for rank, shape in enumerate(shapes):
        start = sum(counts[:rank])
        spec.cut.put(full, every[start : start + counts[rank]].reshape(shape), rank, tensor.size)
    return full
