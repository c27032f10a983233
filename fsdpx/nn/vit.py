"""ViT: a transformer over patches of images (Dosovitskiy et al. 2021)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fsdpx.errors import ConfigError, ShapeError
from fsdpx.nn.activation import activation_of
from fsdpx.nn.block import MLP
from fsdpx.nn.container import Container, chained
from fsdpx.nn.grouped import AttentionBlock, GroupedQueryAttention
from fsdpx.nn.init import normal
from fsdpx.nn.layer import Array, Env, Layer, Params, Spec, positive
from fsdpx.nn.linear import Linear
from fsdpx.nn.norm import LayerNorm
from fsdpx.nn.numeric import add_product, add_sum, affine, flat, product
from fsdpx.nn.shape import First

__all__ = ["Patches", "ViT"]


class Patches(Layer):
    """Images `(samples, channels, size, size)` -> a class token and a token for each patch, with positions added.

    The result is `(samples, 1 + patches, d_model)`, patches row by row. Weights are
    `weight (d_model, channels, patch, patch)`, `bias (d_model,)`, `token (d_model,)` and
    `position (1 + patches, d_model)`.

    Parameters
    ----------
    image, patch : height and width of the images and of a patch, in pixels; image is a multiple of patch
    channels : of the images
    d_model : features of a token
    """

    runs = ("linear",)

    def __init__(self, image: int, patch: int, channels: int, d_model: int) -> None:
        positive(self, image=image, patch=patch, channels=channels, d_model=d_model)
        if image % patch:
            raise ConfigError(f"Patches: images of {image} pixels are not a multiple of patches of {patch}")
        self.image, self.patch, self.channels, self.d_model = image, patch, channels, d_model
        self._side = image // patch

    def specs(self) -> dict[str, Spec]:
        init = normal(0.02)
        return {
            "weight": Spec((self.d_model, self.channels, self.patch, self.patch), init),
            "bias": Spec((self.d_model,)),
            "token": Spec((self.d_model,), init),
            "position": Spec((1 + self._side**2, self.d_model), init),
        }

    def forward(self, env: Env, p: Params, x: Array) -> tuple[Array, Any]:
        if x.ndim != 4 or tuple(x.shape[1:]) != (self.channels, self.image, self.image):
            wanted = f"(samples, {self.channels}, {self.image}, {self.image})"
            raise ShapeError(f"{self!r} wants images {wanted}, got {tuple(x.shape)}")
        cut = x.reshape(x.shape[0], self.channels, self._side, self.patch, self._side, self.patch)
        rows = cut.transpose(0, 2, 4, 1, 3, 5).reshape(-1, self._width) if x.size else x.reshape(0, self._width)
        y = env.xp.empty((x.shape[0], 1 + self._side**2, self.d_model), dtype=x.dtype)
        tokens = affine(env.xp, rows, p["weight"].reshape(self.d_model, self._width), p["bias"])
        y[:, 0] = p["token"]
        y[:, 1:] = tokens.reshape(x.shape[0], self._side**2, self.d_model)
        y += p["position"]
        return y, (rows,)

    def backward_input(self, env: Env, p: Params, saved: Any, dy: Array) -> tuple[Array, Any]:
        dtokens = flat(env.xp.ascontiguousarray(dy[:, 1:]))
        drows = product(env.xp, dtokens, p["weight"].reshape(self.d_model, self._width))
        side, patch = self._side, self.patch
        cut = drows.reshape(dy.shape[0], side, side, self.channels, patch, patch).transpose(0, 3, 1, 4, 2, 5)
        return cut.reshape(dy.shape[0], self.channels, self.image, self.image), (saved[0], dy)

    def backward_leaf(self, env: Env, p: Params, g: Params, saved: Any, dy: Array) -> None:
        self.backward_params(env, g, (saved[0], dy))

    def backward_params(self, env: Env, g: Params, kept: Any) -> None:
        rows, dy = kept
        tokens = flat(env.xp.ascontiguousarray(dy[:, 1:]))
        add_product(env.xp, g, "weight", tokens.T, rows)
        if "bias" in g:
            add_sum(env.xp, g["bias"], tokens, 0)
        if "token" in g:
            add_sum(env.xp, g["token"], dy[:, 0], 0)
        if "position" in g:
            add_sum(env.xp, g["position"], dy, 0)

    @property
    def _width(self) -> int:
        return self.channels * self.patch**2


class ViT(Container):
    """Images `(samples, channels, image, image)` -> logits `(samples, classes)`, made from the class token.

    Children: "embed", "blocks.0" ..., "norm", "first" and "head". Weights begin as N(0, 0.02), biases as 0.

    Parameters
    ----------
    image, patch, channels : as in `Patches`
    d_model : features between the blocks; a multiple of n_heads
    n_layers, n_heads : blocks, and heads per block
    classes : number of logits
    hidden : features inside the MLP of a block; None: 4 d_model
    activation : of the MLP, as in `GPT`
    eps : of the LayerNorm layers
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
        positive(self, n_layers=n_layers, n_heads=n_heads, classes=classes)
        self.image, self.patch, self.d_model, self.n_layers = image, patch, d_model, n_layers
        self.n_heads, self.classes, self.channels = n_heads, classes, channels
        init = normal(0.02)
        attention = GroupedQueryAttention(
            d_model, n_heads, n_heads, None, causal=False, qkv_bias=qkv_bias, out_bias=True, init=init
        )
        mlp = MLP(d_model, hidden, activation=activation_of(self, activation), init=init)
        block = AttentionBlock(attention, mlp, LayerNorm(d_model, eps))
        layers: dict[str, Layer] = {
            "embed": Patches(image, patch, channels, d_model),
            "blocks": Container(*chained(dict.fromkeys(map(str, range(n_layers)), block))),
            "norm": LayerNorm(d_model, eps),
            "first": First(),
            "head": Linear(d_model, classes, init=init),
        }
        super().__init__(*chained(layers), None, frozen)

    def __repr__(self) -> str:
        return Layer.__repr__(self)
