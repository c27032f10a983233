"""Attention kernels: scaled dot products, softmax, and rotary position embedding."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from operator import matmul
from typing import Any

import numpy as np

from fsdpx.core.array.kernels.dispatch import kernel
from fsdpx.core.array.kernels.head_layout import empty_attention_gradients, empty_time_first
from fsdpx.core.array.namespace import concatenate_on_device
from fsdpx.core.array.shapes.flop_counter import iterate_first_and_count_all

__all__ = ["attention", "attention_backward", "rotate", "softmax", "softmax_backward"]


@kernel()
def softmax(xp: Any, x: Any) -> Any:
    """Return exp(x) / sum(exp(x)) over the last dim of x."""
    y = xp.exp(x - xp.max(x, axis=-1, keepdims=True))
    y /= xp.sum(y, axis=-1, keepdims=True)
    return y


@kernel()
def softmax_backward(xp: Any, y: Any, dy: Any) -> Any:
    """Return the gradient of `softmax`: `y * (dy - sum(y * dy))`, where y is the result of `softmax`."""
    return y * (dy - xp.sum(y * dy, axis=-1, keepdims=True))


@kernel()
def rotate(xp: Any, x: Any, cos: Any, sin: Any) -> Any:
    """Apply rotary position embedding (Su et al. 2021): return `(a * cos - b * sin, b * cos + a * sin)`, where a and b
    are the halves of the last dim, as in Llama. The gradient is `rotate` with -sin.

    Parameters
    ----------
    x : (B, T, H, D)
    cos, sin : (T, D / 2) in the compute dtype
    """
    half = x.shape[3] // 2
    c, s = cos[None, :, None, :], sin[None, :, None, :]
    a, b = x[..., :half], x[..., half:]
    return concatenate_on_device(xp, (a * c - b * s, b * c + a * s))


@kernel()
def attention(
    xp: Any, q: Any, k: Any, v: Any, causal: bool, scale: float, window: int = 0, segments: Any = None
) -> tuple[Any, Any]:
    """Return `softmax(scale * q @ k^T) @ v` for each head (Vaswani et al. 2017), and the log-sum-exp of each row of
    scores.

    Parameters
    ----------
    q : (B, H, T, D): batch, heads, time and features
    k, v : (B, G, T, D), or (B, G, S, D) if not causal; each of the G heads is shared by H / G heads of q (Ainslie et
        al. 2023). All strides are allowed, and S must be positive
    causal : if true, no position attends to later positions
    scale : factor applied to the scores
    window : with `causal`, a position attends to itself and to the `window` - 1 positions just before it; if `window`
        is 0, a position attends to itself and to all earlier positions
    segments : (B, T) integers, allowed only if k is as long as q. A position attends only to positions with the same
        number

    Returns
    -------
    o (B, H, T, D) and lse (B, H, T). lse is the logarithm of each row's sum of exponentials; the backward pass needs it
        (Rabe and Staats 2021). o is stored with time before heads, so that merging the heads needs no copy. Peak
        memory: T x S scores of one head, or 64 rows of these scores in compiled code.
    """
    o, lse = empty_time_first(xp, q), xp.empty(q.shape[:3], dtype=q.dtype)
    earlier, group = _make_causal_mask(xp, q, window) if causal else None, q.shape[1] // k.shape[1]
    for b, h in _iterate_head_indices(xp, q):
        seen = _make_segment_mask(earlier, segments, b)
        scores = _compute_scores(xp, q[b, h], k[b, h // group], seen, scale)
        top = xp.max(scores, axis=-1, keepdims=True) if scores.size else xp.sum(scores, axis=-1, keepdims=True)
        scores = xp.exp(scores - top)
        total = xp.sum(scores, axis=-1, keepdims=True)
        o[b, h] = (
            compute_masked_if_not_finite(xp, partial(multiply_without_hidden_rows, scores, v[b, h // group]), seen)
            / total
        )
        lse[b, h] = (top + xp.log(total))[:, 0]
    return o, lse


@kernel(narrow=3)
def attention_backward(
    xp: Any, q: Any, k: Any, v: Any, o: Any, lse: Any, do: Any, causal: bool, scale: float, window: int = 0,
    segments: Any = None,
) -> Any:  # fmt: skip
    """Return the gradients dq, dk, dv of `attention` as one array (3, B, H, T, D). Probabilities are recomputed from
    lse (Dao et al. 2022).

    The array is stored as (B, T, 3, H, D), like the gradient of a fused projection to queries, keys and values. If k
    has a different length or fewer heads than q, three separate arrays are returned.

    The formulas are `dv = p^T @ do`, `dq = ds @ k` and `dk = ds^T @ q`. p are the probabilities, and the score
    gradients are `ds = p * (do @ v^T - sum(do * o)) * scale`.
    """
    d = empty_attention_gradients(xp, q, k)
    dq, dk, dv = d[0], d[1], d[2]
    earlier, group = _make_causal_mask(xp, q, window) if causal else None, q.shape[1] // k.shape[1]
    for b, h in _iterate_head_indices(xp, q):
        head_index, first = (b, h // group), h % group == 0
        seen = _make_segment_mask(earlier, segments, b)
        p = xp.exp(_compute_scores(xp, q[b, h], k[head_index], seen, scale) - lse[b, h][:, None])
        head = partial(
            _attention_backward_of_head, xp, p, q[b, h], k[head_index], v[head_index], o[b, h], do[b, h], scale
        )
        dq[b, h], more_k, more_v = compute_masked_if_not_finite(xp, head, seen)
        dv[head_index] = more_v if first else dv[head_index] + more_v
        dk[head_index] = more_k if first else dk[head_index] + more_k
    return d


def _iterate_head_indices(xp: Any, q: Any) -> Iterable[tuple[int, ...]]:
    """Yield the indices (sample, head) of all heads. For shape-only arrays, yield only the first head, and multiply its
    counted work by the number of heads."""
    if getattr(xp, "holds_no_data", False):
        return iterate_first_and_count_all((0, 0), q.shape[0] * q.shape[1])
    return np.ndindex(*q.shape[:2])


def _attention_backward_of_head(
    xp: Any, p: Any, q: Any, k: Any, v: Any, o: Any, do: Any, scale: float, seen: Any
) -> tuple[Any, ...]:
    """Return the gradients of q, k and v of one head, given its attention probabilities p. `seen` is the attention
    mask (T, S), or None if all positions are visible."""
    seeing = None if seen is None else seen.T
    along = xp.sum(do * o, axis=-1, keepdims=True)
    ds = zero_hidden_weights(p * (do @ v.T - along) * scale, seen)
    dv = multiply_without_hidden_rows(zero_hidden_weights(p, seen).T, do, seeing)
    return multiply_without_hidden_rows(ds, k, seen), multiply_without_hidden_rows(ds.T, q, seeing), dv


def compute_masked_if_not_finite(xp: Any, compute: Callable[[Any], Any], seen: Any) -> Any:
    """Return `compute(None)`, or the more expensive `compute(seen)` if the result contains NaN or Inf.

    `seen` is an attention mask (T, S) that is False where a row is hidden; None means that all rows are visible.
    `compute` multiplies rows by weights, which are 0 for hidden rows. However, 0 times NaN or Inf is NaN, so a hidden
    row can still affect `compute(None)`. `compute(seen)` leaves hidden rows out. If the arrays are not NumPy arrays,
    only `compute(None)` runs.
    """
    mask = compute(None)
    if xp is not np or seen is None:
        return mask
    parts = mask if isinstance(mask, tuple) else (mask,)
    return mask if all(np.isfinite(one).all() for one in parts) else compute(seen)


def multiply_without_hidden_rows(weights: Any, rows: Any, seen: Any, multiply: Callable[..., Any] = matmul) -> Any:
    """Return the product of weights (..., T, S) and rows (..., S, D). NaN and Inf in hidden rows do not affect the
    product. `seen` is the mask (T, S) of visible rows, and `multiply` is the function that computes the product."""
    if seen is None:
        return multiply(weights, rows)
    finite, nothing = np.isfinite(rows), rows.dtype.type(0)
    total = multiply(weights, np.where(finite, rows, nothing))
    for s in np.flatnonzero(~finite.all(axis=-1).reshape(-1, rows.shape[-2]).all(axis=0)):
        odd = seen[:, s, None] & ~finite[..., s, None, :]
        total = total + np.where(odd, weights[..., s, None] * rows[..., s, None, :], nothing)
    return total


def zero_hidden_weights(x: Any, seen: Any) -> Any:
    """Set the attention weights x (..., T, S) of hidden rows to 0. Before this call, the weight of a hidden row is NaN
    if the row contains NaN. `seen` is the mask (T, S) of visible rows."""
    return x if seen is None else np.where(seen, x, x.dtype.type(0))


def _compute_scores(xp: Any, q: Any, k: Any, seen: Any, scale: float) -> Any:
    scores = (q @ k.T) * scale
    return scores if seen is None else xp.where(seen, scores, xp.full((), -np.inf, dtype=q.dtype))


def _make_causal_mask(xp: Any, q: Any, window: int) -> Any:
    """Return the mask (T, T) that is True where a position (row) attends to a position (column). Each position attends
    to itself and to earlier positions within the window."""
    time = xp.arange(q.shape[2])
    seen = time[None, :] <= time[:, None]
    return seen & (time[None, :] > time[:, None] - window) if window else seen


def _make_segment_mask(earlier: Any, segments: Any, b: int) -> Any:
    """Return the attention mask of sample b. `earlier` is the causal mask, or None if attention is not causal. If
    `segments` is given, pairs of positions in different segments are masked as well. Return None if all positions are
    visible."""
    if segments is None:
        return earlier
    same = segments[b][None, :] == segments[b][:, None]
    return same if earlier is None else earlier & same
