"""Multi-head attention with one fused product for queries, keys and values."""

from __future__ import annotations

import math
from copy import copy
from typing import Any, ClassVar, Protocol

from fsdpx.array import kernels
from fsdpx.errors import ConfigError, ShapeError
from fsdpx.nn.cut import share
from fsdpx.nn.dropout import apply_mask, keep_mask
from fsdpx.nn.init import Init, uniform, zeros
from fsdpx.nn.layer import Array, Env, Layer, Params, Spec, branches, fraction, positive, prefixed
from fsdpx.nn.linear import Linear
from fsdpx.nn.numeric import product

__all__ = ["Core", "Heads", "MultiHeadAttention", "scores_of", "split_heads"]


class MultiHeadAttention(Layer):
    """softmax(q k^T / sqrt(d_head)) v per head, `(samples, time, d_model)` to the same (Vaswani et al. 2017).

    Weights `qkv.weight (3 d_model, d_model)` with rows in the order of PyTorch's `in_proj_weight`, `qkv.bias`,
    `out.weight (d_model, d_model)`, `out.bias`; they begin as PyTorch's: qkv from Xavier's uniform, biases 0. With
    "attention" in `env.recompute` only queries, keys and values are saved for backward, and the rest is recomputed.

    Parameters
    ----------
    d_model : features of the input and the result
    n_heads : number of heads; d_model must be a multiple of it
    causal : a position attends to itself and to earlier positions only
    dropout : on the attention weights, which are then saved in full, (samples, heads, time, time)
    bias : whether the two projections have biases
    init : of `qkv.weight`, instead of Xavier's uniform
    out_init : of `out.weight`, instead of that of `Linear`
    """

    aliases: ClassVar = {
        "in_proj_weight": "qkv.weight",
        "in_proj_bias": "qkv.bias",
        "out_proj.weight": "out.weight",
        "out_proj.bias": "out.bias",
    }

    def __init__(
        self,
        d_model: int,
        n_heads: int,
        causal: bool = True,
        dropout: float = 0.0,
        bias: bool = True,
        *,
        init: Init | None = None,
        out_init: Init | None = None,
    ) -> None:
        positive(self, d_model=d_model, n_heads=n_heads)
        fraction(self, dropout=dropout)
        if d_model % n_heads:
            raise ConfigError(f"MultiHeadAttention: d_model {d_model} is not a multiple of n_heads {n_heads}")
        self.d_model, self.n_heads = d_model, n_heads
        self.d_head = d_model // n_heads
        self.causal = bool(causal)
        self.dropout = float(dropout)
        self.runs = ("softmax", "softmax_backward", "drop_backward") if dropout else ("attention", "attention_backward")
        self.bias = bool(bias)
        self.init, self.out_init = init, out_init
        xavier = uniform(math.sqrt(6.0 / (4 * d_model)))
        self._qkv: Layer = Linear(d_model, 3 * d_model, bias, init=init or xavier, bias_init=zeros)
        self._out: Layer = Linear(d_model, d_model, bias, init=out_init, bias_init=zeros)
        self._core: Core = Heads(n_heads, self.d_head, self.causal, self.dropout)

    def rebuilt(
        self, qkv: Layer | None = None, out: Layer | None = None, core: Core | None = None
    ) -> MultiHeadAttention:
        """A copy with other projections, or another `core`; None: its own."""
        new = copy(self)
        new._qkv, new._out, new._core = qkv or self._qkv, out or self._out, core or self._core
        return new

    @property
    def caches(self) -> bool:  # type: ignore[override]
        return self.causal and type(self._core) is Heads

    def children(self) -> dict[str, Layer]:
        return {"qkv": self._qkv, "out": self._out}

    def specs(self) -> dict[str, Spec]:
        return prefixed(self.children().items())

    def forward(self, env: Env, p: Params, x: Array) -> tuple[Array, Any]:
        if x.ndim != 3 or x.shape[-1] != self.d_model:
            wanted = f"(samples, time, {self.d_model})"
            raise ShapeError(f"{self!r} wants an input of shape {wanted}, got {tuple(x.shape)}")
        parts = branches(p)
        qkv, held_qkv = self._qkv.forward(env, parts["qkv"], x)
        merged, kept = self._core.forward(env, qkv)
        y, held_out = self._out.forward(env, parts["out"], merged)
        if "attention" in env.recompute:
            return y, (held_qkv, (qkv,))
        return y, (held_qkv, kept, held_out)

    def backward(self, env: Env, p: Params, g: Params, saved: Any, dy: Array) -> Array:
        held_qkv, kept, held_out = self._completed(env, saved)
        parts, into = branches(p), branches(g)
        dmerged = self._out.backward(env, parts["out"], into.get("out", {}), held_out, dy)
        dqkv = self._core.backward(env, kept, dmerged)
        return self._qkv.backward(env, parts["qkv"], into.get("qkv", {}), held_qkv, dqkv)

    def backward_leaf(self, env: Env, p: Params, g: Params, saved: Any, dy: Array) -> None:
        held_qkv, kept, held_out = self._completed(env, saved)
        parts, into = branches(p), branches(g)
        if "qkv" not in into:
            self._out.backward_leaf(env, parts["out"], into.get("out", {}), held_out, dy)
            return
        dmerged = self._out.backward(env, parts["out"], into.get("out", {}), held_out, dy)
        self._qkv.backward_leaf(env, parts["qkv"], into["qkv"], held_qkv, self._core.backward(env, kept, dmerged))

    def backward_input(self, env: Env, p: Params, saved: Any, dy: Array) -> tuple[Array, Any]:
        held_qkv, kept, held_out = self._completed(env, saved)
        parts = branches(p)
        dmerged, kept_out = self._out.backward_input(env, parts["out"], held_out, dy)
        dqkv = self._core.backward(env, kept, dmerged)
        dx, kept_qkv = self._qkv.backward_input(env, parts["qkv"], held_qkv, dqkv)
        return dx, (kept_qkv, kept_out)

    def backward_params(self, env: Env, g: Params, kept: Any) -> None:
        parts = branches(g)
        for name, layer, rest in zip(("qkv", "out"), self.children().values(), kept, strict=True):
            if name in parts:
                layer.backward_params(env, parts[name], rest)

    def _completed(self, env: Env, saved: Any) -> Any:
        """What forward saved, with what it left out recomputed."""
        if len(saved) == 3:
            return saved
        held_qkv, (qkv,) = saved
        merged, kept = self._core.forward(env, qkv)
        return held_qkv, kept, (merged,)  # a projection saves its input and nothing else


class Core(Protocol):
    """From queries, keys and values, side by side as the projection gave them, to the heads' results side by side."""

    def forward(self, env: Env, qkv: Array) -> tuple[Array, Any]:
        """`(samples, time, 3 width)` -> `(samples, time, width)`, and a tuple of what backward needs."""
        ...

    def backward(self, env: Env, kept: Any, dmerged: Array) -> Array:
        """The gradient of `qkv`."""
        ...


class Heads:
    """Attention of all heads, or of this tensor rank's part of them, each over the full time.

    With a part of the heads, dropout has the mask that a single rank would have."""

    def __init__(self, n_heads: int, d_head: int, causal: bool, dropout: float) -> None:
        self.n_heads, self.d_head, self.causal, self.dropout = n_heads, d_head, causal, dropout
        self.scale = 1.0 / math.sqrt(d_head)

    def forward(self, env: Env, qkv: Array) -> tuple[Array, Any]:
        q, k, v = split_heads(qkv, 3, self.d_head)
        rest: tuple[Array, ...] = ()
        if env.cache is not None:
            o = env.cache.attend(env.xp, env.random.path, q, k, v, self.scale)
        elif not env.training or self.dropout == 0.0:
            o, lse = kernels.attention(env.xp, q, k, v, self.causal, self.scale)
            rest = (lse,)
        else:
            keep = self._keep(env, (*q.shape[:3], k.shape[2]))
            weights = self._weights(env.xp, q, k)
            o, rest = product(env.xp, apply_mask(weights, keep, self.dropout), v), (weights, keep)
        merged = o.swapaxes(1, 2).reshape(*qkv.shape[:2], qkv.shape[2] // 3)
        return merged, (qkv, merged, rest)

    def backward(self, env: Env, kept: Any, dmerged: Array) -> Array:
        qkv, merged, rest = kept
        q, k, v = split_heads(qkv, 3, self.d_head)
        (o,), (do,) = split_heads(merged, 1, self.d_head), split_heads(dmerged, 1, self.d_head)
        if len(rest) == 1:
            heads = kernels.attention_backward(env.xp, q, k, v, o, rest[0], do, self.causal, self.scale)
        else:
            heads = self._dropped_backward(env.xp, q, k, v, do, *rest)
        return heads.transpose(1, 3, 0, 2, 4).reshape(qkv.shape)

    def _dropped_backward(self, xp: Any, q: Array, k: Array, v: Array, do: Array, weights: Array, keep: Array) -> Array:
        """The gradients of q, k and v, (3, samples, heads, time, d_head)."""
        dweights = apply_mask(product(xp, do, v.swapaxes(-1, -2)), keep, self.dropout)
        rows = (-1, weights.shape[-1])
        dscores = kernels.softmax_backward(xp, weights.reshape(rows), dweights.reshape(rows))
        dscores *= self.scale
        dscores = dscores.reshape(weights.shape)
        dv = product(xp, apply_mask(weights, keep, self.dropout).swapaxes(-1, -2), do)
        dq, dk = product(xp, dscores, k), product(xp, dscores.swapaxes(-1, -2), q)
        return xp.stack((dq, dk, dv))

    def _weights(self, xp: Any, q: Array, k: Array) -> Array:
        scores = scores_of(xp, q, k, self.causal, self.scale)
        return kernels.softmax(xp, scores.reshape(-1, scores.shape[-1])).reshape(scores.shape)

    def _keep(self, env: Env, shape: tuple[int, ...]) -> Array:
        if shape[1] == self.n_heads:
            return keep_mask(env.at("dropout"), shape, self.dropout)
        start, stop = share(self.n_heads, env.mesh.tensor.rank, env.mesh.tensor.size)
        assert stop - start == shape[1], f"{shape[1]} heads, not those of [{start}, {stop})"
        return keep_mask(env.at("dropout"), shape, self.dropout, {1: (start, self.n_heads)})


def split_heads(merged: Array, count: int, d_head: int) -> list[Array]:
    """`count` views (samples, heads, time, d_head) of (samples, time, count heads d_head)."""
    samples, time, width = merged.shape
    split = merged.reshape(samples, time, count, width // (count * d_head), d_head)
    return [split[:, :, i].swapaxes(1, 2) for i in range(count)]


def scores_of(xp: Any, q: Array, k: Array, causal: bool, scale: float) -> Array:
    """scale q k^T; with `causal` -inf at later positions."""
    scores = product(xp, q, k.swapaxes(-1, -2))
    scores *= scale
    if causal:
        time = xp.arange(scores.shape[-1])
        scores = xp.where(time[None, :] <= time[:, None], scores, xp.full_like(scores, -math.inf))
    return scores
