"""Attention in blocks of rows: BLAS for the products, one compiled pass over a block of scores between them."""

from typing import Any

import numpy as np

from fsdpx.array.kernels.compiled.jit import jit
from fsdpx.array.kernels.compiled.rows import largest, total
from fsdpx.array.kernels.compiled.scalar import exp

__all__ = ["attention", "attention_backward"]

BLOCK = 64  # rows of scores alive at a time; with `causal` the keys behind a block are never computed


@jit
def _exponentials(s, scale, hidden, lse, share):
    """Rows of scores to exp(scale s - max), 0 where hidden; 1 / sum and log sum exp of each row.

    hidden: the first row sees all but `hidden` columns, each next row one more; < 0: all rows see all.
    """
    rows, keys = s.shape
    for i in range(rows):
        seen = min(keys, max(keys - hidden + i, 0)) if hidden >= 0 else keys
        for j in range(seen):
            s[i, j] *= scale
        top = largest(s[i, :seen])
        for j in range(seen):
            s[i, j] = exp(s[i, j] - top)
        s[i, seen:] = 0
        summed = total(s[i, :seen])
        share[i] = s.dtype.type(1) / summed
        lse[i] = top + np.log(summed)


@jit
def _gradients(s, dp, scale, hidden, lse, along):
    """Scores to probabilities p, and dp to p (dp - along) scale, both in place; `hidden` as above."""
    rows, keys = s.shape
    for i in range(rows):
        seen = min(keys, max(keys - hidden + i, 0)) if hidden >= 0 else keys
        for j in range(seen):
            p = exp(s[i, j] * scale - lse[i])
            s[i, j] = p
            dp[i, j] = p * (dp[i, j] - along[i]) * scale
        s[i, seen:] = 0
        dp[i, seen:] = 0


def _blocks(time: int, causal: bool) -> list[tuple[slice, slice, int]]:
    """(rows, keys they may see, keys hidden from the first of them or -1)."""
    cuts = [(start, min(start + BLOCK, time)) for start in range(0, time, BLOCK)]
    if causal:
        return [(slice(a, b), slice(0, b), b - a - 1) for a, b in cuts]
    return [(slice(a, b), slice(0, time), -1) for a, b in cuts]


def _flat_last(x: np.ndarray) -> np.ndarray:
    """x, copied only if its last dim is not contiguous: BLAS takes any distance between rows."""
    return x if x.strides[-1] == x.itemsize else np.ascontiguousarray(x)


def _like_time_first(x: np.ndarray) -> np.ndarray:
    """Empty (B, H, T, D) with time before heads in memory, so that joining the heads again is a view."""
    b, h, t, d = x.shape
    return np.empty((b, t, h, d), x.dtype).transpose(0, 2, 1, 3)


def attention(xp: Any, q: Any, k: Any, v: Any, causal: bool, scale: float) -> tuple[np.ndarray, np.ndarray]:
    q, k, v = _flat_last(q), _flat_last(k), _flat_last(v)
    o, lse = _like_time_first(q), np.empty(q.shape[:3], q.dtype)
    factor, blocks = q.dtype.type(scale), _blocks(q.shape[2], causal)
    scratch, share = np.empty(BLOCK * q.shape[2], q.dtype), np.empty(BLOCK, q.dtype)
    for b, h in np.ndindex(*q.shape[:2]):
        for rows, keys, hidden in blocks:
            count, width = rows.stop - rows.start, keys.stop
            s = scratch[: count * width].reshape(count, width)
            np.matmul(q[b, h, rows], k[b, h, keys].T, out=s)
            _exponentials(s, factor, hidden, lse[b, h, rows], share)
            np.multiply(s @ v[b, h, keys], share[:count, None], out=o[b, h, rows])
    return o, lse


def attention_backward(
    xp: Any, q: Any, k: Any, v: Any, o: Any, lse: Any, do: Any, causal: bool, scale: float
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    q, k, v, do, lse = _flat_last(q), _flat_last(k), _flat_last(v), _flat_last(do), np.ascontiguousarray(lse)
    dq, dk, dv = (_like_time_first(q) for _ in range(3))
    along = np.ascontiguousarray(np.einsum("bhtd,bhtd->bht", do, o))
    factor, blocks = q.dtype.type(scale), _blocks(q.shape[2], causal)
    scratch = np.empty((2, BLOCK * q.shape[2]), q.dtype)
    sums = np.empty((2, *q.shape[2:]), q.dtype)
    for b, h in np.ndindex(*q.shape[:2]):
        sums[...] = 0
        for rows, keys, hidden in blocks:
            count, width = rows.stop - rows.start, keys.stop
            s, dp = (part[: count * width].reshape(count, width) for part in scratch)
            np.matmul(q[b, h, rows], k[b, h, keys].T, out=s)
            np.matmul(do[b, h, rows], v[b, h, keys].T, out=dp)
            _gradients(s, dp, factor, hidden, lse[b, h, rows], along[b, h, rows])
            sums[0, keys] += dp.T @ q[b, h, rows]
            sums[1, keys] += s.T @ do[b, h, rows]
            dq[b, h, rows] = dp @ k[b, h, keys]
        dk[b, h], dv[b, h] = sums
    return dq, dk, dv
