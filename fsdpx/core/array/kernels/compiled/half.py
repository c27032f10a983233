"""Casts between float32 and 16-bit floats, rounded to nearest (ties to even) or stochastically, and sums of 16-bit
floats in float32.

The casts load and store the bits of floats as uint32 and uint16. Therefore neither the processor nor Numba needs to
support 16-bit floats.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np

from fsdpx.core.array.jit import jit
from fsdpx.core.array.kernels.choice import register_compiled_kernel
from fsdpx.core.array.kernels.compiled.elements import (
    HALF,
    INFINITY_BITS,
    REAL,
    REST,
    SIGN,
    WORD,
    from_bfloat16_bits,
    to_bfloat16_bits,
)
from fsdpx.core.array.lazy_numba import intrinsic, ir, types
from fsdpx.core.array.parallel import parallel_for_rows
from fsdpx.core.array.random import MIX, NumberRange

__all__ = ["emit_bit_mixing", "emit_round_to_bfloat16", "emit_round_to_float16_precision", "round_randomly"]


@intrinsic
def to_float16_bits(typingctx: Any, x: Any) -> Any:
    """Convert float32 to the bits of float16. There are three cases, depending on the magnitude: too large (or NaN),
    normal, and subnormal. In the subnormal case, the code adds 0.5 in float32. This addition rounds the number at the
    lowest bit of a float16 subnormal."""

    def emit_ir(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        n = builder.bitcast(arguments[0], WORD)
        sign = builder.lshr(builder.and_(n, WORD(SIGN)), WORD(16))
        size = builder.and_(n, WORD(REST))
        odd = builder.and_(builder.lshr(size, WORD(13)), WORD(1))
        lowered = builder.sub(builder.add(size, builder.add(odd, WORD(0xFFF))), WORD(112 << 23))
        half = ir.Constant(REAL, 0.5)
        summed = builder.bitcast(builder.fadd(builder.bitcast(size, REAL), half), WORD)
        small = builder.sub(summed, builder.bitcast(half, WORD))
        nan = builder.icmp_unsigned(">", size, WORD(INFINITY_BITS))
        result = builder.select(
            builder.icmp_unsigned("<", size, WORD(113 << 23)), small, builder.lshr(lowered, WORD(13))
        )
        large = builder.icmp_unsigned(">=", size, WORD(143 << 23))
        result = builder.select(large, builder.select(nan, WORD(0x7E00), WORD(0x7C00)), result)
        return builder.trunc(builder.or_(result, sign), HALF)

    return types.uint16(types.float32), emit_ir


@intrinsic
def from_float16_bits(typingctx: Any, h: Any) -> Any:
    """Convert the bits of float16 to float32. Exponent and mantissa are shifted up; then the exponents for Inf, NaN, 0
    and subnormals are corrected."""

    def emit_ir(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        n = builder.zext(arguments[0], WORD)
        sign = builder.shl(builder.and_(n, WORD(0x8000)), WORD(16))
        size = builder.shl(builder.and_(n, WORD(0x7FFF)), WORD(13))
        normal = builder.add(size, WORD(112 << 23))
        top = builder.icmp_unsigned(">=", size, WORD(0x7C00 << 13))
        result = builder.select(top, builder.add(normal, WORD(112 << 23)), normal)
        least = ir.Constant(REAL, 2.0**-14)
        raised = builder.bitcast(builder.add(normal, WORD(1 << 23)), REAL)
        small = builder.bitcast(builder.fsub(raised, least), WORD)
        result = builder.select(builder.icmp_unsigned("<", size, WORD(1 << 23)), small, result)
        return builder.bitcast(builder.or_(result, sign), REAL)

    return types.float32(types.uint16), emit_ir


def emit_round_to_bfloat16(builder: Any, x: Any) -> Any:
    """Emit the instructions that round a float32 vector to bfloat16 and convert the result back to float32."""
    c = partial(_make_constant_vector, x.type.count)
    n = builder.bitcast(x, c(0).type)
    odd = builder.and_(builder.lshr(n, c(16)), c(1))
    nan = builder.icmp_unsigned(">", builder.and_(n, c(REST)), c(INFINITY_BITS))
    rounded = builder.add(n, builder.add(odd, c(0x7FFF)))
    kept = builder.select(nan, builder.or_(n, c(0x40 << 16)), rounded)
    return builder.bitcast(builder.and_(kept, c(0xFFFF0000)), x.type)


def emit_round_to_float16_precision(builder: Any, x: Any) -> Any:
    """Emit the instructions that round a float32 vector to float16 and convert the result back to float32."""
    c = partial(_make_constant_vector, x.type.count)
    n = builder.bitcast(x, c(0).type)
    size = builder.and_(n, c(REST))
    odd = builder.and_(builder.lshr(size, c(13)), c(1))
    rounded = builder.and_(builder.add(size, builder.add(odd, c(0xFFF))), c(0xFFFFE000))
    half = ir.Constant(x.type, [ir.Constant(REAL, 0.5)] * x.type.count)
    small = builder.bitcast(builder.fsub(builder.fadd(builder.bitcast(size, x.type), half), half), n.type)
    rounded = builder.select(builder.icmp_unsigned("<", size, c(113 << 23)), small, rounded)
    large = builder.icmp_unsigned(">=", rounded, c(143 << 23))
    nan = builder.icmp_unsigned(">", size, c(INFINITY_BITS))
    rounded = builder.select(large, builder.select(nan, c(0x7FC00000), c(INFINITY_BITS)), rounded)
    return builder.bitcast(builder.or_(rounded, builder.and_(n, c(SIGN))), x.type)


def _make_constant_vector(count: int, number: int) -> Any:
    """Return a constant vector with `number` in each of `count` lanes."""
    return ir.Constant(ir.VectorType(WORD, count), [WORD(number)] * count)


def _make_conversion_loops(name: str, to: Any, back: Any) -> dict[str, Any]:
    """Return a dict of three compiled loops for a 16-bit dtype: one rounds float32 arrays to the dtype, one converts
    arrays of the dtype to float32, and one adds arrays of the dtype to float32 arrays. `to` and `back` are functions
    that convert one number to the dtype and back."""

    def narrow_loop(x, out):
        for i in range(x.size):
            out[i] = to(x[i])

    def widen_loop(x, out):
        for i in range(x.size):
            out[i] = back(x[i])

    def add_loop(x, out):
        for i in range(x.size):
            out[i] += back(x[i])

    return {loop.__name__: jit(loop, name=f"{loop.__name__}_{name}") for loop in (narrow_loop, widen_loop, add_loop)}


LOOPS = {
    "float16": _make_conversion_loops("float16", to_float16_bits, from_float16_bits),
    "bfloat16": _make_conversion_loops("bfloat16", to_bfloat16_bits, from_bfloat16_bits),
}


@register_compiled_kernel()
def store(x: np.ndarray, out: np.ndarray) -> None:
    """Copy x to `out`. Both are contiguous; one of them is float32, the other 16-bit."""
    if x.dtype.itemsize == 2:
        parallel_for_rows(LOOPS[x.dtype.name]["widen_loop"], (x.reshape(-1).view(np.uint16), out.reshape(-1)))
    else:
        parallel_for_rows(LOOPS[out.dtype.name]["narrow_loop"], (x.reshape(-1), out.reshape(-1).view(np.uint16)))


@register_compiled_kernel()
def add_widened(x: np.ndarray, out: np.ndarray) -> None:
    """Add the 16-bit array x to the float32 array `out` in place. Both are contiguous."""
    parallel_for_rows(LOOPS[x.dtype.name]["add_loop"], (x.reshape(-1).view(np.uint16), out.reshape(-1)))


def emit_bit_mixing(builder: Any, n: Any) -> Any:
    """Emit the instructions that apply the 32-bit mixing function of `NumberRange.make_16bit_numbers` to n."""
    for shift, factor in ((16, MIX[0]), (15, MIX[1])):
        n = builder.mul(builder.xor(n, builder.lshr(n, WORD(shift))), WORD(factor))
    return builder.xor(n, builder.lshr(n, WORD(16)))


@intrinsic
def round_to_bfloat16_bits_stochastically(typingctx: Any, x: Any, position: Any, key0: Any, key1: Any) -> Any:
    """Convert a float32 to the bits of a bfloat16 by adding 16 random bits to its lower half and truncating the sum.
    Inf and NaN stay unchanged. The random bits depend on `position` and on two words of the generator's key."""

    def emit_ir(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        n = builder.bitcast(arguments[0], WORD)
        position, key0, key1 = (builder.trunc(a, WORD) for a in arguments[1:])
        number = emit_bit_mixing(builder, builder.xor(emit_bit_mixing(builder, builder.xor(position, key0)), key1))
        upper = builder.lshr(builder.add(n, builder.lshr(number, WORD(16))), WORD(16))
        size, kept = builder.and_(n, WORD(REST)), builder.lshr(n, WORD(16))
        nan = builder.icmp_unsigned(">", size, WORD(INFINITY_BITS))
        special = builder.select(nan, builder.or_(kept, WORD(0x40)), kept)
        return builder.trunc(
            builder.select(builder.icmp_unsigned(">=", size, WORD(INFINITY_BITS)), special, upper), HALF
        )

    return types.uint16(types.float32, types.int64, types.int64, types.int64), emit_ir


@jit
def _round_stochastically_loop(x, out, start, key0, key1):
    for i in range(x.size):
        out[i] = round_to_bfloat16_bits_stochastically(x[i], start + i, key0, key1)


@register_compiled_kernel()
def round_randomly(x: np.ndarray, out: np.ndarray, numbers: NumberRange) -> None:
    """Write x to `out`, rounded stochastically. See `kernels.half.round_randomly`."""
    bits = out.view(np.uint16)
    for offset, start, key0, key1 in numbers.iterate_runs_of_equal_upper_word():
        _round_stochastically_loop(x[offset], bits[offset], start, key0, key1)
