"""Order of fields in memory. Compiled kernels read and write fields with channels last."""

from __future__ import annotations

from typing import Any

import numpy as np

from fsdpx.core.array.kernels.dispatch import kernel

__all__ = ["channels_last", "match_memory_order", "put_channels_last"]


@kernel()
def channels_last(xp: Any, x: Any) -> Any:
    """Return a copy of x (samples, channels, *cells) with channels last in memory."""
    return xp.moveaxis(xp.ascontiguousarray(xp.moveaxis(x, 1, -1)), -1, 1)


def put_channels_last(xp: Any, x: Any) -> Any:
    """Return x, or a copy with channels last in memory if x is a NumPy field with channels first.

    Layers that keep their input for backward call this, so that an input of the model is converted only once in a
    step."""
    return channels_last(xp, x) if xp is np and _has_channels_first(x) else x


def match_memory_order(target: Any, y: Any) -> Any:
    """Return `target`. If it is a NumPy field with channels first in memory, and y a field of the same shape with
    channels last, return a copy with channels last instead. Tuples of fields are matched one by one."""
    if isinstance(y, tuple) and isinstance(target, tuple) and len(y) == len(target):
        return tuple(map(match_memory_order, target, y))
    if not (isinstance(y, np.ndarray) and isinstance(target, np.ndarray) and y.shape == target.shape):
        return target
    same = y.ndim < 3 or not _has_channels_first(target) or y.strides[1] != y.itemsize
    return target if same else channels_last(np, target)


def _has_channels_first(x: Any) -> bool:
    """Return whether a float32 or float64 field is stored with channels first in memory."""
    return x.ndim > 2 and x.dtype.char in "fd" and x.shape[1] > 1 and x.strides[1] != x.itemsize
