"""Activations as one pass over memory each."""

from typing import Any

import numpy as np
from numba.extending import register_jitable

from fsdpx.array.kernels.activation import CUBIC, DENSITY, SLOPE, exact
from fsdpx.array.kernels.compiled.jit import jit
from fsdpx.array.kernels.compiled.scalar import density, exp, like, tail

__all__ = ["gelu", "gelu_backward", "sigmoid", "silu", "silu_backward"]


@register_jitable
def _sigmoid(x):
    e = exp(-abs(x))
    one = like(x, 1.0)
    return (e if x < 0 else one) / (one + e)


@register_jitable
def _integral(x, bell):
    below = tail(x, bell)
    return below if x < 0 else like(x, 1.0) - below


@register_jitable
def _argument(x):
    return x * (x * x * like(x, CUBIC) + like(x, 1.0)) * like(x, SLOPE)


@jit
def _sigmoid_loop(x, y):
    for i in range(x.size):
        y[i] = _sigmoid(x[i])


@jit
def _silu_loop(x, y):
    for i in range(x.size):
        y[i] = x[i] * _sigmoid(x[i])


@jit
def _silu_backward_loop(x, dy, dx):
    for i in range(x.size):
        s = _sigmoid(x[i])
        dx[i] = dy[i] * (s + x[i] * s * (like(s, 1.0) - s))


@jit
def _gelu_loop(x, y):
    for i in range(x.size):
        y[i] = x[i] * _integral(x[i], density(x[i]))


@jit
def _gelu_backward_loop(x, dy, dx):
    for i in range(x.size):
        bell = density(x[i])
        dx[i] = dy[i] * (_integral(x[i], bell) + x[i] * bell * like(bell, DENSITY))


@jit
def _gelu_tanh_loop(x, y):
    for i in range(x.size):
        y[i] = x[i] * _sigmoid(_argument(x[i]))


@jit
def _gelu_tanh_backward_loop(x, dy, dx):
    for i in range(x.size):
        s = _sigmoid(_argument(x[i]))
        slope = (x[i] * x[i] * like(s, 3.0 * CUBIC) + like(s, 1.0)) * like(s, SLOPE)
        dx[i] = dy[i] * (s + x[i] * s * (like(s, 1.0) - s) * slope)


def _over(loop: Any, *arrays: np.ndarray) -> np.ndarray:
    """Run `loop(*flat arrays, flat result)`."""
    flat = [np.ascontiguousarray(a).reshape(-1) for a in arrays]
    out = np.empty_like(flat[0])
    loop(*flat, out)
    return out.reshape(arrays[0].shape)


def sigmoid(xp: Any, x: np.ndarray) -> np.ndarray:
    return _over(_sigmoid_loop, x)


def silu(xp: Any, x: np.ndarray) -> np.ndarray:
    return _over(_silu_loop, x)


def silu_backward(xp: Any, x: np.ndarray, dy: np.ndarray) -> np.ndarray:
    return _over(_silu_backward_loop, x, dy)


def gelu(xp: Any, x: np.ndarray, approximate: str = "none") -> np.ndarray:
    return _over(_gelu_loop if exact(approximate) else _gelu_tanh_loop, x)


def gelu_backward(xp: Any, x: np.ndarray, dy: np.ndarray, approximate: str = "none") -> np.ndarray:
    return _over(_gelu_backward_loop if exact(approximate) else _gelu_tanh_backward_loop, x, dy)
