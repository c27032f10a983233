"""Arrays as compiled loops take them: float32, float64 or bfloat16 in one layout, and rows in vector lanes.

Numba compiles again for read-only or unaligned arrays, so there is one layout. Numba knows no bfloat16: the dispatcher
passes views of the bits (uint16); loops read elements by `real` and write by `put`, which for float32 and float64 are
nothing at all."""

from __future__ import annotations

from typing import Any

import numpy as np

from fsdpx.core.array.jit import REORDER, jit
from fsdpx.core.array.kernels.compiled.scalar import exp, order, unorder, widest
from fsdpx.core.array.lazy_numba import intrinsic, ir, overload, register_jitable, types
from fsdpx.core.array.namespace import dtype as bfloat16

__all__ = [
    "HALF", "INFINITE", "REAL", "REST", "SIGN", "WORD", "dot", "exponentials", "fallback", "from_bfloat16", "in_line",
    "largest", "number", "numbers", "owned", "prefetch", "put", "real", "square_distance", "to_bfloat16", "total",
    "wide", "zero",
]

WORD, HALF, REAL = ir.IntType(32), ir.IntType(16), ir.FloatType()
INFINITE = 0x7F800000
SIGN, REST = 0x80000000, 0x7FFFFFFF


@intrinsic
def to_bfloat16(typingctx: Any, x: Any) -> Any:
    """The upper half, plus one if the lower half is more than a tie, or a tie and the upper half is odd."""

    def code(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        n = builder.bitcast(arguments[0], WORD)
        upper = builder.lshr(n, WORD(16))
        odd = builder.and_(upper, WORD(1))
        rounded = builder.lshr(builder.add(n, builder.add(odd, WORD(0x7FFF))), WORD(16))
        nan = builder.icmp_unsigned(">", builder.and_(n, WORD(REST)), WORD(INFINITE))
        return builder.trunc(builder.select(nan, builder.or_(upper, WORD(0x40)), rounded), HALF)

    return types.uint16(types.float32), code


@intrinsic
def from_bfloat16(typingctx: Any, h: Any) -> Any:
    def code(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.bitcast(builder.shl(builder.zext(arguments[0], WORD), WORD(16)), REAL)

    return types.float32(types.uint16), code


def real(x: Any) -> Any:
    """An element as a number to compute with: float32 for bfloat16."""
    raise NotImplementedError("for compiled code")


def put(array: Any, x: Any) -> Any:
    """x as an element of `array`, rounded once."""
    raise NotImplementedError("for compiled code")


def zero(array: Any) -> Any:
    """0 in the format in which elements of `array` are added up."""
    raise NotImplementedError("for compiled code")


@overload(zero, inline="always")
def _zero(array):
    return (lambda array: np.float32(0)) if array.dtype == types.uint16 else (lambda array: array.dtype.type(0))


@overload(real, inline="always")
def _real(x):
    return (lambda x: from_bfloat16(x)) if x == types.uint16 else (lambda x: x)


@overload(put, inline="always")
def _put(array, x):
    return (lambda array, x: to_bfloat16(x)) if array.dtype == types.uint16 else (lambda array, x: x)


def number(array: Any) -> Any:
    """bfloat16 for an array of its bits, all else as it is."""
    return array.view(bfloat16("bf16")) if isinstance(array, np.ndarray) and array.dtype == np.uint16 else array


def fallback(kernel: Any, xp: Any, *arguments: Any) -> Any:
    """A kernel without the compiled code for this format, for what that does not take."""
    result = kernel.fallback(xp, *map(number, arguments))
    return tuple(map(_bits, result)) if isinstance(result, tuple) else _bits(result)


def _bits(a: Any) -> Any:
    return a.view(np.uint16) if a is not None and a.dtype.name == "bfloat16" else a


def wide(dtype: np.dtype) -> np.dtype:
    """The format in which elements of `dtype` are added up."""
    return np.dtype(np.float32) if dtype == np.uint16 else dtype


def owned(x: np.ndarray, dtype: Any = None) -> np.ndarray:
    """x itself where it is contiguous, aligned, writable and of `dtype` (its own if None), else a copy."""
    flags = x.flags
    if flags.c_contiguous and flags.aligned and flags.writeable and (dtype is None or x.dtype == dtype):
        return x
    return np.array(x, dtype, order="C")


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
