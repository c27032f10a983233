"""Rotary positions in one pass over memory."""

from typing import Any

import numpy as np

from fsdpx.array.kernels import attention as plain
from fsdpx.array.kernels.compiled.arrays import owned
from fsdpx.array.kernels.compiled.bits import fallback, put, real, wide
from fsdpx.array.kernels.compiled.scalar import widest
from fsdpx.array.parallel import over
from fsdpx.native.compiled import jit

__all__ = ["rotate"]


@jit
def _rotate(x, y, cos, sin):
    widest()
    half = cos.shape[1]
    for b in range(x.shape[0]):
        for t in range(x.shape[1]):
            c, s = cos[t], sin[t]
            for h in range(x.shape[2]):
                row, out = x[b, t, h], y[b, t, h]
                for i in range(half):
                    p, q = real(row[i]), real(row[half + i])
                    out[i] = put(out, p * c[i] - q * s[i])
                    out[half + i] = put(out, q * c[i] + p * s[i])


def rotate(xp: Any, x: np.ndarray, cos: np.ndarray, sin: np.ndarray) -> np.ndarray:
    dtype = wide(x.dtype)
    if not cos.dtype == sin.dtype == dtype:
        return fallback(plain.rotate, xp, x, cos, sin)
    x, y = owned(x), np.empty(x.shape, x.dtype)
    over(_rotate, (x, y), owned(cos), owned(sin))
    return y
