"""Numba implementations of counter-based random numbers and dropout. Random bits come from Philox 4x64 (Salmon et al.,
SC'11), and match the bits from `array.random`. Normal numbers come from the Box-Muller transform, with logarithm and
cosine computed in vector lanes.

Normal numbers are accurate to a few units in the last place of float64. Their bits do not depend on where a range
begins. Dropout needs only one pass over memory: its random numbers are generated in cache, just before they are used.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from fsdpx.core.array import parallel
from fsdpx.core.array.jit import jit
from fsdpx.core.array.kernels.choice import register_compiled_kernel
from fsdpx.core.array.kernels.compiled.elements import (
    accumulation_dtype,
    accumulation_zero,
    round_to_dtype_of,
    to_float,
)
from fsdpx.core.array.kernels.compiled.scalar import (
    fused_multiply_add,
    make_polynomial,
    multiply_high,
    round_to_even,
    use_widest_vectors,
)
from fsdpx.core.array.kernels.dropout import dropout_scale, dropout_threshold
from fsdpx.core.array.lazy_numba import intrinsic, ir, register_jitable, types
from fsdpx.core.array.random import NumberRange

__all__ = ["fill_raw_numbers"]

ROUNDS, WORDS = 10, 4
FACTOR0, FACTOR1 = np.uint64(0xD2E7470EE14C6C93), np.uint64(0xCA5A826395121157)
WEYL0, WEYL1 = np.uint64(0x9E3779B97F4A7C15), np.uint64(0xBB67AE8584CAA73B)


@register_jitable
def _generate_four_philox_numbers(counter, key0, key1):
    """Return the four random numbers that Philox generates from one counter value."""
    a, b, c, d = counter, np.uint64(0), np.uint64(0), np.uint64(0)
    for _ in range(ROUNDS):
        high0, low0 = multiply_high(FACTOR0, a), FACTOR0 * a
        high1, low1 = multiply_high(FACTOR1, c), FACTOR1 * c
        a, b, c, d = high1 ^ b ^ key0, low1, high0 ^ d ^ key1, low0
        key0 += WEYL0
        key1 += WEYL1
    return a, b, c, d


@jit
def fill_raw_numbers(out, start, key0, key1):
    """Fill the uint64 array `out` with consecutive random numbers of a Philox stream, beginning with number `start`."""
    position = np.uint64(start)
    counter, ahead = (position >> np.uint64(2)) + np.uint64(1), np.int64(position & np.uint64(3))
    done = 0
    if ahead > 0:
        numbers = _generate_four_philox_numbers(counter, key0, key1)
        done = min(WORDS - ahead, out.size)
        for n in range(done):
            out[n] = numbers[ahead + n]
        counter += np.uint64(1)
    steps = (out.size - done) // WORDS
    for n in range(steps):
        a, b, c, d = _generate_four_philox_numbers(counter + np.uint64(n), key0, key1)
        i = done + WORDS * n
        out[i], out[i + 1], out[i + 2], out[i + 3] = a, b, c, d
    done += WORDS * steps
    if done < out.size:
        numbers = _generate_four_philox_numbers(counter + np.uint64(steps), key0, key1)
        for n in range(out.size - done):
            out[done + n] = numbers[n]


PIECE_ELEMENTS = 1024  # number of elements whose random numbers fit into the L1 cache
FRACTION_SHIFT = np.uint64(11)  # shifting a 64-bit number right by this many bits leaves 53 bits
HALF_ROOT = 0x3FE6A09E667F3BCD  # the bits of sqrt(1/2)
MANTISSA = (1 << 52) - 1


def _make_power_series(values: list[float]) -> Any:
    return make_polynomial(tuple(values), tuple(values))


_turn = 2.0 * math.pi
_cosine = _make_power_series([(-1.0) ** k * _turn ** (2 * k) / math.factorial(2 * k) for k in range(10)])
_sine = _make_power_series([(-1.0) ** k * _turn ** (2 * k + 1) / math.factorial(2 * k + 1) for k in range(10)])
# 2 atanh(s) / s as a power series in s^2, for |s| <= 0.172
_area = _make_power_series([2.0 / (2 * k + 1) for k in range(12)])


@intrinsic
def _split_mantissa_and_exponent(typingctx: Any, x: Any) -> Any:
    """Return (m, e) with `x = m * 2^e` and m in [sqrt(1/2), sqrt(2)), for a positive normal float64 x."""

    def emit_ir(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        word, real = ir.IntType(64), ir.DoubleType()
        bits = builder.bitcast(arguments[0], word)
        above = builder.sub(bits, word(HALF_ROOT))
        exponent = builder.ashr(above, word(52))
        mantissa = builder.add(builder.and_(above, word(MANTISSA)), word(HALF_ROOT))
        parts = [builder.bitcast(mantissa, real), builder.sitofp(exponent, real)]
        return context.make_tuple(builder, signature.return_type, parts)

    return types.UniTuple(types.float64, 2)(x), emit_ir


@register_jitable
def _compute_log(x):
    m, e = _split_mantissa_and_exponent(x)
    s = (m - 1.0) / (m + 1.0)
    return fused_multiply_add(e, 0.6931471805599453, s * _area(s * s))


@register_jitable
def _compute_cosine_of_turns(v):
    """Return `cos(2 * pi * v)` for v in [0, 1). The argument is reduced exactly, by subtracting the nearest quarter
    turn."""
    quarter = round_to_even(v * 4.0)
    r = fused_multiply_add(quarter, -0.25, v)
    odd = quarter == 1.0 or quarter == 3.0
    size = r * _sine(r * r) if odd else _cosine(r * r)
    return -size if quarter == 1.0 or quarter == 2.0 else size


@jit
def _box_muller_into(numbers, out):
    use_widest_vectors()
    for i in range(out.size):
        u = np.float64(np.int64(numbers[2 * i] >> FRACTION_SHIFT)) * 2.0**-53
        v = np.float64(np.int64(numbers[2 * i + 1] >> FRACTION_SHIFT)) * 2.0**-53
        out[i] = np.sqrt(-2.0 * _compute_log(1.0 - u)) * _compute_cosine_of_turns(v)


@jit
def _fill_normal(out, start, key0, key1):
    numbers = np.empty(2 * PIECE_ELEMENTS, np.uint64)
    for a in range(0, out.size, PIECE_ELEMENTS):
        b = min(a + PIECE_ELEMENTS, out.size)
        fill_raw_numbers(numbers[: 2 * (b - a)], 2 * (start + a), key0, key1)
        _box_muller_into(numbers, out[a:b])


@register_compiled_kernel()
def normal(numbers: NumberRange) -> np.ndarray:
    """Return the normal random numbers for a range of a stream (see `array.random.normal`). Each number has the same
    bits wherever the range begins."""
    out = np.empty(numbers.stop - numbers.start)
    parts = parallel.split_range(out.size, parallel.MIN_PIECE_ELEMENTS // 4)
    parallel.run_tasks(_fill_normal, [(out[a:b], numbers.start + a, *numbers.keys) for a, b in parts])
    return out


CHANCE_SHIFT = np.uint64(40)  # shifting a 64-bit number right by this many bits leaves 24 bits


@jit
def _dropout_with_mask_loop(x, keep, y, factor):
    nothing = accumulation_zero(x)
    for i in range(x.size):
        y[i] = round_to_dtype_of(y, to_float(x[i]) * (factor if keep[i] != 0 else nothing))


@jit
def _fill_keep_mask(numbers, keep, threshold):
    use_widest_vectors()
    for i in range(keep.size):
        keep[i] = numbers[i] >> CHANCE_SHIFT >= threshold


@jit
def _dropout_loop(x, keep, y, start, key0, key1, threshold, factor):
    numbers = np.empty(PIECE_ELEMENTS, np.uint64)
    for a in range(0, x.size, PIECE_ELEMENTS):
        b = min(a + PIECE_ELEMENTS, x.size)
        fill_raw_numbers(numbers[: b - a], start + a, key0, key1)
        _fill_keep_mask(numbers, keep[a:b], threshold)
        _dropout_with_mask_loop(x[a:b], keep[a:b], y[a:b], factor)


@register_compiled_kernel(lambda x, w, s: (x, NumberRange(0, "", 0, 6), 0.5))
def drop(xp: Any, x: np.ndarray, numbers: NumberRange, p: float) -> tuple[np.ndarray, np.ndarray]:
    flat = np.ascontiguousarray(x).reshape(-1)
    keep, y = np.empty(flat.size, np.uint8), np.empty_like(flat)
    rest = (*numbers.keys, np.uint64(dropout_threshold(p)), accumulation_dtype(x.dtype).type(dropout_scale(p)))
    cut = parallel.split_range(
        flat.size, parallel.MIN_PIECE_ELEMENTS // 4
    # threads pay off even for small pieces, because generating random numbers takes as long as a few passes over the
    # array
    )
    parallel.run_tasks(_dropout_loop, [(flat[a:b], keep[a:b], y[a:b], numbers.start + a, *rest) for a, b in cut])
    return y.reshape(x.shape), keep.view(np.bool_).reshape(x.shape)


@register_compiled_kernel(lambda x, w, s: (x, x > 0, 0.5))
def drop_backward(xp: Any, dy: np.ndarray, keep: np.ndarray, p: float) -> np.ndarray:
    flat = np.ascontiguousarray(dy).reshape(-1)
    dx = np.empty_like(flat)
    parallel.parallel_for_rows(
        _dropout_with_mask_loop,
        (flat, np.ascontiguousarray(keep).reshape(-1).view(np.uint8), dx),
        accumulation_dtype(dy.dtype).type(dropout_scale(p)),
    )
    return dx.reshape(dy.shape)
