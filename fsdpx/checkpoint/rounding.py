"""From one floating-point format to another, rounded once to the nearest, ties to even."""

from __future__ import annotations

import numpy as np

__all__ = ["rounded"]


def rounded(array: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """`array` in `dtype`; itself if it is that already. What is too large becomes Inf, without a warning."""
    if array.dtype == dtype:
        return array
    with np.errstate(over="ignore", invalid="ignore", under="ignore"):
        if dtype.name == "bfloat16" and array.dtype == np.float64:
            array = _to_odd(array)
        return array.astype(dtype)


def _to_odd(array: np.ndarray) -> np.ndarray:
    """float64 as float32, inexact ones to the neighbour with an odd last bit: rounding on is then as if from the start
    (Boldo and Melquiond, 2008, "Emulation of FMA and correctly rounded sums"). ml_dtypes itself rounds twice."""
    near = array.astype(np.float32)
    back = near.astype(np.float64)
    bits = near.view(np.uint32)
    inexact = (back != array) & ~np.isnan(array)
    bits -= (inexact & (np.abs(back) > np.abs(array))).astype(np.uint32)  # now towards zero
    bits |= inexact.astype(np.uint32)
    return near
