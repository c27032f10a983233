"""Update kernels in array-namespace terms: the reference, and what runs on CuPy or without Numba.

Each works through the arrays in blocks that stay in cache, with two blocks of scratch. All operations are
elementwise, so the results do not depend on the blocks. `compiled.py` has the same operations in the same order and so
gives the same bits."""

from collections.abc import Callable
from typing import Any

import numpy as np

__all__ = ["KERNELS"]

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
