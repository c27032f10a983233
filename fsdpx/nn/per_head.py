"""Layers that process each attention head separately: attention, and a norm of each head."""

from __future__ import annotations

from copy import copy
from dataclasses import replace
from typing import Any

from fsdpx.core.array.namespace import concatenate_on_device
from fsdpx.errors import ConfigError, DataError, ShapeError
from fsdpx.nn.attention_math import AttentionCore, AttentionHeads, split_heads
from fsdpx.nn.gradient_accumulation import has_integer_dtype
from fsdpx.nn.layer import (
    Array,
    Layer,
    LayerContext,
    ParameterSpec,
    Params,
    ShardedLayer,
    require_fraction,
    require_positive,
)
from fsdpx.nn.norm import RMSNorm
from fsdpx.nn.shard_specs import ShardedFeatures, ShardedSequence, ShardingContext

__all__ = ["Attention", "HeadNorm", "PerHead"]


class PerHead(Layer):
    """Base class for layers that process each attention head separately. A tensor rank can run the layer on only its
    own heads. Inputs are the concatenated features of all heads.

    All heads share the parameters, so a rank that runs only some of the heads computes only the contribution of these
    heads to the gradient of each parameter."""

    d_head: int
    blocks = 1
    """Number of blocks of heads that are concatenated in one input; 3 for fused queries, keys and values."""

    def shard_over_ranks(self, request: ShardingContext) -> ShardedLayer:
        """Return the layer that a rank runs on its own heads, or on its shard of the sequence. Raise ConfigError if the
        sharding of the inputs splits a head, or if the shards of two inputs on a rank contain different heads."""
        kinds = request.kinds[:3]  # leave out a fourth input, the segments, which every rank has in full
        cut = [kind for kind in kinds if isinstance(kind, ShardedFeatures)]
        if request.mark is not None or not (cut or any(isinstance(kind, ShardedSequence) for kind in kinds)):
            return super().shard_over_ranks(replace(request, kinds=kinds))
        if not cut:
            return ShardedLayer(self.bind_sequence_shard(request), ShardedSequence(), self.specs())
        grain = cut[0].grain
        whole = all(kind.blocks == self.blocks and kind.grain % self.d_head == 0 for kind in cut)
        if len(cut) < len(kinds) or not whole or len({kind.total // kind.grain for kind in cut}) > 1:
            options = f"grain={self.d_head}" if self.blocks == 1 else f"blocks={self.blocks}, grain={self.d_head}"
            raise ConfigError(
                f"{request.path!r} {self!r} reads {', '.join(map(str, kinds))}, but needs heads of {self.d_head} "
                "features that stay together: give the ColumnParallel layers a grain, such as "
                f"nn.sharding.ColumnParallel({options})"
            )
        return ShardedLayer(self, ShardedFeatures(cut[0].total // self.blocks, 1, grain, cut[0].source), self.specs())

    def bind_sequence_shard(self, request: ShardingContext) -> Layer:
        """Return the layer that processes all heads of this rank's shard of the sequence. By default, return the layer
        itself."""
        return self


class HeadNorm(PerHead):
    """`RMSNorm` of each head. Input and output have the shape `(samples, time, heads x d_head)`.

    Parameters
    ----------
    d_head : number of features per head; all heads share `weight (d_head,)`
    eps, unit_offset : as in `RMSNorm`
    """

    acts_on = "position"
    cheap = True

    def __init__(self, d_head: int, eps: float | None = None, unit_offset: bool = False) -> None:
        self.d_head, self.eps, self.unit_offset = d_head, eps, bool(unit_offset)
        self._norm = RMSNorm(d_head, eps, unit_offset=unit_offset)
        self.kernel_names = self._norm.kernel_names

    def specs(self) -> dict[str, ParameterSpec]:
        return self._norm.specs()

    def forward(self, env: LayerContext, p: Params, x: Array) -> tuple[Array, Any]:
        y, (_, rstd) = self._norm.forward(env, p, self._split_into_heads(x))
        return y.reshape(x.shape), (x, rstd)

    def recompute(self, env: LayerContext, p: Params, saved: Any) -> Array:
        return self.forward(env, p, saved[0])[0]

    def backward_input(self, env: LayerContext, p: Params, saved: Any, dy: Array) -> tuple[Array, Any]:
        x, rstd = saved
        dx, kept = self._norm.backward_input(env, p, (self._split_into_heads(x), rstd), self._split_into_heads(dy))
        return dx.reshape(x.shape), kept

    def backward_params(self, env: LayerContext, g: Params, kept: Any) -> None:
        self._norm.backward_params(env, g, kept)

    def _split_into_heads(self, x: Array) -> Array:
        return x.reshape(*x.shape[:-1], x.shape[-1] // self.d_head, self.d_head)


class Attention(PerHead):
    """Scaled dot-product attention with queries, keys and values as three inputs: `softmax(q @ k^T / sqrt(d_head)) @ v`
    for each head.

    Queries are `(samples, time, n_heads x d_head)`, keys and values `(samples, time, kv_heads x d_head)`. Each group of
    n_heads / kv_heads consecutive query heads shares one head of keys and values (Ainslie et al. 2023). If
    `env.recompute` contains "attention", the enclosing layer saves only the inputs; see `AttentionContainer`.

    Parameters
    ----------
    n_heads, kv_heads : number of query heads, and number of key and value heads; n_heads is a multiple of kv_heads
    d_head : number of features per head
    causal : whether a position attends only to itself and to earlier positions
    window : with `causal`, number of positions that a position attends to: itself and the window - 1 positions before
        it (Beltagy et al. 2020); if None, itself and all positions before it
    segments : whether there is a fourth input, integer segment ids (samples, time); a position then attends only to
        positions with the same id. Each document in a packed sequence has its own id, and the padding has a separate id
    fused : whether queries, keys and values are concatenated in one input; kv_heads is then n_heads
    dropout : with `fused`, dropout probability of attention weights. If it is not 0, the attention weights, an array
        (samples, heads, time, time), are saved for the backward pass
    """

    def __init__(
        self,
        n_heads: int,
        kv_heads: int,
        d_head: int,
        causal: bool = True,
        window: int | None = None,
        segments: bool = False,
        *,
        fused: bool = False,
        dropout: float = 0.0,
    ) -> None:
        require_positive(self, n_heads=n_heads, kv_heads=kv_heads, d_head=d_head)
        require_fraction(self, dropout=dropout)
        if window is not None:
            require_positive(self, window=window)
        if n_heads % kv_heads:
            raise ConfigError(f"Attention: n_heads {n_heads} is not a multiple of kv_heads {kv_heads}")
        if window is not None and not causal:
            raise ConfigError("Attention: a window needs causal=True")
        if fused and (segments or kv_heads != n_heads):
            raise ConfigError("Attention: fused needs kv_heads=n_heads, and no segments")
        if dropout and not fused:
            raise ConfigError("Attention: dropout needs fused=True")
        self.n_heads, self.kv_heads, self.d_head = n_heads, kv_heads, d_head
        self.causal, self.window = bool(causal), window
        self.fused, self.dropout = bool(fused), float(dropout)
        self.segments, self.n_inputs = bool(segments), 1 if fused else 4 if segments else 3
        self.takes = ("numbers", "numbers", "numbers", "indices")[: self.n_inputs]
        self.kernel_names = (
            ("softmax", "softmax_backward", "drop_backward") if dropout else ("attention", "attention_backward")
        )
        self.blocks = 3 if fused else 1
        self._heads = AttentionHeads(n_heads, d_head, self.causal, self.dropout, window or 0)
        self.core: AttentionCore | None = None

    @property
    def caches(self) -> bool:  # type: ignore[override]
        return self.causal and self.core is None and not self.segments

    def needs_full_input(self, input_index: int, mark: Any) -> bool:
        return input_index == 3

    def bind_sequence_shard(self, request: ShardingContext) -> Layer:
        path, sequence = request.path, request.sequence
        if sequence == "ulysses":
            request.require_at_least_one_per_rank(self.n_heads, "heads", 'sequence="ring"')
        if sequence not in ("ring", "ulysses"):
            raise ConfigError(
                f"{path!r}: attention needs the whole sequence, but gets a part of it: cut it by heads, with "
                "nn.sharding.LayerDefault "
                "for the layer around it"
            )
        within = "segments" if self.segments else None if self.window is None else f"a window of {self.window}"
        if within:
            raise ConfigError(
                f"{path!r}: attention within {within} works on whole sequences: use a tensor plan, or "
                f"sequence='parallel', instead of {sequence!r}"
            )
        # imported here, because only sharded sequences need these classes
        from fsdpx.nn.sequence_attention import RingAttention, UlyssesAttention

        new = copy(self)
        new.core = RingAttention(self._heads) if sequence == "ring" else UlyssesAttention(self._heads)
        return new

    def forward(self, env: LayerContext, p: Params, x: Any) -> tuple[Array, Any]:
        self._require_input_shapes((x,) if self.fused else x)
        inputs = (x,) if "attention" in env.recompute else ()
        if self.core is not None:
            merged, kept = self.core.forward(env, x if self.fused else self._repeat_kv_and_concatenate_qkv(env, *x))
        elif self.fused:
            merged, kept = self._heads.forward(env, x)
        else:
            merged, rest = self._heads.attend(env, *self._split_into_heads(x[:3]), segments=self._get_segments(env, x))
            kept = tuple(x), merged, rest
        return merged, (kept, *inputs)

    def backward_input(self, env: LayerContext, p: Params, saved: Any, dy: Array) -> tuple[Any, Any]:
        kept = saved[0]
        if self.fused:
            return (self.core or self._heads).backward(env, kept, dy), ()
        if self.core is not None:
            return self._split_qkv_gradient_and_sum_repeats(env, self.core.backward(env, kept, dy)), ()
        x, merged, rest = kept
        d = self._heads.attend_backward(
            env, merged, rest, dy, *self._split_into_heads(x[:3]), segments=self._get_segments(env, x)
        )
        parts = [part.swapaxes(1, 2).reshape(a.shape) for part, a in zip(d, x[:3], strict=True)]
        return (*parts, *(None for _ in x[3:])), ()

    def _require_input_shapes(self, x: tuple[Array, ...]) -> None:
        q, k, v, *segments = x * 3 if self.fused else x
        fits = q.shape[2:] and q.shape[2] * self.kv_heads == k.shape[2] * self.n_heads and k.shape == v.shape
        if not fits or q.shape[2] % (self.blocks * self.d_head) or any(a.shape[:2] != q.shape[:2] for a in x):
            wanted = f"(samples, time, {self.n_heads} x {self.d_head}), twice (.., {self.kv_heads} x {self.d_head})"
            got = ", ".join(str(tuple(a.shape)) for a in x)
            more = " and segments (samples, time)" if self.segments else ", side by side" if self.fused else ""
            raise ShapeError(f"{self!r} wants queries, keys and values {wanted}{more}, got {got}")
        if any(not has_integer_dtype(a) for a in segments):
            raise DataError(f"{self!r} wants whole numbers as segments, got {segments[0].dtype}")

    def _get_segments(self, env: LayerContext, x: tuple[Array, ...]) -> Array | None:
        """Return the fourth input, the segment ids of packed documents, in the dtype that the kernel takes. Return None
        if the layer has no such input."""
        return x[3].astype(env.xp.int64, copy=False) if self.segments else None

    def _split_into_heads(self, x: tuple[Array, ...]) -> list[Array]:
        """Return queries, keys and values as views (samples, heads, time, d_head)."""
        return [split_heads(a, 1, self.d_head)[0] for a in x]

    def _repeat_kv_and_concatenate_qkv(self, env: LayerContext, q: Array, k: Array, v: Array) -> Array:
        """Repeat the heads of keys and values until there are as many as query heads, and return queries, keys and
        values concatenated along the features."""
        shape = (*q.shape[:2], self.kv_heads, self.n_heads // self.kv_heads, self.d_head)
        more = [env.xp.broadcast_to(a.reshape(*shape[:3], 1, self.d_head), shape).reshape(q.shape) for a in (k, v)]
        return concatenate_on_device(env.xp, (q, *more), 2)

    def _split_qkv_gradient_and_sum_repeats(self, env: LayerContext, d: Array) -> tuple[Array, ...]:
        """Return the gradients of q, k and v, given the gradient `d` of the result of `_repeat_kv_and_concatenate_qkv`.
        Gradients of repeated heads are summed."""
        width = self.n_heads * self.d_head
        dq, *rest = (d[:, :, i * width : (i + 1) * width] for i in range(3))
        shape = (*d.shape[:2], self.kv_heads, self.n_heads // self.kv_heads, self.d_head)
        kv = (*d.shape[:2], self.kv_heads * self.d_head)
        return dq, *(env.xp.sum(part.reshape(shape), axis=3).reshape(kv) for part in rest)
