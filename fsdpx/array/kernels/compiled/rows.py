"""Reductions of one row, in vector lanes."""

import numpy as np
from numba.extending import register_jitable

from fsdpx.array.kernels.compiled.bits import real, zero
from fsdpx.array.kernels.compiled.jit import REORDER, jit
from fsdpx.array.kernels.compiled.scalar import order, unorder

__all__ = ["dot", "largest", "square_distance", "total"]


@register_jitable
def largest(x):
    """max(x); -inf of an empty row."""
    best = order(x.dtype.type(-np.inf))
    for j in range(x.size):
        n = order(x[j])
        best = n if n > best else best
    return unorder(best)


@jit(fastmath=REORDER)
def total(x):
    """sum(x)."""
    result = zero(x)
    for j in range(x.size):
        result += real(x[j])
    return result


@jit(fastmath=REORDER)
def square_distance(x, centre):
    """sum((x - centre)^2)."""
    result = zero(x)
    for j in range(x.size):
        d = real(x[j]) - centre
        result += d * d
    return result


@jit(fastmath=REORDER)
def dot(a, b):
    """sum(a b)."""
    result = a.dtype.type(0)
    for j in range(a.size):
        result += a[j] * b[j]
    return result
