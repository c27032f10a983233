"""The largest cell and the mean of each window of a field of any dims."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from fsdpx.core.array.kernels.dispatch import kernel
from fsdpx.ext.fields.kernels.convolution import WindowStrides

__all__ = ["avg_pool", "avg_pool_backward", "max_pool", "max_pool_backward"]


@kernel(bits=False)
def max_pool(xp: Any, x: Any, strides: WindowStrides, sizes: Sequence[int]) -> tuple[Any, Any]:
    """The largest value of each window of x (samples, channels, *cells), NaN before all others, and its place
    in the window, int32: the first of equals."""
    y = xp.full((*x.shape[:2], *sizes), -math.inf, dtype=x.dtype)
    winner = xp.zeros(y.shape, dtype="int32")
    for place, outputs, cells in strides.iterate_places(sizes, x.shape[2:]):
        value, best = x[cells], y[outputs]
        better = (value > best) | (value != value)
        y[outputs] = xp.where(better, value, best)
        winner[outputs] = xp.where(better, strides.number_of_place(place), winner[outputs])
    return y, winner


@kernel(bits=False)
def max_pool_backward(xp: Any, dy: Any, winner: Any, strides: WindowStrides, shape: Sequence[int]) -> Any:
    """dy to the cell that won, in a field of this shape."""
    dx, nothing = xp.zeros(tuple(shape), dtype=dy.dtype), xp.zeros((), dtype=dy.dtype)
    for place, outputs, cells in strides.iterate_places(dy.shape[2:], shape[2:]):
        into = dx[cells]
        into += xp.where(winner[outputs] == strides.number_of_place(place), dy[outputs], nothing)
    return dx


@kernel(bits=False)
def avg_pool(xp: Any, x: Any, strides: WindowStrides, sizes: Sequence[int], divisor: int) -> Any:
    """The sum of each window of x (samples, channels, *cells) over `divisor`."""
    y = xp.zeros((*x.shape[:2], *sizes), dtype=x.dtype)
    for _, outputs, cells in strides.iterate_places(sizes, x.shape[2:]):
        into = y[outputs]
        into += x[cells]
    y /= divisor
    return y


@kernel(bits=False)
def avg_pool_backward(xp: Any, dy: Any, strides: WindowStrides, shape: Sequence[int], divisor: int) -> Any:
    """dy / divisor to all cells of its window, in a field of this shape."""
    dx, share = xp.zeros(tuple(shape), dtype=dy.dtype), dy / divisor
    for _, outputs, cells in strides.iterate_places(dy.shape[2:], shape[2:]):
        into = dx[cells]
        into += share[outputs]
    return dx
