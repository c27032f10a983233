"""Update kernels in array-namespace terms: the reference, and what runs on CuPy or without Numba.

Each works through the arrays in blocks that stay in cache, with two blocks of scratch. All operations are
elementwise, so the results do not depend on the blocks. `compiled.py` has the same operations in the same order and so
gives the same bits."""

from collections.abc import Callable
from typing import Any

import numpy as np

from fsdpx.optim.dynamic import table

__all__ = ["KERNELS", "adam8"]

BLOCK = 1 << 16
DEVICE_BLOCK = 1 << 24  # a launch costs more than a pass over 64 Ki elements

Body = Callable[..., None]
KERNELS: dict[str, Body] = {}


def blocked(body: Body) -> Body:
    """body(xp, a, b, *arrays, *numbers) on every block; a, b are scratch of the first array's dtype."""

    def run(xp: Any, arrays: tuple[Any, ...], numbers: tuple[Any, ...]) -> None:
        n = arrays[0].size
        size = min(n, BLOCK if xp is np else DEVICE_BLOCK)
        a, b = xp.empty(size, arrays[0].dtype), xp.empty(size, arrays[0].dtype)
        with np.errstate(all="ignore"):  # as compiled; gradients are checked for finite values elsewhere
            for start in range(0, n, size):
                parts = [x[start : start + size] for x in arrays]
                k = parts[0].size
                body(xp, a[:k], b[:k], *parts, *numbers)

    KERNELS[body.__name__] = run
    return run


def _gradient(xp, a, b, p, g, scale, l2):
    """a = scale g + l2 p"""
    xp.multiply(g, scale, out=a)
    if l2 != 0:
        xp.multiply(p, l2, out=b)
        a += b


def _toward(xp, m, a, b, share):
    """m += share (a - m)"""
    xp.subtract(a, m, out=b)
    b *= share
    m += b


def _square_toward(xp, v, a, b, keep, share):
    """v = keep v + share a^2"""
    xp.multiply(a, a, out=b)
    b *= share
    v *= keep
    v += b


@blocked
def sgd(xp, a, b, p, g, scale, l2, lr):
    _gradient(xp, a, b, p, g, scale, l2)
    a *= lr
    p -= a


@blocked
def momentum(xp, a, b, p, g, m, scale, l2, lr, mu, nesterov):
    _gradient(xp, a, b, p, g, scale, l2)
    m *= mu
    m += a
    if nesterov != 0:
        xp.multiply(m, mu, out=b)
        a += b
        a *= lr
    else:
        xp.multiply(m, lr, out=a)
    p -= a


@blocked
def adam_of_mean(xp, a, b, p, g, m, v, scale, keep, unbias, eps, most, rate):
    xp.multiply(g, scale, out=m)
    xp.sqrt(v, out=b)
    b *= unbias
    b += eps
    xp.divide(m, b, out=a)
    xp.clip(a, -most, most, out=a)
    a *= rate
    p *= keep
    p -= a


@blocked
def adam(xp, a, b, p, g, m, v, scale, l2, keep, share1, beta2, share2, unbias, eps, rate):
    _gradient(xp, a, b, p, g, scale, l2)
    _toward(xp, m, a, b, share1)
    _square_toward(xp, v, a, b, beta2, share2)
    xp.sqrt(v, out=b)
    b *= unbias
    b += eps
    xp.divide(m, b, out=a)
    a *= rate
    if keep != 1:
        p *= keep
    p -= a


def adam8(xp: Any, arrays: tuple[Any, ...], numbers: tuple[Any, ...]) -> None:
    """Rows of (blocks, elements), some at a time."""
    scale, keep, share1, beta2, share2, unbias, eps, rate = numbers
    signed, edges, unsigned, bounds = (xp.asarray(array) for sign in (True, False) for array in table(sign))
    step = max((BLOCK if xp is np else DEVICE_BLOCK) // arrays[0].shape[1], 1)
    with np.errstate(all="ignore"):
        for start in range(0, arrays[0].shape[0], step):
            p, g, m, v, m_scale, v_scale = (array[start : start + step] for array in arrays)
            a = g * scale
            new_m = signed[m] * m_scale.astype(p.dtype)[:, None]
            _toward(xp, new_m, a, xp.empty_like(a), share1)
            new_v = unsigned[v] * v_scale.astype(p.dtype)[:, None]
            _square_toward(xp, new_v, a, xp.empty_like(a), beta2, share2)
            p *= keep
            p -= new_m / (xp.sqrt(new_v) * unbias + eps) * rate
            _encode(xp, new_m, edges, m, m_scale)
            _encode(xp, new_v, bounds, v, v_scale)
            v += (v == 0) & (new_v > 0)


def _encode(xp: Any, x: Any, edges: Any, codes: Any, scales: Any) -> None:
    """The codes of x in rows, and the largest of each."""
    scales[...] = abs(x).max(axis=1)
    top = scales.astype(x.dtype)[:, None]
    y = xp.where(top > 0, x / top, x)
    codes[...] = xp.searchsorted(edges, y.reshape(-1).astype(edges.dtype)).reshape(y.shape)


@blocked
def lion(xp, a, b, p, g, m, scale, keep, share1, share2, lr):
    xp.multiply(g, scale, out=a)
    xp.subtract(a, m, out=b)
    b *= share1
    b += m
    xp.sign(b, out=b)
    b *= lr
    if keep != 1:
        p *= keep
    p -= b
    _toward(xp, m, a, b, share2)


@blocked
def schedule_free(xp, a, b, p, g, v, ahead, scale, beta2, share2, eps, decay, share, keep, rate, rate_ahead):
    xp.multiply(g, scale, out=a)
    _square_toward(xp, v, a, b, beta2, share2)
    xp.sqrt(v, out=b)
    b += eps
    a /= b
    if decay != 0:
        xp.multiply(p, decay, out=b)
        a += b
    xp.multiply(ahead, share, out=b)
    p += b
    xp.multiply(a, rate, out=b)
    p -= b
    a *= rate_ahead
    ahead -= a
    ahead *= keep


@blocked
def prodigy(xp, a, b, p, g, m, v, s, away, scale, share1, beta2, share2, keep, share, eps, decay, rate):
    xp.multiply(g, scale, out=a)
    _toward(xp, m, a, b, share1)
    _square_toward(xp, v, a, b, beta2, share2)
    a *= share
    s *= keep
    s += a
    xp.sqrt(v, out=b)
    b += eps
    xp.divide(m, b, out=a)
    if decay != 0:
        xp.multiply(p, decay, out=b)
        a += b
    a *= rate
    p -= a
    away += a


@blocked
def moments(xp, a, b, m, v, g, scale, share1, beta2, share2):
    xp.multiply(g, scale, out=a)
    _toward(xp, m, a, b, share1)
    _square_toward(xp, v, a, b, beta2, share2)


def _direction(xp, u, b, p, m, v, unbias1, unbias2, eps, decay):
    xp.sqrt(v, out=b)
    b *= unbias2
    b += eps
    xp.multiply(m, unbias1, out=u)
    u /= b
    if decay != 0:
        xp.multiply(p, decay, out=b)
        u += b


@blocked
def direction(xp, a, b, u, p, m, v, unbias1, unbias2, eps, decay):
    _direction(xp, u, b, p, m, v, unbias1, unbias2, eps, decay)


@blocked
def follow(xp, a, b, p, m, v, unbias1, unbias2, eps, decay, rate):
    _direction(xp, a, b, p, m, v, unbias1, unbias2, eps, decay)
    a *= rate
    p -= a
