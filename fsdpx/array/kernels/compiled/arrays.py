"""Small arrays in the one layout that loops are compiled for: Numba compiles anew for read-only or unaligned arrays."""

from typing import Any

import numpy as np

__all__ = ["in_memory", "owned"]


def owned(x: np.ndarray, dtype: Any = None) -> np.ndarray:
    """x itself where it is contiguous, aligned, writable and of `dtype` (its own if None), else a copy."""
    flags = x.flags
    if flags.c_contiguous and flags.aligned and flags.writeable and (dtype is None or x.dtype == dtype):
        return x
    return np.array(x, dtype, order="C")


def in_memory(*arrays: np.ndarray) -> list[np.ndarray] | None:
    """Arrays of one shape as 1-D views in the order in which they lie in memory, if that is one order without gaps."""
    strides = arrays[0].strides
    order = sorted(range(arrays[0].ndim), key=strides.__getitem__, reverse=True)
    turned = [a.transpose(order) for a in arrays]
    if any(a.strides != strides for a in arrays) or not turned[0].flags.c_contiguous:
        return None
    return [a.reshape(-1) for a in turned]
