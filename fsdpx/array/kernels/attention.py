"""Attention: scores, softmax, and rotary positions."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

from fsdpx.array.kernels.dispatch import kernel
from fsdpx.array.namespace import joined
from fsdpx.cuda.head_layout import merged, time_first
from fsdpx.shapes.work import alike

__all__ = ["attention", "attention_backward", "rotate", "softmax", "softmax_backward"]


@kernel()
def softmax(xp: Any, x: Any) -> Any:
    """exp(x) / sum exp(x) over the last dim; x (rows, columns) or any shape with columns last."""
    y = xp.exp(x - xp.max(x, axis=-1, keepdims=True))
    y /= xp.sum(y, axis=-1, keepdims=True)
    return y


@kernel()
def softmax_backward(xp: Any, y: Any, dy: Any) -> Any:
    """y (dy - sum(y dy)): the gradient of `softmax` at its result y."""
    return y * (dy - xp.sum(y * dy, axis=-1, keepdims=True))


@kernel()
def rotate(xp: Any, x: Any, cos: Any, sin: Any) -> Any:
    """(a cos - b sin, b cos + a sin) for the halves a, b of the last dim (Su et al. 2021, in the order of Llama).

    x: (B, T, H, D); cos, sin: (T, D / 2) of the dtype that is computed in. The gradient is `rotate` with -sin."""
    half = x.shape[3] // 2
    c, s = cos[None, :, None, :], sin[None, :, None, :]
    a, b = x[..., :half], x[..., half:]
    return joined(xp, (a * c - b * s, b * c + a * s))


@kernel()
def attention(
    xp: Any, q: Any, k: Any, v: Any, causal: bool, scale: float, window: int = 0, segments: Any = None
) -> tuple[Any, Any]:
    """softmax(scale q k^T) v per head (Vaswani et al. 2017); causal: a position attends to none that is later.

    q: (B, H, T, D); k, v: (B, G, T, D), or (B, G, S, D) if not causal, each of G heads for H / G heads of q (Ainslie et
    al. 2023); any strides, S > 0. window: with `causal` a position attends to itself and the window - 1 before it; 0:
    to all before it. segments: (B, T) of integers, k as long as q: a position attends to those of its own number only.
    Returns o (B, H, T, D) and lse (B, H, T), the logarithm of each row's sum of exponentials, which is all that
    backward needs (Rabe and Staats 2021). In memory o has time before heads, so that merging the heads is a view. Peak:
    one head's T x S; compiled, 64 rows of it."""
    o, lse = time_first(xp, q), xp.empty(q.shape[:3], dtype=q.dtype)
    mask, group = _mask(xp, q, window) if causal else None, q.shape[1] // k.shape[1]
    for b, h in _heads(xp, q):
        scores = _scores(xp, q[b, h], k[b, h // group], _within(xp, mask, segments, b, q), scale)
        top = xp.max(scores, axis=-1, keepdims=True) if scores.size else xp.sum(scores, axis=-1, keepdims=True)
        scores = xp.exp(scores - top)
        total = xp.sum(scores, axis=-1, keepdims=True)
        o[b, h] = (scores @ v[b, h // group]) / total
        lse[b, h] = (top + xp.log(total))[:, 0]
    return o, lse


@kernel(narrow=3)
def attention_backward(
    xp: Any, q: Any, k: Any, v: Any, o: Any, lse: Any, do: Any, causal: bool, scale: float, window: int = 0,
    segments: Any = None,
) -> Any:  # fmt: skip
    """dq, dk, dv of `attention` as one array (3, B, H, T, D), probabilities recomputed from lse (Dao et al. 2022).

    In memory it is (B, T, 3, H, D): the gradient of queries, keys and values that came from one product. Where k has
    another length than q, or fewer heads, three arrays.

    With p the probabilities and dp = do v^T: dv = p^T do, ds = p (dp - sum(do o)) scale, dq = ds k, dk = ds^T q."""
    d = merged(xp, q, k)
    dq, dk, dv = d[0], d[1], d[2]
    mask, group = _mask(xp, q, window) if causal else None, q.shape[1] // k.shape[1]
    for b, h in _heads(xp, q):
        at, first = (b, h // group), h % group == 0
        p = xp.exp(_scores(xp, q[b, h], k[at], _within(xp, mask, segments, b, q), scale) - lse[b, h][:, None])
        along = xp.sum(do[b, h] * o[b, h], axis=-1, keepdims=True)
        ds = p * (do[b, h] @ v[at].T - along) * scale
        dq[b, h] = ds @ k[at]
        dv[at] = p.T @ do[b, h] if first else dv[at] + p.T @ do[b, h]
        dk[at] = ds.T @ q[b, h] if first else dk[at] + ds.T @ q[b, h]
    return d


def _heads(xp: Any, q: Any) -> Iterable[tuple[int, ...]]:
    """Every (sample, head); for arrays without data the first one only."""
    if getattr(xp, "holds_no_data", False):
        return alike((0, 0), q.shape[0] * q.shape[1])
    return np.ndindex(*q.shape[:2])


def _scores(xp: Any, q: Any, k: Any, mask: Any, scale: float) -> Any:
    scores = (q @ k.T) * scale
    return scores if mask is None else scores + mask


def _mask(xp: Any, q: Any, window: int) -> Any:
    """0 at positions that are attended to, -inf at later ones and at those before the window, (T, T)."""
    time = xp.arange(q.shape[2])
    hidden = time[None, :] > time[:, None]
    if window:
        hidden = hidden | (time[None, :] <= time[:, None] - window)
    return _infinite(xp, hidden, q)


def _within(xp: Any, mask: Any, segments: Any, b: int, q: Any) -> Any:
    """The mask of sample b: also -inf at positions of other segments."""
    if segments is None:
        return mask
    apart = _infinite(xp, segments[b][None, :] != segments[b][:, None], q)
    return apart if mask is None else mask + apart


def _infinite(xp: Any, hidden: Any, q: Any) -> Any:
    return xp.where(hidden, xp.full((), -np.inf, dtype=q.dtype), xp.zeros((), dtype=q.dtype))
