"""Attention of each cell of a field to the cells of a window, in plain array code.

Queries are processed in tiles. The keys of a tile are the cells of all windows of its queries, and a mask hides the
keys outside the window of a query. Scores are computed one tile at a time and are recomputed in the backward pass."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from itertools import product
from math import prod
from typing import Any, NamedTuple

import numpy as np

from fsdpx.core.array.kernels.dispatch import kernel
from fsdpx.core.array.shapes.flop_counter import iterate_first_and_count_all

__all__ = ["make_neighborhood_masks", "neighborhood_attention", "neighborhood_attention_backward"]

TILE_SIDES = {1: 64, 2: 8, 3: 4}
"""Number of queries in a tile along each dim, keyed by the number of dims."""

Starts = tuple[tuple[int, ...], ...]


class DimTile(NamedTuple):
    """The queries and keys of a tile along one dim.

    Attributes
    ----------
    queries, keys : ranges of cells of the queries and of the keys
    starts : for each query, the first key of its window, counted from the first key of the tile
    """

    queries: slice
    keys: slice
    starts: tuple[int, ...]

    @property
    def lengths(self) -> tuple[int, int]:
        return len(self.starts), self.keys.stop - self.keys.start


@kernel()
def neighborhood_attention(
    xp: Any, q: Any, k: Any, v: Any, starts: Starts, window: tuple[int, ...], masks: tuple[Any, ...], scale: float
) -> tuple[Any, Any]:
    """Return two arrays: `softmax(scale * q k^T) v`, where each query sees the keys of its own window, and the
    log-sum-exp of each query's scores (Hassani et al. 2023).

    Parameters
    ----------
    q : (B, H, *cells, D): batch, heads, cells and features
    k, v : (B, H, *box, D); box has as many dims as cells
    starts : for each dim, the first key of each query's window along this dim, in increasing order
    window : number of keys of a window along each dim
    masks : result of `make_neighborhood_masks`, in float32 for 16-bit arrays
    scale : factor by which scores are multiplied

    Returns
    -------
    o (B, H, *cells, D), stored in memory with cells before heads, and lse (B, H, *cells)
    """
    o, lse = _empty_cells_first(xp, q), xp.empty(q.shape[:-1], dtype=q.dtype)
    for queries, keys, mask in _iterate_tiles(xp, starts, window, masks):
        scores = _compute_scores(xp, _take_rows(q, queries), _take_rows(k, keys), mask, scale)
        top = xp.max(scores, axis=-1, keepdims=True)
        scores -= top
        scores = xp.exp(scores)
        total = xp.sum(scores, axis=-1, keepdims=True)
        found = xp.matmul(scores, _take_rows(v, keys)) / total
        o[queries] = found.reshape(o[queries].shape)
        lse[queries] = (top + xp.log(total)).reshape(lse[queries].shape)
    return o, lse


@kernel(narrow=3)
def neighborhood_attention_backward(
    xp: Any, q: Any, k: Any, v: Any, o: Any, lse: Any, do: Any, starts: Starts, window: tuple[int, ...],
    masks: tuple[Any, ...], scale: float,
) -> tuple[Any, Any, Any]:  # fmt: skip
    """Return the gradients of q, k and v, stored with cells before heads. `o` and `lse` are the results of
    `neighborhood_attention`, `do` is the gradient of `o`, and the other arguments are the same as in the forward
    pass."""
    dq, dk, dv = _empty_cells_first(xp, q), _empty_cells_first(xp, k), _empty_cells_first(xp, v)
    dk[...], dv[...] = 0, 0
    for queries, keys, mask in _iterate_tiles(xp, starts, window, masks):
        rows, slopes = _take_rows(q, queries), _take_rows(do, queries)
        key_rows, value_rows = _take_rows(k, keys), _take_rows(v, keys)
        p = _compute_scores(xp, rows, key_rows, mask, scale)
        p -= _take_rows(lse[..., None], queries)
        p = xp.exp(p)
        ds = xp.matmul(slopes, value_rows.swapaxes(-1, -2))
        ds -= xp.sum(slopes * _take_rows(o, queries), axis=-1, keepdims=True)
        ds *= p
        ds *= scale
        dq[queries] = xp.matmul(ds, key_rows).reshape(dq[queries].shape)
        dk[keys] += xp.matmul(ds.swapaxes(-1, -2), rows).reshape(dk[keys].shape)
        dv[keys] += xp.matmul(p.swapaxes(-1, -2), slopes).reshape(dv[keys].shape)
    return dq, dk, dv


def _empty_cells_first(xp: Any, a: Any) -> Any:
    """Return an uninitialized array with the shape (B, H, *cells, D) of a, stored in memory as (B, *cells, H, D)."""
    batch, heads, *cells, features = a.shape
    return xp.moveaxis(xp.empty((batch, *cells, heads, features), dtype=a.dtype), -2, 1)


def _take_rows(a: Any, cells: tuple[Any, ...]) -> Any:
    """Return the selected cells of `a`, (B, H, *cells, D), as (B, H, selected cells, D)."""
    taken = a[cells]
    return taken.reshape(*taken.shape[:2], prod(taken.shape[2:-1]), taken.shape[-1])


def _compute_scores(xp: Any, q: Any, k: Any, mask: Any, scale: float) -> Any:
    scores = xp.matmul(q * scale, k.swapaxes(-1, -2))
    scores += mask
    return scores


def make_neighborhood_masks(xp: Any, starts: Starts, window: tuple[int, ...], dtype: Any) -> tuple[Any, ...]:
    """Return the argument `masks` of the kernels. A mask (queries, keys) is 0 where a query sees a key, and -inf
    elsewhere. Tiles whose windows have the same positions relative to the tile share one mask. Most tiles of a field
    share the same mask."""
    return tuple(xp.asarray(_make_mask(kind, window).astype(dtype)) for kind in _plan_tiles(starts, window)[1])


def _iterate_tiles(
    xp: Any, starts: Starts, window: tuple[int, ...], masks: tuple[Any, ...]
) -> Iterator[tuple[tuple[Any, ...], tuple[Any, ...], Any]]:
    """Yield (index of the queries, index of the keys, mask) for each tile.

    For shape-only arrays, tiles of equal shape are computed only once, and their work is multiplied by the number of
    such tiles."""
    tiles: Any = _plan_tiles(starts, window)[0]
    if getattr(xp, "holds_no_data", False):
        alike: dict[Any, list[Any]] = {}
        for tile in tiles:
            alike.setdefault(tuple(one.lengths for one in tile[0]), []).append(tile)
        tiles = (tile for same in alike.values() for tile in iterate_first_and_count_all(same[0], len(same)))
    for sides, kind in tiles:
        batch = (slice(None), slice(None))
        yield (*batch, *(one.queries for one in sides)), (*batch, *(one.keys for one in sides)), masks[kind]


@lru_cache(256)
def _plan_tiles(
    starts: Starts, window: tuple[int, ...]
) -> tuple[tuple[tuple[tuple[DimTile, ...], int], ...], tuple[Starts, ...]]:
    """Return two tuples: the tiles, and the kinds of tiles. Tiles are of the same kind if their windows have the same
    positions relative to the tile. The first tuple holds, for each tile, one `DimTile` per dim, and the index of its
    kind. The second holds, for each kind and dim, the first key of each query's window."""
    side, kinds = TILE_SIDES[len(starts)], dict[Starts, int]()
    rows = product(*(_split_dim_into_tiles(first, k, side) for first, k in zip(starts, window, strict=True)))
    tiles = tuple((row, kinds.setdefault(tuple(one.starts for one in row), len(kinds))) for row in rows)
    return tiles, tuple(kinds)


def _split_dim_into_tiles(starts: tuple[int, ...], window: int, side: int) -> list[DimTile]:
    made = []
    for low in range(0, len(starts), side):
        own = starts[low : low + side]
        keys, relative = slice(own[0], own[-1] + window), tuple(start - own[0] for start in own)
        made.append(DimTile(slice(low, low + len(own)), keys, relative))
    return made


def _make_mask(starts: Starts, window: tuple[int, ...]) -> np.ndarray:
    seen: Any = np.ones((1, 1), bool)
    for first, k in zip(starts, window, strict=True):
        begin, key = np.array(first)[:, None], np.arange(first[-1] + k)[None, :]
        here = (key >= begin) & (key < begin + k)
        seen = (seen[:, None, :, None] & here[None, :, None, :]).reshape(
            seen.shape[0] * here.shape[0], seen.shape[1] * here.shape[1]
        )
    return np.where(seen, 0.0, -np.inf)
