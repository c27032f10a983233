"""Sums of whole flat arrays."""

from typing import Any

import numpy as np

from fsdpx.array.kernels.choice import kernel

__all__ = ["square_sum"]

PIECE = 1 << 16  # elements converted at a time: the float64 copy stays in cache


@kernel(narrow=0)
def square_sum(xp: Any, flat: Any) -> float:
    """The sum of squares of a 1-D array, added in float64."""
    total = 0.0
    for start in range(0, flat.shape[0], PIECE):
        piece = flat[start : start + PIECE].astype(np.float64, copy=False)
        total += float(xp.sum(xp.square(piece)))
    return total
