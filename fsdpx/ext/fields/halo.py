"""Halo specifications: which cells of other ranks each rank needs along each dim of a partitioned field.

The activations of a field are (samples, channels, *cells). Along each cell dim, the ranks in a line of the grid own
consecutive intervals of cells. Intervals may have any size and may be empty. All ranks know the bounds of these
intervals. Each rank therefore derives a layer's halo from these bounds, and ranks need not negotiate at run time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache
from math import isfinite
from numbers import Real
from typing import Any, ClassVar, NamedTuple

import numpy as np

from fsdpx.core.base.dataclass import dataclass
from fsdpx.errors import ConfigError, ShapeError
from fsdpx.nn.layer import Array, Layer, LayerContext, ShardedLayer
from fsdpx.nn.shard_specs import Cuts, FieldPartition, GhostWidths, Kind, ShardingContext, bind_partition

__all__ = [
    "MODES", "DimEnds", "FieldLayer", "HaloSpec", "PaddingMode", "PaddingSide", "compute_output_bounds_of_ranks",
    "expand_padding_modes", "get_local_range", "get_rank_along", "make_halo_spec_per_dim", "require_field_shape",
    "require_halo_fits_field", "to_slice_if_consecutive",
]  # fmt: skip

MODES = ("zeros", "circular", "reflect", "replicate")
"""Padding modes, as in PyTorch. The values beyond an end of a dim are, respectively, zeros, the cells at the other end,
the mirror image of the cells at this end, or copies of the cell at this end."""

PaddingSide = str | float
"""Padding beyond one end of a dim: one of `MODES`, or a number, which is then the value of all cells beyond the end."""

PaddingMode = PaddingSide | tuple[PaddingSide | tuple[PaddingSide, PaddingSide], ...]
"""Padding as passed by the caller: one padding for all dims, or one per dim, each of which may be a pair (before,
after)."""

CellInterval = tuple[int, int]


class FieldEnd(NamedTuple):
    """One end of the field along a dim, including ghost cells beyond the domain. `cell` is the index of the first cell
    for the lower end, and the index after the last cell for the upper end. `rank` is the rank that holds the cells at
    this end."""

    cell: int
    rank: int


class HaloPiece(NamedTuple):
    """Halo cells along one dim that rank `receiver` receives from rank `sender`.

    Attributes
    ----------
    receiver, sender : coordinates of the two ranks along the dim
    into : index of these cells among the cells that rank `receiver` needs: a slice, or an index array if the cells are
        not consecutive
    cells : index of these cells among the cells that rank `sender` provides: a slice or an index array
    length : number of cells
    """

    receiver: int
    sender: int
    into: Any
    cells: Any
    length: int


@dataclass(frozen=True)
class HaloSpec:
    """The range of cells that each rank needs along one dim, and the rules for cells beyond the ends of the field.

    Parameters
    ----------
    dim : index of the dim in the array (samples, channels, *cells)
    cuts : bounds of the cells that the ranks own
    needs : the range [start, stop) of cells that each rank needs, possibly beyond the ends of the field
    mode : padding beyond both ends, or a pair (padding before the field, padding after it)
    ghosts : widths (before, after) of the ghost cells that each rank already holds around its own cells and therefore
        does not request; () if there are none
    """

    dim: int
    cuts: Cuts
    needs: tuple[CellInterval, ...]
    mode: PaddingSide | tuple[PaddingSide, PaddingSide] = "zeros"
    ghosts: tuple[GhostWidths, ...] = ()

    @property
    def padding_sides(self) -> tuple[PaddingSide, PaddingSide]:
        """Padding before and after the field. Each is either a mode, or a number: the constant value of the padding
        cells."""
        return self.mode if isinstance(self.mode, tuple) else (self.mode, self.mode)

    @property
    def has_constants(self) -> bool:
        """True if cells beyond at least one end have a constant value, because the padding at that end is a number."""
        return not all(isinstance(side, str) for side in self.padding_sides)

    @property
    def is_local(self) -> bool:
        """True if each rank needs exactly the cells that it owns, so that nothing is exchanged."""
        parts = zip(self.needs, self.cuts, self.cuts[1:], strict=False)
        return not self.ghosts and all(need == (a, b) for need, a, b in parts)

    @property
    def is_covered_by_ghosts(self) -> bool:
        """True if each rank already holds all cells that it needs, either its own or ghost cells, so that nothing is
        exchanged."""
        if not self.ghosts:
            return False
        pairs = zip(self.needs, self.provided_cell_intervals, strict=True)
        return all(a <= start and stop <= b for (start, stop), (a, b) in pairs if stop > start)

    @property
    def field_ends(self) -> tuple[FieldEnd, FieldEnd]:
        """The lower and upper end of the field. Ghost cells that ranks hold beyond the domain count as part of the
        field."""
        return _find_field_bounds_with_ghosts(self.cuts, self.ghosts)

    @property
    def needed_extent(self) -> CellInterval:
        """The smallest interval [start, stop) that contains all cells needed by any rank."""
        some = [need for need in self.needs if need[1] > need[0]]
        return min((start for start, _ in some), default=0), max((stop for _, stop in some), default=0)

    @property
    def provided_cell_intervals(self) -> tuple[CellInterval, ...]:
        """The interval [start, stop) of cells that each rank provides to the exchange.

        It covers the rank's own cells and the ghost cells that the rank needs itself. Ranks at the ends of the field
        also provide ghost cells that other ranks need."""
        own = zip(self.cuts, self.cuts[1:], strict=False)
        if not self.ghosts:
            return tuple(own)
        rows = zip(self.needs, own, self.ghosts, strict=True)
        found = [
            (a - min(low, max(a - start, 0)), b + min(high, max(stop - b, 0)))
            for (start, stop), (a, b), (low, high) in rows
        ]
        (low, first), (high, last), (start, stop), n = *self.field_ends, self.needed_extent, self.cuts[-1]
        if start < 0 > low:
            found[first] = min(found[first][0], max(start, low)), found[first][1]
        if stop > n < high:
            found[last] = found[last][0], max(found[last][1], min(stop, high))
        return tuple(found)

    def get_read_slice(self, rank: int) -> slice:
        """Return the slice of a rank's array (with its ghost cells) that a layer or the halo exchange reads."""
        first = self.cuts[rank] - self.ghosts[rank][0]
        start, stop = (self.needs if self.is_covered_by_ghosts else self.provided_cell_intervals)[rank]
        return slice(start - first, stop - first)

    def count_needed_cells(self, rank: int) -> int:
        """Return the number of cells that a rank needs along this dim, including its own cells."""
        start, stop = self.needs[rank]
        return max(stop - start, 0)

    def list_halo_transfers(self) -> tuple[HaloPiece, ...]:
        """Return all transfers of halo cells between ranks along this dim, in the same order on every rank."""
        return _list_halo_transfers(self)


@lru_cache(1 << 10)
def _find_field_bounds_with_ghosts(cuts: Cuts, ghosts: tuple[GhostWidths, ...]) -> tuple[FieldEnd, FieldEnd]:
    if not ghosts:
        return FieldEnd(0, 0), FieldEnd(cuts[-1], len(cuts) - 2)
    rows = list(zip(cuts, cuts[1:], ghosts, strict=False))
    low = min(FieldEnd(a - before, rank) for rank, (a, _, (before, _)) in enumerate(rows))
    high = max(FieldEnd(b + after, rank) for rank, (_, b, (_, after)) in enumerate(rows))
    return low._replace(cell=min(low.cell, 0)), high._replace(cell=max(high.cell, cuts[-1]))


@lru_cache(1 << 10)
def _list_halo_transfers(halo: HaloSpec) -> tuple[HaloPiece, ...]:
    return tuple(piece for rank in range(len(halo.needs)) for piece in _iterate_pieces_of_rank(rank, halo))


def _iterate_pieces_of_rank(rank: int, halo: HaloSpec) -> Iterator[HaloPiece]:
    cuts, held, n = halo.cuts, halo.provided_cell_intervals, halo.cuts[-1]
    wanted = np.arange(*halo.needs[rank])
    if not wanted.size:
        return
    (low, first), (high, last) = halo.field_ends
    cells = np.where((wanted >= low) & (wanted < high), wanted, _map_padding_to_cells(wanted, n, halo.padding_sides))
    inside = (cells >= low) & (cells < high)
    if halo.ghosts:
        inside &= (wanted < held[rank][0]) | (wanted >= held[rank][1])
    owners = np.searchsorted(np.asarray(cuts), cells, side="right") - 1
    owners[cells < 0], owners[cells >= n] = first, last
    for owner in np.unique(owners[inside]):
        at = np.flatnonzero(inside & (owners == owner))
        yield HaloPiece(
            rank,
            int(owner),
            to_slice_if_consecutive(at),
            to_slice_if_consecutive(cells[at] - held[owner][0]),
            int(at.size),
        )


def _map_padding_to_cells(cells: np.ndarray, n: int, sides: tuple[PaddingSide, PaddingSide]) -> np.ndarray:
    """Replace each index of a cell beyond the ends of a field of n cells with the index of the cell inside the field
    that provides the padding value. If the padding has a fixed value, as in mode "zeros", leave the indices
    unchanged."""
    turned = [np.where(cells < 0, -cells, 2 * (n - 1) - cells)] if "reflect" in sides else []
    maps = {"circular": lambda: cells % n, "replicate": lambda: np.clip(cells, 0, n - 1), "reflect": lambda: turned[0]}
    low, high = (maps[side]() if side in maps else cells for side in sides)
    return np.where(cells < 0, low, np.where(cells >= n, high, cells))


def to_slice_if_consecutive(indices: np.ndarray) -> Any:
    """Return a slice if the indices are consecutive; otherwise, return the index array unchanged."""
    first, last = int(indices[0]), int(indices[-1])
    if last - first == indices.size - 1 and (np.diff(indices) == 1).all():
        return slice(first, last + 1)
    return indices


def expand_padding_modes(
    layer: object, name: str, given: Any, dims: int
) -> tuple[tuple[PaddingSide, PaddingSide], ...]:
    """Return the padding before and after the field for each dim.

    `given` is one padding for all dims, or a sequence with one padding per dim, each of which may be a pair (before,
    after). `name` is the name of this argument. Raises ConfigError if a padding is neither one of `MODES` nor a finite
    number, or if a field is periodic at one end only."""
    each = tuple(given) if isinstance(given, tuple | list) else (given,) * dims
    pairs = tuple(tuple(one) if isinstance(one, tuple | list) else (one, one) for one in each)
    if len(each) != dims or not all(len(pair) == 2 and all(map(_is_padding_side, pair)) for pair in pairs):
        raise ConfigError(
            f"{type(layer).__name__}: {name}={given!r}: choose one of {', '.join(MODES)} or give a number, for all "
            f"dims, or {dims} of them, each of which may be a pair (before, after)"
        )
    for pair in pairs:
        if pair[0] != pair[1] and "circular" in pair:
            raise ConfigError(f"{type(layer).__name__}: {name}: {pair}: set 'circular' at both ends of a dim")
    return tuple((pair[0], pair[1]) for pair in pairs)


def _is_padding_side(side: Any) -> bool:
    if isinstance(side, str):
        return side in MODES
    return isinstance(side, Real) and not isinstance(side, bool | np.bool_) and isfinite(side)


def make_halo_spec_per_dim(
    parts: FieldPartition, windows: Sequence[tuple[int, int, int]], outputs: FieldPartition, modes: Sequence[Any]
) -> tuple[HaloSpec, ...]:
    """Return one halo spec per dim, with the range of input cells that each rank needs to compute its outputs.

    `parts` and `outputs` are the partitions of the input and the output. `windows` holds, for each dim, the stride, the
    first cell under the window of output 0 (negative with padding), and the number of cells that a window spans."""
    made = []
    for dim, (cuts, (stride, first, span), out, mode) in enumerate(
        zip(parts.cuts, windows, outputs.cuts, modes, strict=True)
    ):
        needs = tuple(
            (a * stride + first, (b - 1) * stride + first + span) if b > a else (start, start)
            for a, b, start in zip(out, out[1:], cuts, strict=False)
        )
        made.append(HaloSpec(dim + 2, cuts, needs, mode, parts.get_ghosts_along(dim)))
    return tuple(made)


def require_halo_fits_field(halo: HaloSpec, parts: FieldPartition) -> None:
    """Raise ShapeError if the field is too small for the padding, or if windows reach beyond the ghost cells outside
    the domain.

    Inside the domain, windows may reach any distance because the owners send the cells. `parts` provides the name of
    the dim for the error message."""
    n, name, (low, high) = halo.cuts[-1], parts.get_dim_name(halo.dim - 2), halo.field_ends
    start, stop = halo.needed_extent
    for side, lacks, ghosts in zip(halo.padding_sides, (-start, stop - n), (-low.cell, high.cell - n), strict=True):
        if lacks > ghosts > 0:
            raise ShapeError(
                f"windows reach {lacks} cells beyond the field along {name}, and arrays have ghosts={ghosts} there: "
                "give the grid more ghost cells, or none"
            )
        most = {"circular": n, "reflect": n - 1}.get(side) if isinstance(side, str) else None
        if most is not None and not ghosts and lacks > most:
            raise ShapeError(
                f"padding {lacks} of mode {side!r} along {name} needs fields of at least "
                f"{lacks + (side == 'reflect')} cells, got {n}"
            )


def compute_output_bounds_of_ranks(cuts: Cuts, bounds: Sequence[int], total: int) -> Cuts:
    """Return the bounds between the ranks' output intervals along one dim, which has `total` outputs.

    `cuts` holds the bounds of the ranks' input cells. For each of these bounds, `bounds` holds the first output of the
    part that begins there. Outputs beyond the last cell belong to the last part that has cells."""
    last = max((r for r in range(len(cuts) - 1) if cuts[r + 1] > cuts[r]), default=0)
    return tuple(total if r > last else min(bound, total) for r, bound in enumerate(bounds))


class DimEnds(NamedTuple):
    """Describes how a layer continues the field beyond the ends of a dim.

    Attributes
    ----------
    dim : index of the cell dim
    periodic : whether the layer continues the field periodically
    text : description of what the layer does, for warnings
    advice : a pair with the recommended setting for a non-periodic dim and for a periodic dim
    """

    dim: int
    periodic: bool
    text: str
    advice: tuple[str, str]

    @classmethod
    def of_padding(cls, dim: int, mode: tuple[PaddingSide, PaddingSide], circular: str = "'circular'") -> DimEnds:
        """Return the `DimEnds` for dim `dim` with the padding `mode`. `circular` is the setting to recommend if the dim
        is periodic."""
        chosen = mode[0] if mode[0] == mode[1] else mode
        text = f"pads it with {chosen!r}"
        return cls(dim, "circular" in mode, text, ("'zeros', 'reflect' or 'replicate'", circular))


class FieldLayer(Layer):
    """Base class for layers that need to know how their input field is partitioned over ranks."""

    parts: FieldPartition | None = None
    """Partition of the input. If None, this rank holds the full field."""
    rows_of_mesh: ClassVar[tuple[str, ...]] = ()
    """What the rows of an input may stand for on a mesh, such as "nodes" or "edges" (see `ext.meshes.MeshPartition`).
    If empty, the layer does not run on meshes."""
    dims: ClassVar[int]
    """Number of cell dims, in classes that accept only fields with this many dims, such as
    `class Conv2d(Conv, dims=2)`."""

    def __init_subclass__(cls, dims: int | None = None) -> None:
        super().__init_subclass__()
        if dims is not None:
            cls.dims = dims

    def partition_outputs(self, parts: FieldPartition) -> Kind:
        """Return the partition of the output, given the partition `parts` of the input. By default, the output is
        partitioned like the input."""
        return parts

    def get_partition(self, x: Array) -> FieldPartition:
        """Return the partition of the input `x` over ranks. If `x` is not partitioned, the result has a single part."""
        return self.parts or FieldPartition.on_one_rank(x.shape[2:])

    def list_dim_ends(self, dims: int) -> list[DimEnds]:
        """Return one `DimEnds` for each dim along which the layer reads beyond the ends of a field with `dims` cell
        dims."""
        return []

    def shard_over_ranks(self, request: ShardingContext) -> ShardedLayer:
        kind = request.get_common_input_sharding(self)
        if not isinstance(kind, FieldPartition):
            return super().shard_over_ranks(request)
        return self.bind_to_partition(request, kind)

    def bind_to_partition(self, request: ShardingContext, kind: FieldPartition) -> ShardedLayer:
        """Return the layer that each rank runs if the first input is distributed as `kind`."""
        request.require_no_tensor_plan_mark(self)
        if not kind.can_run_bound(self):
            raise ConfigError(f"{request.path!r} {self!r} reads {kind}, and needs the cells of a field")
        return ShardedLayer(bind_partition(self, kind), self.partition_outputs(kind))


def get_rank_along(env: LayerContext, cuts: Cuts, d: int) -> int:
    """Return this rank's coordinate in the grid along cell dim `d`. It is 0 if the dim is not partitioned."""
    return 0 if len(cuts) == 2 else env.mesh.domain[d].rank


def get_local_range(env: LayerContext, cuts: Cuts, d: int) -> tuple[int, int]:
    """Return the range [start, stop) of cells that this rank owns along cell dim `d`."""
    rank = get_rank_along(env, cuts, d)
    return cuts[rank], cuts[rank + 1]


def require_field_shape(layer: object, x: Array, dims: int, channels: int | None = None) -> None:
    """Raise ShapeError unless `x` is (samples, channels, *cells) with `dims` cell dims and, if `channels` is given,
    this number of channels."""
    if x.ndim != dims + 2 or channels not in (None, x.shape[1]):
        wanted = "channels" if channels is None else channels
        cells = ", ".join(("depth", "height", "width")[3 - dims :])
        raise ShapeError(f"{layer!r} wants an input of shape (samples, {wanted}, {cells}), got {tuple(x.shape)}")
