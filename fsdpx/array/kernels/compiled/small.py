"""Products of small bfloat16 matrices: widened, multiplied by cblas in float32, and rounded, in one compiled call.

For them a call of another library takes longer than the product. All arrays are in C order, so that loops run through
memory in order."""

import numpy as np

from fsdpx.array.kernels.compiled.bits import put, real
from fsdpx.array.kernels.compiled.product import multiply
from fsdpx.native.compiled import jit
from fsdpx.native.late import register_jitable

__all__ = ["small_product"]


@register_jitable
def _wide(x, out):
    x, out = x.reshape(x.size), out.reshape(out.size)
    for i in range(x.size):
        out[i] = real(x[i])


@register_jitable
def _finish(out, total, bias, accumulate):
    """out = total + bias (none if it is empty), or out += total; rounded once."""
    for i in range(out.shape[0]):
        row, sums = out[i], total[i]
        if bias.size:
            for j in range(row.size):
                row[j] = put(row, sums[j] + real(bias[j]))
        elif accumulate:
            for j in range(row.size):
                row[j] = put(row, real(row[j]) + sums[j])
        else:
            for j in range(row.size):
                row[j] = put(row, sums[j])


@jit
def small_product(at, out, a, b, bias, accumulate, turned_a, turned_b):
    """out = a b + bias (none if it is empty), or out += a b, into bits or float32. a, b: bits; a^T and b^T where
    `turned`."""
    x, y, total = np.empty(a.shape, np.float32), np.empty(b.shape, np.float32), np.empty(out.shape, np.float32)
    one, zero = np.float32(1), np.float32(0)
    _wide(a, x)
    _wide(b, y)
    left, right = x.T if turned_a else x, y.T if turned_b else y
    fits = multiply(at, total, left, right, one, zero)
    if fits:
        _finish(out, total, bias, accumulate)
    return fits
