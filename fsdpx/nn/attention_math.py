"""Forward and backward passes of attention, for all heads or for the heads of one tensor rank."""

from __future__ import annotations

import math
from functools import partial
from typing import Any, Protocol

from fsdpx.core.array import kernels
from fsdpx.core.array.kernels.dot_product_attention import (
    compute_masked_if_not_finite,
    multiply_without_hidden_rows,
    zero_hidden_weights,
)
from fsdpx.nn.activation import apply_dropout_mask, make_keep_mask
from fsdpx.nn.gradient_accumulation import matmul_in_dtype_of_first
from fsdpx.nn.layer import Array, LayerContext
from fsdpx.nn.shard_specs import shard_bounds

__all__ = ["AttentionCore", "AttentionHeads", "compute_scores", "make_causal_mask", "split_heads"]


class AttentionCore(Protocol):
    """Protocol for attention implementations that take queries, keys and values in one array, concatenated along the
    features."""

    def forward(self, env: LayerContext, qkv: Array) -> tuple[Array, Any]:
        """Return the attention output of all heads, and the values that `backward` needs. `qkv` is
        `(samples, time, 3 * width)`, and the output is `(samples, time, width)`."""
        ...

    def backward(self, env: LayerContext, kept: Any, dmerged: Array) -> Array:
        """Return the gradient of `qkv`. `dmerged` is the gradient of the attention output, and `kept` contains the
        values that `forward` returned for the backward pass."""
        ...


class AttentionHeads:
    """Attention over the full sequence, for all heads or only for this tensor rank's heads.

    The dropout mask is defined for all heads. If this rank computes only some of the heads, it uses their slice of the
    mask.

    Parameters
    ----------
    n_heads, d_head : total number of query heads on all ranks, and number of features per head
    causal, window : as in `Attention`; window=0 means no window
    dropout : probability that an attention weight is dropped; if it is not 0, there must be as many key heads as query
        heads
    """

    def __init__(self, n_heads: int, d_head: int, causal: bool, dropout: float = 0.0, window: int = 0) -> None:
        self.n_heads, self.d_head, self.causal, self.dropout, self.window = n_heads, d_head, causal, dropout, window
        self.scale = 1.0 / math.sqrt(d_head)

    def forward(self, env: LayerContext, qkv: Array) -> tuple[Array, Any]:
        merged, rest = self.attend(env, *split_heads(qkv, 3, self.d_head))
        return merged, (qkv, merged, rest)

    def backward(self, env: LayerContext, kept: Any, dmerged: Array) -> Array:
        qkv, merged, rest = kept
        heads = self.attend_backward(env, merged, rest, dmerged, *split_heads(qkv, 3, self.d_head))
        return heads.transpose(1, 3, 0, 2, 4).reshape(qkv.shape)

    def attend(
        self, env: LayerContext, q: Array, k: Array, v: Array, *, segments: Array | None = None
    ) -> tuple[Array, Any]:
        """Return two values: the attention output with merged heads, (samples, time, heads x d_head), and a tuple of
        the other values that `attend_backward` needs.

        `q`, `k` and `v` have the shape (samples, heads, time, d_head). `segments` is an integer array (samples, time)
        that separates packed documents; see `Attention`."""
        rest: tuple[Array, ...] = ()
        if env.cache is not None:
            o = env.cache.store_and_attend(env.xp, env.random.path, q, k, v, self.scale, self.window)
        elif not env.training or self.dropout == 0.0:
            o, lse = kernels.attention(env.xp, q, k, v, self.causal, self.scale, self.window, segments)
            rest = (lse,)
        else:
            keep = self._make_dropout_keep_mask(env, (*q.shape[:3], k.shape[2]))
            weights = self._compute_attention_weights(env.xp, q, k)
            dropped, multiply = (
                apply_dropout_mask(weights, keep, self.dropout),
                partial(matmul_in_dtype_of_first, env.xp),
            )
            form = partial(multiply_without_hidden_rows, dropped, v, multiply=multiply)
            o, rest = (
                compute_masked_if_not_finite(env.xp, form, make_causal_mask(env.xp, q, self.causal)),
                (weights, keep),
            )
        samples, heads, time, d_head = q.shape
        return o.swapaxes(1, 2).reshape(samples, time, heads * d_head), rest

    def attend_backward(
        self, env: LayerContext, merged: Array, rest: Any, dmerged: Array, q: Array, k: Array, v: Array,
        *, segments: Array | None = None,
    ) -> Any:  # fmt: skip
        """Return the gradients of q, k and v: as one stacked array if their shapes are equal, otherwise as a tuple of
        three arrays. `merged` and `rest` are the two results of `attend`, and `dmerged` is the gradient of `merged`."""
        (o,), (do,) = split_heads(merged, 1, self.d_head), split_heads(dmerged, 1, self.d_head)
        if len(rest) == 1:
            form = self.causal, self.scale, self.window, segments
            return kernels.attention_backward(env.xp, q, k, v, o, rest[0], do, *form)
        slopes = partial(self._attend_backward_with_dropout, env.xp, q, k, v, do, *rest)
        return compute_masked_if_not_finite(env.xp, slopes, make_causal_mask(env.xp, q, self.causal))

    def _attend_backward_with_dropout(
        self, xp: Any, q: Array, k: Array, v: Array, do: Array, weights: Array, keep: Array, seen: Array | None
    ) -> Array:
        """Return the gradients of q, k and v for attention with dropout, stacked into one array (3, samples, heads,
        time, d_head). `seen` is the causal mask, or None if attention is not causal."""
        multiply, seeing = partial(matmul_in_dtype_of_first, xp), None if seen is None else seen.T
        dweights = zero_hidden_weights(apply_dropout_mask(multiply(do, v.swapaxes(-1, -2)), keep, self.dropout), seen)
        rows = (-1, weights.shape[-1])
        dscores = kernels.softmax_backward(xp, weights.reshape(rows), dweights.reshape(rows))
        dscores *= self.scale
        dscores = zero_hidden_weights(dscores.reshape(weights.shape), seen)
        dropped = zero_hidden_weights(apply_dropout_mask(weights, keep, self.dropout), seen)
        dv = multiply_without_hidden_rows(dropped.swapaxes(-1, -2), do, seeing, multiply)
        dq = multiply_without_hidden_rows(dscores, k, seen, multiply)
        return xp.stack((dq, multiply_without_hidden_rows(dscores.swapaxes(-1, -2), q, seeing, multiply), dv))

    def _compute_attention_weights(self, xp: Any, q: Array, k: Array) -> Array:
        scores = compute_scores(xp, q, k, self.causal, self.scale)
        return kernels.softmax(xp, scores.reshape(-1, scores.shape[-1])).reshape(scores.shape)

    def _make_dropout_keep_mask(self, env: LayerContext, shape: tuple[int, ...]) -> Array:
        if shape[1] == self.n_heads:
            return make_keep_mask(env.child("dropout"), shape, self.dropout)
        start, stop = shard_bounds(self.n_heads, env.mesh.tensor.rank, env.mesh.tensor.size)
        assert stop - start == shape[1], f"{shape[1]} heads, not those of [{start}, {stop})"
        return make_keep_mask(env.child("dropout"), shape, self.dropout, {1: (start, self.n_heads)})


def split_heads(merged: Array, count: int, d_head: int) -> list[Array]:
    """Split an array (samples, time, count x heads x d_head) into `count` views (samples, heads, time, d_head)."""
    samples, time, width = merged.shape
    split = merged.reshape(samples, time, count, width // (count * d_head), d_head)
    return [split[:, :, i].swapaxes(1, 2) for i in range(count)]


def compute_scores(xp: Any, q: Array, k: Array, causal: bool, scale: float) -> Array:
    """Return the attention scores, `scale * q @ k^T`. If `causal` is true, the score is -inf where the key comes after
    the query."""
    scores = matmul_in_dtype_of_first(xp, q, k.swapaxes(-1, -2))
    scores *= scale
    seen = make_causal_mask(xp, q, causal)
    return scores if seen is None else xp.where(seen, scores, xp.full_like(scores, -math.inf))


def make_causal_mask(xp: Any, q: Array, causal: bool) -> Array | None:
    """Return a boolean mask (time, time) that is True where the query position (row) may attend to the key position
    (column). Return None if `causal` is False."""
    time = xp.arange(q.shape[-2])
    return time[None, :] <= time[:, None] if causal else None
