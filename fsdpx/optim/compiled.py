"""Update kernels in Numba: one pass over memory, the operations of `plain.py` in the same order.

No fastmath: with it the result of an element could depend on whether it falls into the vector body or the
tail of the loop, and so on where a parameter was cut. The numpy error model divides by zero like NumPy does."""

from collections.abc import Callable

import numpy as np

from fsdpx.native.compiled import jit

__all__ = ["KERNELS"]

KERNELS: dict[str, Callable[..., None]] = {}


def kernel(body: Callable[..., None]) -> Callable[..., None]:
    KERNELS[body.__name__] = jit(body)
    return body


@kernel
def sgd(p, g, scale, l2, lr):
    for i in range(p.size):
        a = g[i] * scale
        if l2 != 0:
            a = a + p[i] * l2
        p[i] = p[i] - a * lr


@kernel
def momentum(p, g, m, scale, l2, lr, mu, nesterov):
    for i in range(p.size):
        a = g[i] * scale
        if l2 != 0:
            a = a + p[i] * l2
        buf = m[i] * mu + a
        m[i] = buf
        if nesterov != 0:
            a = a + buf * mu
        else:
            a = buf
        p[i] = p[i] - a * lr


@kernel
def adam(p, g, m, v, scale, l2, keep, share1, beta2, share2, unbias, eps, rate):
    for i in range(p.size):
        x = p[i]
        a = g[i] * scale
        if l2 != 0:
            a = a + x * l2
        mi = m[i] + (a - m[i]) * share1
        vi = v[i] * beta2 + (a * a) * share2
        m[i] = mi
        v[i] = vi
        p[i] = x * keep - (mi / (np.sqrt(vi) * unbias + eps)) * rate


@kernel
def lion(p, g, m, scale, keep, share1, share2, lr):
    for i in range(p.size):
        a = g[i] * scale
        b = (a - m[i]) * share1 + m[i]
        p[i] = p[i] * keep - np.sign(b) * lr
        m[i] = m[i] + (a - m[i]) * share2


@kernel
def moments(m, v, g, scale, share1, beta2, share2):
    for i in range(m.size):
        a = g[i] * scale
        m[i] = m[i] + (a - m[i]) * share1
        v[i] = v[i] * beta2 + (a * a) * share2


@kernel
def direction(u, p, m, v, unbias1, unbias2, eps, decay):
    for i in range(u.size):
        a = (m[i] * unbias1) / (np.sqrt(v[i]) * unbias2 + eps)
        if decay != 0:
            a = a + p[i] * decay
        u[i] = a


@kernel
def follow(p, m, v, unbias1, unbias2, eps, decay, rate):
    for i in range(p.size):
        a = (m[i] * unbias1) / (np.sqrt(v[i]) * unbias2 + eps)
        if decay != 0:
            a = a + p[i] * decay
        p[i] = p[i] - a * rate
