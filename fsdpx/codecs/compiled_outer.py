"""Products of two thin matrices, row by row, see `codecs.powersgd`: the same bits."""

import numpy as np

from fsdpx.array.kernels.compiled.scalar import widest
from fsdpx.native.tools import jit

__all__ = ["outer"]


@jit
def _outer(p, q, at, out, take):
    widest()
    ranks, columns = q.shape
    first, offset = at // columns, at % columns
    row = np.empty(columns, out.dtype)
    done = 0
    while done < out.size:
        count = min(columns - offset, out.size - done)
        here, right = row[:count], q[0, offset : offset + count]
        left = p[first, 0]
        for i in range(count):
            here[i] = left * right[i]
        for k in range(1, ranks):
            left, right = p[first, k], q[k, offset : offset + count]
            for i in range(count):
                here[i] += left * right[i]
        part = out[done : done + count]
        if take:
            for i in range(count):
                part[i] -= here[i]
        else:
            for i in range(count):
                part[i] = here[i]
        done, first, offset = done + count, first + 1, 0


def outer(p: np.ndarray, q: np.ndarray, at: int, out: np.ndarray, take: bool) -> None:
    _outer(p, np.ascontiguousarray(q.T), at, out, take)
