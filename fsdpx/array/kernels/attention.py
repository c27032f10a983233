"""Scaled dot-product attention, one head after the other: no array of all heads' probabilities is ever made."""

from collections.abc import Iterable
from typing import Any

import numpy as np

from fsdpx.array.kernels.choice import kernel

__all__ = ["attention", "attention_backward"]


@kernel()
def attention(xp: Any, q: Any, k: Any, v: Any, causal: bool, scale: float) -> tuple[Any, Any]:
    """softmax(scale q k^T) v per head (Vaswani et al. 2017); causal: a position sees itself and what came before.

    q, k, v: (B, H, T, D), any strides. Returns o (B, H, T, D) and lse (B, H, T), the logarithm of each row's sum of
    exponentials, which is all that backward needs (Rabe and Staats 2021). Peak: one head's T x T.
    """
    o, lse = xp.empty(q.shape, dtype=q.dtype), xp.empty(q.shape[:3], dtype=q.dtype)
    mask = _mask(xp, q) if causal else None
    for b, h in _heads(xp, q):
        scores = _scores(xp, q[b, h], k[b, h], mask, scale)
        top = xp.max(scores, axis=-1, keepdims=True) if scores.size else xp.sum(scores, axis=-1, keepdims=True)
        scores = xp.exp(scores - top)
        total = xp.sum(scores, axis=-1, keepdims=True)
        o[b, h] = (scores @ v[b, h]) / total
        lse[b, h] = (top + xp.log(total))[:, 0]
    return o, lse


@kernel(narrow=3)
def attention_backward(
    xp: Any, q: Any, k: Any, v: Any, o: Any, lse: Any, do: Any, causal: bool, scale: float
) -> tuple[Any, Any, Any]:
    """dq, dk, dv of `attention`, probabilities made again from lse (Dao et al. 2022).

    With p the probabilities and dp = do v^T: dv = p^T do, ds = p (dp - sum(do o)) scale, dq = ds k, dk = ds^T q.
    """
    dq, dk, dv = (xp.empty(q.shape, dtype=q.dtype) for _ in range(3))
    mask = _mask(xp, q) if causal else None
    for b, h in _heads(xp, q):
        p = xp.exp(_scores(xp, q[b, h], k[b, h], mask, scale) - lse[b, h][:, None])
        dv[b, h] = p.T @ do[b, h]
        along = xp.sum(do[b, h] * o[b, h], axis=-1, keepdims=True)
        ds = p * (do[b, h] @ v[b, h].T - along) * scale
        dq[b, h] = ds @ k[b, h]
        dk[b, h] = ds.T @ q[b, h]
    return dq, dk, dv


def _heads(xp: Any, q: Any) -> Iterable[tuple[int, ...]]:
    """Every (sample, head); of arrays without data one stands for all."""
    return np.ndindex(*(min(n, 1) for n in q.shape[:2]) if getattr(xp, "holds_no_data", False) else q.shape[:2])


def _scores(xp: Any, q: Any, k: Any, mask: Any, scale: float) -> Any:
    scores = (q @ k.T) * scale
    return scores if mask is None else scores + mask


def _mask(xp: Any, q: Any) -> Any:
    """0 where a position may look, -inf where it may not, (T, T)."""
    time = xp.arange(q.shape[2])
    hidden = time[None, :] > time[:, None]
    return xp.where(hidden, xp.full((), -np.inf, dtype=q.dtype), xp.zeros((), dtype=q.dtype))
