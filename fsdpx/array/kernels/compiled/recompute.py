"""GELU and its gradient in one pass: both need the same exponential."""

from typing import Any

import numpy as np

from fsdpx.array.kernels.activation import DENSITY, exact
from fsdpx.array.kernels.compiled.activation import argument_of, gelu_tanh_slope, integral_of, sigmoid_of
from fsdpx.array.kernels.compiled.bits import fallback, put, real
from fsdpx.array.kernels.compiled.scalar import density, like, widest
from fsdpx.array.kernels.recompute import gelu_recompute as plain
from fsdpx.array.parallel import over
from fsdpx.native.compiled import jit

__all__ = ["gelu_recompute"]


@jit
def _gelu_loop(x, dy, y):
    widest()
    for i in range(x.size):
        v = real(x[i])
        bell = density(v)
        below = integral_of(v, bell)
        y[i] = put(y, v * below)
        dy[i] = put(dy, real(dy[i]) * (below + v * bell * like(bell, DENSITY)))


@jit
def _gelu_tanh_loop(x, dy, y):
    widest()
    for i in range(x.size):
        v = real(x[i])
        s = sigmoid_of(argument_of(v))
        y[i] = put(y, v * s)
        dy[i] = put(dy, real(dy[i]) * gelu_tanh_slope(v, s))


def gelu_recompute(xp: Any, x: np.ndarray, dy: np.ndarray, approximate: str = "none") -> np.ndarray:
    if x.dtype == np.uint16 and dy.dtype != x.dtype:
        return fallback(plain, xp, x, dy, approximate)
    if not dy.flags.c_contiguous or dy.dtype != x.dtype:
        flat = np.array(dy, x.dtype, order="C")
        y = gelu_recompute(xp, x, flat, approximate)
        dy[...] = flat
        return y
    x = np.ascontiguousarray(x)
    y = np.empty_like(x)
    over(_gelu_loop if exact(approximate) else _gelu_tanh_loop, (x.reshape(-1), dy.reshape(-1), y.reshape(-1)))
    return y
