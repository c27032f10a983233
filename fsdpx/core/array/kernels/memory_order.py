"""The memory order of fields. Compiled kernels read and write fields with channels last."""

from __future__ import annotations

from typing import Any

import numpy as np

from fsdpx.core.array.kernels.dispatch import kernel

__all__ = ["channels_last", "put_channels_last"]


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
