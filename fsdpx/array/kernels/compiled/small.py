"""Products of small bfloat16 matrices: widened, multiplied by cblas in float32, and rounded, in one compiled call.

For them a call of another library takes longer than the product. A line of layers multiplies by the same calls as its
layers one by one, so the bits are the same. All arrays are in C order, so that loops run through memory in order."""

import numpy as np

from fsdpx.array.kernels.compiled.addition import column_sums
from fsdpx.array.kernels.compiled.bits import put, real
from fsdpx.array.kernels.compiled.product import multiply
from fsdpx.native.tools import jit, register_jitable

__all__ = ["small_line", "small_line_backward", "small_product"]


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


@jit
def small_line(at, out, x, layers):
    """out[i] = out[i - 1] weight_i^T + bias_i, out[-1] being x. layers: a row each, the weight and then the bias."""
    rows, width = x.shape
    wide, weight = np.empty((rows, width), np.float32), np.empty((width, width), np.float32)
    total, fits = np.empty((rows, width), np.float32), True
    _wide(x, wide)
    for i in range(out.shape[0]):
        _wide(layers[i, : width * width], weight)
        fits = fits and multiply(at, total, wide, weight.T, np.float32(1), np.float32(0))
        _finish(out[i], total, layers[i, width * width :], False)
        _wide(out[i], wide)
    return fits


@jit
def small_line_backward(at, dx, x, out, dy, layers, grads, accumulate):
    """Gradients of `small_line`, of at least two layers; that of x ends in dx[0]. dx: bits of (2, rows, width), taken
    in turn. grads: float32, as `layers`."""
    rows, width = x.shape
    given, before = np.empty((rows, width), np.float32), np.empty((rows, width), np.float32)
    weight, sums = np.empty((width, width), np.float32), np.empty((width, width), np.float32)
    total, none = np.empty((rows, width), np.float32), grads[0, :0]
    one, zero, fits, last = np.float32(1), np.float32(0), True, out.shape[0] - 1
    for i in range(last, -1, -1):
        dweight, dbias = grads[i, : width * width].reshape(width, width), grads[i, width * width :]
        if i == last:
            _wide(dy, given)
            column_sums(0, width, dy, dbias, accumulate)
        else:
            _wide(dx[(i + 1) % 2], given)
            column_sums(0, width, dx[(i + 1) % 2], dbias, accumulate)
        if i > 0:
            _wide(out[i - 1], before)
        else:
            _wide(x, before)
        _wide(layers[i, : width * width], weight)
        fits = fits and multiply(at, total, given, weight, one, zero)
        _finish(dx[i % 2], total, none, False)
        fits = fits and multiply(at, sums, given.T, before, one, zero)
        _finish(dweight, sums, none, accumulate)
    return fits
