"""Neighborhood attention: each cell of a field, which may be partitioned over ranks, attends to a window of cells."""

from __future__ import annotations

from functools import lru_cache, partial
from math import sqrt
from typing import Any

from fsdpx.errors import ConfigError, ShapeError
from fsdpx.ext.fields import kernels
from fsdpx.ext.fields.cell_heads import (
    FieldAttention,
    merge_heads_into_channels,
    require_divisible_by_heads,
    split_channels_into_heads,
)
from fsdpx.ext.fields.conv import Sizes, expand_to_dims
from fsdpx.ext.fields.halo import DimEnds, FieldLayer, HaloSpec, get_rank_along
from fsdpx.ext.fields.halo_slabs import exchange_halo, exchange_halo_backward
from fsdpx.ext.fields.kernels.neighborhood import TILE_SIDES, make_neighborhood_masks
from fsdpx.nn.gradient_accumulation import accumulation_dtype
from fsdpx.nn.layer import Array, LayerContext, Params
from fsdpx.nn.shard_specs import FieldPartition

__all__ = ["NeighborhoodAttention", "WindowAttention", "list_to_tuple"]


class NeighborhoodAttention(FieldAttention):
    """Multi-head attention in which each cell of (samples, channels, *cells) attends to the cells of a window around it
    (Hassani et al. 2023): softmax(q k^T / sqrt(channels / n_heads)) v for each head.

    Near the ends of a dim, windows are shifted into the field so that every cell attends to the same number of cells.
    Along a periodic dim, windows wrap around instead. Parameters are `qkv.weight (3 channels, channels)`, `qkv.bias`,
    `out.weight (channels, channels)` and `out.bias`. There is no relative position bias. On a grid of ranks, each rank
    computes the results of its own cells. If a window reaches into the part of another rank, that rank sends the keys
    and values of the cells under the window, as in a convolution. The layer is one FSDP unit.

    Parameters
    ----------
    channels : number of channels of the input and the output
    n_heads : number of heads, a divisor of channels
    kernel_size : window size in cells, which must be odd and at most the number of cells of the field: one number for
        all dims, or one per dim
    periodic : whether windows wrap around at the ends of the field: one bool for all dims, or one per dim; default
        False
    bias : whether the two projections have biases; default True
    """

    def __init__(
        self,
        channels: int,
        n_heads: int,
        kernel_size: Sizes | list[int],
        periodic: bool | tuple[bool, ...] | list[bool] = False,
        bias: bool = True,
    ) -> None:
        d_head = require_divisible_by_heads(self, channels, n_heads)
        self.kernel_size, self.periodic = list_to_tuple(kernel_size), list_to_tuple(periodic)
        each = self.kernel_size if isinstance(self.kernel_size, tuple) else (self.kernel_size,)
        if any(not hasattr(size, "__index__") or size < 1 or size % 2 == 0 for size in each):
            raise ConfigError(f"NeighborhoodAttention: kernel_size={self.kernel_size}: windows must have odd sizes")
        super().__init__(channels, n_heads, bias, WindowAttention(n_heads, d_head, self.kernel_size, self.periodic))


class WindowAttention(FieldLayer):
    """The part of `NeighborhoodAttention` between its projections. It takes queries, keys and values, (samples, 3
    channels, *cells), and returns (samples, channels, *cells).

    Parameters
    ----------
    n_heads, d_head : number of heads, and number of channels per head
    kernel_size, periodic : as in `NeighborhoodAttention`
    """

    kernel_names = ("neighborhood_attention", "neighborhood_attention_backward")

    def __init__(self, n_heads: int, d_head: int, kernel_size: Sizes, periodic: bool | tuple[bool, ...]) -> None:
        self.n_heads, self.d_head, self.kernel_size, self.periodic = n_heads, d_head, kernel_size, periodic

    def forward(self, env: LayerContext, p: Params, x: Array) -> tuple[Array, Any]:
        channels, (halos, windows) = self.n_heads * self.d_head, self._plan_halos_and_windows(env, x)
        kv = exchange_halo(env, x[:, channels:], halos)
        fields = x[:, :channels], kv[:, :channels], kv[:, channels:]
        q, k, v = (split_channels_into_heads(env.xp, a, self.n_heads) for a in fields)
        # a view of q would keep all of x alive, including the keys and values, which are also saved in kv
        q = q.copy() if halos else q
        o, lse = kernels.neighborhood_attention(env.xp, q, k, v, *windows, 1.0 / sqrt(self.d_head))
        kept = (q, k, v, o, lse)
        merged = merge_heads_into_channels(env.xp, o, x.shape[2:])
        return merged, (kept, x) if "attention" in env.recompute else (kept,)

    def backward_input(self, env: LayerContext, p: Params, saved: Any, dy: Array) -> tuple[Array, Any]:
        halos, windows = self._plan_halos_and_windows(env, dy)
        slopes = split_channels_into_heads(env.xp, dy, self.n_heads)
        scale = 1.0 / sqrt(self.d_head)
        dq, dk, dv = kernels.neighborhood_attention_backward(env.xp, *saved[0], slopes, *windows, scale)
        dq, dk, dv = (merge_heads_into_channels(env.xp, d, d.shape[2:-1]) for d in (dq, dk, dv))
        dkv = exchange_halo_backward(env, env.xp.concatenate([dk, dv], axis=1), halos)
        return env.xp.concatenate([dq, dkv], axis=1), ()

    def list_dim_ends(self, dims: int) -> list[DimEnds]:
        texts = "keeps windows of attention within the field", "continues windows of attention at the other end"
        advice = "periodic=False", "periodic=True"
        return [DimEnds(d, p, texts[p], advice) for d, p in enumerate(self._list_periods(dims))]

    def _list_periods(self, dims: int) -> tuple[bool, ...]:
        each = self.periodic if isinstance(self.periodic, tuple) else (self.periodic,) * dims
        if len(each) != dims:
            raise ShapeError(f"{self!r}: periodic has {len(each)} entries, and the field {dims} dims of cells")
        return tuple(map(bool, each))

    def _plan_halos_and_windows(
        self, env: LayerContext, x: Array
    ) -> tuple[tuple[HaloSpec, ...], tuple[tuple[tuple[int, ...], ...], tuple[int, ...], tuple[Array, ...]]]:
        """Return the halos of keys and values to exchange, and the arguments (starts, window, masks) of the kernels for
        this rank. The masks are cached per context."""
        parts = self.get_partition(x)
        dims = len(parts.cuts)
        if dims not in TILE_SIDES:
            raise ConfigError(f"{self!r}: the field has {dims} dims of cells: windows have 1 to {max(TILE_SIDES)}")
        window = expand_to_dims(self, "kernel_size", self.kernel_size, dims, 1)
        for d, (n, size) in enumerate(zip(parts.shape, window, strict=True)):
            if n < size:
                name = parts.get_dim_name(d)
                raise ShapeError(f"{self!r}: the field has {n} cells along {name}, fewer than windows of {size}")
        place = tuple(get_rank_along(env, cuts, d) for d, cuts in enumerate(parts.cuts))
        halos, starts = _plan_halos_and_starts(parts, window, self._list_periods(dims), place)
        key = "neighborhood", starts, window, (dtype := accumulation_dtype(x.dtype)).str
        if key not in env.constants:
            env.constants[key] = make_neighborhood_masks(env.xp, starts, window, dtype)
        return halos, (starts, window, env.constants[key])


def list_to_tuple(value: Any) -> Any:
    """Return `value`, converted to a tuple if it is a list."""
    return tuple(value) if isinstance(value, list) else value


def _find_window_start(cell: int, cells: int, size: int, periodic: bool) -> int:
    """Return the index of the first cell in the window of cell `cell`, along a dim of `cells` cells. The index may be
    negative if the dim is periodic."""
    return cell - size // 2 if periodic else min(max(cell - size // 2, 0), cells - size)


@lru_cache(1 << 10)
def _plan_halos_and_starts(
    parts: FieldPartition, window: tuple[int, ...], periods: tuple[bool, ...], place: tuple[int, ...]
) -> tuple[tuple[HaloSpec, ...], tuple[tuple[int, ...], ...]]:
    """Return (halos, starts) for the rank with grid coordinates `place`.

    `halos` are the halos of keys and values along the dims in which any rank needs more than its own cells. `starts`
    holds, for each dim, the first key of each query's window on this rank. Keys are counted from the first key that the
    rank needs."""
    halos, starts = [], []
    for d, (cuts, size, periodic) in enumerate(zip(parts.cuts, window, periods, strict=True)):
        find_start = partial(_find_window_start, cells=cuts[-1], size=size, periodic=periodic)
        edges = zip(cuts, cuts[1:], strict=False)
        needs = tuple((find_start(a), find_start(b - 1) + size) if b > a else (a, a) for a, b in edges)
        halos.append(HaloSpec(d + 2, cuts, needs, "circular" if periodic else "zeros"))
        own = range(cuts[place[d]], cuts[place[d] + 1])
        starts.append(tuple(find_start(cell) - needs[place[d]][0] for cell in own))
    return tuple(halo for halo in halos if not halo.is_local), tuple(starts)
