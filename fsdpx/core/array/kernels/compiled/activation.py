"""Numba implementations of activations, gated activations and sums over rows. Each forward or backward function takes
one pass over memory.

Sums over rows are computed in fixed blocks of rows, and are split over threads by columns.
`recompute_gelu_and_backward` computes GELU and its gradient in one pass, since both need the same exponential.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from fsdpx.core.array.jit import jit
from fsdpx.core.array.kernels import activation as plain
from fsdpx.core.array.kernels.activation import CUBIC, DENSITY, SLOPE, is_exact_gelu
from fsdpx.core.array.kernels.choice import register_compiled_kernel
from fsdpx.core.array.kernels.compiled.elements import (
    accumulation_dtype,
    as_contiguous,
    call_plain_kernel,
    round_to_dtype_of,
    to_float,
    view_bits_as_bfloat16,
)
from fsdpx.core.array.kernels.compiled.memory_order import make_flat_views_and_output
from fsdpx.core.array.kernels.compiled.scalar import (
    constant_like,
    exp_of_negative,
    gaussian_tail,
    unnormalized_gaussian_density,
    use_widest_vectors,
)
from fsdpx.core.array.lazy_numba import register_jitable
from fsdpx.core.array.parallel import parallel_for_columns, parallel_for_rows

__all__ = ["sum_columns_into"]


@register_jitable
def compute_sigmoid(x):
    e = exp_of_negative(-abs(x))
    one = constant_like(x, 1.0)
    return (e if x < 0 else one) / (one + e)


@register_jitable
def compute_gaussian_cdf(x, bell):
    below = gaussian_tail(x, bell)
    return below if x < 0 else constant_like(x, 1.0) - below


@register_jitable
def compute_tanh_argument(x):
    return x * (x * x * constant_like(x, CUBIC) + constant_like(x, 1.0)) * constant_like(x, SLOPE)


@register_jitable
def compute_gelu(x):
    """Return GELU(x) for a number x."""
    return x * compute_gaussian_cdf(x, unnormalized_gaussian_density(x))


@register_jitable
def compute_gelu_tanh(x):
    """Return the tanh approximation of GELU(x) for a number x."""
    return x * compute_sigmoid(compute_tanh_argument(x))


@register_jitable
def compute_relu(x):
    return constant_like(x, 0.0) if x <= 0 else x  # NaN stays NaN, because the condition is false for NaN


@register_jitable
def compute_silu(x):
    return x * compute_sigmoid(x)


@register_jitable
def compute_silu_derivative(x):
    s = compute_sigmoid(x)
    return s + x * s * (constant_like(s, 1.0) - s)


@register_jitable
def compute_gelu_derivative(x):
    bell = unnormalized_gaussian_density(x)
    return compute_gaussian_cdf(x, bell) + x * bell * constant_like(bell, DENSITY)


@register_jitable
def compute_gelu_tanh_derivative(x):
    s = compute_sigmoid(compute_tanh_argument(x))
    slope = (x * x * constant_like(s, 3.0 * CUBIC) + constant_like(s, 1.0)) * constant_like(s, SLOPE)
    return s + x * s * (constant_like(s, 1.0) - s) * slope


def _make_elementwise_loop(function: Any) -> Any:
    """Return a compiled loop that computes `y = function(x)` for each element."""

    def map_loop(x, y):
        use_widest_vectors()
        for i in range(x.size):
            y[i] = round_to_dtype_of(y, function(to_float(x[i])))

    return jit(map_loop, name=f"mapped_{function.__name__}")


_sigmoid_loop, _silu_loop, _gelu_loop, _gelu_tanh_loop = map(
    _make_elementwise_loop, (compute_sigmoid, compute_silu, compute_gelu, compute_gelu_tanh)
)
_relu_loop = _make_elementwise_loop(compute_relu)


@jit
def _relu_backward_loop(y, dy, dx):
    for i in range(y.size):
        dx[i] = dy[i] if to_float(y[i]) > 0 else dy.dtype.type(0)


def _make_backward_loop(derivative: Any) -> Any:
    """Return a compiled loop that computes `dx = dy * derivative(x)` for each element."""

    def slope_loop(x, dy, dx):
        use_widest_vectors()
        for i in range(x.size):
            dx[i] = round_to_dtype_of(dx, to_float(dy[i]) * derivative(to_float(x[i])))

    return jit(slope_loop, name=f"sloped_{derivative.__name__}")


_silu_backward_loop, _gelu_backward_loop = (
    _make_backward_loop(compute_silu_derivative),
    _make_backward_loop(compute_gelu_derivative),
)
_gelu_tanh_backward_loop = _make_backward_loop(compute_gelu_tanh_derivative)


def _run_elementwise(loop: Any, *arrays: np.ndarray) -> np.ndarray:
    """Run `loop(*arrays, result)` on 1-D views of `arrays` and of a new array, and return the new array."""
    flat, out = make_flat_views_and_output(*arrays)
    parallel_for_rows(loop, flat)
    return out


@register_compiled_kernel(lambda x, w, s: (x,))
def relu(xp: Any, x: np.ndarray) -> np.ndarray:
    return _run_elementwise(_relu_loop, x)


@register_compiled_kernel(lambda x, w, s: (x, x))
def relu_backward(xp: Any, y: np.ndarray, dy: np.ndarray) -> np.ndarray:
    return _run_elementwise(_relu_backward_loop, y, dy)


@register_compiled_kernel(lambda x, w, s: (x,))
def sigmoid(xp: Any, x: np.ndarray) -> np.ndarray:
    return _run_elementwise(_sigmoid_loop, x)


@register_compiled_kernel(lambda x, w, s: (x,))
def silu(xp: Any, x: np.ndarray) -> np.ndarray:
    return _run_elementwise(_silu_loop, x)


@register_compiled_kernel(lambda x, w, s: (x, x))
def silu_backward(xp: Any, x: np.ndarray, dy: np.ndarray) -> np.ndarray:
    return _run_elementwise(_silu_backward_loop, x, dy)


@register_compiled_kernel(lambda x, w, s: (x,))
def gelu(xp: Any, x: np.ndarray, approximate: str = "none") -> np.ndarray:
    return _run_elementwise(_gelu_loop if is_exact_gelu(approximate) else _gelu_tanh_loop, x)


@register_compiled_kernel(lambda x, w, s: (x, x))
def gelu_backward(xp: Any, x: np.ndarray, dy: np.ndarray, approximate: str = "none") -> np.ndarray:
    return _run_elementwise(_gelu_backward_loop if is_exact_gelu(approximate) else _gelu_tanh_backward_loop, x, dy)


def _make_gated_loop(function: Any) -> Any:
    """Return a compiled loop that computes `y = function(a) * b` for each element."""

    def gated_loop(a, b, y):
        use_widest_vectors()
        for i in range(a.size):
            y[i] = round_to_dtype_of(y, function(to_float(a[i])) * to_float(b[i]))

    return jit(gated_loop, name=f"gated_{function.__name__}")


def _make_gated_backward_loop(function: Any, derivative: Any) -> Any:
    """Return a compiled loop that computes `da = dy * b * derivative(a)` and `db = dy * function(a)` for each
    element."""

    def gated_backward_loop(a, b, dy, da, db):
        use_widest_vectors()
        for i in range(a.size):
            x, d = to_float(a[i]), to_float(dy[i])
            da[i] = round_to_dtype_of(da, d * to_float(b[i]) * derivative(x))
            db[i] = round_to_dtype_of(db, d * function(x))

    return jit(gated_backward_loop, name=f"gated_backward_{function.__name__}")


_loops = {
    "silu": (_make_gated_loop(compute_silu), _make_gated_backward_loop(compute_silu, compute_silu_derivative)),
    "gelu": (_make_gated_loop(compute_gelu), _make_gated_backward_loop(compute_gelu, compute_gelu_derivative)),
    "gelu tanh": (
        _make_gated_loop(compute_gelu_tanh),
        _make_gated_backward_loop(compute_gelu_tanh, compute_gelu_tanh_derivative),
    ),
}


@register_compiled_kernel(lambda x, w, s: (x, x))
def gated(xp: Any, a: np.ndarray, b: np.ndarray, form: str = "silu") -> np.ndarray:
    if form not in _loops or a.shape != b.shape or a.dtype != b.dtype:
        return call_plain_kernel(plain.gated, xp, a, b, form)
    flat, out = make_flat_views_and_output(a, b)
    parallel_for_rows(_loops[form][0], flat)
    return out


@register_compiled_kernel(lambda x, w, s: (x, x, x))
def gated_backward(
    xp: Any, a: np.ndarray, b: np.ndarray, dy: np.ndarray, form: str = "silu"
) -> tuple[np.ndarray, np.ndarray]:
    if form not in _loops or not a.shape == b.shape == dy.shape or not a.dtype == b.dtype == dy.dtype:
        return call_plain_kernel(plain.gated_backward, xp, a, b, dy, form)
    flat = [np.ascontiguousarray(x).reshape(-1) for x in (a, b, dy)]
    out = np.empty((2, *a.shape), a.dtype)
    parallel_for_rows(_loops[form][1], (*flat, out[0].reshape(-1), out[1].reshape(-1)))
    return out[0], out[1]


def _make_gelu_recompute_and_backward_loop(function: Any, derivative: Any) -> Any:
    """Return a compiled loop that, for each element, computes `y = function(x)` and multiplies dy by `derivative(x)` in
    place."""

    def recompute_loop(x, dy, y):
        use_widest_vectors()
        for i in range(x.size):
            v = to_float(x[i])
            y[i] = round_to_dtype_of(y, function(v))
            dy[i] = round_to_dtype_of(dy, to_float(dy[i]) * derivative(v))

    return jit(recompute_loop, name=f"both_{function.__name__}")


_gelu_recomputed, _gelu_tanh_recomputed = (
    _make_gelu_recompute_and_backward_loop(compute_gelu, compute_gelu_derivative),
    _make_gelu_recompute_and_backward_loop(compute_gelu_tanh, compute_gelu_tanh_derivative),
)


@register_compiled_kernel(lambda x, w, s: (x, x.copy()))
def recompute_gelu_and_backward(xp: Any, x: np.ndarray, dy: np.ndarray, approximate: str = "none") -> np.ndarray:
    if x.dtype == np.uint16 and dy.dtype != x.dtype:
        return call_plain_kernel(plain.recompute_gelu_and_backward, xp, x, dy, approximate)
    if not dy.flags.c_contiguous or dy.dtype != x.dtype:
        flat = np.array(dy, x.dtype, order="C")
        y = recompute_gelu_and_backward(xp, x, flat, approximate)
        dy[...] = flat
        return y
    x = np.ascontiguousarray(x)
    y = np.empty_like(x)
    loop = _gelu_recomputed if is_exact_gelu(approximate) else _gelu_tanh_recomputed
    parallel_for_rows(loop, (x.reshape(-1), dy.reshape(-1), y.reshape(-1)))
    return y


BLOCK_ROWS = 32  # number of rows per partial sum; rounding errors are proportional to rows / BLOCK_ROWS + BLOCK_ROWS


@jit
def _add_loop(a, b, out):
    for i in range(a.size):
        out[i] = round_to_dtype_of(out, to_float(a[i]) + to_float(b[i]))


@jit
def _add_bias_loop(y, bias):
    for i in range(y.shape[0]):
        for j in range(y.shape[1]):
            y[i, j] = round_to_dtype_of(y, to_float(y[i, j]) + to_float(bias[j]))


def _make_add_bias_and_apply_loop(function: Any) -> Any:
    """Return a compiled loop that adds bias to h in place, and computes `y = function(h)`."""

    def bias_loop(h, y, bias):
        use_widest_vectors()
        for i in range(h.shape[0]):
            for j in range(h.shape[1]):
                h[i, j] = round_to_dtype_of(h, to_float(h[i, j]) + to_float(bias[j]))
                y[i, j] = round_to_dtype_of(y, function(to_float(h[i, j])))

    return jit(bias_loop, name=f"biased_{function.__name__}")


_bias_gelu_loop, _bias_gelu_tanh_loop = (
    _make_add_bias_and_apply_loop(compute_gelu),
    _make_add_bias_and_apply_loop(compute_gelu_tanh),
)


@jit
def sum_columns_into(start, stop, rows, out, accumulate):
    into, block = out[start:stop], np.empty(stop - start, out.dtype)
    if not accumulate:
        into[:] = 0
    for first in range(0, rows.shape[0], BLOCK_ROWS):
        block[:] = 0
        last = min(first + BLOCK_ROWS, rows.shape[0])
        whole = first + (last - first) // 4 * 4
        for i in range(first, whole, 4):
            a, b, c, d = rows[i, start:stop], rows[i + 1, start:stop], rows[i + 2, start:stop], rows[i + 3, start:stop]
            for j in range(block.size):
                block[j] += (to_float(a[j]) + to_float(b[j])) + (to_float(c[j]) + to_float(d[j]))
        for i in range(whole, last):
            row = rows[i, start:stop]
            for j in range(block.size):
                block[j] += to_float(row[j])
        for j in range(block.size):
            into[j] += block[j]


def _reshape_to_rows(x: np.ndarray) -> np.ndarray:
    return x.reshape(math.prod(x.shape[:-1]), x.shape[-1])


@register_compiled_kernel(lambda x, w, s: (x, x))
def add(xp: Any, a: np.ndarray, b: np.ndarray) -> np.ndarray:
    if a.shape != b.shape:
        return call_plain_kernel(plain.add, xp, a, b)
    flat, out = make_flat_views_and_output(a, b)
    parallel_for_rows(_add_loop, flat)
    return out


@register_compiled_kernel(lambda x, w, s: (x, w))
def add_bias(xp: Any, y: np.ndarray, bias: np.ndarray) -> None:
    lead, fits = y.shape[: y.ndim - bias.ndim], bias.shape == y.shape[y.ndim - bias.ndim :] and bias.dtype == y.dtype
    if y.flags.c_contiguous and fits:
        parallel_for_rows(_add_bias_loop, (y.reshape(math.prod(lead), bias.size),), as_contiguous(bias).reshape(-1))
    else:
        call_plain_kernel(plain.add_bias, xp, y, bias)


@register_compiled_kernel(lambda x, w, s: (x, w))
def bias_gelu(xp: Any, h: np.ndarray, bias: np.ndarray | None, approximate: str = "none") -> np.ndarray:
    if bias is None or bias.shape != h.shape[-1:] or bias.dtype != h.dtype or not h.flags.c_contiguous:
        return call_plain_kernel(plain.bias_gelu, xp, h, bias, approximate)
    y = np.empty(h.shape, h.dtype)
    loop = _bias_gelu_loop if is_exact_gelu(approximate) else _bias_gelu_tanh_loop
    parallel_for_rows(loop, (_reshape_to_rows(h), _reshape_to_rows(y)), as_contiguous(bias))
    return y


@register_compiled_kernel(lambda x, w, s: (x, s))
def sum_rows(xp: Any, rows: np.ndarray, out: np.ndarray, accumulate: bool = True) -> None:
    rows = np.ascontiguousarray(rows).reshape(rows.shape[0], math.prod(rows.shape[1:]))
    if out.flags.c_contiguous and out.dtype == accumulation_dtype(rows.dtype):
        parallel_for_columns(sum_columns_into, rows, out.reshape(-1), accumulate)
        return
    total = np.empty(rows.shape[1], accumulation_dtype(rows.dtype))
    parallel_for_columns(sum_columns_into, rows, total, False)
    numbers = view_bits_as_bfloat16(out)
    total = total.reshape(out.shape)
    numbers[...] = total + numbers if accumulate else total
