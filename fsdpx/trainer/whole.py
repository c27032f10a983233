"""Whole parameters and gradients from the pieces that ranks hold, and back."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from fsdpx.array.namespace import to_host
from fsdpx.comm.communicator import ReduceOp
from fsdpx.engine.engine import Engine
from fsdpx.layout.pages import Page, product
from fsdpx.state.pages import each_piece

__all__ = ["put", "whole_gradients", "whole_parameters", "whole_state"]


def whole_parameters(engine: Engine) -> dict[str, np.ndarray]:
    """Canonical name -> full array, on every rank's host. Collective."""

    def flat(page: Page) -> Any:
        return _over_shards(engine, page, engine.pages[page.index].master)

    return _everywhere(engine, flat, trained=False)


def whole_gradients(engine: Engine) -> dict[str, np.ndarray]:
    """The same of the gradients in the store, not yet divided by the weight. Collective."""

    def flat(page: Page) -> Any:
        p, total = page.index, 0.0
        if f"part{p}" in engine.store:
            total = _over_shards(engine, page, engine.store[f"part{p}"])
            engine.axes.replica.all_reduce(total, ReduceOp.SUM, what="gradients").wait()
        if f"grad{p}" in engine.store:
            local = engine.store[f"grad{p}"].at(0).copy()
            engine.axes.data.all_reduce(local, ReduceOp.SUM, what="gradients").wait()
            total = total + local
        if page.partial:
            engine.axes.tensor.all_reduce(total, ReduceOp.SUM, what="gradients").wait()
        return total

    return _everywhere(engine, flat, trained=True)


def whole_state(engine: Engine) -> dict[str, np.ndarray]:
    """Running statistics, from the rank of the pipe whose layer moves them. Collective."""
    found = {}
    for name, array in engine.state.items():
        flat = np.array(to_host(array).reshape(-1))
        engine.axes.pipe.broadcast(flat, engine.state_home[name], what=f"state {name}").wait()
        found[name] = flat.reshape(engine.layout.specs[name].shape)
    return found


def put(engine: Engine, values: Mapping[str, Any]) -> None:
    """Set this rank's shards from full arrays by canonical name."""
    layout, spread = engine.layout, engine.layout.spread

    def piece(name: str, start: int, stop: int) -> Any:
        spec, full = layout.specs[name], np.asarray(values[name])
        local = full if spec.cut is None else spec.cut.take(full, spread.rank, spread.width)
        return np.ascontiguousarray(local).reshape(-1)[start:stop]

    for state in engine.pages.values():
        each_piece(state, piece, engine.xp)


def _everywhere(engine: Engine, flat: Callable[[Page], Any], trained: bool) -> dict[str, np.ndarray]:
    """flat: this rank's line of the tensor axis' elements of a page, for pages of this rank of the pipe."""
    found: dict[str, np.ndarray] = {}
    homes = {p: stage.rank for stage in reversed(engine.stages) for p in stage.pages}
    for page in engine.layout.pages:
        if trained and not page.trainable:
            continue
        parts = _named(page, to_host(flat(page))) if page.index in engine.pages else None
        for f in page.fields:
            full = _over_tensor(engine, f.source, None if parts is None else parts[f.name])
            engine.axes.pipe.broadcast(full.reshape(-1), homes[page.index], what=f"parameter {f.name}").wait()
            found[f.source] = full + found[f.source] if trained and f.source in found else full
    return found


def _over_shards(engine: Engine, page: Page, shard: Any) -> Any:
    state = engine.pages[page.index]
    full = engine.xp.empty((page.size,), dtype=shard.dtype)
    own = full[state.mine.start : state.mine.stop]
    own[...] = shard[: own.size]
    engine.axes.shard.all_gather(own, full, state.counts, what=f"page {engine.name(page.index)}").wait()
    return full


def _over_tensor(engine: Engine, name: str, local: np.ndarray | None) -> np.ndarray:
    """The full array from what the ranks of the tensor axis hold; on other stages room for it."""
    spec, tensor = engine.layout.specs[name], engine.axes.tensor
    if local is None:
        return np.empty(spec.shape, engine.dtype)
    if spec.cut is None or tensor.size == 1:
        return np.array(local)
    shapes = [spec.cut.local(spec.shape, rank, tensor.size) for rank in range(tensor.size)]
    counts = [product(shape) for shape in shapes]
    every = np.empty(sum(counts), local.dtype)
    first = sum(counts[: tensor.rank])
    every[first : first + local.size] = local.reshape(-1)
    tensor.all_gather(every[first : first + local.size], every, counts, what=f"parameter {name}").wait()
    full = np.empty(spec.shape, local.dtype)
    for rank, shape in enumerate(shapes):
        start = sum(counts[:rank])
        spec.cut.put(full, every[start : start + counts[rank]].reshape(shape), rank, tensor.size)
    return full


def _named(page: Page, flat: np.ndarray) -> dict[str, np.ndarray]:
    return {f.name: flat[f.offset : f.offset + f.size].reshape(f.shape) for f in page.fields}
