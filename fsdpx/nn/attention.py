"""Multi-head attention with one fused product for queries, keys and values."""

import math
from collections.abc import Mapping
from typing import Any

from fsdpx.array import kernels
from fsdpx.errors import ConfigError, ShapeError
from fsdpx.nn.check import fraction, positive
from fsdpx.nn.dropout import apply_mask, keep_mask
from fsdpx.nn.init import Init, uniform, zeros
from fsdpx.nn.layer import Array, Env, Layer, Spec, branches, prefixed
from fsdpx.nn.linear import Linear
from fsdpx.nn.numeric import product

__all__ = ["MultiHeadAttention"]


class MultiHeadAttention(Layer):
    """softmax(q k^T / sqrt(d_head)) v per head, `(samples, time, d_model)` to the same (Vaswani et al. 2017).

    Parameters `qkv.weight (3 d_model, d_model)`, rows of q, k, v in PyTorch's order of `in_proj_weight`,
    `qkv.bias`, `out.weight (d_model, d_model)`, `out.bias`. Begins as PyTorch's: qkv from Xavier's uniform,
    biases 0. causal: a position sees itself and what came before. dropout: on the attention weights; it needs
    them whole, samples x heads x time x time, where otherwise the kernel decides what it keeps.
    """

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
        self.d_model = d_model
        self.n_heads = n_heads
        self.causal = bool(causal)
        self.dropout = float(dropout)
        self.runs = ("softmax", "softmax_backward", "drop_backward") if dropout else ("attention", "attention_backward")
        self.bias = bool(bias)
        self.init = init
        self.out_init = out_init
        xavier = uniform(math.sqrt(6.0 / (4 * d_model)))
        self._qkv = Linear(d_model, 3 * d_model, bias, init=init or xavier, bias_init=zeros)
        self._out = Linear(d_model, d_model, bias, init=out_init, bias_init=zeros)
        self._scale = 1.0 / math.sqrt(d_model // n_heads)

    def children(self) -> dict[str, Layer]:
        return {"qkv": self._qkv, "out": self._out}

    def specs(self) -> dict[str, Spec]:
        return prefixed(self.children().items())

    def forward(self, env: Env, p: Mapping[str, Array], x: Array) -> tuple[Array, Any]:
        if x.ndim != 3 or x.shape[-1] != self.d_model:
            wanted = f"(samples, time, {self.d_model})"
            raise ShapeError(f"{self!r} wants an input of shape {wanted}, got {tuple(x.shape)}")
        parts = branches(p)
        qkv, held_qkv = self._qkv.forward(env, parts["qkv"], x)
        q, k, v = self._heads(qkv, 3)
        o, probabilities = self._attend(env, q, k, v)
        merged = o.swapaxes(1, 2).reshape(x.shape)
        y, held_out = self._out.forward(env, parts["out"], merged)
        return y, (held_qkv, (qkv, merged, probabilities), held_out)

    def backward(self, env: Env, p: Mapping[str, Array], g: Mapping[str, Array], saved: Any, dy: Array) -> Array:
        held_qkv, middle, held_out = saved
        parts, into = branches(p), branches(g)
        dmerged = self._out.backward(env, parts["out"], into.get("out", {}), held_out, dy)
        dqkv = self._heads_backward(env, middle, dmerged)
        return self._qkv.backward(env, parts["qkv"], into.get("qkv", {}), held_qkv, dqkv)

    def backward_input(self, env: Env, p: Mapping[str, Array], saved: Any, dy: Array) -> tuple[Array, Any]:
        held_qkv, middle, held_out = saved
        parts = branches(p)
        dmerged, kept_out = self._out.backward_input(env, parts["out"], held_out, dy)
        dqkv = self._heads_backward(env, middle, dmerged)
        dx, kept_qkv = self._qkv.backward_input(env, parts["qkv"], held_qkv, dqkv)
        return dx, (kept_qkv, kept_out)

    def _heads_backward(self, env: Env, saved: Any, dmerged: Array) -> Array:
        """From the gradient of the heads' results to that of queries, keys and values, as `qkv` gave them."""
        qkv, merged, probabilities = saved
        q, k, v = self._heads(qkv, 3)
        (o,), (do,) = self._heads(merged, 1), self._heads(dmerged, 1)
        heads = self._attend_backward(env, q, k, v, o, do, probabilities)
        return heads.transpose(1, 3, 0, 2, 4).reshape(qkv.shape)

    def backward_params(self, env: Env, g: Mapping[str, Array], kept: Any) -> None:
        parts = branches(g)
        for name, layer, rest in zip(("qkv", "out"), self.children().values(), kept, strict=True):
            if name in parts:
                layer.backward_params(env, parts[name], rest)

    def _heads(self, merged: Array, count: int) -> list[Array]:
        """`count` views (samples, heads, time, d_head) of (samples, time, count d_model)."""
        samples, time, _ = merged.shape
        split = merged.reshape(samples, time, count, self.n_heads, self.d_model // self.n_heads)
        return [split[:, :, i].swapaxes(1, 2) for i in range(count)]

    def _attend(self, env: Env, q: Array, k: Array, v: Array) -> tuple[Array, tuple[Array, ...]]:
        """The heads' results, and (lse,) or with dropout (weights, keep)."""
        if not env.training or self.dropout == 0.0:
            o, lse = kernels.attention(env.xp, q, k, v, self.causal, self._scale)
            return o, (lse,)
        weights = self._weights(env.xp, q, k)
        keep = keep_mask(env.at("dropout"), weights.shape, self.dropout)
        return product(env.xp, apply_mask(weights, keep, self.dropout), v), (weights, keep)

    def _attend_backward(
        self, env: Env, q: Array, k: Array, v: Array, o: Array, do: Array, probabilities: tuple[Array, ...]
    ) -> Array:
        """Of q, k and v, (3, samples, heads, time, d_head)."""
        if len(probabilities) == 1:
            (lse,) = probabilities
            return kernels.attention_backward(env.xp, q, k, v, o, lse, do, self.causal, self._scale)
        weights, keep = probabilities
        dweights = apply_mask(product(env.xp, do, v.swapaxes(-1, -2)), keep, self.dropout)
        rows = (-1, weights.shape[-1])
        dscores = kernels.softmax_backward(env.xp, weights.reshape(rows), dweights.reshape(rows))
        dscores *= self._scale
        dscores = dscores.reshape(weights.shape)
        dv = product(env.xp, apply_mask(weights, keep, self.dropout).swapaxes(-1, -2), do)
        dq, dk = product(env.xp, dscores, k), product(env.xp, dscores.swapaxes(-1, -2), q)
        return env.xp.stack((dq, dk, dv))

    def _weights(self, xp: Any, q: Array, k: Array) -> Array:
        scores = product(xp, q, k.swapaxes(-1, -2))
        scores *= self._scale
        if self.causal:
            time = xp.arange(scores.shape[-1])
            scores = xp.where(time[None, :] <= time[:, None], scores, xp.full_like(scores, -math.inf))
        return kernels.softmax(xp, scores.reshape(-1, scores.shape[-1])).reshape(scores.shape)
