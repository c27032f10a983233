"""Fields that are cut over a grid of ranks: who has which cells, which cells an output needs, and the moves between.

An activation of a field is (samples, channels, *cells). Along each dim of cells the ranks of one line of the grid hold
intervals, one after the other, of any sizes, some of them empty. Whatever a layer needs of other ranks follows from
the bounds of these intervals, a few whole numbers that all ranks know: nothing is asked for at run time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, ClassVar, NamedTuple

import numpy as np

from fsdpx.errors import ShapeError
from fsdpx.nn.layer import Array, Layer, LayerContext, ShardedLayer
from fsdpx.nn.shard_specs import Cuts, FieldPartition, ShardingContext, Sides, bind_partition

__all__ = [
    "MODES",
    "FieldLayer",
    "HaloSpec",
    "as_slice",
    "find_cells",
    "find_halo_specs",
    "find_rank_along",
    "output_cuts",
    "require_dims",
    "require_fit",
]  # fmt: skip

MODES = ("zeros", "circular", "reflect", "replicate")
"""What lies beyond the ends of a dim, as in PyTorch: nothing, the other end, the mirror image, or the last cell."""

CellInterval = tuple[int, int]


class GhostSource(NamedTuple):
    """A cell, or the one after it, and the rank that brings it."""

    cell: int
    rank: int


class HaloPiece(NamedTuple):
    """Cells that a rank needs and their owner has: where they come in what is needed, and which of the owner's they
    are, each as a slice, or as indices where they do not follow one another."""

    needs: int
    owner: int
    into: Any
    cells: Any
    length: int


@dataclass(frozen=True)
class HaloSpec:
    """What the ranks of one line need along one dim.

    Parameters
    ----------
    dim : of the array
    cuts : the bounds of what they have
    needs : [start, stop) for each rank, also beyond the ends of the field
    mode : what lies there, one of `MODES`
    ghosts : cells that each rank brings before and after its own, which it does not ask others for; (): none
    """

    dim: int
    cuts: Cuts
    needs: tuple[CellInterval, ...]
    mode: str = "zeros"
    ghosts: tuple[Sides, ...] = ()

    @property
    def is_local(self) -> bool:
        """Whether each rank needs what it has."""
        return not self.ghosts and all(
            need == (a, b) for need, a, b in zip(self.needs, self.cuts, self.cuts[1:], strict=False)
        )

    @property
    def is_covered_by_ghosts(self) -> bool:
        """Whether each rank finds all that it needs among its own cells and the ghost cells that it brings."""
        if not self.ghosts:
            return False
        pairs = zip(self.needs, self.available_intervals, strict=True)
        return all(a <= start and stop <= b for (start, stop), (a, b) in pairs if stop > start)

    @property
    def field_ends(self) -> tuple[GhostSource, GhostSource]:
        """Where the field begins and ends if the ghost cells beyond it count that some rank brings."""
        return _find_field_ends(self.cuts, self.ghosts)

    @property
    def extent(self) -> CellInterval:
        """The first cell that any rank needs, and the one after the last."""
        some = [need for need in self.needs if need[1] > need[0]]
        return min((start for start, _ in some), default=0), max((stop for _, stop in some), default=0)

    @property
    def available_intervals(self) -> tuple[CellInterval, ...]:
        """The own cells of each rank, with those ghost cells that it needs, or others do beyond the ends."""
        own = zip(self.cuts, self.cuts[1:], strict=False)
        if not self.ghosts:
            return tuple(own)
        rows = zip(self.needs, own, self.ghosts, strict=True)
        found = [
            (a - min(low, max(a - start, 0)), b + min(high, max(stop - b, 0)))
            for (start, stop), (a, b), (low, high) in rows
        ]
        (low, first), (high, last), (start, stop), n = *self.field_ends, self.extent, self.cuts[-1]
        if start < 0 > low:
            found[first] = min(found[first][0], max(start, low)), found[first][1]
        if stop > n < high:
            found[last] = found[last][0], max(found[last][1], min(stop, high))
        return tuple(found)

    def slice_read_by(self, rank: int) -> slice:
        """Where among the cells that a rank brings those are that it reads."""
        first, (start, stop) = (
            self.cuts[rank] - self.ghosts[rank][0],
            (self.needs if self.is_covered_by_ghosts else self.available_intervals)[rank],
        )
        return slice(start - first, stop - first)

    def count_cells(self, rank: int) -> int:
        """Cells that a rank needs."""
        start, stop = self.needs[rank]
        return max(stop - start, 0)

    def list_pieces(self) -> tuple[HaloPiece, ...]:
        """All pieces of all ranks, in one order."""
        return _list_pieces(self)


@lru_cache(1 << 10)
def _find_field_ends(cuts: Cuts, ghosts: tuple[Sides, ...]) -> tuple[GhostSource, GhostSource]:
    if not ghosts:
        return GhostSource(0, 0), GhostSource(cuts[-1], len(cuts) - 2)
    rows = list(zip(cuts, cuts[1:], ghosts, strict=False))
    low = min(GhostSource(a - before, rank) for rank, (a, _, (before, _)) in enumerate(rows))
    high = max(GhostSource(b + after, rank) for rank, (_, b, (_, after)) in enumerate(rows))
    return low._replace(cell=min(low.cell, 0)), high._replace(cell=max(high.cell, cuts[-1]))


@lru_cache(1 << 10)
def _list_pieces(reach: HaloSpec) -> tuple[HaloPiece, ...]:
    return tuple(piece for rank in range(len(reach.needs)) for piece in _list_pieces_of_rank(rank, reach))


def _list_pieces_of_rank(rank: int, reach: HaloSpec) -> Iterator[HaloPiece]:
    cuts, held, n = reach.cuts, reach.available_intervals, reach.cuts[-1]
    wanted = np.arange(*reach.needs[rank])
    if not wanted.size:
        return
    (low, first), (high, last) = reach.field_ends
    cells = np.where((wanted >= low) & (wanted < high), wanted, _map_beyond_ends(wanted, n, reach.mode))
    inside = (cells >= low) & (cells < high)
    if reach.ghosts:
        inside &= (wanted < held[rank][0]) | (wanted >= held[rank][1])
    owners = np.searchsorted(np.asarray(cuts), cells, side="right") - 1
    owners[cells < 0], owners[cells >= n] = first, last
    for owner in np.unique(owners[inside]):
        at = np.flatnonzero(inside & (owners == owner))
        yield HaloPiece(rank, int(owner), as_slice(at), as_slice(cells[at] - held[owner][0]), int(at.size))


def _map_beyond_ends(at: np.ndarray, n: int, mode: str) -> np.ndarray:
    """The cells of the field that stand for places beyond its ends; with "zeros" they stay there."""
    if mode == "circular":
        return at % n
    if mode == "replicate":
        return np.clip(at, 0, n - 1)
    if mode == "reflect":
        at = np.abs(at)
        return np.where(at >= n, 2 * (n - 1) - at, at)
    return at


def as_slice(indices: np.ndarray) -> Any:
    """A slice if each index follows the one before it."""
    first, last = int(indices[0]), int(indices[-1])
    if last - first == indices.size - 1 and (np.diff(indices) == 1).all():
        return slice(first, last + 1)
    return indices


def find_halo_specs(
    parts: FieldPartition, windows: Sequence[tuple[int, int, int]], outputs: FieldPartition, modes: Sequence[str]
) -> tuple[HaloSpec, ...]:
    """What each rank needs for its part of the outputs, dim by dim.

    parts : of the input
    windows : stride, first cell of the window of output 0 (below 0 where there is padding), and span of a window
    outputs : parts of the output
    """
    made = []
    for dim, (cuts, (stride, first, span), out, mode) in enumerate(
        zip(parts.cuts, windows, outputs.cuts, modes, strict=True)
    ):
        needs = tuple(
            (a * stride + first, (b - 1) * stride + first + span) if b > a else (start, start)
            for a, b, start in zip(out, out[1:], cuts, strict=False)
        )
        made.append(HaloSpec(dim + 2, cuts, needs, mode, parts.ghosts_along(dim)))
    return tuple(made)


def require_fit(reach: HaloSpec, parts: FieldPartition) -> None:
    """ShapeError where a field is too small for what lies beyond its ends, or brings too few ghost cells there. What
    windows reach inside the field comes from its owners. parts: for the name of the dim."""
    n, name, (start, stop), (low, high) = reach.cuts[-1], parts.dim_name(reach.dim - 2), reach.extent, reach.field_ends
    pads = 0
    for lacks, ghosts in ((-start, -low.cell), (stop - n, high.cell - n)):
        if lacks > ghosts > 0:
            raise ShapeError(
                f"windows reach {lacks} cells beyond the field along {name}, and arrays bring ghosts={ghosts} there: "
                "give the grid more ghost cells, or none"
            )
        pads = max(pads, 0 if ghosts else lacks)
    most = {"circular": n, "reflect": n - 1}.get(reach.mode)
    if most is not None and pads > most:
        raise ShapeError(
            f"padding {pads} of mode {reach.mode!r} along {name} takes fields of at least "
            f"{pads + (reach.mode == 'reflect')} cells, got {n}"
        )


def output_cuts(cuts: Cuts, bounds: Sequence[int], total: int) -> Cuts:
    """Who has which of `total` outputs. bounds: for each of `cuts` the first output from there on; what lies beyond the
    last cell falls to the last part that has cells."""
    last = max((r for r in range(len(cuts) - 1) if cuts[r + 1] > cuts[r]), default=0)
    return tuple(total if r > last else min(bound, total) for r, bound in enumerate(bounds))


class FieldLayer(Layer):
    """The base of layers that know how the field is cut that they read."""

    parts: FieldPartition | None = None
    """How it is; None: this rank has the whole."""
    dims: ClassVar[int]
    """Of cells, for a class that reads fields of so many alone, as `class Conv2d(Conv, dims=2)`."""

    def __init_subclass__(cls, dims: int | None = None) -> None:
        super().__init_subclass__()
        if dims is not None:
            cls.dims = dims

    def partition_outputs(self, parts: FieldPartition) -> FieldPartition:
        """Who has which outputs."""
        return parts

    def get_partition(self, x: Array) -> FieldPartition:
        return self.parts or FieldPartition.on_one_rank(x.shape[2:])

    def shard_over_ranks(self, request: ShardingContext) -> ShardedLayer:
        kind = request.require_same_kind(self)
        if not isinstance(kind, FieldPartition):
            return super().shard_over_ranks(request)
        request.refuse_mark(self)
        return ShardedLayer(bind_partition(self, kind), self.partition_outputs(kind))


def find_rank_along(env: LayerContext, cuts: Cuts, d: int) -> int:
    """This rank's place in the line along dim d of the cells; 0 where it has the whole of it."""
    return 0 if len(cuts) == 2 else env.mesh.domain[d].rank


def find_cells(env: LayerContext, cuts: Cuts, d: int) -> tuple[int, int]:
    """The cells [start, stop) of this rank along dim d of the cells."""
    rank = find_rank_along(env, cuts, d)
    return cuts[rank], cuts[rank + 1]


def require_dims(layer: object, x: Array, dims: int, channels: int | None = None) -> None:
    """ShapeError unless `x` is (samples, channels, *cells) with `dims` dims of cells."""
    if x.ndim != dims + 2 or channels not in (None, x.shape[1]):
        wanted = "channels" if channels is None else channels
        cells = ", ".join(("depth", "height", "width")[3 - dims :])
        raise ShapeError(f"{layer!r} wants an input of shape (samples, {wanted}, {cells}), got {tuple(x.shape)}")
