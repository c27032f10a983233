"""The memory order of fields. Compiled kernels read and write fields with channels last."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from fsdpx.core.array.kernels.dispatch import kernel

__all__ = ["channels_last", "put_channels_first", "put_channels_last"]


@kernel()
def channels_last(xp: Any, x: Any) -> Any:
    """Return a copy of x (samples, channels, *cells) with channels last in memory."""
    return xp.moveaxis(xp.ascontiguousarray(xp.moveaxis(x, 1, -1)), -1, 1)


def put_channels_last(xp: Any, x: Any) -> Any:
    """If x is a NumPy field of float32 or float64 with channels first, return a copy with channels last in memory.
    Otherwise return x itself.

    Layers that keep their input for the backward pass call this function and keep its result. The backward pass then
    does not have to convert the input again."""
    first = xp is np and x.ndim > 2 and x.dtype.char in "fd" and x.shape[1] > 1 and x.strides[1] != x.itemsize
    return channels_last(xp, x) if first else x


def put_channels_first(xp: Any, x: Any) -> Any:
    """Return x (samples, channels, *cells) with its channels first in memory if it is a NumPy array whose channels are
    last. Return other arrays unchanged."""
    if xp is not np or x.ndim < 3 or x.flags.c_contiguous or x.strides[1] != x.itemsize or x.dtype.char not in "fd":
        return x
    if x.shape[1] < 8:  # NumPy is faster for few channels
        return np.ascontiguousarray(x)
    rows = np.moveaxis(x, 1, -1).reshape(x.shape[0], math.prod(x.shape[2:]), x.shape[1])
    return channels_last(xp, rows).transpose(0, 2, 1).reshape(x.shape)  # it moves the cells to the end
