"""The model's outputs as a caller sees them: whole, on every rank that works on the same samples."""

from __future__ import annotations

from typing import Any

import numpy as np

from fsdpx.engine.engine import Engine

__all__ = ["cut_output", "whole_outputs"]


def whole_outputs(engine: Engine, outputs: tuple[Any, ...]) -> tuple[Any, ...]:
    """Gathered along the tensor axis where they are cut, then given to all ranks of the pipe. Collective there.

    outputs: of the rank of the pipe that has them, else nothing.
    """
    (batch,) = engine.batch
    found = []
    for i, value in enumerate(engine.stage.outputs):
        whole = _joined(engine, outputs[i]) if outputs else None
        if engine.axes.pipe.size > 1:
            whole = _spread(engine, whole, value, batch)
        found.append(whole)
    return tuple(found)


def cut_output(engine: Engine, dy: Any) -> Any:
    """This rank's part of a gradient of a whole output."""
    if engine.output_dim is None:
        return dy
    dim = engine.output_dim % dy.ndim
    start = sum(_sizes(engine, dy.shape[dim])[: engine.axes.tensor.rank])
    stop = start + _sizes(engine, dy.shape[dim])[engine.axes.tensor.rank]
    return dy[(slice(None),) * dim + (slice(start, stop),)]


def _sizes(engine: Engine, total: int) -> list[int]:
    n = engine.axes.tensor.size
    return [total * (r + 1) // n - total * r // n for r in range(n)]


def _joined(engine: Engine, own: Any) -> Any:
    if engine.output_dim is None:
        return own
    tensor, xp, dim = engine.axes.tensor, engine.xp, engine.output_dim % own.ndim
    everyone = np.zeros(tensor.size, np.int64)
    everyone[tensor.rank] = own.shape[dim]
    tensor.all_gather(everyone[tensor.rank : tensor.rank + 1], everyone, what="outputs (sizes)").wait()
    shapes = [(*own.shape[:dim], int(n), *own.shape[dim + 1 :]) for n in everyone]
    counts = [int(np.prod(shape)) for shape in shapes]
    flat = xp.empty((sum(counts),), dtype=own.dtype)
    first = sum(counts[: tensor.rank])
    flat[first : first + own.size] = xp.ascontiguousarray(own).reshape(-1)
    tensor.all_gather(flat[first : first + own.size], flat, counts, what="outputs").wait()
    starts = [sum(counts[:r]) for r in range(tensor.size)]
    parts = [flat[a : a + n].reshape(shape) for a, n, shape in zip(starts, counts, shapes, strict=True)]
    return xp.concatenate(parts, axis=dim)


def _spread(engine: Engine, whole: Any, value: int, batch: Any) -> Any:
    """To all ranks of the pipe; those that do not have it know its shape from the rank that does."""
    pipe, xp, home = engine.axes.pipe, engine.xp, engine.pipe_home
    shape = np.zeros(8, np.int64)
    if whole is not None:
        shape[: whole.ndim + 1] = (whole.ndim, *whole.shape)
    pipe.broadcast(shape, home, what="outputs (shape)").wait()
    dims = tuple(int(n) for n in shape[1 : shape[0] + 1])
    dtype = engine.message(value, batch).dtype
    flat = xp.empty((int(np.prod(dims)),), dtype=dtype) if whole is None else xp.ascontiguousarray(whole).reshape(-1)
    pipe.broadcast(flat, home, what="outputs").wait()
    return flat.reshape(dims)
