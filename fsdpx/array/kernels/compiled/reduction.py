"""Sums of whole flat arrays in one pass."""

from typing import Any

import numpy as np

from fsdpx.array.kernels.compiled.jit import REORDER, jit

__all__ = ["square_sum"]


@jit(fastmath=REORDER)
def _square_sum(x):
    result = 0.0
    for i in range(x.size):
        v = np.float64(x[i])
        result += v * v
    return result


def square_sum(xp: Any, flat: np.ndarray) -> float:
    return float(_square_sum(np.ascontiguousarray(flat)))
