"""Gates in one pass over memory, forward and backward."""

from typing import Any

import numpy as np

from fsdpx.array.kernels import activation as plain
from fsdpx.array.kernels.activation import DENSITY
from fsdpx.array.kernels.compiled.activation import (
    argument_of,
    gelu_of,
    gelu_tanh_of,
    gelu_tanh_slope,
    integral_of,
    sigmoid_of,
    silu_of,
)
from fsdpx.array.kernels.compiled.arrays import alike
from fsdpx.array.kernels.compiled.bits import fallback, put, real
from fsdpx.array.kernels.compiled.scalar import density, like, widest
from fsdpx.array.parallel import over
from fsdpx.native.compiled import jit
from fsdpx.native.late import register_jitable

__all__ = ["gated", "gated_backward"]


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
