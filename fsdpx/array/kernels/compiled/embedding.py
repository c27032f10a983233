"""The gradient of looking up rows, added in the order of the batch."""

from typing import Any

import numpy as np

from fsdpx.array.kernels.compiled.arrays import owned
from fsdpx.array.kernels.compiled.bits import number, real, wide
from fsdpx.array.parallel import over_columns
from fsdpx.native.compiled import jit

__all__ = ["embedding_backward"]


@jit
def _first_wrong(index, rows):
    """Position of the first index that is out of range, or -1."""
    for i in range(index.size):
        if not -rows <= index[i] < rows:
            return i
    return -1


@jit
def _add_rows(start, stop, dy, index, gw):
    for i in range(index.size):
        row = index[i] + gw.shape[0] if index[i] < 0 else index[i]
        into, part = gw[row, start:stop], dy[i, start:stop]
        for j in range(into.size):
            into[j] += real(part[j])


def embedding_backward(xp: Any, gw: Any, index: Any, dy: Any) -> None:
    index, dy = owned(index, np.int64), np.ascontiguousarray(dy)
    bad = _first_wrong(index, gw.shape[0])
    if bad >= 0:
        raise IndexError(f"embedding_backward: index {index[bad]} at {bad} is out of range for {gw.shape[0]} rows")
    direct = gw.dtype == wide(dy.dtype) and gw.flags.c_contiguous
    table = gw if direct else np.zeros(gw.shape, wide(dy.dtype))
    over_columns(_add_rows, dy, index, table)
    if not direct:
        into = number(gw)
        into += table
