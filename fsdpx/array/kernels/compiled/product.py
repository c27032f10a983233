"""Calls of cblas gemm by address, fused with biases in forward and their gradients in backward.

The address is an argument, because it differs between processes and compiled code is cached on disk."""

from typing import Any

from fsdpx.array.kernels.compiled.addition import column_sums
from fsdpx.native.tools import extending, ir, jit, register_jitable, types

__all__ = ["affine", "cblas", "gemm", "line", "line_backward", "linear_backward", "linear_gradients", "multiply"]

intrinsic: Any = extending.intrinsic
ROW_MAJOR, PLAIN, TURNED = 101, 111, 112


@intrinsic
def cblas(typingctx: Any, at: Any, ta: Any, tb: Any, m: Any, n: Any, k: Any, alpha: Any, a: Any, lda: Any, b: Any,
          ldb: Any, beta: Any, c: Any, ldc: Any) -> Any:  # fmt: skip
    """cblas_?gemm(row major, ta, tb, m, n, k, alpha, a, lda, b, ldb, beta, c, ldc) at address `at`; sizes are int64."""

    def code(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        enum, size, real = ir.IntType(32), ir.IntType(64), arguments[6].type
        kinds = [enum, enum, enum, size, size, size, real, size, size, size, size, real, size, size]
        function = builder.inttoptr(arguments[0], ir.FunctionType(ir.VoidType(), kinds).as_pointer())
        flags = [builder.trunc(flag, enum) for flag in arguments[1:3]]
        builder.call(function, [enum(ROW_MAJOR), *flags, *arguments[3:]])
        return context.get_dummy_value()

    return types.void(at, ta, tb, m, n, k, alpha, a, lda, b, ldb, beta, c, ldc), code


@register_jitable
def _order(size, rows, columns, down, across):
    """The transpose flag of a matrix for cblas and its leading dimension, 0 if neither dim has unit stride. Of numbers,
    not of an array, so that it is compiled once for all formats and layouts."""
    if (across == size or columns == 1) and down % size == 0 and (down >= columns * size or rows == 1):
        return PLAIN, max(down // size, columns, 1)
    if (down == size or rows == 1) and across % size == 0 and (across >= rows * size or columns == 1):
        return TURNED, max(across // size, rows, 1)
    return PLAIN, 0


@register_jitable
def multiply(at, out, a, b, alpha, beta):
    """out = alpha a b + beta out, 2-D; False, without effect, if BLAS cannot take their shapes or strides."""
    m, n, k = out.shape[0], out.shape[1], a.shape[1]
    if a.shape[0] != m or b.shape[0] != k or b.shape[1] != n:
        return False
    ta, lda = _order(a.itemsize, m, k, a.strides[0], a.strides[1])
    tb, ldb = _order(b.itemsize, k, n, b.strides[0], b.strides[1])
    to, ldc = _order(out.itemsize, m, n, out.strides[0], out.strides[1])
    if lda == 0 or ldb == 0 or ldc == 0:
        return False
    if to == PLAIN:
        cblas(at, ta, tb, m, n, k, alpha, a.ctypes.data, lda, b.ctypes.data, ldb, beta, out.ctypes.data, ldc)
    else:  # out^T = b^T a^T
        ta, tb = PLAIN + TURNED - ta, PLAIN + TURNED - tb
        cblas(at, tb, ta, n, m, k, alpha, b.ctypes.data, ldb, a.ctypes.data, lda, beta, out.ctypes.data, ldc)
    return True


@jit
def gemm(at, out, a, b, accumulate):
    one = out.dtype.type(1)
    return multiply(at, out, a, b, one, one if accumulate else out.dtype.type(0))


@jit
def affine(at, out, x, weight, bias):
    """out = x weight^T + bias (none if it is empty)."""
    one, zero = out.dtype.type(1), out.dtype.type(0)
    if bias.size not in (0, out.shape[1]) or not multiply(at, out, x, weight.T, one, zero):
        return False
    if bias.size:
        for i in range(out.shape[0]):
            for j in range(bias.size):
                out[i, j] += bias[j]
    return True


@jit
def linear_gradients(at, dweight, dbias, dy, x, accumulate_weight, accumulate_bias):
    """dweight (+)= dy^T x and dbias (+)= the column sums of dy; an empty one is left out."""
    one, zero = dy.dtype.type(1), dy.dtype.type(0)
    if dbias.size not in (0, dy.shape[1]):
        return False
    if dweight.size and not multiply(at, dweight, dy.T, x, one, one if accumulate_weight else zero):
        return False
    if dbias.size:
        column_sums(0, dbias.size, dy, dbias, accumulate_bias)
    return True


@jit
def linear_backward(at, dx, dweight, dbias, dy, x, weight, add_weight, add_bias):
    """dx = dy weight, and `linear_gradients`."""
    one, zero = dy.dtype.type(1), dy.dtype.type(0)
    if not multiply(at, dx, dy, weight, one, zero):
        return False
    return linear_gradients(at, dweight, dbias, dy, x, add_weight, add_bias)


@register_jitable
def _onward(at, out, x, weight, bias):
    fits = multiply(at, out, x, weight.T, out.dtype.type(1), out.dtype.type(0))
    for i in range(out.shape[0]):
        for j in range(bias.size):
            out[i, j] += bias[j]
    return fits


@jit
def line(at, out, x, weights, biases):
    """out[i] = out[i - 1] weights[i]^T + biases[i], out[-1] being x."""
    fits = _onward(at, out[0], x, weights[0], biases[0])
    for i in range(1, out.shape[0]):
        fits = fits and _onward(at, out[i], out[i - 1], weights[i], biases[i])
    return fits


@register_jitable
def _back(at, dx, dy, x, weight, dweight, dbias, accumulate):
    one, zero = dx.dtype.type(1), dx.dtype.type(0)
    fits = multiply(at, dx, dy, weight, one, zero)
    fits = fits and multiply(at, dweight, dy.T, x, one, one if accumulate else zero)
    column_sums(0, dbias.size, dy, dbias, accumulate)
    return fits


@jit
def line_backward(at, dx, x, out, dy, weights, biases, dweights, dbiases, accumulate):
    """Gradients of `line`, of at least two layers; that of x ends in dx[0]. dx: (2, rows, width), taken in turn."""
    last = out.shape[0] - 1
    fits = _back(at, dx[last % 2], dy, out[last - 1], weights[last], dweights[last], dbiases[last], accumulate)
    for i in range(last - 1, 0, -1):
        into, given = dx[i % 2], dx[(i + 1) % 2]
        fits = fits and _back(at, into, given, out[i - 1], weights[i], dweights[i], dbiases[i], accumulate)
    return fits and _back(at, dx[0], dx[1], x, weights[0], dweights[0], dbiases[0], accumulate)
