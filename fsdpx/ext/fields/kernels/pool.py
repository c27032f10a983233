"""Max and average pooling of fields of any number of dims, in plain array code."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from fsdpx.core.array.kernels.dispatch import kernel
from fsdpx.ext.fields.kernels.convolution import WindowStrides

__all__ = ["avg_pool", "avg_pool_backward", "max_pool", "max_pool_backward"]


@kernel(bits=False)
def max_pool(xp: Any, x: Any, strides: WindowStrides, sizes: Sequence[int]) -> tuple[Any, Any]:
    """Return the maximum under each window of x (samples, channels, *cells), and the window offset of the maximum as a
    flat int32 index.

    NaN compares greater than any number. Ties go to the first cell."""
    y = xp.full((*x.shape[:2], *sizes), -math.inf, dtype=x.dtype)
    winner = xp.zeros(y.shape, dtype="int32")
    for offset, outputs, cells in strides.iterate_window_offsets(sizes, x.shape[2:]):
        value, best = x[cells], y[outputs]
        better = (value > best) | (value != value)
        y[outputs] = xp.where(better, value, best)
        winner[outputs] = xp.where(better, strides.ravel_window_offset(offset), winner[outputs])
    return y, winner


@kernel(bits=False)
def max_pool_backward(xp: Any, dy: Any, winner: Any, strides: WindowStrides, shape: Sequence[int]) -> Any:
    """Return the gradient with respect to the input, which has shape `shape`. Each element of `dy` is added to the cell
    that was the maximum. `winner` holds the window offset of this cell."""
    dx, nothing = xp.zeros(tuple(shape), dtype=dy.dtype), xp.zeros((), dtype=dy.dtype)
    for offset, outputs, cells in strides.iterate_window_offsets(dy.shape[2:], shape[2:]):
        into = dx[cells]
        into += xp.where(winner[outputs] == strides.ravel_window_offset(offset), dy[outputs], nothing)
    return dx


@kernel(bits=False)
def avg_pool(xp: Any, x: Any, strides: WindowStrides, sizes: Sequence[int], divisor: int) -> Any:
    """Return the sum over each window of x (samples, channels, *cells), divided by `divisor`."""
    y = xp.zeros((*x.shape[:2], *sizes), dtype=x.dtype)
    for _, outputs, cells in strides.iterate_window_offsets(sizes, x.shape[2:]):
        into = y[outputs]
        into += x[cells]
    y /= divisor
    return y


@kernel(bits=False)
def avg_pool_backward(xp: Any, dy: Any, strides: WindowStrides, shape: Sequence[int], divisor: int) -> Any:
    """Return the gradient with respect to the input, which has shape `shape`. Each element of `dy`, divided by
    `divisor`, is added to all cells under its window."""
    dx, share = xp.zeros(tuple(shape), dtype=dy.dtype), dy / divisor
    for _, outputs, cells in strides.iterate_window_offsets(dy.shape[2:], shape[2:]):
        into = dx[cells]
        into += share[outputs]
    return dx
