"""The model's outputs as a caller sees them: whole, on every rank that works on the same samples."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from typing import Any

from fsdpx.comm.communicator import ReduceOp
from fsdpx.nn import moves
from fsdpx.nn.numeric import is_index
from fsdpx.program import Slot
from fsdpx.state.feed import Microbatch
from fsdpx.state.placement import Placement

__all__ = ["cut_output", "input_gradients", "whole_outputs"]


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
    return dy if dim is None else moves.cut(placement.xp, placement.axes.tensor, dy, dim)


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
    return moves.join(placement.xp, placement.axes.tensor, own, dim, shape[dim], what="outputs")


def _spread(placement: Placement, whole: Any, value: int, shape: tuple[int, ...], batch: Microbatch) -> Any:
    """From the rank of the pipe that has it."""
    xp = placement.xp
    dtype = placement.shapes.of(value, batch).dtype
    flat = xp.empty((prod(shape),), dtype=dtype) if whole is None else xp.ascontiguousarray(whole).reshape(-1)
    placement.axes.pipe.broadcast(flat, placement.pipe_home, what="outputs").wait()
    return flat.reshape(shape)
