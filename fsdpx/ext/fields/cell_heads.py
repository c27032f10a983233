"""Attention heads for the cells of a field, and the projections before and after attention. The channels are split into
one group per head."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, ClassVar

from fsdpx.errors import ConfigError
from fsdpx.ext.fields.over_channels import OverChannels
from fsdpx.nn.attention_layer import AttentionContainer
from fsdpx.nn.container import ChildCall
from fsdpx.nn.init import uniform, zeros
from fsdpx.nn.layer import Array, Layer, format_constructor, require_positive
from fsdpx.nn.linear import Linear

__all__ = [
    "FieldAttention", "merge_heads_into_channels", "require_divisible_by_heads", "split_channels_into_heads",
]  # fmt: skip


class FieldAttention(AttentionContainer):
    """Base class for attention among the cells of a field. One matrix product computes the queries, keys and values of
    each cell from the cell's channels. The layer `attend` computes attention from them, and a second matrix product
    projects the result.

    Parameters are named and initialized as in `MultiHeadAttention`."""

    aliases: ClassVar = {
        "in_proj_weight": "qkv.weight",
        "in_proj_bias": "qkv.bias",
        "out_proj.weight": "out.weight",
        "out_proj.bias": "out.bias",
    }

    def __init__(self, channels: int, n_heads: int, bias: bool, attend: Layer) -> None:
        self.channels, self.n_heads, self.bias = channels, n_heads, bool(bias)
        xavier = uniform(math.sqrt(6.0 / (4 * channels)))
        qkv = Linear(channels, 3 * channels, bias, init=xavier, bias_init=zeros)
        layers = {
            "qkv": OverChannels(qkv, channels),
            "": attend,
            "out": OverChannels(Linear(channels, channels, bias, bias_init=zeros), channels),
        }
        rows = zip(layers.items(), ("x", "qkv", ""), strict=True)
        super().__init__([ChildCall(name, layer, (x,), (name,)) for (name, layer), x in rows], ("x",), ("out",))

    def __repr__(self) -> str:
        return format_constructor(self)


def require_divisible_by_heads(layer: Layer, channels: int, n_heads: int) -> int:
    """Return the number of channels per head. Raise ConfigError if `channels` is not a multiple of `n_heads`."""
    require_positive(layer, channels=channels, n_heads=n_heads)
    if channels % n_heads:
        raise ConfigError(f"{type(layer).__name__}: channels={channels} must be a multiple of n_heads={n_heads}")
    return channels // n_heads


def split_channels_into_heads(xp: Any, x: Array, n_heads: int) -> Array:
    """Return `x`, (samples, channels, *cells), as (samples, heads, *cells, channels per head). The result is a view if
    channels are last in memory."""
    samples, channels, *cells = x.shape
    return xp.moveaxis(xp.moveaxis(x, 1, -1).reshape(samples, *cells, n_heads, channels // n_heads), -2, 1)


def merge_heads_into_channels(xp: Any, heads: Array, cells: Sequence[int]) -> Array:
    """Invert `split_channels_into_heads`. `cells` is the shape of the field. In `heads`, the cells may have one dim for
    each dim of the field, or a single dim in total. The result has channels last in memory."""
    samples, n_heads, features = heads.shape[0], heads.shape[1], heads.shape[-1]
    return xp.moveaxis(xp.moveaxis(heads, 1, -2).reshape(samples, *cells, n_heads * features), -1, 1)
