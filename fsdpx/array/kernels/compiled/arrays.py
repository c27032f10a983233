"""Small arrays as the loops know them, whoever made them: Numba compiles again for read-only or unaligned ones."""

from typing import Any

import numpy as np

__all__ = ["owned"]


def owned(x: np.ndarray, dtype: Any = None) -> np.ndarray:
    """x itself where it is contiguous, aligned, writable and of `dtype` (its own if None), else a copy."""
    flags = x.flags
    if flags.c_contiguous and flags.aligned and flags.writeable and (dtype is None or x.dtype == dtype):
        return x
    return np.array(x, dtype, order="C")
