"""Passes over one row, in vector lanes."""

from typing import Any

import numpy as np

from fsdpx.array.kernels.compiled.bits import real, zero
from fsdpx.array.kernels.compiled.scalar import exp, order, unorder, widest
from fsdpx.native.compiled import REORDER, jit
from fsdpx.native.late import intrinsic, ir, register_jitable, types

__all__ = ["dot", "exponentials", "in_line", "largest", "numbers", "prefetch", "square_distance", "total"]

CACHE_LINE = 64


@intrinsic
def in_line(typingctx: Any, x: Any) -> Any:
    """A row that has unit stride, as an array of which the compiler knows it: it is read in vectors."""

    def code(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        context.nrt.incref(builder, signature.return_type, arguments[0])
        return arguments[0]

    return x.copy(layout="C")(x), code


@intrinsic
def _prefetch(typingctx: Any, at: Any) -> Any:
    """Ask for the cache line at an address, which need not be one of ours."""

    def code(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        place, number = ir.IntType(8).as_pointer(), ir.IntType(32)
        kind = ir.FunctionType(ir.VoidType(), [place, number, number, number])
        function = builder.module.declare_intrinsic("llvm.prefetch", [place], kind)
        read, into_l2, data = number(0), number(2), number(1)
        builder.call(function, [builder.inttoptr(arguments[0], place), read, into_l2, data])
        return context.get_dummy_value()

    return types.void(at), code


@register_jitable
def prefetch(x, ahead):
    """Ask for as much memory as x has, from `ahead` bytes behind its beginning on.

    A processor that guesses what is read next stops at each page of 4 KiB, and a core that reads one array from memory
    waits a quarter of its time for that."""
    begin = x.ctypes.data + ahead
    for at in range(begin, begin + x.size * x.itemsize, CACHE_LINE):
        _prefetch(at)


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
