"""Arrays in the layout that loops are compiled for (Numba compiles again for read-only or unaligned arrays), and passes
over one row in vector lanes."""

from __future__ import annotations

from typing import Any

import numpy as np

from fsdpx.array.kernels.compiled.half import real, zero
from fsdpx.array.kernels.compiled.scalar import exp, order, unorder, widest
from fsdpx.native.compiled import REORDER, jit
from fsdpx.native.late import intrinsic, ir, register_jitable, types

__all__ = [
    "alike", "dot", "exponentials", "in_line", "in_memory", "largest", "numbers", "owned", "prefetch",
    "square_distance", "total",
]  # fmt: skip


def owned(x: np.ndarray, dtype: Any = None) -> np.ndarray:
    """x itself where it is contiguous, aligned, writable and of `dtype` (its own if None), else a copy."""
    flags = x.flags
    if flags.c_contiguous and flags.aligned and flags.writeable and (dtype is None or x.dtype == dtype):
        return x
    return np.array(x, dtype, order="C")


def in_memory(*arrays: np.ndarray) -> list[np.ndarray] | None:
    """Arrays of one shape as 1-D views in the order in which they lie in memory, if that is one order without gaps."""
    if all(a.flags.c_contiguous for a in arrays):
        return [a.reshape(-1) for a in arrays]
    strides = arrays[0].strides
    order = sorted(range(arrays[0].ndim), key=strides.__getitem__, reverse=True)
    turned = [a.transpose(order) for a in arrays]
    if any(a.strides != strides for a in arrays) or not turned[0].flags.c_contiguous:
        return None
    return [a.reshape(-1) for a in turned]


def alike(*arrays: np.ndarray) -> tuple[tuple[np.ndarray, ...], np.ndarray]:
    """Arrays of one shape, and a new one like the first, as 1-D views in one order; and the new one."""
    out = np.empty_like(arrays[0])
    flat = in_memory(*arrays, out)
    if flat is None:
        out = np.empty(out.shape, out.dtype)
        flat = [np.ascontiguousarray(a).reshape(-1) for a in (*arrays, out)]
    return tuple(flat), out


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
