"""Small arrays in the layout that loops are compiled for: Numba compiles again for read-only or unaligned arrays."""

from typing import Any

import numpy as np

__all__ = ["alike", "in_memory", "owned"]


def owned(x: np.ndarray, dtype: Any = None) -> np.ndarray:
    """x itself where it is contiguous, aligned, writable and of `dtype` (its own if None), else a copy."""
    flags = x.flags
    if flags.c_contiguous and flags.aligned and flags.writeable and (dtype is None or x.dtype == dtype):
        return x
    return np.array(x, dtype, order="C")


def in_memory(*arrays: np.ndarray) -> list[np.ndarray] | None:
    """Arrays of one shape as 1-D views in the order in which they lie in memory, if that is one order without gaps."""
    if all(a.flags.c_contiguous for a in arrays):
        return [a.reshape(-1) for a in arrays]
    strides = arrays[0].strides
    order = sorted(range(arrays[0].ndim), key=strides.__getitem__, reverse=True)
    turned = [a.transpose(order) for a in arrays]
    if any(a.strides != strides for a in arrays) or not turned[0].flags.c_contiguous:
        return None
    return [a.reshape(-1) for a in turned]


def alike(*arrays: np.ndarray) -> tuple[tuple[np.ndarray, ...], np.ndarray]:
    """Arrays of one shape, and a new one like the first, as 1-D views in one order; and the new one."""
    out = np.empty_like(arrays[0])
    flat = in_memory(*arrays, out)
    if flat is None:
        out = np.empty(out.shape, out.dtype)
        flat = [np.ascontiguousarray(a).reshape(-1) for a in (*arrays, out)]
    return tuple(flat), out
