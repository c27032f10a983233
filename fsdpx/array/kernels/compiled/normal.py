"""Normally distributed numbers: Box and Muller's transform of Philox's, with logarithm and cosine in vector lanes.

Correct to a few units in the last place of float64, and the same bits wherever a range begins."""

import math
from typing import Any

import numpy as np

from fsdpx.array import parallel
from fsdpx.array.kernels.compiled.philox import raws
from fsdpx.array.kernels.compiled.scalar import fma, nearest, polynomial, widest
from fsdpx.array.random import Stretch
from fsdpx.native.compiled import jit
from fsdpx.native.late import intrinsic, ir, register_jitable, types

__all__ = ["normal"]

PIECE = 1024  # elements: their raw numbers stay in the nearest cache
TOP = np.uint64(11)  # shifted by it, 53 bits are left
HALF_ROOT = 0x3FE6A09E667F3BCD  # the bits of sqrt(1/2)
MANTISSA = (1 << 52) - 1


def _series(values: list[float]) -> Any:
    return polynomial(tuple(values), tuple(values))


_turn = 2.0 * math.pi
_cosine = _series([(-1.0) ** k * _turn ** (2 * k) / math.factorial(2 * k) for k in range(10)])
_sine = _series([(-1.0) ** k * _turn ** (2 * k + 1) / math.factorial(2 * k + 1) for k in range(10)])
_area = _series([2.0 / (2 * k + 1) for k in range(12)])  # 2 atanh(s) / s in powers of s^2: |s| <= 0.172


@intrinsic
def _split(typingctx: Any, x: Any) -> Any:
    """(m, e) with x = m 2^e and m in [sqrt(1/2), sqrt(2)), for a positive normal float64."""

    def code(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        word, real = ir.IntType(64), ir.DoubleType()
        bits = builder.bitcast(arguments[0], word)
        above = builder.sub(bits, word(HALF_ROOT))
        exponent = builder.ashr(above, word(52))
        mantissa = builder.add(builder.and_(above, word(MANTISSA)), word(HALF_ROOT))
        parts = [builder.bitcast(mantissa, real), builder.sitofp(exponent, real)]
        return context.make_tuple(builder, signature.return_type, parts)

    return types.UniTuple(types.float64, 2)(x), code


@register_jitable
def _log(x):
    m, e = _split(x)
    s = (m - 1.0) / (m + 1.0)
    return fma(e, 0.6931471805599453, s * _area(s * s))


@register_jitable
def _cosine_of_turns(v):
    """cos(2 pi v) for v in [0, 1): the quarter turn is taken off exactly."""
    quarter = nearest(v * 4.0)
    r = fma(quarter, -0.25, v)
    odd = quarter == 1.0 or quarter == 3.0
    size = r * _sine(r * r) if odd else _cosine(r * r)
    return -size if quarter == 1.0 or quarter == 2.0 else size


@jit
def _transform(numbers, out):
    widest()
    for i in range(out.size):
        u = np.float64(np.int64(numbers[2 * i] >> TOP)) * 2.0**-53
        v = np.float64(np.int64(numbers[2 * i + 1] >> TOP)) * 2.0**-53
        out[i] = np.sqrt(-2.0 * _log(1.0 - u)) * _cosine_of_turns(v)


@jit
def _normal(out, start, key0, key1):
    numbers = np.empty(2 * PIECE, np.uint64)
    for a in range(0, out.size, PIECE):
        b = min(a + PIECE, out.size)
        raws(numbers[: 2 * (b - a)], 2 * (start + a), key0, key1)
        _transform(numbers, out[a:b])


def normal(numbers: Stretch) -> np.ndarray:
    """`array.random.normal` of elements [start, stop)."""
    out = np.empty(numbers.stop - numbers.start)
    parts = parallel.cuts(out.size, parallel.GRAIN // 4)
    parallel.run(_normal, [(out[a:b], numbers.start + a, *numbers.keys) for a, b in parts])
    return out
