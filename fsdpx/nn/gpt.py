"""GPT-2 (Radford et al. 2019) and models with the same structure."""

from __future__ import annotations

import math
from collections.abc import Sequence

from fsdpx.nn.activation import Dropout
from fsdpx.nn.container import Sequential
from fsdpx.nn.embedding import TokenEmbedding
from fsdpx.nn.init import normal, sinusoid
from fsdpx.nn.layer import Layer, require_positive, store_init_args
from fsdpx.nn.linear import Linear
from fsdpx.nn.norm import LayerNorm
from fsdpx.nn.shard_specs import VocabParallel
from fsdpx.nn.transformer import TransformerBlock

__all__ = ["GPT"]


class GPT(Sequential):
    """GPT-2 language model (Radford et al. 2019): tokens `(samples, time)` -> logits `(samples, time, vocab)`.

    Children are "embed" (`embed.weight`, `embed.position`), "blocks.0", "blocks.1", ..., "norm" and "head", a Linear
    without bias. Initial values are the same as in GPT-2: weights are N(0, 0.02), except in the last Linear of a
    residual branch, where they are N(0, 0.02 / sqrt(2 * n_layers)). Biases are 0. Initial positions are sinusoids with
    root mean square 0.04.

    Parameters
    ----------
    vocab : vocabulary size; tokens are integers in [0, vocab)
    d_model : model width, the number of features per position; a multiple of n_heads
    n_layers : number of transformer blocks
    n_heads : number of attention heads per block
    seq_len : maximum length of a sequence
    tie : whether `head.weight` is tied to `embed.weight`
    dropout : dropout probability of the embedding, the attention weights and the residual branches
    bias : whether Linear and LayerNorm layers have biases
    hidden : hidden width of each block's MLP; if None, 4 * d_model
    activation : activation of the MLP: "gelu", "gelu_new" (the tanh form of GELU, which GPT-2 was trained with),
        "relu", "silu" or "tanh"
    eps : `eps` of the LayerNorm layers
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
        tie: bool = True,
        dropout: float = 0.0,
        *,
        bias: bool = True,
        hidden: int | None = None,
        activation: str = "gelu",
        eps: float = 1e-5,
        frozen: Sequence[str] = (),
    ) -> None:
        require_positive(self, vocab=vocab, d_model=d_model, n_layers=n_layers, n_heads=n_heads, seq_len=seq_len)
        store_init_args(self, locals())
        init, out_init = normal(0.02), normal(0.02 / math.sqrt(2 * n_layers))
        block = TransformerBlock(
            d_model, n_heads, hidden, dropout=dropout, bias=bias, activation=activation, eps=eps, init=init,
            out_init=out_init,
        )  # fmt: skip
        layers: dict[str, Layer] = {
            "embed": TokenEmbedding(vocab, d_model, seq_len, init=init, position_init=sinusoid(0.04))
        }
        layers |= {"dropout": Dropout(dropout)} if dropout else {}
        layers["blocks"] = Sequential(*[block] * n_layers)
        layers["norm"] = LayerNorm(d_model, eps, bias=bias)
        layers["head"] = Linear(d_model, vocab, bias=False, init=init)
        super().__init__(layers, ties={"head.weight": "embed.weight"} if tie else None, frozen=frozen)

    def __repr__(self) -> str:
        return Layer.__repr__(self)
