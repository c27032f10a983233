"""Attention among all cells of a field that may be partitioned over ranks."""

from __future__ import annotations

from functools import lru_cache
from itertools import product
from math import prod
from typing import Any

from fsdpx.ext.fields.cell_heads import (
    FieldAttention,
    merge_heads_into_channels,
    require_divisible_by_heads,
    split_channels_into_heads,
)
from fsdpx.ext.fields.halo import FieldLayer
from fsdpx.nn.attention_math import AttentionHeads
from fsdpx.nn.layer import Array, LayerContext, Params
from fsdpx.nn.sequence_attention import Ring, RingAttention
from fsdpx.nn.shard_specs import FieldPartition

__all__ = ["CellRingAttention", "GlobalAttention"]


class GlobalAttention(FieldAttention):
    """Multi-head attention (Vaswani et al. 2017) in which each cell of (samples, channels, *cells) attends to all
    cells: softmax(q k^T / sqrt(channels / n_heads)) v for each head.

    This is `MultiHeadAttention(causal=False)` on the sequence of cells, with the same parameters:
    `qkv.weight (3 channels, channels)`, `qkv.bias`, `out.weight (channels, channels)` and `out.bias`. The run time of
    the layer grows with the square of the number of cells, so vision transformers first reduce a field to patches. On a
    grid of ranks, each rank keeps the queries of its cells, and the ranks pass the keys and values of all parts around
    a ring (Liu et al. 2023). In the backward pass, the gradients of keys and values go around the same ring. Parts may
    have any size. The layer is one FSDP unit.

    Parameters
    ----------
    channels : number of channels of the input and the output
    n_heads : number of heads, a divisor of channels
    bias : whether the two projections have biases; default True
    """

    def __init__(self, channels: int, n_heads: int, bias: bool = True) -> None:
        d_head = require_divisible_by_heads(self, channels, n_heads)
        super().__init__(channels, n_heads, bias, CellRingAttention(n_heads, d_head))


class CellRingAttention(FieldLayer):
    """The part of `GlobalAttention` between its projections. It takes queries, keys and values, (samples, 3 channels,
    *cells), and returns (samples, channels, *cells).

    Parameters
    ----------
    n_heads, d_head : number of heads, and number of channels per head
    """

    kernel_names = ("attention", "attention_backward")

    def __init__(self, n_heads: int, d_head: int) -> None:
        self.n_heads, self.d_head = n_heads, d_head
        self._heads = AttentionHeads(n_heads, d_head, causal=False)

    def forward(self, env: LayerContext, p: Params, x: Array) -> tuple[Array, Any]:
        merged, kept = self._get_ring_attention().forward(env, _flatten_cells(env.xp, x))
        y = merge_heads_into_channels(env.xp, merged[:, None], x.shape[2:])
        return y, (kept, x) if "attention" in env.recompute else (kept,)

    def backward_input(self, env: LayerContext, p: Params, saved: Any, dy: Array) -> tuple[Array, Any]:
        d = self._get_ring_attention().backward(env, saved[0], _flatten_cells(env.xp, dy))
        return merge_heads_into_channels(env.xp, d[:, None], dy.shape[2:]), ()

    def _get_ring_attention(self) -> RingAttention:
        return RingAttention(self._heads, self._find_ring)

    def _find_ring(self, env: LayerContext, cells: int) -> Ring:
        return Ring(env.mesh.parts, (cells,) if self.parts is None else _list_part_sizes(self.parts))


@lru_cache(1 << 10)
def _list_part_sizes(parts: FieldPartition) -> tuple[int, ...]:
    """Return the number of cells in each rank's part, in the order of `env.mesh.parts`."""
    places = product(*(range(len(cuts) - 1) for cuts in parts.cuts))
    return tuple(prod(parts.local_shape(place)) for place in places)


def _flatten_cells(xp: Any, x: Array) -> Array:
    """Return a field (samples, channels, *cells) as a sequence (samples, cells, channels)."""
    return split_channels_into_heads(xp, x, 1).reshape(x.shape[0], prod(x.shape[2:]), x.shape[1])
