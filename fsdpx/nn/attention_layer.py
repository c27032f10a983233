"""Attention with its projections, multi-head and grouped-query, and the block of a transformer around it."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from copy import copy
from functools import partial
from typing import Any, ClassVar

from fsdpx.errors import ConfigError, ShapeError
from fsdpx.nn.container import ChildCall, Composite, Container, mapped
from fsdpx.nn.init import Init, uniform, zeros
from fsdpx.nn.layer import Env, Layer, Params, positive, remember
from fsdpx.nn.linear import Linear
from fsdpx.nn.per_head import Attention, HeadNorm, Rotary
from fsdpx.nn.sharding import Column, Row

__all__ = ["AttentionBlock", "GroupedQueryAttention", "MultiHeadAttention"]


class Attending(Container):
    """A container whose last two steps are an `Attention` and the Linear that reads it; one unit.

    With "attention" in `env.recompute` only what the attention reads is saved for its backward, and the rest is
    recomputed."""

    unit = True

    def forward(self, env: Env, p: Params, x: Any) -> tuple[Any, Any]:
        y, saved = super().forward(env, p, x)
        if saved and "attention" in env.recompute:
            *before, (_, read), _ = saved
            saved = (*before, (read,), ())
        return y, saved

    def _backwards(
        self,
        env: Env,
        parts: Mapping[str, Any],
        one: Callable[[ChildCall, Any, Any], Any],
        saved: Any,
        dy: Any,
        constant: Collection[str] = (),
    ) -> Any:
        *before, held, last = saved
        if last == ():
            step = self.steps[-2]
            (read,) = mapped(held, partial(self._resolved, env, parts, saved))
            merged, held = step.layer.forward(env.at(step.name), {}, read)
            last = (merged,)
        return super()._backwards(env, parts, one, (*before, held, last), dy, constant)


class MultiHeadAttention(Attending):
    """softmax(q k^T / sqrt(d_head)) v per head, `(samples, time, d_model)` to the same (Vaswani et al. 2017), one unit.

    One product makes queries, keys and values. Weights `qkv.weight (3 d_model, d_model)` with rows in the order of
    PyTorch's `in_proj_weight`, `qkv.bias`, `out.weight (d_model, d_model)`, `out.bias`; they begin as PyTorch's: qkv
    from Xavier's uniform, biases 0. The attention is a step without a name: its random numbers are those of the layer.

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
        self.d_model, self.n_heads, self.causal, self.bias = d_model, n_heads, bool(causal), bool(bias)
        self.dropout, self.init, self.out_init = dropout, init, out_init
        d_head = _share(self, d_model, n_heads)
        xavier = uniform(math.sqrt(6.0 / (4 * d_model)))
        qkv = Linear(d_model, 3 * d_model, bias, init=init or xavier, bias_init=zeros)
        out = Linear(d_model, d_model, bias, init=out_init, bias_init=zeros)
        attend = Attention(n_heads, n_heads, d_head, causal, fused=True, dropout=dropout)
        self.plan = {"qkv": Column(blocks=3, grain=d_head), "out": Row()}
        steps = [("qkv", qkv, "x"), ("", attend, "qkv"), ("out", out, "")]
        super().__init__([ChildCall(name, layer, (x,), (name,)) for name, layer, x in steps], ("x",), ("out",))

    def forward(self, env: Env, p: Params, x: Any) -> tuple[Any, Any]:
        if x.ndim != 3 or x.shape[-1] != self.d_model:
            wanted = f"(samples, time, {self.d_model})"
            raise ShapeError(f"{self!r} wants an input of shape {wanted}, got {tuple(x.shape)}")
        return super().forward(env, p, x)


class GroupedQueryAttention(Attending, Composite):
    """Attention of Llama and its kin: `(samples, time, d_model)` to the same, one unit.

    Weights `q.weight (n_heads d_head, d_model)`, `k.weight` and `v.weight (kv_heads d_head, d_model)`, `out.weight
    (d_model, n_heads d_head)`; with `qk_norm` also `q_norm.weight` and `k_norm.weight (d_head,)`. With "attention" in
    `env.recompute` only queries, keys and values are saved for backward of the attention itself.

    Parameters
    ----------
    d_model : features of the input and the result
    n_heads, kv_heads : heads of queries, and of keys and values, as in `Attention`
    rotary : how positions turn queries and keys; its d_head is that of all heads. None: they do not, and d_head is
        d_model / n_heads
    causal, window, segments : as in `Attention`; with segments they are a second input
    qk_norm : None, or the eps of an RMSNorm of each head of queries and keys, before positions (Qwen3)
    qkv_bias, out_bias : whether q, k and v, and the last Linear, have biases
    init, out_init : of the weights; None: as in `Linear`
    """

    def __init__(
        self,
        d_model: int,
        n_heads: int,
        kv_heads: int,
        rotary: Rotary | None,
        *,
        causal: bool = True,
        window: int | None = None,
        qk_norm: float | None = None,
        segments: bool = False,
        qkv_bias: bool = False,
        out_bias: bool = False,
        init: Init | None = None,
        out_init: Init | None = None,
    ) -> None:
        positive(self, d_model=d_model, n_heads=n_heads, kv_heads=kv_heads)
        remember(self, locals())
        d_head = rotary.d_head if rotary else _share(self, d_model, n_heads)
        self.attend = Attention(n_heads, kv_heads, d_head, causal, window, segments)
        self.rotary = rotary
        self.reads = ("x", "segments") if segments else ("x",)
        self.q = Linear(d_model, n_heads * d_head, qkv_bias, init=init, bias_init=zeros)
        self.k = Linear(d_model, kv_heads * d_head, qkv_bias, init=init, bias_init=zeros)
        self.v = Linear(d_model, kv_heads * d_head, qkv_bias, init=init, bias_init=zeros)
        self.out = Linear(n_heads * d_head, d_model, out_bias, init=out_init or init, bias_init=zeros)
        if qk_norm is not None:
            self.q_norm, self.k_norm = HeadNorm(d_head, qk_norm), HeadNorm(d_head, qk_norm)
        grain = n_heads // kv_heads * d_head  # a rank that has a head of keys has all queries that read it
        keys = Column(grain=d_head)
        self.plan = {"q": Column(grain=grain), "k": keys, "v": keys, "out": Row()}

    def compose(self, x: Any, *segments: Any) -> Any:
        q, k, v = self.q(x), self.k(x), self.v(x)
        if hasattr(self, "q_norm"):
            q, k = self.q_norm(q), self.k_norm(k)
        if self.rotary is not None:
            q, k = self.rotary(q), self.rotary(k)
        return self.out(self.attend(q, k, v, *segments))


class AttentionBlock(Composite):
    """x + attn(norm1(x)), then x + mlp(norm2(x)): `(samples, time, d_model)` to the same, one unit.

    Parameters
    ----------
    attn : the attention; a second input of it, its segments, is one of the block
    mlp : a layer
    norm : what both norms are like
    post : norm1(x + attn(x)), then norm2(x + mlp(x)), as in BERT
    """

    unit = True

    def __init__(self, attn: GroupedQueryAttention, mlp: Layer, norm: Layer, post: bool = False) -> None:
        self.norm1, self.attn, self.norm2, self.mlp = copy(norm), attn, copy(norm), mlp
        self.post = bool(post)
        self.reads = attn.reads

    def compose(self, x: Any, *segments: Any) -> Any:
        if self.post:
            x = self.norm1(x + self.attn(x, *segments))
            return self.norm2(x + self.mlp(x))
        x = x + self.attn(self.norm1(x), *segments)
        return x + self.mlp(self.norm2(x))


def _share(owner: object, d_model: int, n_heads: int) -> int:
    if d_model % n_heads:
        raise ConfigError(f"{type(owner).__name__}: d_model {d_model} is not a multiple of n_heads {n_heads}")
    return d_model // n_heads
