"""Sums of squares of flat arrays, in float64 over blocks that do not depend on ranks or threads."""

from typing import Any

import numpy as np

from fsdpx.array.kernels.dispatch import kernel

__all__ = ["square_sum", "square_sums"]

BLOCK = 1 << 14  # elements of a partial sum of `square_sum`
PIECE = 1 << 16  # elements converted at a time: the float64 copy stays in cache


@kernel(narrow=0)
def square_sum(xp: Any, flat: Any) -> float:
    """The sum of squares of a 1-D array, added in float64."""
    total = 0.0
    for start in range(0, flat.shape[0], PIECE):
        piece = flat[start : start + PIECE].astype(np.float64, copy=False)
        total += float(xp.sum(xp.square(piece)))
    return total


@kernel(narrow=0)
def square_sums(xp: Any, flat: Any, grain: int) -> Any:
    """Sums of squares over blocks of `grain` elements of a 1-D array, the last one perhaps shorter: float64."""
    wide = xp.square(flat.astype(np.float64))
    body = wide.size // grain * grain
    sums = wide[:body].reshape(-1, grain).sum(axis=1)
    return sums if body == wide.size else xp.concatenate([sums, wide[body:].sum(keepdims=True)])
