"""Numba implementations of ReLU variants and of the gradients of sigmoid and tanh. Each takes one pass over memory."""

from __future__ import annotations

from typing import Any

import numpy as np

from fsdpx.core.array.jit import jit
from fsdpx.core.array.kernels.choice import register_compiled_kernel
from fsdpx.core.array.kernels.compiled.activation import compute_sigmoid
from fsdpx.core.array.kernels.compiled.elements import round_to_dtype_of, to_float
from fsdpx.core.array.kernels.compiled.memory_order import make_flat_views_and_output
from fsdpx.core.array.kernels.compiled.scalar import (
    constant_like,
    exp_of_negative,
    expm1_of_nonpositive,
    log_one_plus_fraction,
    use_widest_vectors,
)
from fsdpx.core.array.lazy_numba import register_jitable
from fsdpx.core.array.parallel import parallel_for_rows

__all__ = [
    "elu", "elu_backward", "leaky_relu", "leaky_relu_backward", "sigmoid_backward", "softplus", "softplus_backward",
    "tanh_backward",
]  # fmt: skip


@register_jitable
def compute_leaky_relu(x, slope, _):
    return x if x > 0 else x * constant_like(x, slope)


@register_jitable
def compute_leaky_relu_backward(x, dy, slope, _):
    return dy if x > 0 else dy * constant_like(x, slope)


@register_jitable
def compute_elu(x, alpha, _):
    zero = constant_like(x, 0.0)
    return x if x > 0 else expm1_of_nonpositive(zero if x > 0 else x) * constant_like(x, alpha)


@register_jitable
def compute_elu_backward(x, dy, alpha, _):
    zero = constant_like(x, 0.0)
    return dy if x > 0 else dy * (exp_of_negative(zero if x > 0 else x) * constant_like(x, alpha))


@register_jitable
def compute_softplus(x, beta, threshold):
    steep, zero = x * constant_like(x, beta), constant_like(x, 0.0)
    y = (steep if steep > 0 else zero) + log_one_plus_fraction(exp_of_negative(-abs(steep)))
    return x if steep > constant_like(x, threshold) else y * constant_like(x, 1.0 / beta)


@register_jitable
def compute_softplus_backward(x, dy, beta, threshold):
    steep = x * constant_like(x, beta)
    return dy if steep > constant_like(x, threshold) else dy * compute_sigmoid(steep)


@register_jitable
def compute_sigmoid_backward(y, dy, _, __):
    return dy * (y * (constant_like(y, 1.0) - y))


@register_jitable
def compute_tanh_backward(y, dy, _, __):
    return dy * (constant_like(y, 1.0) - y * y)


def _make_loop(function: Any) -> Any:
    """Return a compiled loop that computes `y = function(x, first, second)` for each element."""

    def one_array_loop(x, y, first, second):
        use_widest_vectors()
        for i in range(x.size):
            y[i] = round_to_dtype_of(y, function(to_float(x[i]), first, second))

    return jit(one_array_loop, name=f"mapped_{function.__name__}")


def _make_backward_loop(function: Any) -> Any:
    """Return a compiled loop that computes `dx = function(x, dy, first, second)` for each element."""

    def two_arrays_loop(x, dy, dx, first, second):
        use_widest_vectors()
        for i in range(x.size):
            dx[i] = round_to_dtype_of(dx, function(to_float(x[i]), to_float(dy[i]), first, second))

    return jit(two_arrays_loop, name=f"mapped_{function.__name__}")


_leaky_relu_loop, _elu_loop, _softplus_loop = map(_make_loop, (compute_leaky_relu, compute_elu, compute_softplus))
_leaky_relu_backward_loop, _elu_backward_loop, _softplus_backward_loop = map(
    _make_backward_loop, (compute_leaky_relu_backward, compute_elu_backward, compute_softplus_backward)
)
_sigmoid_backward_loop, _tanh_backward_loop = map(
    _make_backward_loop, (compute_sigmoid_backward, compute_tanh_backward)
)


def _run_loop(loop: Any, arrays: tuple[np.ndarray, ...], first: float = 0.0, second: float = 0.0) -> np.ndarray:
    """Run `loop(*arrays, result, first, second)` on 1-D views of `arrays` and of a new array, and return the new
    array."""
    flat, out = make_flat_views_and_output(*arrays)
    parallel_for_rows(loop, flat, float(first), float(second))
    return out


@register_compiled_kernel(lambda x, w, s: (x, 0.1))
def leaky_relu(xp: Any, x: np.ndarray, slope: float) -> np.ndarray:
    return _run_loop(_leaky_relu_loop, (x,), slope)


@register_compiled_kernel(lambda x, w, s: (x, x, 0.1))
def leaky_relu_backward(xp: Any, x: np.ndarray, dy: np.ndarray, slope: float) -> np.ndarray:
    return _run_loop(_leaky_relu_backward_loop, (x, dy), slope)


@register_compiled_kernel(lambda x, w, s: (x, 1.0))
def elu(xp: Any, x: np.ndarray, alpha: float) -> np.ndarray:
    return _run_loop(_elu_loop, (x,), alpha)


@register_compiled_kernel(lambda x, w, s: (x, x, 1.0))
def elu_backward(xp: Any, x: np.ndarray, dy: np.ndarray, alpha: float) -> np.ndarray:
    return _run_loop(_elu_backward_loop, (x, dy), alpha)


@register_compiled_kernel(lambda x, w, s: (x, 1.0, 20.0))
def softplus(xp: Any, x: np.ndarray, beta: float, threshold: float) -> np.ndarray:
    return _run_loop(_softplus_loop, (x,), beta, threshold)


@register_compiled_kernel(lambda x, w, s: (x, x, 1.0, 20.0))
def softplus_backward(xp: Any, x: np.ndarray, dy: np.ndarray, beta: float, threshold: float) -> np.ndarray:
    return _run_loop(_softplus_backward_loop, (x, dy), beta, threshold)


@register_compiled_kernel(lambda x, w, s: (x, x))
def sigmoid_backward(xp: Any, y: np.ndarray, dy: np.ndarray) -> np.ndarray:
    return _run_loop(_sigmoid_backward_loop, (y, dy))


@register_compiled_kernel(lambda x, w, s: (x, x))
def tanh_backward(xp: Any, y: np.ndarray, dy: np.ndarray) -> np.ndarray:
    return _run_loop(_tanh_backward_loop, (y, dy))
