"""Activations, gates and sums, each in one pass over memory, forward and backward; columns are added in fixed blocks of
rows and cut among threads.

`gelu_recompute` makes GELU and its gradient in one pass: both need the same exponential."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from fsdpx.core.array.jit import jit
from fsdpx.core.array.kernels import activation as plain
from fsdpx.core.array.kernels.activation import CUBIC, DENSITY, SLOPE, exact
from fsdpx.core.array.kernels.choice import form
from fsdpx.core.array.kernels.compiled.elements import fallback, number, owned, put, real, wide
from fsdpx.core.array.kernels.compiled.memory_order import alike
from fsdpx.core.array.kernels.compiled.scalar import density, exp, like, tail, widest
from fsdpx.core.array.lazy_numba import register_jitable
from fsdpx.core.array.parallel import over, over_columns

__all__ = ["column_sums"]


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
def relu_of(x):
    return like(x, 0.0) if x <= 0 else x  # NaN stays NaN


@register_jitable
def silu_of(x):
    return x * sigmoid_of(x)


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
    s = sigmoid_of(argument_of(x))
    slope = (x * x * like(s, 3.0 * CUBIC) + like(s, 1.0)) * like(s, SLOPE)
    return s + x * s * (like(s, 1.0) - s) * slope


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


def _sloped(slope_of: Any) -> Any:
    """The loop dx = dy slope_of(x)."""

    def loop(x, dy, dx):
        widest()
        for i in range(x.size):
            dx[i] = put(dx, real(dy[i]) * slope_of(real(x[i])))

    return jit(loop, name=f"sloped_{slope_of.__name__}")


_silu_backward_loop, _gelu_backward_loop = _sloped(silu_slope_of), _sloped(gelu_slope_of)
_gelu_tanh_backward_loop = _sloped(gelu_tanh_slope_of)


def _over(loop: Any, *arrays: np.ndarray) -> np.ndarray:
    """Run `loop(*flat arrays, flat result)`."""
    flat, out = alike(*arrays)
    over(loop, flat)
    return out


@form(lambda x, w, s: (x,))
def relu(xp: Any, x: np.ndarray) -> np.ndarray:
    return _over(_relu_loop, x)


@form(lambda x, w, s: (x, x))
def relu_backward(xp: Any, y: np.ndarray, dy: np.ndarray) -> np.ndarray:
    return _over(_relu_backward_loop, y, dy)


@form(lambda x, w, s: (x,))
def sigmoid(xp: Any, x: np.ndarray) -> np.ndarray:
    return _over(_sigmoid_loop, x)


@form(lambda x, w, s: (x,))
def silu(xp: Any, x: np.ndarray) -> np.ndarray:
    return _over(_silu_loop, x)


@form(lambda x, w, s: (x, x))
def silu_backward(xp: Any, x: np.ndarray, dy: np.ndarray) -> np.ndarray:
    return _over(_silu_backward_loop, x, dy)


@form(lambda x, w, s: (x,))
def gelu(xp: Any, x: np.ndarray, approximate: str = "none") -> np.ndarray:
    return _over(_gelu_loop if exact(approximate) else _gelu_tanh_loop, x)


@form(lambda x, w, s: (x, x))
def gelu_backward(xp: Any, x: np.ndarray, dy: np.ndarray, approximate: str = "none") -> np.ndarray:
    return _over(_gelu_backward_loop if exact(approximate) else _gelu_tanh_backward_loop, x, dy)


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


@form(lambda x, w, s: (x, x))
def gated(xp: Any, a: np.ndarray, b: np.ndarray, form: str = "silu") -> np.ndarray:
    if form not in _loops or a.shape != b.shape or a.dtype != b.dtype:
        return fallback(plain.gated, xp, a, b, form)
    flat, out = alike(a, b)
    over(_loops[form][0], flat)
    return out


@form(lambda x, w, s: (x, x, x))
def gated_backward(
    xp: Any, a: np.ndarray, b: np.ndarray, dy: np.ndarray, form: str = "silu"
) -> tuple[np.ndarray, np.ndarray]:
    if form not in _loops or not a.shape == b.shape == dy.shape or not a.dtype == b.dtype == dy.dtype:
        return fallback(plain.gated_backward, xp, a, b, dy, form)
    flat = [np.ascontiguousarray(x).reshape(-1) for x in (a, b, dy)]
    out = np.empty((2, *a.shape), a.dtype)
    over(_loops[form][1], (*flat, out[0].reshape(-1), out[1].reshape(-1)))
    return out[0], out[1]


def _both(of: Any, slope_of: Any) -> Any:
    """The loops y = of(x) and dy = dy slope_of(x)."""

    def loop(x, dy, y):
        widest()
        for i in range(x.size):
            v = real(x[i])
            y[i] = put(y, of(v))
            dy[i] = put(dy, real(dy[i]) * slope_of(v))

    return jit(loop, name=f"both_{of.__name__}")


_gelu_recomputed, _gelu_tanh_recomputed = _both(gelu_of, gelu_slope_of), _both(gelu_tanh_of, gelu_tanh_slope_of)


@form(lambda x, w, s: (x, x.copy()))
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
    loop = _gelu_recomputed if exact(approximate) else _gelu_tanh_recomputed
    over(loop, (x.reshape(-1), dy.reshape(-1), y.reshape(-1)))
    return y


BLOCK = 32  # rows added up before they are added to the total: rounding grows with rows / BLOCK + BLOCK


@jit
def _add(a, b, out):
    for i in range(a.size):
        out[i] = put(out, real(a[i]) + real(b[i]))


@jit
def _add_bias(y, bias):
    for i in range(y.shape[0]):
        for j in range(y.shape[1]):
            y[i, j] = put(y, real(y[i, j]) + real(bias[j]))


def _biased(of: Any) -> Any:
    """The loop h += bias, y = of(h)."""

    def loop(h, y, bias):
        widest()
        for i in range(h.shape[0]):
            for j in range(h.shape[1]):
                h[i, j] = put(h, real(h[i, j]) + real(bias[j]))
                y[i, j] = put(y, of(real(h[i, j])))

    return jit(loop, name=f"biased_{of.__name__}")


_bias_gelu, _bias_gelu_tanh = _biased(gelu_of), _biased(gelu_tanh_of)


@jit
def column_sums(start, stop, rows, out, accumulate):
    into, block = out[start:stop], np.empty(stop - start, out.dtype)
    if not accumulate:
        into[:] = 0
    for first in range(0, rows.shape[0], BLOCK):
        block[:] = 0
        last = min(first + BLOCK, rows.shape[0])
        whole = first + (last - first) // 4 * 4
        for i in range(first, whole, 4):
            a, b, c, d = rows[i, start:stop], rows[i + 1, start:stop], rows[i + 2, start:stop], rows[i + 3, start:stop]
            for j in range(block.size):
                block[j] += (real(a[j]) + real(b[j])) + (real(c[j]) + real(d[j]))
        for i in range(whole, last):
            row = rows[i, start:stop]
            for j in range(block.size):
                block[j] += real(row[j])
        for j in range(block.size):
            into[j] += block[j]


def _rows(x: np.ndarray) -> np.ndarray:
    return x.reshape(math.prod(x.shape[:-1]), x.shape[-1])


@form(lambda x, w, s: (x, x))
def add(xp: Any, a: np.ndarray, b: np.ndarray) -> np.ndarray:
    if a.shape != b.shape:
        return fallback(plain.add, xp, a, b)
    flat, out = alike(a, b)
    over(_add, flat)
    return out


@form(lambda x, w, s: (x, w))
def add_bias(xp: Any, y: np.ndarray, bias: np.ndarray) -> None:
    lead, fits = y.shape[: y.ndim - bias.ndim], bias.shape == y.shape[y.ndim - bias.ndim :] and bias.dtype == y.dtype
    if y.flags.c_contiguous and fits:
        over(_add_bias, (y.reshape(math.prod(lead), bias.size),), owned(bias).reshape(-1))
    else:
        fallback(plain.add_bias, xp, y, bias)


@form(lambda x, w, s: (x, w))
def bias_gelu(xp: Any, h: np.ndarray, bias: np.ndarray | None, approximate: str = "none") -> np.ndarray:
    if bias is None or bias.shape != h.shape[-1:] or bias.dtype != h.dtype or not h.flags.c_contiguous:
        return fallback(plain.bias_gelu, xp, h, bias, approximate)
    y = np.empty(h.shape, h.dtype)
    loop = _bias_gelu if exact(approximate) else _bias_gelu_tanh
    over(loop, (_rows(h), _rows(y)), owned(bias))
    return y


@form(lambda x, w, s: (x, s))
def sum_rows(xp: Any, rows: np.ndarray, out: np.ndarray, accumulate: bool = True) -> None:
    rows = np.ascontiguousarray(rows).reshape(rows.shape[0], math.prod(rows.shape[1:]))
    if out.flags.c_contiguous and out.dtype == wide(rows.dtype):
        over_columns(column_sums, rows, out.reshape(-1), accumulate)
        return
    total = np.empty(rows.shape[1], wide(rows.dtype))
    over_columns(column_sums, rows, total, False)
    numbers = number(out)
    total = total.reshape(out.shape)
    numbers[...] = total + numbers if accumulate else total
