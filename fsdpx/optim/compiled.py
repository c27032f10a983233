"""Update kernels in Numba: one pass over memory, the operations of `plain.py` in the same order.

No fastmath: with it the result of an element could depend on whether it falls into the vector body or the
tail of the loop, and so on where a parameter was cut. The numpy error model divides by zero like NumPy does."""

from collections.abc import Callable
from hashlib import blake2b
from pathlib import Path

import numpy as np

from fsdpx.native.tools import jit
from fsdpx.optim.dynamic import START

__all__ = ["KERNELS"]

SHIFT = np.uint32(32 - START)
KERNELS: dict[str, Callable[..., None]] = {}
SOURCE = blake2b(Path(__file__).read_bytes(), digest_size=8).hexdigest()


def kernel(body: Callable[..., None]) -> Callable[..., None]:
    body.__qualname__ = f"{body.__name__}.{SOURCE}"  # names the cache: code of another version is never taken
    KERNELS[body.__name__] = jit(body)
    return body


@jit
def largest(x):
    top = abs(x[0])
    for i in range(x.size):
        top = max(top, abs(x[i]))
    return top


@jit
def encode(x, top, search, codes):
    """How many edges lie below each x / top; 0 counts as 0 where top is 0."""
    edges, first, more = search
    y = np.empty(x.size, np.float32)
    for i in range(x.size):
        y[i] = x[i] / top if top > 0 else x[i]
    bits = y.view(np.uint32)
    for i in range(x.size):
        k = np.int64(first[bits[i] >> SHIFT])
        for _ in range(more):
            k += edges[k] < y[i]
        codes[i] = k


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
def adam_of_mean(p, g, m, v, scale, keep, unbias, eps, most, rate):
    for i in range(p.size):
        a = g[i] * scale
        m[i] = a
        step = a / (np.sqrt(v[i]) * unbias + eps)
        if step > most:
            step = most
        elif step < -most:
            step = -most
        p[i] = p[i] * keep - step * rate


@kernel
def adam8(p, g, m, v, m_scale, v_scale, signed, unsigned, search_m, search_v, scale, keep, share1, beta2, share2,
          unbias, eps, rate):  # fmt: skip
    rows, n = p.shape
    zero = share1 - share1
    new_m, new_v = np.empty(n, p.dtype), np.empty(n, p.dtype)
    for r in range(rows):
        of_m, of_v = zero + m_scale[r], zero + v_scale[r]
        for i in range(n):
            x = p[r, i]
            a = g[r, i] * scale
            b = signed[m[r, i]] * of_m
            mi = b + (a - b) * share1
            vi = (unsigned[v[r, i]] * of_v) * beta2 + (a * a) * share2
            new_m[i] = mi
            new_v[i] = vi
            p[r, i] = x * keep - (mi / (np.sqrt(vi) * unbias + eps)) * rate
        m_scale[r] = largest(new_m)
        v_scale[r] = largest(new_v)
        encode(new_m, zero + m_scale[r], search_m, m[r])
        encode(new_v, zero + v_scale[r], search_v, v[r])
        for i in range(n):
            if v[r, i] == 0 and new_v[i] > 0:
                v[r, i] = 1


@kernel
def lion(p, g, m, scale, keep, share1, share2, lr):
    for i in range(p.size):
        a = g[i] * scale
        b = (a - m[i]) * share1 + m[i]
        p[i] = p[i] * keep - np.sign(b) * lr
        m[i] = m[i] + (a - m[i]) * share2


@kernel
def schedule_free(p, g, v, ahead, scale, beta2, share2, eps, decay, share, keep, rate, rate_ahead):
    for i in range(p.size):
        x, d = p[i], ahead[i]
        a = g[i] * scale
        vi = v[i] * beta2 + (a * a) * share2
        v[i] = vi
        u = a / (np.sqrt(vi) + eps)
        if decay != 0:
            u = u + x * decay
        p[i] = (x + d * share) - u * rate
        ahead[i] = (d - u * rate_ahead) * keep


@kernel
def prodigy(p, g, m, v, s, away, scale, share1, beta2, share2, keep, share, eps, decay, rate):
    for i in range(p.size):
        a = g[i] * scale
        m[i] = m[i] + (a - m[i]) * share1
        v[i] = v[i] * beta2 + (a * a) * share2
        s[i] = s[i] * keep + a * share
        u = m[i] / (np.sqrt(v[i]) + eps)
        if decay != 0:
            u = u + p[i] * decay
        p[i] = p[i] - u * rate
        away[i] = away[i] + u * rate


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
