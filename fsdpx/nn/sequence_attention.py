"""Attention over sequences that are sharded over ranks (context parallelism): Ulysses attention and ring attention."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from fsdpx.core.array import kernels
from fsdpx.core.array.kernels.dot_product_attention import (
    compute_masked_if_not_finite,
    multiply_without_hidden_rows,
    zero_hidden_weights,
)
from fsdpx.nn import collectives
from fsdpx.nn.activation import apply_dropout_mask, make_keep_mask
from fsdpx.nn.attention_math import AttentionHeads, compute_scores, make_causal_mask, split_heads
from fsdpx.nn.gradient_accumulation import accumulation_dtype, matmul_in_dtype_of_first
from fsdpx.nn.layer import Array, AxisRanks, LayerContext
from fsdpx.nn.linear import make_call_label
from fsdpx.nn.shard_specs import shard_bounds

__all__ = ["Ring", "RingAttention", "UlyssesAttention"]

KEYS_VALUES, GRADIENTS = 0, 1
"""Message tags for keys and values, and for their gradients."""


class UlyssesAttention:
    """Ulysses attention (Jacobs et al. 2023). An all-to-all redistributes queries, keys and values from sequence
    shards with all heads to full sequences with some of the heads. A second all-to-all redistributes the result to
    sequence shards.

    The numbers of heads and positions need not be multiples of the number of ranks. Each of N ranks holds 1/N of the
    activations."""

    def __init__(self, heads: AttentionHeads) -> None:
        self.heads = heads

    def forward(self, env: LayerContext, qkv: Array) -> tuple[Array, Any]:
        merged, kept = self.heads.forward(env, self._all_to_all_time_to_heads(env, qkv, 3, "q, k, v"))
        return self._all_to_all_heads_to_time(env, merged, 1, "attention"), kept

    def backward(self, env: LayerContext, kept: Any, dmerged: Array) -> Array:
        dqkv = self.heads.backward(env, kept, self._all_to_all_time_to_heads(env, dmerged, 1, "attention gradient"))
        return self._all_to_all_heads_to_time(env, dqkv, 3, "gradient of q, k, v")

    def _all_to_all_time_to_heads(self, env: LayerContext, x: Array, count: int, thing: str) -> Array:
        """Redistribute an array from sequence shards to head shards: `(samples, this rank's time, count x all heads)`
        -> `(samples, time, count x this rank's heads)`. Collective.

        `count` is the number of arrays that are concatenated along the last dim (3 for queries, keys and values), and
        `thing` is their name in error messages."""
        apart = x.reshape(*x.shape[:2], count, self.heads.n_heads, self.heads.d_head)
        y = collectives.all_to_all_dims(
            env.xp, env.mesh.tensor, apart, 3, 1, env.time, what=make_call_label(env, thing)
        )
        return y.reshape(*y.shape[:2], count * y.shape[3] * y.shape[4])

    def _all_to_all_heads_to_time(self, env: LayerContext, x: Array, count: int, thing: str) -> Array:
        """Invert `_all_to_all_time_to_heads`: redistribute an array from head shards to sequence shards. The arguments
        are the same. Collective."""
        width = x.shape[2] // (count * self.heads.d_head)
        apart = x.reshape(*x.shape[:2], count, width, self.heads.d_head)
        y = collectives.all_to_all_dims(
            env.xp, env.mesh.tensor, apart, 1, 3, self.heads.n_heads, what=make_call_label(env, thing)
        )
        return y.reshape(*y.shape[:2], x.shape[2] // width * self.heads.n_heads)


class Ring(NamedTuple):
    """The ranks that pass keys and values around, and the number of positions that each of them holds."""

    comm: AxisRanks
    lengths: Sequence[int]


def find_tensor_ring(env: LayerContext, part: int) -> Ring:
    """Return the ring of ranks over which a sequence is sharded. `part` is the number of positions that this rank
    holds."""
    comm, (_, time) = env.mesh.tensor, env.sequence_offset(part)
    bounds = (shard_bounds(time, rank, comm.size) for rank in range(comm.size))
    return Ring(comm, [stop - start for start, stop in bounds])


class RingAttention:
    """Ring attention (Liu et al. 2023). Blocks of keys and values are passed around the ring of ranks, while each rank
    keeps its queries.

    An online softmax (Milakov and Gimelshein 2018) combines the results of the blocks. No rank ever holds keys, values
    or scores of the full sequence, so each rank needs O(time / N) memory. In causal attention, a rank skips the blocks
    after its own, so rank 0 waits while the last rank computes. Dropout masks are not saved: the backward pass
    generates the same random numbers again. The next block is received while the current block is processed.

    Parameters
    ----------
    heads : attention of all heads, without a window
    find_ring : function that returns the ring, given the context and the number of positions of this rank; default: the
        ranks of the tensor axis. Other rings support only attention without a causal mask and without dropout
    """

    def __init__(
        self, heads: AttentionHeads, find_ring: Callable[[LayerContext, int], Ring] = find_tensor_ring
    ) -> None:
        self.heads, self.find_ring = heads, find_ring

    def forward(self, env: LayerContext, qkv: Array) -> tuple[Array, Any]:
        xp, ring = env.xp, self.find_ring(env, qkv.shape[1])
        comm = ring.comm
        if comm.size == 1:
            return self.heads.forward(env, qkv)
        q, k, v = split_heads(qkv, 3, self.heads.d_head)
        kv = xp.stack((k, v))
        o = xp.zeros(q.shape, dtype=accumulation_dtype(q.dtype))
        lse = xp.full(q.shape[:3], -math.inf, dtype=accumulation_dtype(q.dtype))
        for step in range(comm.size):
            block = (comm.rank - step) % comm.size
            incoming = (
                _start_shift(env, ring, kv, block, KEYS_VALUES, "keys and values") if step + 1 < comm.size else None
            )
            if self._is_block_visible(comm.rank, block, q, kv):
                o, lse = _merge_attention(xp, o, lse, *self._attend_block(env, q, kv[0], kv[1], block))
            kv = incoming.wait() if incoming else kv
        merged = o.astype(qkv.dtype, copy=False).swapaxes(1, 2).reshape(*qkv.shape[:2], qkv.shape[2] // 3)
        return merged, (qkv, merged, (lse,))

    def backward(self, env: LayerContext, kept: Any, dmerged: Array) -> Array:
        xp, ring = env.xp, self.find_ring(env, dmerged.shape[1])
        comm = ring.comm
        if comm.size == 1:
            return self.heads.backward(env, kept, dmerged)
        qkv, merged, (lse,) = kept
        q, k, v = split_heads(qkv, 3, self.heads.d_head)
        (o,), (do,) = split_heads(merged, 1, self.heads.d_head), split_heads(dmerged, 1, self.heads.d_head)
        dtype = accumulation_dtype(qkv.dtype)
        kv, dq, outgoing = xp.stack((k, v)), xp.zeros(q.shape, dtype=dtype), None
        for step in range(comm.size):
            block = (comm.rank - step) % comm.size
            incoming = (
                _start_shift(env, ring, kv, block, KEYS_VALUES, "keys and values") if step + 1 < comm.size else None
            )
            dkv = xp.zeros(kv.shape, dtype=dtype)
            if self._is_block_visible(comm.rank, block, q, kv):
                some = self._attend_block_backward(env, q, kv[0], kv[1], o, lse, do, block)
                for total, more in zip((dq, dkv[0], dkv[1]), some, strict=True):
                    total += more
            if outgoing:
                dkv += outgoing.wait()
            outgoing = _start_shift(env, ring, dkv, block, GRADIENTS, "gradients of keys and values")
            kv = incoming.wait() if incoming else kv
        assert outgoing is not None
        heads = xp.concatenate((dq[None], outgoing.wait())).transpose(1, 3, 0, 2, 4)
        return heads.reshape(qkv.shape).astype(qkv.dtype, copy=False)

    def _is_block_visible(self, rank: int, block: int, q: Array, kv: Array) -> bool:
        """Return whether the queries of `rank` attend to any key in the block that belongs to rank `block`. The result
        is also False if one of the two ranks has no positions, as may happen for short sequences."""
        return (not self.heads.causal or block <= rank) and q.shape[2] > 0 and kv.shape[3] > 0

    def _attend_block(self, env: LayerContext, q: Array, k: Array, v: Array, block: int) -> tuple[Array, Array]:
        """Return the attention output of this rank's queries for the keys of one block, and the log-sum-exp of the
        scores."""
        causal, heads = self.heads.causal and block == env.mesh.tensor.rank, self.heads
        if not self._is_dropping(env):
            return kernels.attention(env.xp, q, k, v, causal, heads.scale)
        scores = compute_scores(env.xp, q, k, causal, heads.scale).astype(accumulation_dtype(q.dtype), copy=False)
        top = env.xp.max(scores, axis=-1, keepdims=True)
        weights = env.xp.exp(scores - top)
        total = env.xp.sum(weights, axis=-1, keepdims=True)
        lse = (top + env.xp.log(total))[..., 0]
        weights /= total
        dropped = apply_dropout_mask(weights, self._make_dropout_keep_mask(env, weights.shape, block), heads.dropout)
        dropped, multiply = dropped.astype(q.dtype, copy=False), partial(matmul_in_dtype_of_first, env.xp)
        form = partial(multiply_without_hidden_rows, dropped, v, multiply=multiply)
        return compute_masked_if_not_finite(env.xp, form, make_causal_mask(env.xp, q, causal)), lse

    def _attend_block_backward(
        self, env: LayerContext, q: Array, k: Array, v: Array, o: Array, lse: Array, do: Array, block: int
    ) -> Sequence[Array]:
        """Return one block's contribution to the gradients of q, k and v (Dao et al. 2022). `o` and `lse` are the
        attention output over all blocks and the log-sum-exp of all scores."""
        causal, heads, xp = self.heads.causal and block == env.mesh.tensor.rank, self.heads, env.xp
        if not self._is_dropping(env):
            return kernels.attention_backward(xp, q, k, v, o, lse, do, causal, heads.scale)
        scores = compute_scores(xp, q, k, causal, heads.scale).astype(accumulation_dtype(q.dtype), copy=False)
        form = partial(
            self._attend_block_with_dropout_backward, env, xp.exp(scores - lse[..., None]), (q, k, v, o, do), block
        )
        return compute_masked_if_not_finite(xp, form, make_causal_mask(xp, q, causal))

    def _attend_block_with_dropout_backward(
        self, env: LayerContext, weights: Array, heads: tuple[Array, ...], block: int, seen: Array | None
    ) -> tuple[Array, ...]:
        """Return one block's contribution to the gradients of q, k and v, for attention with dropout. `weights` are the
        attention weights of the block before dropout."""
        (q, k, v, o, do), xp, drop = heads, env.xp, self.heads.dropout
        multiply, seeing = partial(matmul_in_dtype_of_first, xp), None if seen is None else seen.T
        weights, keep = zero_hidden_weights(weights, seen), self._make_dropout_keep_mask(env, weights.shape, block)
        dropped = apply_dropout_mask(weights, keep, drop).astype(q.dtype, copy=False)
        dv = multiply_without_hidden_rows(dropped.swapaxes(-1, -2), do, seeing, multiply)
        dweights = apply_dropout_mask(multiply(do, v.swapaxes(-1, -2)), keep, drop)
        along = xp.sum((do * o).astype(weights.dtype, copy=False), axis=-1, keepdims=True)
        dscores = (weights * (dweights - along) * self.heads.scale).astype(q.dtype, copy=False)
        dscores = zero_hidden_weights(dscores, seen)
        dq = multiply_without_hidden_rows(dscores, k, seen, multiply)
        return dq, multiply_without_hidden_rows(dscores.swapaxes(-1, -2), q, seeing, multiply), dv

    def _is_dropping(self, env: LayerContext) -> bool:
        return env.training and self.heads.dropout > 0.0

    def _make_dropout_keep_mask(self, env: LayerContext, shape: tuple[int, ...], block: int) -> Array:
        """Return the slice of the dropout mask (samples, heads, time, time) for this rank's queries and the keys of
        `block`."""
        own_position = _, time = env.sequence_offset(shape[2])
        cuts = {2: own_position, 3: (shard_bounds(time, block, env.mesh.tensor.size)[0], time)}
        return make_keep_mask(env.child("dropout"), shape, self.heads.dropout, cuts)


def _start_shift(
    env: LayerContext, ring: Ring, array: Array, block: int, tag: int, thing: str
) -> collectives.PendingCollective:
    """Start sending `array` (the keys and values of `block`, or their gradients) to the next rank of the ring, and
    start receiving the array of the preceding block from the previous rank. Return the pending receive. Collective.

    `array` has the shape (2, samples, heads, positions of the block, d_head). `tag` is the message tag, and `thing` is
    the name of the array in error messages."""
    comm, description = ring.comm, make_call_label(env, thing)
    shape = (*array.shape[:3], ring.lengths[(block - 1) % comm.size], array.shape[4])
    sent = env.xp.ascontiguousarray(array).reshape(-1)
    into = env.xp.empty((math.prod(shape),), dtype=sent.dtype)
    receiving = comm.recv(into, (comm.rank - 1) % comm.size, tag, what=description)
    sending = comm.send(sent, (comm.rank + 1) % comm.size, tag, what=description)

    def finish_shift() -> Array:
        sending.wait()
        return into.reshape(shape)

    return collectives.PendingCollective(receiving, finish_shift, sent)


def _merge_attention(xp: Any, o: Array, lse: Array, part: Array, part_lse: Array) -> tuple[Array, Array]:
    """Combine the attention over two disjoint sets of keys into the attention over all keys. Each of these attentions
    is represented by two arrays: the normalized result (`o` or `part`), and the log-sum-exp of the scores (`lse` or
    `part_lse`)."""
    top = xp.maximum(lse, part_lse)
    total = top + xp.log(xp.exp(lse - top) + xp.exp(part_lse - top))
    o = o * xp.exp(lse - total)[..., None]
    o += part.astype(o.dtype, copy=False) * xp.exp(part_lse - total)[..., None]
    return o, total.astype(np.dtype(o.dtype), copy=False)
