"""Activations and gates, each in one pass over memory, forward and backward.

`gelu_recompute` makes GELU and its gradient in one pass: both need the same exponential."""

from __future__ import annotations

from typing import Any

import numpy as np

from fsdpx.array.kernels import activation as plain
from fsdpx.array.kernels.activation import CUBIC, DENSITY, SLOPE, exact
from fsdpx.array.kernels.compiled.half import fallback, put, real
from fsdpx.array.kernels.compiled.rows import alike
from fsdpx.array.kernels.compiled.scalar import density, exp, like, tail, widest
from fsdpx.array.parallel import over
from fsdpx.native.compiled import jit
from fsdpx.native.late import register_jitable

__all__ = [
    "argument_of", "gated", "gated_backward", "gelu", "gelu_backward", "gelu_of", "gelu_recompute", "gelu_tanh_of",
    "gelu_tanh_slope", "integral_of", "relu", "relu_backward", "sigmoid", "sigmoid_of", "silu", "silu_backward",
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


@register_jitable
def silu_slope_of(x):
    s = sigmoid_of(x)
    return s + x * s * (like(s, 1.0) - s)


@register_jitable
def gelu_slope_of(x):
    bell = density(x)
    return integral_of(x, bell) + x * bell * like(bell, DENSITY)


@register_jitable
def gelu_tanh_slope_of(x):
    return gelu_tanh_slope(x, sigmoid_of(argument_of(x)))


def _forward(of: Any) -> Any:
    """The loop y = of(a) b."""

    def loop(a, b, y):
        widest()
        for i in range(a.size):
            y[i] = put(y, of(real(a[i])) * real(b[i]))

    return jit(loop, name=f"gated_{of.__name__}")


def _backward(of: Any, slope_of: Any) -> Any:
    """The loops da = dy b slope_of(a) and db = dy of(a)."""

    def loop(a, b, dy, da, db):
        widest()
        for i in range(a.size):
            x, d = real(a[i]), real(dy[i])
            da[i] = put(da, d * real(b[i]) * slope_of(x))
            db[i] = put(db, d * of(x))

    return jit(loop, name=f"gated_backward_{of.__name__}")


_loops = {
    "silu": (_forward(silu_of), _backward(silu_of, silu_slope_of)),
    "gelu": (_forward(gelu_of), _backward(gelu_of, gelu_slope_of)),
    "gelu tanh": (_forward(gelu_tanh_of), _backward(gelu_tanh_of, gelu_tanh_slope_of)),
}


def gated(xp: Any, a: np.ndarray, b: np.ndarray, form: str = "silu") -> np.ndarray:
    if form not in _loops or a.shape != b.shape or a.dtype != b.dtype:
        return fallback(plain.gated, xp, a, b, form)
    flat, out = alike(a, b)
    over(_loops[form][0], flat)
    return out


def gated_backward(
    xp: Any, a: np.ndarray, b: np.ndarray, dy: np.ndarray, form: str = "silu"
) -> tuple[np.ndarray, np.ndarray]:
    if form not in _loops or not a.shape == b.shape == dy.shape or not a.dtype == b.dtype == dy.dtype:
        return fallback(plain.gated_backward, xp, a, b, dy, form)
    flat = [np.ascontiguousarray(x).reshape(-1) for x in (a, b, dy)]
    out = np.empty((2, *a.shape), a.dtype)
    over(_loops[form][1], (*flat, out[0].reshape(-1), out[1].reshape(-1)))
    return out[0], out[1]


@jit
def _gelu_recomputed(x, dy, y):
    widest()
    for i in range(x.size):
        v = real(x[i])
        bell = density(v)
        below = integral_of(v, bell)
        y[i] = put(y, v * below)
        dy[i] = put(dy, real(dy[i]) * (below + v * bell * like(bell, DENSITY)))


@jit
def _gelu_tanh_recomputed(x, dy, y):
    widest()
    for i in range(x.size):
        v = real(x[i])
        s = sigmoid_of(argument_of(v))
        y[i] = put(y, v * s)
        dy[i] = put(dy, real(dy[i]) * gelu_tanh_slope(v, s))


def gelu_recompute(xp: Any, x: np.ndarray, dy: np.ndarray, approximate: str = "none") -> np.ndarray:
    if x.dtype == np.uint16 and dy.dtype != x.dtype:
        return fallback(plain.gelu_recompute, xp, x, dy, approximate)
    if not dy.flags.c_contiguous or dy.dtype != x.dtype:
        flat = np.array(dy, x.dtype, order="C")
        y = gelu_recompute(xp, x, flat, approximate)
        dy[...] = flat
        return y
    x = np.ascontiguousarray(x)
    y = np.empty_like(x)
    over(
        _gelu_recomputed if exact(approximate) else _gelu_tanh_recomputed,
        (x.reshape(-1), dy.reshape(-1), y.reshape(-1)),
    )
    return y
