"""The gradient of looking up rows, added in the order of the batch."""

from typing import Any

import numpy as np

from fsdpx.array.kernels.compiled.jit import jit

__all__ = ["embedding_backward"]


@jit
def _add_rows(gw, index, dy):
    """The first index that is out of range, or -1."""
    for i in range(index.size):
        row = index[i] + gw.shape[0] if index[i] < 0 else index[i]
        if not 0 <= row < gw.shape[0]:
            return i
        for j in range(gw.shape[1]):
            gw[row, j] += dy[i, j]
    return -1


def embedding_backward(xp: Any, gw: Any, index: Any, dy: Any) -> None:
    index, dy = np.ascontiguousarray(index, dtype=np.int64), np.ascontiguousarray(dy)
    direct = gw.dtype == dy.dtype and gw.flags.c_contiguous
    table = gw if direct else np.zeros(gw.shape, dy.dtype)
    bad = _add_rows(table, index, dy)
    if bad >= 0:
        raise IndexError(f"embedding_backward: index {index[bad]} at {bad} is out of range for {gw.shape[0]} rows")
    if not direct:
        gw += table
