"""Access array elements in compiled loops, and reduce rows in vector lanes, for float32, float64 and bfloat16.

Numba would compile a function again for read-only or unaligned arrays, so all arrays are converted to one layout. Numba
has no bfloat16, so bfloat16 arrays are passed as views of their bits (uint16). Loops read elements with `to_float` and
write them with `round_to_dtype_of`, which cost nothing for float32 and float64.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from fsdpx.core.array.jit import REORDER, jit
from fsdpx.core.array.kernels.compiled.scalar import exp, from_ordered_integer, to_ordered_integer, use_widest_vectors
from fsdpx.core.array.lazy_numba import intrinsic, ir, overload_function, register_jitable, types
from fsdpx.core.array.namespace import parse_dtype

__all__ = [
    "HALF", "INFINITY_BITS", "REAL", "REST", "SIGN", "WORD", "accumulation_dtype", "accumulation_zero", "as_contiguous",
    "assume_unit_stride", "call_plain_kernel", "dot_product", "exponentiate_in_place", "find_max_of_vector",
    "from_bfloat16_bits", "keep_alive", "prefetch_array_at_byte_offset", "round_to_dtype_of", "sum_row",
    "sum_squared_deviations", "to_bfloat16_bits", "to_float", "view_bits_as_bfloat16", "widen_into",
]  # fmt: skip

WORD, HALF, REAL = ir.IntType(32), ir.IntType(16), ir.FloatType()
INFINITY_BITS = 0x7F800000
SIGN, REST = 0x80000000, 0x7FFFFFFF


@intrinsic
def to_bfloat16_bits(typingctx: Any, x: Any) -> Any:
    """Convert a float32 to the bits of a bfloat16, rounded to nearest, ties to even."""

    def emit_ir(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        n = builder.bitcast(arguments[0], WORD)
        upper = builder.lshr(n, WORD(16))
        odd = builder.and_(upper, WORD(1))
        rounded = builder.lshr(builder.add(n, builder.add(odd, WORD(0x7FFF))), WORD(16))
        nan = builder.icmp_unsigned(">", builder.and_(n, WORD(REST)), WORD(INFINITY_BITS))
        return builder.trunc(builder.select(nan, builder.or_(upper, WORD(0x40)), rounded), HALF)

    return types.uint16(types.float32), emit_ir


@intrinsic
def from_bfloat16_bits(typingctx: Any, h: Any) -> Any:
    def emit_ir(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.bitcast(builder.shl(builder.zext(arguments[0], WORD), WORD(16)), REAL)

    return types.float32(types.uint16), emit_ir


def to_float(x: Any) -> Any:
    """Convert an array element to a number for computations: bfloat16 bits become a float32, and other elements are
    unchanged."""
    raise NotImplementedError("for compiled code")


def round_to_dtype_of(array: Any, x: Any) -> Any:
    """Round the number x to the dtype of `array` in a single rounding, without an intermediate dtype."""
    raise NotImplementedError("for compiled code")


def accumulation_zero(array: Any) -> Any:
    """Return 0 in the dtype used to sum elements of `array` (float32 for bfloat16)."""
    raise NotImplementedError("for compiled code")


@overload_function(accumulation_zero, inline="always")
def _overload_accumulation_zero(array):
    return (lambda array: np.float32(0)) if array.dtype == types.uint16 else (lambda array: array.dtype.type(0))


@overload_function(to_float, inline="always")
def _overload_to_float(x):
    return (lambda x: from_bfloat16_bits(x)) if x == types.uint16 else (lambda x: x)


@overload_function(round_to_dtype_of, inline="always")
def _overload_round_to_dtype_of(array, x):
    return (lambda array, x: to_bfloat16_bits(x)) if array.dtype == types.uint16 else (lambda array, x: x)


def view_bits_as_bfloat16(array: Any) -> Any:
    """View an array of bfloat16 bits (uint16) as bfloat16. Return anything else unchanged."""
    return array.view(parse_dtype("bf16")) if isinstance(array, np.ndarray) and array.dtype == np.uint16 else array


def call_plain_kernel(kernel: Any, xp: Any, *arguments: Any) -> Any:
    """Call the plain implementation of a kernel for arguments that compiled code does not support. bfloat16 arrays are
    passed and returned as views of their bits."""
    result = kernel.fallback(xp, *map(view_bits_as_bfloat16, arguments))
    return tuple(map(_view_bfloat16_as_bits, result)) if isinstance(result, tuple) else _view_bfloat16_as_bits(result)


def _view_bfloat16_as_bits(a: Any) -> Any:
    return a.view(np.uint16) if a is not None and a.dtype.name == "bfloat16" else a


def accumulation_dtype(dtype: np.dtype) -> np.dtype:
    """Return the dtype used to sum elements of `dtype`: float32 for bfloat16 bits, else `dtype` itself."""
    return np.dtype(np.float32) if dtype == np.uint16 else dtype


def as_contiguous(x: np.ndarray, dtype: Any = None) -> np.ndarray:
    """Return x itself if it is contiguous, aligned, writable and of `dtype`, else a copy. If `dtype` is None, any dtype
    is accepted."""
    flags = x.flags
    if flags.c_contiguous and flags.aligned and flags.writeable and (dtype is None or x.dtype == dtype):
        return x
    return np.array(x, dtype, order="C")


CACHE_LINE = 64


@intrinsic
def assume_unit_stride(typingctx: Any, x: Any) -> Any:
    """Tell the compiler that the 1-D array x is contiguous, so that it can use vector loads."""

    def emit_ir(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        context.nrt.incref(builder, signature.return_type, arguments[0])
        return arguments[0]

    return x.copy(layout="C")(x), emit_ir


@intrinsic
def prefetch_line(typingctx: Any, address: Any) -> Any:
    """Prefetch the cache line at an address. The address need not be valid."""

    def emit_ir(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        place, number = ir.IntType(8).as_pointer(), ir.IntType(32)
        kind = ir.FunctionType(ir.VoidType(), [place, number, number, number])
        function = builder.module.declare_intrinsic("llvm.prefetch", [place], kind)
        read, into_l2, data = number(0), number(2), number(1)
        builder.call(function, [builder.inttoptr(arguments[0], place), read, into_l2, data])
        return context.get_dummy_value()

    return types.void(address), emit_ir


@register_jitable
def keep_alive(*arrays):
    """Keep arrays allocated until this call. Numba frees an array after the last statement that uses its name, even if
    its address is still in use."""


@register_jitable
def prefetch_array_at_byte_offset(x, ahead):
    """Prefetch as many bytes as x has, beginning `ahead` bytes after the start of x.

    The hardware stops prefetching at the end of each 4 KiB page, so without this function, a core that reads a single
    array would spend a quarter of its time waiting.
    """
    begin = x.ctypes.data + ahead
    for address in range(begin, begin + x.size * x.itemsize, CACHE_LINE):
        prefetch_line(address)


@jit
def widen_into(x, out):
    """Copy x to `out`, converting bfloat16 bits to float32."""
    for j in range(x.size):
        out[j] = to_float(x[j])


@jit
def exponentiate_in_place(x, top):
    """Overwrite x with exp(x - top)."""
    use_widest_vectors()
    for j in range(x.size):
        x[j] = exp(x[j] - top)


@register_jitable
def find_max_of_vector(x):
    """Return the maximum of x, or -inf if x is empty."""
    best = to_ordered_integer(x.dtype.type(-np.inf))
    for j in range(x.size):
        n = to_ordered_integer(x[j])
        best = n if n > best else best
    return from_ordered_integer(best)


@jit(fastmath=REORDER)
def sum_row(x):
    """Return the sum of the elements of x."""
    result = accumulation_zero(x)
    for j in range(x.size):
        result += to_float(x[j])
    return result


@jit(fastmath=REORDER)
def sum_squared_deviations(x, centre):
    """Return sum((x - centre)^2), the sum of squared deviations."""
    result = accumulation_zero(x)
    for j in range(x.size):
        d = to_float(x[j]) - centre
        result += d * d
    return result


@jit(fastmath=REORDER)
def dot_product(a, b):
    """Return the dot product of two 1-D arrays, sum(a * b)."""
    result = accumulation_zero(a)
    for j in range(a.size):
        result += to_float(a[j]) * to_float(b[j])
    return result
