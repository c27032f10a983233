"""Activations, each in one pass over memory."""

from typing import Any

import numpy as np

from fsdpx.array.kernels.activation import CUBIC, DENSITY, SLOPE, exact
from fsdpx.array.kernels.compiled.arrays import alike
from fsdpx.array.kernels.compiled.bits import put, real
from fsdpx.array.kernels.compiled.scalar import density, exp, like, tail, widest
from fsdpx.array.parallel import over
from fsdpx.native.compiled import jit
from fsdpx.native.late import register_jitable

__all__ = [
    "argument_of", "gelu", "gelu_backward", "gelu_of", "gelu_tanh_of", "gelu_tanh_slope", "integral_of", "relu",
    "relu_backward", "sigmoid", "sigmoid_of", "silu", "silu_backward",
]  # fmt: skip


@register_jitable
def sigmoid_of(x):
    e = exp(-abs(x))
    one = like(x, 1.0)
    return (e if x < 0 else one) / (one + e)


@register_jitable
def integral_of(x, bell):
    below = tail(x, bell)
    return below if x < 0 else like(x, 1.0) - below


@register_jitable
def argument_of(x):
    return x * (x * x * like(x, CUBIC) + like(x, 1.0)) * like(x, SLOPE)


@register_jitable
def gelu_of(x):
    """One element of `gelu`."""
    return x * integral_of(x, density(x))


@register_jitable
def gelu_tanh_of(x):
    """One element of `gelu` with approximate="tanh"."""
    return x * sigmoid_of(argument_of(x))


@register_jitable
def gelu_tanh_slope(x, s):
    """The derivative of `gelu_tanh_of`, s being `sigmoid_of(argument_of(x))`."""
    slope = (x * x * like(s, 3.0 * CUBIC) + like(s, 1.0)) * like(s, SLOPE)
    return s + x * s * (like(s, 1.0) - s) * slope


@register_jitable
def relu_of(x):
    return like(x, 0.0) if x <= 0 else x  # NaN stays NaN


@register_jitable
def silu_of(x):
    return x * sigmoid_of(x)


def _mapped(of: Any) -> Any:
    """The loop y = of(x), element by element."""

    def loop(x, y):
        widest()
        for i in range(x.size):
            y[i] = put(y, of(real(x[i])))

    return jit(loop, name=f"mapped_{of.__name__}")


_sigmoid_loop, _silu_loop, _gelu_loop, _gelu_tanh_loop = map(_mapped, (sigmoid_of, silu_of, gelu_of, gelu_tanh_of))
_relu_loop = _mapped(relu_of)


@jit
def _relu_backward_loop(y, dy, dx):
    for i in range(y.size):
        dx[i] = dy[i] if real(y[i]) > 0 else dy.dtype.type(0)


@jit
def _silu_backward_loop(x, dy, dx):
    widest()
    for i in range(x.size):
        v = real(x[i])
        s = sigmoid_of(v)
        dx[i] = put(dx, real(dy[i]) * (s + v * s * (like(s, 1.0) - s)))


@jit
def _gelu_backward_loop(x, dy, dx):
    widest()
    for i in range(x.size):
        v = real(x[i])
        bell = density(v)
        dx[i] = put(dx, real(dy[i]) * (integral_of(v, bell) + v * bell * like(bell, DENSITY)))


@jit
def _gelu_tanh_backward_loop(x, dy, dx):
    widest()
    for i in range(x.size):
        v = real(x[i])
        dx[i] = put(dx, real(dy[i]) * gelu_tanh_slope(v, sigmoid_of(argument_of(v))))


def _over(loop: Any, *arrays: np.ndarray) -> np.ndarray:
    """Run `loop(*flat arrays, flat result)`."""
    flat, out = alike(*arrays)
    over(loop, flat)
    return out


def relu(xp: Any, x: np.ndarray) -> np.ndarray:
    return _over(_relu_loop, x)


def relu_backward(xp: Any, y: np.ndarray, dy: np.ndarray) -> np.ndarray:
    return _over(_relu_backward_loop, y, dy)


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
