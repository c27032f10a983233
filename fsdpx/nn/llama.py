"""Llama (Touvron et al. 2023) and models with the same structure."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from fsdpx.core.base.extensions import import_declared_extension
from fsdpx.errors import ConfigError
from fsdpx.nn.container import Container, make_steps_of_chain
from fsdpx.nn.embedding import Embedding
from fsdpx.nn.grouped_query_attention import AttentionBlock, GroupedQueryAttention
from fsdpx.nn.init import normal
from fsdpx.nn.layer import Layer, require_positive, store_init_args
from fsdpx.nn.linear import Linear
from fsdpx.nn.norm import RMSNorm
from fsdpx.nn.rotary import Rotary
from fsdpx.nn.shape import Scale
from fsdpx.nn.shard_specs import VocabParallel
from fsdpx.nn.transformer import GatedMLP

__all__ = ["Llama"]


class Llama(Container):
    """Llama language model (Touvron et al. 2023): tokens `(samples, time)` -> logits `(samples, time, vocab)`.

    Children are "embed" (`embed.weight`), "blocks.0", "blocks.1", ..., "norm" and "head", a Linear without bias. A
    block has `norm1.weight`, `attn.q.weight`, `attn.k.weight`, `attn.v.weight`, `attn.out.weight`, `norm2.weight`,
    `mlp.gate.weight`, `mlp.up.weight` and `mlp.down.weight`. Initial weights are N(0, 0.02), except in the last Linear
    of a residual branch, where they are N(0, 0.02 / sqrt(2 * n_layers)). The defaults are the values for Llama. Other
    models need options: `window` for Mistral, `experts` for Mixtral, `qkv_bias` for Qwen2, `qk_norm` for Qwen3, and
    `scale_embedding`, `unit_offset`, `activation` and `tie` for Gemma.

    Parameters
    ----------
    vocab : vocabulary size; tokens are integers in [0, vocab)
    d_model : model width, the number of features per position
    n_layers : number of blocks
    n_heads : number of query heads per block
    seq_len : sequence length for which the model is designed. Longer inputs also work; only `rope_scaling` depends on
        seq_len
    kv_heads : number of key and value heads, a divisor of n_heads; if None, n_heads
    d_head : number of features per head; if None, d_model / n_heads
    hidden : hidden width of each block's MLP; if None, `8 * ceil(d_model / 3)`
    theta, rope_scaling : options of the rotary positions, see `Rotary`
    window : number of positions that a position attends to: itself and the window - 1 positions before it; if None,
        itself and all positions before it
    qk_norm : whether an RMSNorm is applied to each query and key head
    qkv_bias, bias : whether queries, keys and values have biases, and whether all Linear layers of the blocks have
        biases
    activation : activation of the gate: "silu", "gelu", "gelu_new" or "gelu_pytorch_tanh"
    eps : `eps` of the RMSNorm layers
    tie : whether `head.weight` is tied to `embed.weight`
    scale_embedding : whether rows of the embedding are multiplied by sqrt(d_model)
    unit_offset : whether RMSNorm layers multiply by 1 + weight
    experts, active : number of experts of the `MoE` that replaces each block's MLP, and number of experts that are used
        for each position; with experts=None, each block has a single MLP
    balance : with experts, the weight of the load-balancing loss of each block, see `MoE`
    segments : whether there is a second input, integer segment ids (samples, time); a position then attends only to
        positions with the same id
    frozen : name patterns (fnmatch) of parameters that are not trained
    """

    plan = {"embed": VocabParallel(), "head": VocabParallel()}  # noqa: RUF012

    def __init__(
        self,
        vocab: int,
        d_model: int,
        n_layers: int,
        n_heads: int,
        seq_len: int,
        *,
        kv_heads: int | None = None,
        d_head: int | None = None,
        hidden: int | None = None,
        theta: float = 10000.0,
        rope_scaling: Mapping[str, Any] | None = None,
        window: int | None = None,
        qk_norm: bool = False,
        qkv_bias: bool = False,
        bias: bool = False,
        activation: str = "silu",
        eps: float = 1e-6,
        tie: bool = False,
        scale_embedding: bool = False,
        unit_offset: bool = False,
        experts: int | None = None,
        active: int = 2,
        balance: float = 0.0,
        segments: bool = False,
        frozen: Sequence[str] = (),
    ) -> None:
        require_positive(self, vocab=vocab, d_model=d_model, n_layers=n_layers, n_heads=n_heads, seq_len=seq_len)
        store_init_args(self, locals())
        init, out_init = normal(0.02), normal(0.02 / math.sqrt(2 * n_layers))
        rotary = Rotary(d_head or max(d_model // n_heads, 1), theta, rope_scaling, seq_len)
        attention = GroupedQueryAttention(
            d_model, n_heads, kv_heads or n_heads, rotary, window=window, segments=segments, qkv_bias=qkv_bias or bias,
            qk_norm=eps if qk_norm else None, out_bias=bias, init=init, out_init=out_init,
        )  # fmt: skip
        inside = hidden or -(-d_model // 3) * 8
        mlp: Layer = GatedMLP(d_model, inside, activation, bias, init=init, out_init=out_init)
        if experts is not None:
            _require_plain_experts(activation, bias)
            mixture = import_declared_extension("layer", "moe")
            mlp = mixture(d_model, inside, experts, active, balance, init=init, out_init=out_init)
        layers: dict[str, Layer] = {"embed": Embedding(vocab, d_model, init=init)}
        layers |= {"scale": Scale(math.sqrt(d_model))} if scale_embedding else {}
        norm, shared = RMSNorm(d_model, eps, unit_offset=unit_offset), ("segments",) if segments else ()
        block = AttentionBlock(attention, mlp, norm)
        layers["blocks"] = Container(*make_steps_of_chain(dict.fromkeys(map(str, range(n_layers)), block), "x", shared))
        layers["norm"] = norm
        layers["head"] = Linear(d_model, vocab, bias=False, init=init)
        super().__init__(
            *make_steps_of_chain(layers, "x", shared), {"head.weight": "embed.weight"} if tie else None, frozen
        )

    def __repr__(self) -> str:
        return Layer.__repr__(self)


def _require_plain_experts(activation: str, bias: bool) -> None:
    if activation != "silu" or bias:
        raise ConfigError("Llama: experts have activation='silu' and no bias")
