"""The model's outputs as a caller sees them: whole, on every rank that works on the same samples."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fsdpx.engine.engine import Engine
from fsdpx.layout.pages import product
from fsdpx.nn import moves

__all__ = ["cut_output", "whole_outputs"]


def whole_outputs(engine: Engine, outputs: tuple[Any, ...], shapes: Sequence[tuple[int, ...]]) -> tuple[Any, ...]:
    """Put together along the tensor axis where they are cut, then given to all ranks of the pipe. Collective there.

    outputs: of the rank of the pipe that has them, else nothing. shapes: of the whole outputs.
    """
    found = []
    for i, (value, shape) in enumerate(zip(engine.stage.outputs, shapes, strict=True)):
        whole = _joined(engine, outputs[i], shape) if outputs else None
        found.append(_spread(engine, whole, value, shape) if engine.axes.pipe.size > 1 else whole)
    return tuple(found)


def cut_output(engine: Engine, dy: Any) -> Any:
    """This rank's part of a gradient of a whole output."""
    return dy if engine.output_dim is None else moves.cut(engine.xp, engine.axes.tensor, dy, engine.output_dim)


def _joined(engine: Engine, own: Any, shape: tuple[int, ...]) -> Any:
    dim = engine.output_dim
    if dim is None:
        return own
    return moves.join(engine.xp, engine.axes.tensor, own, dim, shape[dim], what="outputs")


def _spread(engine: Engine, whole: Any, value: int, shape: tuple[int, ...]) -> Any:
    """From the rank of the pipe that has it."""
    xp, (batch,) = engine.xp, engine.batch
    assert batch is not None
    dtype = engine.message(value, batch).dtype
    flat = xp.empty((product(shape),), dtype=dtype) if whole is None else xp.ascontiguousarray(whole).reshape(-1)
    engine.axes.pipe.broadcast(flat, engine.pipe_home, what="outputs").wait()
    return flat.reshape(shape)
