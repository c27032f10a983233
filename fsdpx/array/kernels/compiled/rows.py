"""Passes over one row, in vector lanes."""

from typing import Any

import numpy as np

from fsdpx.array.kernels.compiled.bits import real, zero
from fsdpx.array.kernels.compiled.scalar import exp, order, unorder, widest
from fsdpx.native.compiled import REORDER
from fsdpx.native.tools import extending, jit, register_jitable

__all__ = ["dot", "exponentials", "in_line", "largest", "numbers", "square_distance", "total"]

intrinsic: Any = extending.intrinsic


@intrinsic
def in_line(typingctx: Any, x: Any) -> Any:
    """A row that has unit stride, as an array of which the compiler knows it: it is read in vectors."""

    def code(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        context.nrt.incref(builder, signature.return_type, arguments[0])
        return arguments[0]

    return x.copy(layout="C")(x), code


@jit
def numbers(x, out):
    """out = x, in the format in which its elements are added up."""
    for j in range(x.size):
        out[j] = real(x[j])


@jit
def exponentials(x, top):
    """x to exp(x - top), in place."""
    widest()
    for j in range(x.size):
        x[j] = exp(x[j] - top)


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
    result = zero(a)
    for j in range(a.size):
        result += real(a[j]) * real(b[j])
    return result
