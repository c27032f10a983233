"""Grouped-query attention, and a transformer block that can use any attention layer, MLP and norm."""

from __future__ import annotations

from copy import copy
from typing import Any

from fsdpx.nn.attention_layer import AttentionContainer, compute_head_features
from fsdpx.nn.container import Composite
from fsdpx.nn.init import Init, zeros
from fsdpx.nn.layer import Layer, require_positive, store_init_args
from fsdpx.nn.linear import Linear
from fsdpx.nn.per_head import Attention, HeadNorm
from fsdpx.nn.rotary import Rotary
from fsdpx.nn.shard_specs import ColumnParallel, RowParallel

__all__ = ["AttentionBlock", "GroupedQueryAttention"]


class GroupedQueryAttention(AttentionContainer, Composite):
    """Grouped-query attention as in Llama and similar models. Input and output have the shape
    `(samples, time, d_model)`. The layer is one FSDP unit: its parameters are all-gathered together.

    Weights are `q.weight (n_heads * d_head, d_model)`, `k.weight` and `v.weight (kv_heads * d_head, d_model)`, and
    `out.weight (d_model, n_heads * d_head)`; with `qk_norm`, also `q_norm.weight` and `k_norm.weight (d_head,)`. If
    `env.recompute` contains "attention", only queries, keys and values are saved for the backward pass of the
    attention.

    Parameters
    ----------
    d_model : number of features of the input and the output
    n_heads, kv_heads : number of query heads, and number of key and value heads, see `Attention`
    rotary : the layer that applies rotary positions to queries and keys; it also determines d_head. If None, attention
        ignores positions, and d_head is d_model / n_heads
    causal, window, segments : as in `Attention`; with `segments`, the layer has a second input
    qk_norm : `eps` of an RMSNorm that is applied to each query and key head before rotary positions (Qwen3), or None
        for no norm
    qkv_bias, out_bias : whether the Linear layers q, k and v have biases, and whether the last Linear has a bias
    init, out_init : initializer of the weights of q, k and v, and initializer of the weight of the last Linear; if
        None, as in `Linear`
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
        require_positive(self, d_model=d_model, n_heads=n_heads, kv_heads=kv_heads)
        store_init_args(self, locals())
        d_head = rotary.d_head if rotary else compute_head_features(self, d_model, n_heads)
        self.attend = Attention(n_heads, kv_heads, d_head, causal, window, segments)
        self.rotary = rotary
        self.reads = ("x", "segments") if segments else ("x",)
        self.q = Linear(d_model, n_heads * d_head, qkv_bias, init=init, bias_init=zeros)
        self.k = Linear(d_model, kv_heads * d_head, qkv_bias, init=init, bias_init=zeros)
        self.v = Linear(d_model, kv_heads * d_head, qkv_bias, init=init, bias_init=zeros)
        self.out = Linear(n_heads * d_head, d_model, out_bias, init=out_init or init, bias_init=zeros)
        if qk_norm is not None:
            self.q_norm, self.k_norm = HeadNorm(d_head, qk_norm), HeadNorm(d_head, qk_norm)
        # the query heads that share a key head must be on the same tensor rank as this key head
        grain = n_heads // kv_heads * d_head
        keys = ColumnParallel(grain=d_head)
        self.plan = {"q": ColumnParallel(grain=grain), "k": keys, "v": keys, "out": RowParallel()}

    def compose(self, x: Any, *segments: Any) -> Any:
        q, k, v = self.q(x), self.k(x), self.v(x)
        if hasattr(self, "q_norm"):
            q, k = self.q_norm(q), self.k_norm(k)
        if self.rotary is not None:
            q, k = self.rotary(q), self.rotary(k)
        return self.out(self.attend(q, k, v, *segments))


class AttentionBlock(Composite):
    """Transformer block: `x = x + attn(norm1(x))`, then `x = x + mlp(norm2(x))`. Input and output have the shape
    `(samples, time, d_model)`. The block is one FSDP unit: its parameters are all-gathered together.

    Parameters
    ----------
    attn : the attention layer; if it has segments as a second input, the block has them too
    mlp : the feed-forward layer, such as a GatedMLP
    norm : a norm layer; norm1 and norm2 are copies of it
    post : whether to use post-norm, as in BERT: `x = norm1(x + attn(x))`, then `x = norm2(x + mlp(x))`
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
