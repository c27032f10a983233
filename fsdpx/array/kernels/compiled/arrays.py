"""Small arrays in the one layout that loops are compiled for: Numba compiles anew for read-only or unaligned arrays."""

from typing import Any

import numpy as np

__all__ = ["owned"]


def owned(x: np.ndarray, dtype: Any = None) -> np.ndarray:
    """x itself where it is contiguous, aligned, writable and of `dtype` (its own if None), else a copy."""
    flags = x.flags
    if flags.c_contiguous and flags.aligned and flags.writeable and (dtype is None or x.dtype == dtype):
        return x
    return np.array(x, dtype, order="C")
