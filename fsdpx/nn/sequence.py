"""Sequences that are cut over ranks: the plan, and attention over parts of a sequence."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np

from fsdpx.core.array import kernels
from fsdpx.core.array.kernels.dot_product_attention import clear_hidden, compute_seen, multiply_seen
from fsdpx.errors import DataError
from fsdpx.nn import collectives
from fsdpx.nn.activation import apply_mask, keep_mask
from fsdpx.nn.attention_math import Heads, scores_of, seen_by, split_heads
from fsdpx.nn.gradient_accumulation import is_index, product, wide
from fsdpx.nn.layer import Array, Env, Layer, Params, want_time
from fsdpx.nn.linear import named, want_known
from fsdpx.nn.losses import Loss
from fsdpx.nn.sharding import share

__all__ = ["Enter", "Framed", "Leave", "Ring", "SampleLoss", "SequenceLoss", "Ulysses"]

class Enter(Layer):
    """A full array to this rank's part of dim 1, the sequence, or of dim 0, the samples.

    Backward all-gathers the gradient: n(N-1)/N bytes, n = bytes of the array. Integers have none.

    Parameters
    ----------
    dim : 1 or 0
    """

    takes = "passed"

    def __init__(self, dim: int = 1) -> None:
        self.dim = dim

    def forward(self, env: Env, p: Params, x: Array) -> tuple[Array, Any]:
        if self.dim == 1:
            want_time(x)
            want_known(env, x, named(env, "sequence"))
        elif env.time is None and env.mesh.tensor.size > 1:
            raise DataError(f"{named(env, 'input')}: sequence='samples' takes inputs that all have one length of dim 1")
        return collectives.cut(env.xp, env.mesh.tensor, x, self.dim), (is_index(x), x.shape[self.dim])

    def backward_input(self, env: Env, p: Params, saved: Any, dy: Array) -> tuple[Array | None, Any]:
        index, total = saved
        if index or dy is None:
            return None, ()
        return collectives.join(env.xp, env.mesh.tensor, dy, self.dim, total, what=named(env, "gradient")), ()


class Leave(Layer):
    """This rank's part of the last dim, of size `total` in all, to the full array on every rank: n(N-1)/N bytes."""

    def __init__(self, total: int) -> None:
        self.total = total

    def forward(self, env: Env, p: Params, x: Array) -> tuple[Array, Any]:
        return collectives.join(env.xp, env.mesh.tensor, x, -1, self.total, what=named(env, "output")), ()

    def backward_input(self, env: Env, p: Params, saved: Any, dy: Array) -> tuple[Array, Any]:
        return collectives.cut(env.xp, env.mesh.tensor, dy, -1), ()


class Framed(Layer):
    """A model of one layer between what its inputs and its output go through, if anything. It keeps the names of
    parameters, which a `Chain` would change."""

    def __init__(self, layer: Layer, enter: Layer | None = None, leave: Layer | None = None) -> None:
        self.layer, self.enter, self.leave = layer, enter, leave
        self.collective, self.takes = layer.collective, layer.takes

    def specs(self) -> dict[str, Any]:
        return self.layer.specs()

    def children(self) -> dict[str, Layer]:
        return {"": self.layer}

    def forward(self, env: Env, p: Params, x: Array) -> tuple[Array, Any]:
        entered: tuple[Any, ...] = ()
        if self.enter:
            x, entered = self.enter.forward(env, {}, x)
        y, held = self.layer.forward(env, p, x)
        return (self.leave.forward(env, {}, y)[0] if self.leave else y), (entered, held)

    def backward(self, env: Env, p: Params, g: Params, saved: Any, dy: Array) -> Any:
        entered, held = saved
        dx = self.layer.backward(env, p, g, held, self._inside(env, dy))
        return self._outside(env, entered, dx)

    def backward_leaf(self, env: Env, p: Params, g: Params, saved: Any, dy: Array) -> None:
        self.layer.backward_leaf(env, p, g, saved[1], self._inside(env, dy))

    def backward_input(self, env: Env, p: Params, saved: Any, dy: Array) -> tuple[Any, Any]:
        entered, held = saved
        dx, kept = self.layer.backward_input(env, p, held, self._inside(env, dy))
        return self._outside(env, entered, dx), kept

    def backward_params(self, env: Env, g: Params, kept: Any) -> None:
        self.layer.backward_params(env, g, kept)

    def _inside(self, env: Env, dy: Array) -> Array:
        return self.leave.backward_input(env, {}, (), dy)[0] if self.leave else dy

    def _outside(self, env: Env, entered: Any, dx: Any) -> Any:
        return self.enter.backward_input(env, {}, entered, dx)[0] if self.enter else dx


class SampleLoss(Loss):
    """`loss` of an output that is cut along dim 0 over a tensor axis; all ranks have the full target.

    Total and weight are those of this rank's samples. Communicates nothing."""

    partial = True

    def __init__(self, loss: Loss) -> None:
        self.loss = loss
        self.runs = getattr(loss, "runs", ())

    def forward(self, env: Env, y: Array, target: Array) -> tuple[float, float, Any]:
        return self.loss.forward(env, y, collectives.cut(env.xp, env.mesh.tensor, target, 0))

    def backward(self, env: Env, saved: Any, seed: float) -> Array:
        return self.loss.backward(env, saved, seed)

    def validate(self, shape: tuple[int, ...], target: Array) -> None:
        self.loss.validate((target.shape[0], *shape[1:]), target)


class SequenceLoss(Loss):
    """`loss` of an output that is cut along dim 1 over a tensor axis of `width` ranks; all have the full target.

    Total and weight are those of this rank's part. Communicates nothing."""

    acts_on = "position"
    partial = True

    def __init__(self, loss: Loss, width: int) -> None:
        self.loss, self.width = loss, width
        self.runs = getattr(loss, "runs", ())

    def forward(self, env: Env, y: Array, target: Array) -> tuple[float, float, Any]:
        assert env.mesh.tensor.size == self.width, f"a tensor axis of {env.mesh.tensor.size}, not {self.width}"
        _, time = env.place(y.shape[1])
        if target.ndim < 2 or target.shape[1] != time:
            raise DataError(
                f"{self!r}: the output is cut along dim 1 by sequence=..., and the target with it: dim 1 of the target "
                f"must be {time}, got a target of shape {tuple(target.shape)}"
            )
        return self.loss.forward(env, y, collectives.cut(env.xp, env.mesh.tensor, target, 1))

    def backward(self, env: Env, saved: Any, seed: float) -> Array:
        return self.loss.backward(env, saved, seed)

    def validate(self, shape: tuple[int, ...], target: Array) -> None:
        if len(shape) < 2:
            raise DataError(f"{self!r}: an output of shape {tuple(shape)} has no dim 1 to be cut along")
        time = target.shape[1] if target.ndim > 1 else 0
        if shape[1] not in (time // self.width, -(-time // self.width)):  # no rank has such a part of this target
            time = shape[1] * self.width
        self.loss.validate((shape[0], time, *shape[2:]), target)


KEYS_VALUES, GRADIENTS = 0, 1
"""Tags of the messages that carry keys and values, and of those that carry their gradients."""


class Ulysses:
    """Attention by all-to-all: from all heads of a part of the time to the full time of a part of the heads, and back
    (Jacobs et al. 2023). Neither need divide evenly; each rank holds activations of 1/N of the heads x time."""

    def __init__(self, heads: Heads) -> None:
        self.heads = heads

    def forward(self, env: Env, qkv: Array) -> tuple[Array, Any]:
        merged, kept = self.heads.forward(env, self._to_heads(env, qkv, 3, "q, k, v"))
        return self._to_time(env, merged, 1, "attention"), kept

    def backward(self, env: Env, kept: Any, dmerged: Array) -> Array:
        dqkv = self.heads.backward(env, kept, self._to_heads(env, dmerged, 1, "attention gradient"))
        return self._to_time(env, dqkv, 3, "gradient of q, k, v")

    def _to_heads(self, env: Env, x: Array, count: int, thing: str) -> Array:
        """`(samples, part of time, count x all heads)` -> `(samples, time, count x part of heads)`."""
        apart = x.reshape(*x.shape[:2], count, self.heads.n_heads, self.heads.d_head)
        y = collectives.exchange(env.xp, env.mesh.tensor, apart, 3, 1, env.time, what=named(env, thing))
        return y.reshape(*y.shape[:2], count * y.shape[3] * y.shape[4])

    def _to_time(self, env: Env, x: Array, count: int, thing: str) -> Array:
        """The inverse of `_to_heads`."""
        width = x.shape[2] // (count * self.heads.d_head)
        apart = x.reshape(*x.shape[:2], count, width, self.heads.d_head)
        y = collectives.exchange(env.xp, env.mesh.tensor, apart, 1, 3, self.heads.n_heads, what=named(env, thing))
        return y.reshape(*y.shape[:2], x.shape[2] // width * self.heads.n_heads)


class Ring:
    """Ring attention: keys and values pass round the ranks while each rank keeps its queries (Liu et al. 2023).

    The results of the blocks are added by an online softmax (Milakov and Gimelshein 2018), so that no rank ever holds
    keys, values or scores of more than a part of the time: memory is O(time / N). With `causal` a rank skips the blocks
    after its own, so rank 0 waits while the last rank computes. Backward draws the random numbers of dropout again
    instead of saving masks. Keys and values of the next block are received while this one is computed."""

    def __init__(self, heads: Heads) -> None:
        self.heads = heads

    def forward(self, env: Env, qkv: Array) -> tuple[Array, Any]:
        xp, comm = env.xp, env.mesh.tensor
        if comm.size == 1:
            return self.heads.forward(env, qkv)
        q, k, v = split_heads(qkv, 3, self.heads.d_head)
        kv, (_, time) = xp.stack((k, v)), env.place(qkv.shape[1])
        o = xp.zeros(q.shape, dtype=wide(q.dtype))
        lse = xp.full(q.shape[:3], -math.inf, dtype=wide(q.dtype))
        for step in range(comm.size):
            block = (comm.rank - step) % comm.size
            incoming = _shift(env, kv, time, block, KEYS_VALUES, "keys and values") if step + 1 < comm.size else None
            if self._sees(comm.rank, block, q, kv):
                o, lse = _merged(xp, o, lse, *self._attend(env, q, kv[0], kv[1], block))
            kv = incoming.wait() if incoming else kv
        merged = o.astype(qkv.dtype, copy=False).swapaxes(1, 2).reshape(*qkv.shape[:2], qkv.shape[2] // 3)
        return merged, (qkv, merged, (lse,))

    def backward(self, env: Env, kept: Any, dmerged: Array) -> Array:
        xp, comm = env.xp, env.mesh.tensor
        if comm.size == 1:
            return self.heads.backward(env, kept, dmerged)
        qkv, merged, (lse,) = kept
        q, k, v = split_heads(qkv, 3, self.heads.d_head)
        (o,), (do,) = split_heads(merged, 1, self.heads.d_head), split_heads(dmerged, 1, self.heads.d_head)
        dtype, (_, time) = wide(qkv.dtype), env.place(qkv.shape[1])
        kv, dq, outgoing = xp.stack((k, v)), xp.zeros(q.shape, dtype=dtype), None
        for step in range(comm.size):
            block = (comm.rank - step) % comm.size
            incoming = _shift(env, kv, time, block, KEYS_VALUES, "keys and values") if step + 1 < comm.size else None
            dkv = xp.zeros(kv.shape, dtype=dtype)
            if self._sees(comm.rank, block, q, kv):
                some = self._attend_backward(env, q, kv[0], kv[1], o, lse, do, block)
                for total, more in zip((dq, dkv[0], dkv[1]), some, strict=True):
                    total += more
            if outgoing:
                dkv += outgoing.wait()
            outgoing = _shift(env, dkv, time, block, GRADIENTS, "gradients of keys and values")
            kv = incoming.wait() if incoming else kv
        assert outgoing is not None
        heads = xp.concatenate((dq[None], outgoing.wait())).transpose(1, 3, 0, 2, 4)
        return heads.reshape(qkv.shape).astype(qkv.dtype, copy=False)

    def _sees(self, rank: int, block: int, q: Array, kv: Array) -> bool:
        """Whether these queries attend to any of these keys; a rank of a short sequence may have none."""
        return (not self.heads.causal or block <= rank) and q.shape[2] > 0 and kv.shape[3] > 0

    def _attend(self, env: Env, q: Array, k: Array, v: Array, block: int) -> tuple[Array, Array]:
        """The result of one block alone, and its log-sum-exp."""
        causal, heads = self.heads.causal and block == env.mesh.tensor.rank, self.heads
        if not self._drops(env):
            return kernels.attention(env.xp, q, k, v, causal, heads.scale)
        scores = scores_of(env.xp, q, k, causal, heads.scale).astype(wide(q.dtype), copy=False)
        top = env.xp.max(scores, axis=-1, keepdims=True)
        weights = env.xp.exp(scores - top)
        total = env.xp.sum(weights, axis=-1, keepdims=True)
        lse = (top + env.xp.log(total))[..., 0]
        weights /= total
        dropped = apply_mask(weights, self._keep(env, weights.shape, block), heads.dropout)
        dropped, multiply = dropped.astype(q.dtype, copy=False), partial(product, env.xp)
        form = partial(multiply_seen, dropped, v, multiply=multiply)
        return compute_seen(env.xp, form, seen_by(env.xp, q, causal)), lse

    def _attend_backward(
        self, env: Env, q: Array, k: Array, v: Array, o: Array, lse: Array, do: Array, block: int
    ) -> Sequence[Array]:
        """What one block adds to the gradients of q, k and v, given the full result and its lse (Dao et al. 2022)."""
        causal, heads, xp = self.heads.causal and block == env.mesh.tensor.rank, self.heads, env.xp
        if not self._drops(env):
            return kernels.attention_backward(xp, q, k, v, o, lse, do, causal, heads.scale)
        scores = scores_of(xp, q, k, causal, heads.scale).astype(wide(q.dtype), copy=False)
        form = partial(self._slopes, env, xp.exp(scores - lse[..., None]), (q, k, v, o, do), block)
        return compute_seen(xp, form, seen_by(xp, q, causal))

    def _slopes(
        self, env: Env, weights: Array, heads: tuple[Array, ...], block: int, seen: Array | None
    ) -> tuple[Array, ...]:
        """What one block adds to the gradients of q, k and v where attention weights are dropped."""
        (q, k, v, o, do), xp, drop = heads, env.xp, self.heads.dropout
        multiply, seeing = partial(product, xp), None if seen is None else seen.T
        weights, keep = clear_hidden(weights, seen), self._keep(env, weights.shape, block)
        dropped = apply_mask(weights, keep, drop).astype(q.dtype, copy=False)
        dv = multiply_seen(dropped.swapaxes(-1, -2), do, seeing, multiply)
        dweights = apply_mask(multiply(do, v.swapaxes(-1, -2)), keep, drop)
        along = xp.sum((do * o).astype(weights.dtype, copy=False), axis=-1, keepdims=True)
        dscores = (weights * (dweights - along) * self.heads.scale).astype(q.dtype, copy=False)
        dscores = clear_hidden(dscores, seen)
        dq = multiply_seen(dscores, k, seen, multiply)
        return dq, multiply_seen(dscores.swapaxes(-1, -2), q, seeing, multiply), dv

    def _drops(self, env: Env) -> bool:
        return env.training and self.heads.dropout > 0.0

    def _keep(self, env: Env, shape: tuple[int, ...], block: int) -> Array:
        """The mask of this rank's queries and the keys of `block`, of the full (samples, heads, time, time)."""
        mine = _, time = env.place(shape[2])
        cuts = {2: mine, 3: (share(time, block, env.mesh.tensor.size)[0], time)}
        return keep_mask(env.at("dropout"), shape, self.heads.dropout, cuts)


def _shift(env: Env, array: Array, time: int, block: int, tag: int, thing: str) -> collectives.PendingMove:
    """Send what belongs to a block to the next rank of the ring, and receive that of the block before it.

    array: (2, samples, heads, this block's part of `time`, d_head)."""
    comm, what = env.mesh.tensor, named(env, thing)
    start, stop = share(time, (block - 1) % comm.size, comm.size)
    shape = (*array.shape[:3], stop - start, array.shape[4])
    sent = env.xp.ascontiguousarray(array).reshape(-1)
    into = env.xp.empty((math.prod(shape),), dtype=sent.dtype)
    receiving = comm.recv(into, (comm.rank - 1) % comm.size, tag, what=what)
    sending = comm.send(sent, (comm.rank + 1) % comm.size, tag, what=what)

    def finish() -> Array:
        sending.wait()
        return into.reshape(shape)

    return collectives.PendingMove(receiving, finish, sent)


def _merged(xp: Any, o: Array, lse: Array, part: Array, part_lse: Array) -> tuple[Array, Array]:
    """The attention over two sets of keys, from that over each, normalised by its own sum of exponentials."""
    top = xp.maximum(lse, part_lse)
    total = top + xp.log(xp.exp(lse - top) + xp.exp(part_lse - top))
    o = o * xp.exp(lse - total)[..., None]
    o += part.astype(o.dtype, copy=False) * xp.exp(part_lse - total)[..., None]
    return o, total.astype(np.dtype(o.dtype), copy=False)
