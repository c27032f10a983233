"""Matrix products computed by a cblas gemm function, which is called by its address. In the same call, the forward pass
of a linear layer also adds the bias, and the backward pass also computes the gradient of the bias. Small bfloat16
matrices are converted, multiplied in float32, and rounded in one compiled call.

The address is passed as an argument, because it differs between processes, whereas compiled code is cached on disk.
For small matrices, calling another library takes longer than the product itself. All arrays in small products are in C
order, so that loops access memory in order."""

from __future__ import annotations

from typing import Any

import numpy as np

from fsdpx.core.array.blas.libraries import MAX_ROWS_WITHOUT_BLAS
from fsdpx.core.array.jit import jit
from fsdpx.core.array.kernels.compiled.activation import sum_columns_into
from fsdpx.core.array.kernels.compiled.elements import (
    assume_unit_stride,
    dot_product,
    prefetch_array_at_byte_offset,
    round_to_dtype_of,
    to_float,
)
from fsdpx.core.array.kernels.compiled.scalar import use_widest_vectors
from fsdpx.core.array.lazy_numba import intrinsic, ir, register_jitable, types

__all__ = [
    "call_cblas", "gemm", "linear_backward", "linear_backward_params", "linear_forward", "try_multiply_matrices_into",
    "try_multiply_small_bfloat16_into",
]  # fmt: skip

ROW_MAJOR, PLAIN, TURNED = 101, 111, 112
PREFETCH_BYTES = 8192
"""Distance in bytes by which a matrix is prefetched ahead of its use. In measurements, data arrived too late with a
smaller distance, and was evicted before use with a larger one."""


@intrinsic
def call_cblas(typingctx: Any, address: Any, ta: Any, tb: Any, m: Any, n: Any, k: Any, alpha: Any, a: Any, lda: Any,
          b: Any, ldb: Any, beta: Any, c: Any, ldc: Any) -> Any:  # fmt: skip
    """Call the function cblas_?gemm(row major, ta, tb, m, n, k, alpha, a, lda, b, ldb, beta, c, ldc) at `address`.
    Sizes are int64."""

    def emit_ir(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        enum, size, real = ir.IntType(32), ir.IntType(64), arguments[6].type
        kinds = [enum, enum, enum, size, size, size, real, size, size, size, size, real, size, size]
        function = builder.inttoptr(arguments[0], ir.FunctionType(ir.VoidType(), kinds).as_pointer())
        flags = [builder.trunc(flag, enum) for flag in arguments[1:3]]
        builder.call(function, [enum(ROW_MAJOR), *flags, *arguments[3:]])
        return context.get_dummy_value()

    return types.void(address, ta, tb, m, n, k, alpha, a, lda, b, ldb, beta, c, ldc), emit_ir


@register_jitable
def _find_transpose_flag_and_leading_dim(size, rows, columns, down, across):
    """Return the transpose flag and the leading dimension that must be passed to cblas for a matrix. The leading
    dimension is 0 if neither dim has unit stride.

    The matrix is described by its item size, its shape, and its strides in bytes (`down` from row to row, `across`
    from column to column). Numbers are passed instead of an array, so that this function is compiled once for all
    dtypes and layouts."""
    if (across == size or columns == 1) and down % size == 0 and (down >= columns * size or rows == 1):
        return PLAIN, max(down // size, columns, 1)
    if (down == size or rows == 1) and across % size == 0 and (across >= rows * size or columns == 1):
        return TURNED, max(across // size, rows, 1)
    return PLAIN, 0


@register_jitable
def _multiply_few_rows_into(out, a, b):
    """Compute `out = a @ b` for a matrix a with few rows and a matrix b with contiguous columns. Each element has the
    same bits for any number of rows.

    The order of additions depends on the vector width. Callers whose results must be bitwise equal therefore all call
    `use_widest_vectors`, so that they use the same width.
    """
    for j in range(out.shape[1]):
        column = assume_unit_stride(b[:, j])
        prefetch_array_at_byte_offset(column, PREFETCH_BYTES)
        for i in range(out.shape[0]):
            out[i, j] = dot_product(assume_unit_stride(a[i]), column)


@register_jitable
def try_multiply_matrices_into(address, out, a, b, alpha, beta):
    """Compute `out = alpha * a @ b + beta * out` for 2-D arrays. Return False without computing anything if BLAS does
    not support their shapes or strides, or if BLAS is needed and `address` is 0."""
    m, n, k = out.shape[0], out.shape[1], a.shape[1]
    if a.shape[0] != m or b.shape[0] != k or b.shape[1] != n:
        return False
    ta, lda = _find_transpose_flag_and_leading_dim(a.itemsize, m, k, a.strides[0], a.strides[1])
    tb, ldb = _find_transpose_flag_and_leading_dim(b.itemsize, k, n, b.strides[0], b.strides[1])
    to, ldc = _find_transpose_flag_and_leading_dim(out.itemsize, m, n, out.strides[0], out.strides[1])
    if lda == 0 or ldb == 0 or ldc == 0:
        return False
    if m <= MAX_ROWS_WITHOUT_BLAS and to == PLAIN and ta == PLAIN and tb == TURNED and alpha == 1 and beta == 0:
        _multiply_few_rows_into(out, a, b)
    elif address == 0:
        return False
    elif to == PLAIN:
        call_cblas(address, ta, tb, m, n, k, alpha, a.ctypes.data, lda, b.ctypes.data, ldb, beta, out.ctypes.data, ldc)
    else:  # `out` is transposed: compute `out^T = b^T @ a^T`
        ta, tb = PLAIN + TURNED - ta, PLAIN + TURNED - tb
        call_cblas(address, tb, ta, n, m, k, alpha, b.ctypes.data, ldb, a.ctypes.data, lda, beta, out.ctypes.data, ldc)
    return True


@jit
def gemm(address, out, a, b, accumulate):
    use_widest_vectors()
    one = out.dtype.type(1)
    return try_multiply_matrices_into(address, out, a, b, one, one if accumulate else out.dtype.type(0))


@jit
def linear_forward(address, out, x, weight, bias):
    """Compute `out = x @ weight.T + bias` with the gemm function at `address`. If `bias` is empty, there is no bias.
    Return False if the arrays are not supported."""
    use_widest_vectors()
    one, zero = out.dtype.type(1), out.dtype.type(0)
    if bias.size not in (0, out.shape[1]) or not try_multiply_matrices_into(address, out, x, weight.T, one, zero):
        return False
    if bias.size:
        for i in range(out.shape[0]):
            for j in range(bias.size):
                out[i, j] += bias[j]
    return True


@jit
def linear_backward_params(address, dweight, dbias, dy, x, accumulate_weight, accumulate_bias):
    """Write `dy.T @ x` to dweight, and the column sums of dy to dbias. If `accumulate_weight` or `accumulate_bias` is
    true, add to that array instead. An empty dweight or dbias is skipped. Return False if the arrays are not
    supported."""
    one, zero = dy.dtype.type(1), dy.dtype.type(0)
    if dbias.size not in (0, dy.shape[1]):
        return False
    if dweight.size and not try_multiply_matrices_into(
        address, dweight, dy.T, x, one, one if accumulate_weight else zero
    ):
        return False
    if dbias.size:
        sum_columns_into(0, dbias.size, dy, dbias, accumulate_bias)
    return True


@jit
def linear_backward(address, dx, dweight, dbias, dy, x, weight, add_weight, add_bias):
    """Compute `dx = dy @ weight`, and the parameter gradients as in `linear_backward_params`. `add_weight` and
    `add_bias` correspond to `accumulate_weight` and `accumulate_bias` of that function. Return False if the arrays are
    not supported."""
    one, zero = dy.dtype.type(1), dy.dtype.type(0)
    if not try_multiply_matrices_into(address, dx, dy, weight, one, zero):
        return False
    return linear_backward_params(address, dweight, dbias, dy, x, add_weight, add_bias)


@register_jitable
def _widen_matrix_into(x, out):
    x, out = x.reshape(x.size), out.reshape(out.size)
    for i in range(x.size):
        out[i] = to_float(x[i])


@register_jitable
def _round_total_into(out, total, bias, accumulate):
    """Compute `out = total + bias`, or `out += total` if `accumulate` is true, rounded once. If `bias` is empty, there
    is no bias."""
    for i in range(out.shape[0]):
        row, sums = out[i], total[i]
        if bias.size:
            for j in range(row.size):
                row[j] = round_to_dtype_of(row, sums[j] + to_float(bias[j]))
        elif accumulate:
            for j in range(row.size):
                row[j] = round_to_dtype_of(row, to_float(row[j]) + sums[j])
        else:
            for j in range(row.size):
                row[j] = round_to_dtype_of(row, sums[j])


@jit
def try_multiply_small_bfloat16_into(address, out, a, b, bias, accumulate, transposed_a, transposed_b):
    """Compute `out = a @ b + bias`, or `out += a @ b` if `accumulate` is true. If `bias` is empty, there is no bias.
    Return False if the arrays are not supported.

    a and b contain bfloat16 bits, and `out` contains bfloat16 bits or float32 numbers. If `transposed_a` or
    `transposed_b` is true, that matrix is passed transposed.
    """
    x, y, total = np.empty(a.shape, np.float32), np.empty(b.shape, np.float32), np.empty(out.shape, np.float32)
    one, zero = np.float32(1), np.float32(0)
    _widen_matrix_into(a, x)
    _widen_matrix_into(b, y)
    left, right = x.T if transposed_a else x, y.T if transposed_b else y
    fits = try_multiply_matrices_into(address, total, left, right, one, zero)
    if fits:
        _round_total_into(out, total, bias, accumulate)
    return fits
