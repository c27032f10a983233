"""GPT: a decoder-only transformer over tokens, as GPT-2 (Radford et al. 2019)."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from fsdpx.array import kernels
from fsdpx.errors import ShapeError
from fsdpx.nn.block import TransformerBlock
from fsdpx.nn.check import positive
from fsdpx.nn.container import Chain
from fsdpx.nn.dropout import Dropout
from fsdpx.nn.embedding import check_index
from fsdpx.nn.init import Init, normal, sinusoid
from fsdpx.nn.layer import Array, Env, Layer, Spec
from fsdpx.nn.linear import Linear
from fsdpx.nn.norm import LayerNorm
from fsdpx.nn.numeric import add_sum

__all__ = ["GPT", "TokenEmbedding", "want_tokens"]


class TokenEmbedding(Layer):
    """Tokens `(samples, time <= seq_len)` -> weight[token] + position[time], `(samples, time, d_model)`."""

    runs = ("embedding_backward",)

    def __init__(
        self, vocab: int, d_model: int, seq_len: int, *, init: Init | None = None, position_init: Init | None = None
    ) -> None:
        positive(self, vocab=vocab, d_model=d_model, seq_len=seq_len)
        self.vocab = vocab
        self.d_model = d_model
        self.seq_len = seq_len
        self.init = init
        self.position_init = position_init

    def specs(self) -> dict[str, Spec]:
        return {
            "weight": Spec((self.vocab, self.d_model), self.init or normal(1.0)),
            "position": Spec((self.seq_len, self.d_model), self.position_init or normal(1.0)),
        }

    def forward(self, env: Env, p: Mapping[str, Array], x: Array) -> tuple[Array, Any]:
        want_tokens(self, x, self.seq_len)
        check_index(self, x, self.vocab)
        y = p["weight"][x]
        y += p["position"][: x.shape[1]]
        return y, (x,)

    def backward_input(self, env: Env, p: Mapping[str, Array], saved: Any, dy: Array) -> tuple[None, Any]:
        return None, (saved[0], dy)

    def backward_params(self, env: Env, g: Mapping[str, Array], kept: Any) -> None:
        x, dy = kept
        if "weight" in g:
            kernels.embedding_backward(env.xp, g["weight"], x.reshape(-1), dy.reshape(-1, self.d_model))
        if "position" in g:
            add_sum(env.xp, g["position"][: x.shape[1]], dy, 0)


def want_tokens(layer: Layer, x: Array, seq_len: int) -> None:
    """`x` must be (samples, time) with a time of at most `seq_len`."""
    if x.ndim != 2 or x.shape[1] > seq_len:
        wanted = f"(samples, time <= {seq_len})"
        raise ShapeError(f"{layer!r} wants tokens of shape {wanted}, got {tuple(x.shape)}")


class GPT(Chain):
    """Tokens `(samples, time)` -> logits `(samples, time, vocab)`.

    Children: "embed" (`embed.weight`, `embed.position`), "blocks.0" ..., "norm", "head" (Linear without
    bias); with `tie` the head's weight is the embedding's. Weights begin as in GPT-2: N(0, 0.02), those that
    end in a residual sum N(0, 0.02 / sqrt(2 n_layers)), biases 0; positions begin as sinusoids of twice that size.
    """

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
        frozen: Sequence[str] = (),
    ) -> None:
        positive(self, vocab=vocab, d_model=d_model, n_layers=n_layers, n_heads=n_heads, seq_len=seq_len)
        self.vocab = vocab
        self.d_model = d_model
        self.n_layers = n_layers
        self.n_heads = n_heads
        self.seq_len = seq_len
        self.tie = bool(tie)
        self.dropout = float(dropout)
        self.bias = bool(bias)
        init, out_init = normal(0.02), normal(0.02 / math.sqrt(2 * n_layers))
        block = TransformerBlock(d_model, n_heads, dropout=dropout, bias=bias, init=init, out_init=out_init)
        layers: dict[str, Layer] = {
            "embed": TokenEmbedding(vocab, d_model, seq_len, init=init, position_init=sinusoid(0.04))
        }
        layers |= {"dropout": Dropout(dropout)} if dropout else {}
        layers["blocks"] = Chain(*[block] * n_layers)
        layers["norm"] = LayerNorm(d_model, bias=bias)
        layers["head"] = Linear(d_model, vocab, bias=False, init=init)
        super().__init__(layers, ties={"head.weight": "embed.weight"} if tie else None, frozen=frozen)

    def __repr__(self) -> str:
        return Layer.__repr__(self)
