"""Encoder models: BERT for tokens, and ViT for image patches."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fsdpx.errors import ConfigError, ShapeError
from fsdpx.nn.activation import Dropout, Tanh, make_activation
from fsdpx.nn.container import Composite, Container, make_steps_of_chain
from fsdpx.nn.embedding import Embedding, TokenEmbedding
from fsdpx.nn.gradient_accumulation import (
    add_matmul_gradient,
    add_sum_over_dims_into,
    as_rows,
    linear_forward,
    matmul_in_dtype_of_first,
)
from fsdpx.nn.grouped_query_attention import AttentionBlock, GroupedQueryAttention
from fsdpx.nn.init import normal
from fsdpx.nn.layer import Array, Layer, LayerContext, ParameterSpec, Params, require_positive, store_init_args
from fsdpx.nn.linear import Linear
from fsdpx.nn.norm import LayerNorm
from fsdpx.nn.shape import FirstToken
from fsdpx.nn.shard_specs import VocabParallel
from fsdpx.nn.transformer import MLP

__all__ = ["Bert", "BertEmbedding", "PatchEmbedding", "ViT"]


class BertEmbedding(Composite):
    """BERT's embedding: the LayerNorm of the sum of token, position and token-type embeddings. The two inputs are
    tokens and token types, both `(samples, time)`.

    Parameters
    ----------
    vocab, d_model, seq_len : as in `TokenEmbedding`
    types : number of token types (segments A and B)
    eps : `eps` of the LayerNorm
    """

    plan = {"tokens": VocabParallel()}  # noqa: RUF012

    def __init__(self, vocab: int, d_model: int, seq_len: int, types: int = 2, eps: float = 1e-12) -> None:
        init = normal(0.02)
        self.tokens = TokenEmbedding(vocab, d_model, seq_len, init=init, position_init=init)
        self.types = Embedding(types, d_model, init=init)
        self.norm = LayerNorm(d_model, eps)

    def compose(self, x: Any, kinds: Any) -> Any:
        return self.norm(self.tokens(x) + self.types(kinds))


class Bert(Container):
    """BERT (Devlin et al. 2018): integer arrays `(samples, time)` of tokens, token types and an attention mask ->
    logits.

    Positions with mask 0 are padding: no position with mask 1 attends to them. Padding positions attend to each other,
    so their outputs do not match other implementations and must be ignored.

    Children are "embed", "blocks.0", "blocks.1", ..., followed by the layers of a head. The token head has the layers
    "dense", "activation", "norm" and "head"; the weight of "head" is tied to the embedding. The class head has the
    layers "first", "pooler", "activation" and "head". Initial weights are N(0, 0.02).

    Parameters
    ----------
    vocab : vocabulary size; tokens are integers in [0, vocab)
    d_model : model width, the number of features per position; a multiple of n_heads
    n_layers, n_heads : number of blocks, and number of heads per block
    seq_len : maximum length of a sequence
    hidden : hidden width of each block's MLP; if None, 4 * d_model
    types : number of token types
    classes : number of classes; the logits are (samples, classes), computed from the first position. If None, the
        logits are (samples, time, vocab), for predicting masked tokens with `CrossEntropyLoss`, which ignores targets
        of -100
    activation : activation of the MLP and of the token head, as in `GPT`
    eps : `eps` of the LayerNorm layers
    dropout : dropout probability before the last Linear of the class head
    tie : whether `head.weight` of the token head is tied to `embed.tokens.weight`
    frozen : name patterns (fnmatch) of parameters that are not trained
    """

    plan = {"head": VocabParallel()}  # noqa: RUF012

    def __init__(
        self,
        vocab: int,
        d_model: int,
        n_layers: int,
        n_heads: int,
        seq_len: int,
        *,
        hidden: int | None = None,
        types: int = 2,
        classes: int | None = None,
        activation: str = "gelu",
        eps: float = 1e-12,
        dropout: float = 0.0,
        tie: bool = True,
        frozen: Sequence[str] = (),
    ) -> None:
        require_positive(
            self, vocab=vocab, d_model=d_model, n_layers=n_layers, n_heads=n_heads, seq_len=seq_len, types=types
        )
        if dropout and classes is None:
            raise ConfigError("Bert: dropout is that of the head for classes: give classes=...")
        if classes is not None:
            require_positive(self, classes=classes)
        store_init_args(self, locals())
        init = normal(0.02)
        attention = GroupedQueryAttention(
            d_model, n_heads, n_heads, None, causal=False, segments=True, qkv_bias=True, out_bias=True, init=init
        )
        mlp = MLP(d_model, hidden, activation=make_activation(self, activation), init=init)
        block = AttentionBlock(attention, mlp, LayerNorm(d_model, eps), post=True)
        blocks = Container(*make_steps_of_chain(dict.fromkeys(map(str, range(n_layers)), block), "x", ("mask",)))
        steps, _, (last,) = make_steps_of_chain({"blocks": blocks}, "embed", ("mask",))
        head = (
            _make_class_head(d_model, classes, dropout)
            if classes is not None
            else _make_token_prediction_head(self, d_model, vocab, activation, eps)
        )
        more, _, outputs = make_steps_of_chain(head, last)
        first, _, _ = make_steps_of_chain(
            {"embed": BertEmbedding(vocab, d_model, seq_len, types, eps)}, "x", ("kinds",)
        )
        ties = None if classes is not None or not tie else {"head.weight": "embed.tokens.weight"}
        super().__init__([*first, *steps, *more], ("x", "kinds", "mask"), outputs, ties, frozen)

    def __repr__(self) -> str:
        return Layer.__repr__(self)


def _make_token_prediction_head(owner: Bert, d_model: int, vocab: int, activation: str, eps: float) -> dict[str, Layer]:
    return {
        "dense": Linear(d_model, d_model, init=normal(0.02)),
        "activation": make_activation(owner, activation),
        "norm": LayerNorm(d_model, eps),
        "head": Linear(d_model, vocab, init=normal(0.02)),
    }


def _make_class_head(d_model: int, classes: int, dropout: float) -> dict[str, Layer]:
    drop: dict[str, Layer] = {"dropout": Dropout(dropout)} if dropout else {}
    pooled = {"first": FirstToken(), "pooler": Linear(d_model, d_model, init=normal(0.02)), "activation": Tanh()}
    return {**pooled, **drop, "head": Linear(d_model, classes, init=normal(0.02))}


class PatchEmbedding(Layer):
    """ViT's embedding: converts images `(samples, channels, size, size)` to a class token and one token per patch, and
    adds learned positions.

    The result is `(samples, 1 + patches, d_model)`; patches are ordered row by row. Parameters are
    `weight (d_model, channels, patch, patch)`, `bias (d_model,)`, `token (d_model,)` and
    `position (1 + patches, d_model)`.

    Parameters
    ----------
    image, patch : side length of the square images and of the square patches, in pixels; image must be a multiple of
        patch
    channels : number of channels of the images
    d_model : number of features per token
    """

    kernel_names = ("linear",)

    def __init__(self, image: int, patch: int, channels: int, d_model: int) -> None:
        require_positive(self, image=image, patch=patch, channels=channels, d_model=d_model)
        if image % patch:
            raise ConfigError(f"PatchEmbedding: images of {image} pixels are not a multiple of patches of {patch}")
        self.image, self.patch, self.channels, self.d_model = image, patch, channels, d_model
        self._side = image // patch

    def specs(self) -> dict[str, ParameterSpec]:
        init = normal(0.02)
        return {
            "weight": ParameterSpec((self.d_model, self.channels, self.patch, self.patch), init),
            "bias": ParameterSpec((self.d_model,)),
            "token": ParameterSpec((self.d_model,), init),
            "position": ParameterSpec((1 + self._side**2, self.d_model), init),
        }

    def forward(self, env: LayerContext, p: Params, x: Array) -> tuple[Array, Any]:
        if x.ndim != 4 or tuple(x.shape[1:]) != (self.channels, self.image, self.image):
            wanted = f"(samples, {self.channels}, {self.image}, {self.image})"
            raise ShapeError(f"{self!r} wants images {wanted}, got {tuple(x.shape)}")
        cut = x.reshape(x.shape[0], self.channels, self._side, self.patch, self._side, self.patch)
        rows = (
            cut.transpose(0, 2, 4, 1, 3, 5).reshape(-1, self._patch_features)
            if x.size
            else x.reshape(0, self._patch_features)
        )
        y = env.xp.empty((x.shape[0], 1 + self._side**2, self.d_model), dtype=x.dtype)
        tokens = linear_forward(env.xp, rows, p["weight"].reshape(self.d_model, self._patch_features), p["bias"])
        y[:, 0] = p["token"]
        y[:, 1:] = tokens.reshape(x.shape[0], self._side**2, self.d_model)
        y += p["position"]
        return y, (rows,)

    def backward_input(self, env: LayerContext, p: Params, saved: Any, dy: Array) -> tuple[Array, Any]:
        dtokens = as_rows(env.xp.ascontiguousarray(dy[:, 1:]))
        drows = matmul_in_dtype_of_first(env.xp, dtokens, p["weight"].reshape(self.d_model, self._patch_features))
        side, patch = self._side, self.patch
        cut = drows.reshape(dy.shape[0], side, side, self.channels, patch, patch).transpose(0, 3, 1, 4, 2, 5)
        return cut.reshape(dy.shape[0], self.channels, self.image, self.image), (saved[0], dy)

    def backward_leaf(self, env: LayerContext, p: Params, g: Params, saved: Any, dy: Array) -> None:
        self.backward_params(env, g, (saved[0], dy))

    def backward_params(self, env: LayerContext, g: Params, kept: Any) -> None:
        rows, dy = kept
        tokens = as_rows(env.xp.ascontiguousarray(dy[:, 1:]))
        add_matmul_gradient(env.xp, g, "weight", tokens.T, rows)
        if "bias" in g:
            add_sum_over_dims_into(env.xp, g["bias"], tokens, 0)
        if "token" in g:
            add_sum_over_dims_into(env.xp, g["token"], dy[:, 0], 0)
        if "position" in g:
            add_sum_over_dims_into(env.xp, g["position"], dy, 0)

    @property
    def _patch_features(self) -> int:
        return self.channels * self.patch**2


class ViT(Container):
    """Vision transformer (Dosovitskiy et al. 2020): images `(samples, channels, image, image)` -> logits
    `(samples, classes)`, computed from the class token.

    Children are "embed", "blocks.0", "blocks.1", ..., "norm", "first" and "head". Initial weights are N(0, 0.02), and
    initial biases are 0.

    Parameters
    ----------
    image, patch, channels : as in `PatchEmbedding`
    d_model : model width, the number of features per token; a multiple of n_heads
    n_layers, n_heads : number of blocks, and number of heads per block
    classes : number of classes
    hidden : hidden width of each block's MLP; if None, 4 * d_model
    activation : activation of the MLP, as in `GPT`
    eps : `eps` of the LayerNorm layers
    qkv_bias : whether queries, keys and values have biases
    frozen : name patterns (fnmatch) of parameters that are not trained
    """

    def __init__(
        self,
        image: int,
        patch: int,
        d_model: int,
        n_layers: int,
        n_heads: int,
        classes: int,
        *,
        channels: int = 3,
        hidden: int | None = None,
        activation: str = "gelu",
        eps: float = 1e-12,
        qkv_bias: bool = True,
        frozen: Sequence[str] = (),
    ) -> None:
        require_positive(self, n_layers=n_layers, n_heads=n_heads, classes=classes)
        store_init_args(self, locals())
        init = normal(0.02)
        attention = GroupedQueryAttention(
            d_model, n_heads, n_heads, None, causal=False, qkv_bias=qkv_bias, out_bias=True, init=init
        )
        mlp = MLP(d_model, hidden, activation=make_activation(self, activation), init=init)
        block = AttentionBlock(attention, mlp, LayerNorm(d_model, eps))
        layers: dict[str, Layer] = {
            "embed": PatchEmbedding(image, patch, channels, d_model),
            "blocks": Container(*make_steps_of_chain(dict.fromkeys(map(str, range(n_layers)), block))),
            "norm": LayerNorm(d_model, eps),
            "first": FirstToken(),
            "head": Linear(d_model, classes, init=init),
        }
        super().__init__(*make_steps_of_chain(layers), None, frozen)

    def __repr__(self) -> str:
        return Layer.__repr__(self)
