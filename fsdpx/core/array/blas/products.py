"""Matrix products of 2-D NumPy arrays, written to or added to an output array.

For a small layer, the Python code in this file takes as long as the BLAS call itself, so each function performs as few
lookups and allocations as possible.
"""

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import numpy as np

from fsdpx.core.array import parallel
from fsdpx.core.array.blas import libraries
from fsdpx.core.array.blas.libraries import ADDRESSES
from fsdpx.core.array.kernels import activation
from fsdpx.core.array.kernels.choice import has_numba
from fsdpx.core.array.kernels.half import cast_float_to_dtype, to_float32

__all__ = [
    "add_bias_and_round_total_into", "gemm", "linear_backward", "linear_backward_params", "linear_forward",
    "list_product_parts_per_thread", "try_multiply_small_bfloat16_into",
]  # fmt: skip

Array = np.ndarray
GradientTarget = tuple[Array, bool]
"""(array, add): the array for a gradient, and whether to add the gradient to it instead of overwriting it."""
MIN_PARALLEL_MULTIPLY_ADDS = 1 << 24
"""Minimum number of multiply-adds in a product that is split over threads. A product of this size takes 0.2 ms, seven
times as long as waking a thread."""
MAX_SMALL_MULTIPLY_ADDS = 1 << 20
"""Maximum number of multiply-adds in a product whose 16-bit matrices are converted to float32. For products this small,
conversion to float32 is as fast as calling a library for 16-bit products, because the call alone takes microseconds."""
# products are split at multiples of this number, so that threads share neither cache lines nor the library's tiles
PIECE_ALIGNMENT = 64


def gemm(out: Array, a: Array, b: Array, accumulate: bool = False) -> None:
    """Compute `out = a @ b`, or `out += a @ b` if `accumulate` is true, for a `(m, k)`, b `(k, n)` and out `(m, n)`.

    float32 and float64 arrays with unit stride in one of their dims, such as views and transposes, are passed to BLAS
    without a copy. Other arrays are passed to `numpy.matmul`.
    """
    if libraries.product_threads > 1 and (cut := list_product_parts_per_thread(out, a, b)):
        parallel.run_tasks(_multiply_piece_into, [(*piece, accumulate) for piece in cut])
    else:
        _multiply_piece_into(out, a, b, accumulate)


def add_bias_and_round_total_into(out: Array, total: Array, accumulate: bool, bias: Array | None) -> None:
    """Finish a product computed in float32: compute `out = total + bias`, or `out += total` if `accumulate` is true,
    rounded once to the dtype of `out`. The float32 array `total` is overwritten."""
    if bias is not None:
        total += to_float32(np, bias)
    if accumulate:
        total += to_float32(np, out)
    out[...] = total if out.dtype == np.float32 else cast_float_to_dtype(np, total, out.dtype)


def linear_forward(out: Array, x: Array, weight: Array, bias: Array | None) -> None:
    """Compute `out = x @ weight.T + bias` for x `(m, k)`, weight `(n, k)` and out `(m, n)`. out and bias must be
    contiguous."""
    dtype = out.dtype
    gemm_address = ADDRESSES[dtype.char]
    fits = (
        _can_multiply_compiled(gemm_address, x)
        and dtype is x.dtype is weight.dtype
        and (libraries.product_threads == 1 or not _is_large(out, x))
    )
    added = EMPTY_VECTORS[dtype.char] if bias is None else bias
    if fits and COMPILED["linear_forward"](gemm_address, out, x, weight, added):
        return
    gemm(out, x, weight.T)
    if bias is not None:
        activation.add_bias(np, out, bias)


def linear_backward_params(
    weight_grad: GradientTarget | None, bias_grad: GradientTarget | None, dy: Array, x: Array
) -> None:
    """Compute the parameter gradients of a linear layer: `dy.T @ x` for `weight_grad`, and the column sums of dy for
    `bias_grad`. A gradient whose target is None is not computed."""
    gemm_address = ADDRESSES[dy.dtype.char]
    alike = dy.dtype is x.dtype and _has_gradient_dtype(dy.dtype, weight_grad, bias_grad)
    if gemm_address and alike and dy.flags.c_contiguous and (libraries.product_threads == 1 or not _is_large(dy, x)):
        dweight, add_weight = weight_grad or (EMPTY_MATRICES[dy.dtype.char], False)
        dbias, add_bias = bias_grad or (EMPTY_VECTORS[dy.dtype.char], False)
        if COMPILED["linear_backward_params"](gemm_address, dweight, dbias, dy, x, add_weight, add_bias):
            return
    if weight_grad is not None:
        gemm(weight_grad[0], dy.T, x, weight_grad[1])
    if bias_grad is not None:
        activation.sum_rows(np, dy, *bias_grad)


def linear_backward(
    dx: Array, weight_grad: GradientTarget | None, bias_grad: GradientTarget | None, dy: Array, x: Array, weight: Array
) -> None:
    """Compute the input gradient of a linear layer, `dx = dy @ weight`, and the parameter gradients as in
    `linear_backward_params`."""
    dtype = dy.dtype
    gemm_address = ADDRESSES[dtype.char]
    alike = dtype is x.dtype is weight.dtype and _has_gradient_dtype(dtype, weight_grad, bias_grad)
    if gemm_address and alike and dy.flags.c_contiguous and (libraries.product_threads == 1 or not _is_large(dy, x)):
        dweight, add_weight = weight_grad or (EMPTY_MATRICES[dtype.char], False)
        dbias, add_bias = bias_grad or (EMPTY_VECTORS[dtype.char], False)
        if COMPILED["linear_backward"](gemm_address, dx, dweight, dbias, dy, x, weight, add_weight, add_bias):
            return
    gemm(dx, dy, weight)
    linear_backward_params(weight_grad, bias_grad, dy, x)


def _has_gradient_dtype(dtype: Any, weight_grad: GradientTarget | None, bias_grad: GradientTarget | None) -> bool:
    """Return whether the array of each gradient target has the dtype `dtype`, as the compiled code requires. A target
    that is None is ignored."""
    return (weight_grad is None or weight_grad[0].dtype is dtype) and (bias_grad is None or bias_grad[0].dtype is dtype)


def try_multiply_small_bfloat16_into(out: Array, a: Array, b: Array, accumulate: bool, bias: Array | None) -> bool:
    """Compute `out = a @ b + bias`, or `out += a @ b` if `accumulate` is true, for small bfloat16 matrices and a
    bfloat16 or float32 output. Return False without computing anything if the arguments are not supported."""
    gemm_address = find_float32_gemm_for_small_bfloat16(a, b)
    if not gemm_address or not out.flags.c_contiguous:
        return False
    turned = [not array.flags.c_contiguous for array in (a, b)]
    a, b = (array.T if turn else array for array, turn in zip((a, b), turned, strict=True))
    if not (a.flags.c_contiguous and b.flags.c_contiguous):
        return False
    into, shift = (
        out if out.dtype.itemsize == 4 else view_as_uint16(out),
        EMPTY_BITS if bias is None else view_as_uint16(bias),
    )
    given = gemm_address, into, view_as_uint16(a), view_as_uint16(b), shift, accumulate, *turned
    return bool(COMPILED["try_multiply_small_bfloat16_into"](*given))


def find_float32_gemm_for_small_bfloat16(a: Array, b: Array) -> int:
    """Return the address of the float32 gemm function to use for small bfloat16 matrices `(m, k)` and `(k, n)`, which
    the caller must first convert to float32. Return 0 if the matrices are large or have a dtype other than bfloat16."""
    few = a.shape[0] * a.shape[1] * b.shape[1] <= MAX_SMALL_MULTIPLY_ADDS
    return ADDRESSES["f"] if few and a.dtype == b.dtype and a.dtype.name == "bfloat16" else 0


def view_as_uint16(a: Array) -> Array:
    return a.view(np.uint16)


def _multiply_piece_into(out: Array, a: Array, b: Array, accumulate: bool) -> None:
    gemm_address = ADDRESSES[out.dtype.char]
    if (
        _can_multiply_compiled(gemm_address, a)
        and out.dtype is a.dtype is b.dtype
        and COMPILED["gemm"](gemm_address, out, a, b, accumulate)
    ):
        return
    # suppress NumPy's warnings, because BLAS issues none for the same product
    with np.errstate(over="ignore", invalid="ignore"):
        if accumulate:
            out += np.matmul(a, b)
        else:
            np.matmul(a, b, out=out)


def _can_multiply_compiled(gemm_address: int, a: Array) -> bool:
    """Return whether to try compiled code for a product whose left matrix is `a`. The compiled code calls the gemm
    function at `gemm_address`. If the address is 0, it computes the product without BLAS. Even if the result is True,
    the compiled code may still reject the arrays."""
    return gemm_address != 0 or (a.shape[0] <= libraries.MAX_ROWS_WITHOUT_BLAS and a.dtype.char in "fd" and has_numba())


def _is_large(a: Array, b: Array) -> bool:
    """Return whether the product a @ b is large enough to be split over threads."""
    return a.shape[0] * a.shape[1] * b.shape[1] >= MIN_PARALLEL_MULTIPLY_ADDS


def list_product_parts_per_thread(out: Array, a: Array, b: Array) -> list[tuple[Array, Array, Array]]:
    """Split a matrix product along the longer dim of `out` into one part (out, a, b) per thread. Return an empty list
    if the product is too small to be split.

    The split can change the last bits of the result, since a library may add long sums in an order that depends on the
    shape.
    """
    (m, n), count = out.shape, libraries.product_threads
    if not _is_large(a, b) or max(m, n) < count * PIECE_ALIGNMENT:
        return []
    edges = [max(m, n) * i // count // PIECE_ALIGNMENT * PIECE_ALIGNMENT for i in range(count)] + [max(m, n)]
    parts = [slice(start, stop) for start, stop in pairwise(edges)]
    return [(out[p], a[p], b) if m >= n else (out[:, p], a, b[:, p]) for p in parts]


class CompiledProducts(dict[str, Callable[..., Any]]):
    """A dict that maps names to compiled functions for matrix products. Each function is compiled or loaded on first
    use."""

    def __missing__(self, name: str) -> Callable[..., Any]:
        from fsdpx.core.array.jit import specialize
        from fsdpx.core.array.kernels.compiled import product

        if name.startswith("multiply_small"):
            self[name] = _compile_small_product(name)
        else:
            self[name] = specialize(getattr(product, name), ARGUMENTS[name])
        return self[name]


def _compile_small_product(name: str) -> Callable[..., Any]:
    from fsdpx.core.array.jit import specialize
    from fsdpx.core.array.kernels.compiled.product import try_multiply_small_bfloat16_into

    results = ("float32", "uint16") if name == "try_multiply_small_bfloat16_into" else ("float32",)
    return specialize(try_multiply_small_bfloat16_into, ARGUMENTS[name], results)


COMPILED = CompiledProducts()
ARGUMENTS = {
    "gemm": "i A2 A2r A2r b",
    "linear_forward": "i C2 A2r A2r C1r",
    "linear_backward_params": "i A2 C1 C2r A2r b b",
    "linear_backward": "i A2 A2 C1 C2r A2r A2r b b",
    "try_multiply_small_bfloat16_into": "i C2 C2hr C2hr C1hr b b b",
}
"""Types of the arguments of the compiled functions, in the notation of `specialize`."""
EMPTY_BITS = np.empty(0, np.uint16)
EMPTY_VECTORS = {char: np.empty(0, char) for char in "fd"}
EMPTY_MATRICES = {char: np.empty((0, 0), char) for char in "fd"}
