"""Fields that are cut over grids of ranks."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

import fsdpx
from fsdpx.core.array.random import Random
from fsdpx.core.comm import Communicator
from fsdpx.core.comm.mesh import Mesh, connect_axes, make_single_rank_axes
from fsdpx.ext.fields.sample_groups import group_ranks_sharing_samples
from fsdpx.nn import LayerContext
from fsdpx.nn.shard_specs import FieldPartition

Cuts = Sequence[Sequence[int]]
PARTITIONS = [((1, 1), 0), ((2, 2), 0), ((2, 2), 2), ((1, 5), 3), ((2, 2, 2), 1)]
"""Ranks along each dim of cells, and the seed of `cuts_of`: one rank, even parts, uneven ones, some that are empty
between others, and parts of volumes."""


def noise(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng([seed, *shape]).standard_normal(shape)


def cuts_of(shape: Sequence[int], dims: Sequence[int], seed: int) -> FieldPartition:
    """Parts of any sizes; with seed 0 as even as can be."""
    rng, made = np.random.default_rng([seed, *dims]), []
    for n, d in zip(shape, dims, strict=True):
        even = [n * r // d for r in range(d + 1)]
        made.append(tuple(even if seed == 0 else [0, *sorted(rng.integers(0, n + 1, d - 1).tolist()), n]))
    return FieldPartition(tuple(made))


def even(shape: Sequence[int], dims: Sequence[int]) -> Cuts:
    return cuts_of(shape, dims, 0).cuts


def random_cuts(shape: Sequence[int], dims: Sequence[int]) -> Cuts:
    """Uneven parts, of which some are empty."""
    return cuts_of(shape, dims, sum(dims)).cuts


def place_of(rank: int, dims: Sequence[int]) -> list[int]:
    """Where a rank is in its grid."""
    return [int(i) for i in np.unravel_index(rank, dims)]


def bounds(cuts: Cuts, place: Sequence[int]) -> list[tuple[int, int]]:
    """Along each dim, the first cell of the part at `place`, and the one after its last."""
    return [(c[p], c[p + 1]) for c, p in zip(cuts, place, strict=True)]


def grid_at(comm: Any, dims: Sequence[int], cuts: Cuts, **more: Any) -> fsdpx.Grid:
    """The grid of a rank that has its part of the cuts. If there are more ranks, each so many neighbors are a
    member of an ensemble. more: arguments of `fsdpx.Grid`."""
    place = place_of(comm.rank % int(np.prod(dims)), dims)
    return fsdpx.Grid(comm, [b - a for a, b in bounds(cuts, place)], dims=dims, **more)


def numbered(comm: Any, dims: Sequence[int], cuts: Cuts, order: Sequence[int], **more: Any) -> fsdpx.Grid:
    """The grid of a rank whose number says nothing: it stands at place `order[rank]`, and says where its part begins.
    more: arguments of `fsdpx.Grid`."""
    mine = bounds(cuts, place_of(order[comm.rank], dims))
    return fsdpx.Grid(comm, [b - a for a, b in mine], offsets=[a for a, _ in mine], **more)


def by_turns(shape: Sequence[int], grids: Iterable[Sequence[int]], turn: int = 0) -> list[tuple[Any, Cuts]]:
    """Even parts and uneven ones on one grid after the other; with an odd `turn`, uneven ones first."""
    return [(dims, (even, random_cuts)[(turn + k) % 2](shape, dims)) for k, dims in enumerate(grids)]


def uneven(shape: Sequence[int], *grids: Sequence[int]) -> list[tuple[Any, Cuts]]:
    """Each grid with uneven parts."""
    return [(dims, random_cuts(shape, dims)) for dims in grids]


def part(a: np.ndarray, cuts: Cuts, place: Sequence[int], first: int = 2) -> np.ndarray:
    """What the rank at `place` has of an array whose dims from `first` on are cells."""
    return np.ascontiguousarray(a[(slice(None),) * first + tuple(slice(*ends) for ends in bounds(cuts, place))])


def index_with_ghosts(grid: fsdpx.Grid, width: int | None = None, first: int = 2) -> tuple[slice, ...]:
    """Where a rank's part with its ghost cells is in an array whose dims from `first` on are cells, with as many ghost
    cells at each end as arrays of the grid have, or `width`."""
    cells = []
    for start, n, (low, high) in zip(grid.offsets, grid.local_shape, grid.ghosts, strict=True):
        begin = start + (0 if width is None else width - low)
        cells.append(slice(begin, begin + low + n + high))
    return (slice(None),) * first + tuple(cells)


def part_with_ghosts(a: np.ndarray, grid: fsdpx.Grid, width: int | None = None, first: int = 2) -> np.ndarray:
    """What a rank has of an array with ghost cells, as in `index_with_ghosts`."""
    return np.ascontiguousarray(a[index_with_ghosts(grid, width, first)])


def sum_over_ranks(grid: fsdpx.Grid, mine: np.ndarray, width: int = 1, first: int = 2) -> np.ndarray:
    """Add up what ranks have for their cells and ghost cells, of which the whole has `width` at each end: a cell has a
    gradient on each rank that reads it."""
    sizes = [n + 2 * width for n in grid.shape]
    total = np.zeros((*mine.shape[:first], *sizes, *mine.shape[first + len(sizes) :]))
    total[index_with_ghosts(grid, width, first)] = mine
    return sum(grid.all_gather_value(total))


def whole(found: Sequence[np.ndarray], parts: FieldPartition, dims: Sequence[int], first: int = 2) -> np.ndarray:
    """The array of whose parts the ranks have `found`."""
    out = np.full((*found[0].shape[:first], *parts.shape), np.nan, found[0].dtype)
    for rank, a in enumerate(found):
        out[(slice(None),) * first + tuple(slice(*ends) for ends in bounds(parts.cuts, place_of(rank, dims)))] = a
    return out


THEIRS = {"zeros": "constant", "circular": "wrap", "reflect": "reflect", "replicate": "edge"}
"""NumPy's names of padding modes."""


def padded(x: np.ndarray, dim: int, widths: tuple[int, int], mode: Any) -> np.ndarray:
    """Pad a dim with NumPy, one end after the other; mode: of both ends, or a pair of modes or values. Reflections and
    periods use the width of the field."""
    ends = []
    for number, side in enumerate(mode if isinstance(mode, tuple) else (mode, mode)):
        cells = [(0, 0)] * x.ndim
        cells[dim] = (widths[0], 0) if number == 0 else (0, widths[1])
        more: dict[str, Any] = {} if isinstance(side, str) else {"constant_values": side}
        full = np.pad(x, cells, THEIRS[side] if isinstance(side, str) else "constant", **more)  # type: ignore[call-overload]
        ends.append(np.take(full, range(widths[0]) if number == 0 else range(x.shape[dim], full.shape[dim]), dim))
    return np.concatenate([ends[0], x, ends[1]], dim)


class OfLine:
    """A mesh whose ranks are those of one dim."""

    def __init__(self, comm: Communicator) -> None:
        self.domain = (comm,)


def env_of(comm: Communicator | None, dims: Sequence[int] = (), training: bool = True) -> LayerContext:
    """Of a rank of a grid; None: of one that is alone."""
    axes = make_single_rank_axes()
    if comm is not None:
        mesh = Mesh(shard=comm.size).resolve_open_axis(comm.size)
        axes = connect_axes(
            mesh, comm, check=True, samples=group_ranks_sharing_samples(mesh, comm.rank, dims, [None] * comm.size)
        )
    return LayerContext(np, axes, Random(5, "layer", 3), training)
