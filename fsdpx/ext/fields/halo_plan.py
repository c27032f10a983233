"""The plan of a halo exchange, which consists of slabs, messages and copies. It is made once for each shape of a rank's
part.

Dims are exchanged one after another. A slab along a dim covers all needed cells along the dims before it, and only the
rank's own cells along the dims after it, so that corner cells are received with the slabs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from fsdpx.ext.fields.halo import HaloPiece, HaloSpec, simplify_index

__all__ = [
    "CellCopy",
    "HaloLine",
    "HaloPlan",
    "OwnCells",
    "RecvMessage",
    "SendMessage",
    "find_overlap",
    "make_halo_plan",
    "slice_dim",
]

Index = tuple[Any, ...]
Shape = tuple[int, ...]


class CellCopy(NamedTuple):
    """A copy of cells between a local box and a message or slab. box: number of the box. there: index of the cells in
    the message or slab. here: index of the cells in the box."""

    box: int
    there: Index
    here: Index


class OwnCells(NamedTuple):
    """The cells that a slab or a message copies from local boxes.

    copies: the copies to make. adds: the same cells, for adding their gradients back. A cell that is copied n times
    occurs in n entries of `adds`, so that its gradients are summed."""

    copies: tuple[CellCopy, ...]
    adds: tuple[CellCopy, ...]


class SendMessage(NamedTuple):
    """A message to a rank along the line."""

    rank: int
    shape: Shape
    cells: OwnCells


class RecvMessage(NamedTuple):
    """A message from a rank along the line. parts: for each slab, (number of the slab, index in the slab, index in the
    message)."""

    rank: int
    shape: Shape
    parts: tuple[tuple[int, Index, Index], ...]


class HaloLine(NamedTuple):
    """The exchange along one dim.

    dim: dim of the array. whole: shape of the needed cells after this exchange. slabs: (offset, shape) of each slab.
    own: (number of the slab, cells) that slabs copy from local boxes, such as the other end of a periodic field."""

    dim: int
    whole: Shape
    slabs: tuple[tuple[Shape, Shape], ...]
    own: tuple[tuple[int, OwnCells], ...]
    arriving: tuple[RecvMessage, ...]
    leaving: tuple[SendMessage, ...]


class HaloPlan(NamedTuple):
    """A rank's halo exchange. offset: index of the rank's first own cell among the needed cells, along each cell dim.
    lines: the exchange along each dim, in order."""

    offset: Shape
    lines: tuple[HaloLine, ...]


class _LineNeeds(NamedTuple):
    """The cells that a rank needs along one dim. rank: the rank's coordinate. offset: index of the rank's first own
    cell among the needed cells. size: number of needed cells. slabs: (start, stop) of each slab among the needed
    cells."""

    halo: HaloSpec
    rank: int
    offset: int
    size: int
    slabs: tuple[tuple[int, int], ...]


class _Box(NamedTuple):
    offset: Sequence[int]
    shape: Sequence[int]


@lru_cache(1 << 10)
def make_halo_plan(xp: Any, halos: tuple[HaloSpec, ...], shape: Shape, coords: tuple[int, ...]) -> HaloPlan:
    """Return the plan of the halo exchange for the rank at coordinates `coords`, whose part is (samples, channels,
    *cells) of `shape`."""
    all_needs = [
        _find_line_needs(halo, coords[halo.dim - 2] if len(halo.cuts) > 2 else 0) for halo in halos if not halo.is_local
    ]
    offset, sizes, lines = [0] * (len(shape) - 2), list(shape), []
    for needs in all_needs:
        offset[needs.halo.dim - 2] = needs.offset
    first = tuple(offset)
    boxes, exchanged = [_Box(first, shape)], list[_LineNeeds]()
    for needs in all_needs:
        line, before = needs.halo.dim, list(sizes)
        slabs = []
        for start, stop in needs.slabs:
            offset[line - 2], sizes[line] = start, stop - start
            slabs.append(_Box(tuple(offset), tuple(sizes)))
        offset[line - 2], sizes[line] = 0, needs.size
        lines.append(_plan_line_exchange(xp, needs, before, slabs, boxes, exchanged))
        boxes, exchanged = boxes + slabs, [*exchanged, needs]
    return HaloPlan(first, tuple(lines))


def _find_line_needs(halo: HaloSpec, rank: int) -> _LineNeeds:
    (start, stop), (first, last), ends = halo.needs[rank], halo.available_intervals[rank], halo.field_ends
    size = max(stop - start, 0)
    low, high = [min(max(end.cell - start, 0), size) for end in ends] if halo.mode == "zeros" else (0, size)
    begin, end = (min(max(cell - start, low), high) for cell in (first, last))
    return _LineNeeds(halo, rank, first - start, size, tuple((a, b) for a, b in ((low, begin), (end, high)) if b > a))


def _plan_line_exchange(
    xp: Any,
    needs: _LineNeeds,
    sizes: Sequence[int],
    slabs: Sequence[_Box],
    boxes: Sequence[_Box],
    exchanged: Sequence[_LineNeeds],
) -> HaloLine:
    """Return the exchange along one dim. sizes: shape of the boxes before this exchange. boxes: the boxes that this
    rank holds before this exchange. exchanged: the needs along the dims already exchanged."""
    dim, own = needs.halo.dim, list[tuple[int, OwnCells]]()
    arriving, leaving = list[RecvMessage](), list[SendMessage]()

    def with_length(length: int) -> Shape:
        return (*sizes[:dim], length, *sizes[dim + 1 :])

    for piece in needs.halo.list_pieces():
        if piece.needs == needs.rank:
            parts = list(_iterate_slab_overlaps(needs, piece))
            if piece.owner == needs.rank:
                cells = _as_indices(piece.cells)
                own += [
                    (n, _plan_local_copies(xp, dim, boxes, exchanged, simplify_index(cells[some]), into))
                    for n, into, some in parts
                ]
            else:
                rows = [
                    (n, slice_dim(xp, dim, into), slice_dim(xp, dim, simplify_index(some))) for n, into, some in parts
                ]
                arriving.append(RecvMessage(piece.owner, with_length(piece.length), tuple(rows)))
        elif piece.owner == needs.rank:
            taken = _plan_local_copies(xp, dim, boxes, exchanged, piece.cells, slice(0, piece.length))
            leaving.append(SendMessage(piece.needs, with_length(piece.length), taken))
    shapes = tuple((tuple(slab.offset), tuple(slab.shape)) for slab in slabs)
    return HaloLine(dim, with_length(needs.size), shapes, tuple(own), tuple(arriving), tuple(leaving))


def _iterate_slab_overlaps(needs: _LineNeeds, piece: HaloPiece) -> Iterator[tuple[int, Any, np.ndarray]]:
    """Yield (slab, index in the slab, indices in the piece) for the cells of a piece that fall into slabs."""
    into = _as_indices(piece.into)
    for number, (a, b) in enumerate(needs.slabs):
        some = np.flatnonzero((into >= a) & (into < b))
        if some.size:
            yield number, simplify_index(into[some] - a), some


def _as_indices(cells: Any) -> np.ndarray:
    return np.arange(cells.start, cells.stop) if isinstance(cells, slice) else cells


def _plan_local_copies(
    xp: Any, dim: int, boxes: Sequence[_Box], exchanged: Sequence[_LineNeeds], cells: Any, into: Any
) -> OwnCells:
    """Return the copies of the cells with index `cells` along `dim`, in all boxes, to index `into`."""
    pairs = [(cells, into)]
    if not isinstance(cells, slice):
        places = _as_indices(into)
        pairs = [(slice(cell, cell + 1), slice(offset, offset + 1)) for cell, offset in zip(cells, places, strict=True)]
    copies = tuple(_iterate_copies(xp, dim, boxes, exchanged, cells, into))
    return OwnCells(copies, tuple(one for pair in pairs for one in _iterate_copies(xp, dim, boxes, exchanged, *pair)))


def _iterate_copies(
    xp: Any, dim: int, boxes: Sequence[_Box], exchanged: Sequence[_LineNeeds], cells: Any, into: Any
) -> Iterator[CellCopy]:
    for number, box in enumerate(boxes):
        there, here = [slice(None)] * len(box.shape), [slice(None)] * len(box.shape)
        there[dim], here[dim] = to_device_index(xp, into), to_device_index(xp, cells)
        for needs in exchanged:
            d = needs.halo.dim
            there[d], here[d] = find_overlap(box.offset[d - 2], box.shape[d], needs.size)
        yield CellCopy(number, tuple(there), tuple(here))


def find_overlap(offset: int, count: int, size: int) -> tuple[slice, slice]:
    """Intersect [offset, offset + count) with [0, size); return the intersection as a slice of [0, size), and as a
    slice of the `count` cells."""
    a = max(offset, 0)
    b = max(min(offset + count, size), a)
    return slice(a, b), slice(a - offset, b - offset)


def slice_dim(xp: Any, dim: int, cells: Any) -> Index:
    return (*(slice(None),) * dim, to_device_index(xp, cells))


def to_device_index(xp: Any, cells: Any) -> Any:
    """Return a slice unchanged, and an index array as an array of `xp`."""
    plain = isinstance(cells, slice) or xp is np or getattr(xp, "holds_no_data", False)
    return cells if plain else xp.asarray(cells)
