"""Loops over matrices in few bits: products with a few rows, and rows widened to a float format.

Each loop runs over slices, which is what LLVM turns into vectors of numbers that are widened as they are read."""

from typing import Any

import numpy as np

from fsdpx.array.kernels.compiled.bits import put
from fsdpx.native.compiled import REORDER
from fsdpx.native.tools import jit

__all__ = ["apart", "dots", "together", "widen", "widen_levels"]

DIGIT = np.float32(254)
"""A rest of half a unit at most is 127 units of the next digit."""
LEAST = np.float32(2.0**-100)


@jit(fastmath=REORDER)
def dots(out: Any, stored: Any, scales: Any, x: Any, block: int) -> None:
    """out[j, i] = row j of the matrix times x[i]; blocks of `block` elements share a scale."""
    numbers = stored.view(np.int8)
    columns = x.shape[1]
    for j in range(scales.shape[0]):
        for i in range(x.shape[0]):
            total = np.float32(0)
            for b in range(scales.shape[1]):
                some = x[i, b * block : min(b * block + block, columns)]
                row = numbers[j, b * block : min(b * block + block, columns)]
                part = np.float32(0)
                for n in range(some.size):
                    part += some[n] * np.float32(row[n])
                total += part * scales[j, b]
            out[j, i] = total


@jit
def widen(out: Any, stored: Any, scales: Any, block: int) -> None:
    """out = the matrix, in float32 or, as its bits, in bfloat16."""
    numbers = stored.view(np.int8)
    columns = out.shape[1]
    for j in range(out.shape[0]):
        for b in range(scales.shape[1]):
            scale = scales[j, b]
            into = out[j, b * block : min(b * block + block, columns)]
            row = numbers[j, b * block : min(b * block + block, columns)]
            for n in range(into.size):
                into[n] = put(out, np.float32(row[n]) * scale)


@jit
def widen_levels(out: Any, stored: Any, scales: Any, levels: Any, block: int) -> None:
    """`widen` of codes of 4 bits, two in a byte, the first in its upper half; `block` is even."""
    columns = out.shape[1]
    own = np.empty(16, np.float32)
    for j in range(out.shape[0]):
        row = stored[j]
        for b in range(scales.shape[1]):
            for n in range(16):
                own[n] = levels[n] * scales[j, b]
            first, stop = b * block, min(b * block + block, columns)
            for n in range(first, stop - 1, 2):
                pair = row[n >> 1]
                out[j, n] = put(out, own[pair >> 4])
                out[j, n + 1] = put(out, own[pair & 15])
            if (stop - first) & 1:
                out[j, stop - 1] = put(out, own[row[(stop - 1) >> 1] >> 4])


@jit
def apart(x: Any, digits: Any, unit: Any) -> bool:
    """x[i] as three digits from -127 to 127, the first of unit[i], each next one of 1/254 of it: the rest is 2^-22 of
    the row's largest number at most. False if there is NaN or Inf."""
    bits = x.view(np.int32)
    top = np.zeros(1, np.int32)
    for i in range(x.shape[0]):
        row, some = x[i], bits[i]
        most = np.int32(0)
        for n in range(some.size):
            most = max(most, some[n] & np.int32(0x7FFFFFFF))
        if most >= np.int32(0x7F800000):
            return False
        top[0] = most
        scale = max(top.view(np.float32)[0], LEAST) / np.float32(127)
        unit[i] = scale
        first, second, third = digits[0, i], digits[1, i], digits[2, i]
        for n in range(row.size):
            rest = row[n] / scale
            digit = np.rint(rest)
            first[n] = np.int8(digit)
            rest = (rest - digit) * DIGIT
            digit = np.rint(rest)
            second[n] = np.int8(digit)
            third[n] = np.int8(np.rint((rest - digit) * DIGIT))
    return True


@jit
def together(out: Any, products: Any, unit: Any, scales: Any, bias: Any) -> None:
    """out = what the products of the three digits of x stand for, plus bias (none if it is empty)."""
    for i in range(out.shape[0]):
        row, first, second, third = out[i], products[0, i], products[1, i], products[2, i]
        for j in range(row.size):
            total = first[j] + (second[j] + third[j] / DIGIT) / DIGIT
            row[j] = total * scales[j] * unit[i]
        if bias.size:
            for j in range(row.size):
                row[j] += bias[j]
