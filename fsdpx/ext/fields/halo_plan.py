"""Plans for halo exchanges. A plan lists the messages that a rank sends and receives, and the cells that it copies.
Plans are cached.

A slab is the block of halo cells on one side of a rank's part. Halo cells are exchanged one dim at a time. A slab also
extends over the halo along the dims that were exchanged earlier. Corner cells therefore arrive without messages between
diagonal neighbors."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from fsdpx.ext.fields.halo import HaloPiece, HaloSpec, to_slice_if_consecutive

__all__ = [
    "CellCopy",
    "HaloLine",
    "HaloPlan",
    "OwnCells",
    "RecvMessage",
    "SendMessage",
    "find_overlap_slices",
    "make_halo_plan",
    "slice_dim",
]

Index = tuple[Any, ...]
Shape = tuple[int, ...]


class CellCopy(NamedTuple):
    """Describes which cells are copied from a local box into a message or slab. The box is the rank's own part or a
    received slab.

    Attributes
    ----------
    box : index of the box; 0 is the rank's own part
    there : index of the cells in the message or slab
    here : index of the cells in the box
    """

    box: int
    there: Index
    here: Index


class OwnCells(NamedTuple):
    """Local cells that are copied into a slab or message in the forward pass, and to which gradients are added in the
    backward pass.

    `copies` is for the forward pass. `adds` is for the backward pass, and covers the same cells. A cell that is copied
    n times gets n gradients. It occurs in n entries of `adds`, because each entry adds only one gradient per cell."""

    copies: tuple[CellCopy, ...]
    adds: tuple[CellCopy, ...]


class SendMessage(NamedTuple):
    """A message with halo cells that this rank sends. `rank` is the coordinate of the receiver along the exchanged
    dim."""

    rank: int
    shape: Shape
    cells: OwnCells


class RecvMessage(NamedTuple):
    """A message with halo cells that this rank receives. `rank` is the coordinate of the sender along the exchanged
    dim.

    `parts` has one entry for each slab that gets cells from the message. An entry contains the position of the slab in
    the list of slabs, the index of the cells in the slab, and their index in the message."""

    rank: int
    shape: Shape
    parts: tuple[tuple[int, Index, Index], ...]


class HaloLine(NamedTuple):
    """The halo exchange along one dim.

    Attributes
    ----------
    dim : the dim of the array
    whole : shape of the array after this exchange; it holds the rank's own cells and all halo cells received so far
    slabs : (offset, shape) of each slab of halo cells
    own : (position in `slabs`, cells to copy) for each slab that is filled at least partly from local cells, such as
        the cells at the other end of a periodic field
    arriving, leaving : the messages that this rank receives and sends
    """

    dim: int
    whole: Shape
    slabs: tuple[tuple[Shape, Shape], ...]
    own: tuple[tuple[int, OwnCells], ...]
    arriving: tuple[RecvMessage, ...]
    leaving: tuple[SendMessage, ...]


class HaloPlan(NamedTuple):
    """The halo exchange of one rank, dim by dim.

    `offset` is the position of the rank's first own cell in the array of own cells and halo, along each cell dim.
    `lines` are the exchanges along single dims, in order of execution."""

    offset: Shape
    lines: tuple[HaloLine, ...]


class _DimNeeds(NamedTuple):
    """The cells that a rank needs along one dim: its own cells and its halo.

    Attributes
    ----------
    halo : the halo spec, with the range of cells that each rank needs along the dim
    rank : this rank's coordinate along the dim
    offset : position of the rank's first own cell among the needed cells
    size : number of cells needed
    slabs : (start, stop) of each slab of halo cells among the needed cells
    """

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
    """Return the plan of a halo exchange for one rank.

    `shape` is the shape (samples, channels, *cells) of the rank's part, and `coords` are the rank's coordinates in the
    grid."""
    all_needs = [
        _find_needs_along_dim(halo, coords[halo.dim - 2] if len(halo.cuts) > 2 else 0)
        for halo in halos
        if not halo.is_local
    ]
    offset, sizes, lines = [0] * (len(shape) - 2), list(shape), []
    for needs in all_needs:
        offset[needs.halo.dim - 2] = needs.offset
    first = tuple(offset)
    boxes, exchanged = [_Box(first, shape)], list[_DimNeeds]()
    for needs in all_needs:
        line, before = needs.halo.dim, list(sizes)
        slabs = []
        for start, stop in needs.slabs:
            offset[line - 2], sizes[line] = start, stop - start
            slabs.append(_Box(tuple(offset), tuple(sizes)))
        offset[line - 2], sizes[line] = 0, needs.size
        lines.append(_plan_exchange_along_dim(xp, needs, before, slabs, boxes, exchanged))
        boxes, exchanged = boxes + slabs, [*exchanged, needs]
    return HaloPlan(first, tuple(lines))


def _find_needs_along_dim(halo: HaloSpec, rank: int) -> _DimNeeds:
    (start, stop), (first, last), ends = halo.needs[rank], halo.provided_cell_intervals[rank], halo.field_ends
    size = max(stop - start, 0)
    low, high = (
        min(max(end.cell - start, 0), size) if side == "zeros" or not isinstance(side, str) else open_end
        for side, end, open_end in zip(halo.padding_sides, ends, (0, size), strict=True)
    )
    begin, end = (min(max(cell - start, low), high) for cell in (first, last))
    return _DimNeeds(halo, rank, first - start, size, tuple((a, b) for a, b in ((low, begin), (end, high)) if b > a))


def _plan_exchange_along_dim(
    xp: Any,
    needs: _DimNeeds,
    sizes: Sequence[int],
    slabs: Sequence[_Box],
    boxes: Sequence[_Box],
    exchanged: Sequence[_DimNeeds],
) -> HaloLine:
    """Return the plan of the exchange along one dim.

    `boxes` are the blocks of cells that this rank already holds, and `sizes` is the shape of the array that contains
    all of them. `exchanged` holds the rank's needs along the dims that were exchanged earlier."""
    dim, own = needs.halo.dim, list[tuple[int, OwnCells]]()
    arriving, leaving = list[RecvMessage](), list[SendMessage]()

    def with_length(length: int) -> Shape:
        return (*sizes[:dim], length, *sizes[dim + 1 :])

    for piece in needs.halo.list_halo_transfers():
        if piece.receiver == needs.rank:
            parts = list(_iterate_slabs_receiving_piece(needs, piece))
            if piece.sender == needs.rank:
                cells = _as_indices(piece.cells)
                own += [
                    (
                        n,
                        _plan_copies_into_message_or_slab(
                            xp, dim, boxes, exchanged, to_slice_if_consecutive(cells[some]), into
                        ),
                    )
                    for n, into, some in parts
                ]
            else:
                rows = [
                    (n, slice_dim(xp, dim, into), slice_dim(xp, dim, to_slice_if_consecutive(some)))
                    for n, into, some in parts
                ]
                arriving.append(RecvMessage(piece.sender, with_length(piece.length), tuple(rows)))
        elif piece.sender == needs.rank:
            taken = _plan_copies_into_message_or_slab(xp, dim, boxes, exchanged, piece.cells, slice(0, piece.length))
            leaving.append(SendMessage(piece.receiver, with_length(piece.length), taken))
    shapes = tuple((tuple(slab.offset), tuple(slab.shape)) for slab in slabs)
    return HaloLine(dim, with_length(needs.size), shapes, tuple(own), tuple(arriving), tuple(leaving))


def _iterate_slabs_receiving_piece(needs: _DimNeeds, piece: HaloPiece) -> Iterator[tuple[int, Any, np.ndarray]]:
    """For each slab that receives cells of `piece`, yield the position of the slab in the list of slabs, the index of
    these cells in the slab, and their indices in the piece."""
    into = _as_indices(piece.into)
    for number, (a, b) in enumerate(needs.slabs):
        some = np.flatnonzero((into >= a) & (into < b))
        if some.size:
            yield number, to_slice_if_consecutive(into[some] - a), some


def _as_indices(cells: Any) -> np.ndarray:
    return np.arange(cells.start, cells.stop) if isinstance(cells, slice) else cells


def _plan_copies_into_message_or_slab(
    xp: Any, dim: int, boxes: Sequence[_Box], exchanged: Sequence[_DimNeeds], cells: Any, into: Any
) -> OwnCells:
    """Return the copies that write local cells into a message or slab. Along `dim`, `cells` selects the cells to copy,
    and `into` selects their positions in the message or slab. There is one copy for each local box."""
    pairs = [(cells, into)]
    if not isinstance(cells, slice):
        places = _as_indices(into)
        pairs = [(slice(cell, cell + 1), slice(offset, offset + 1)) for cell, offset in zip(cells, places, strict=True)]
    copies = tuple(_iterate_copies_from_local_boxes(xp, dim, boxes, exchanged, cells, into))
    return OwnCells(
        copies,
        tuple(one for pair in pairs for one in _iterate_copies_from_local_boxes(xp, dim, boxes, exchanged, *pair)),
    )


def _iterate_copies_from_local_boxes(
    xp: Any, dim: int, boxes: Sequence[_Box], exchanged: Sequence[_DimNeeds], cells: Any, into: Any
) -> Iterator[CellCopy]:
    for number, box in enumerate(boxes):
        there, here = [slice(None)] * len(box.shape), [slice(None)] * len(box.shape)
        there[dim], here[dim] = to_device_index(xp, into), to_device_index(xp, cells)
        for needs in exchanged:
            d = needs.halo.dim
            there[d], here[d] = find_overlap_slices(box.offset[d - 2], box.shape[d], needs.size)
        yield CellCopy(number, tuple(there), tuple(here))


def find_overlap_slices(offset: int, count: int, size: int) -> tuple[slice, slice]:
    """Intersect the cells [offset, offset + count) with [0, size). Return the overlap as two slices: one relative to
    cell 0, and one relative to cell `offset`."""
    a = max(offset, 0)
    b = max(min(offset + count, size), a)
    return slice(a, b), slice(a - offset, b - offset)


def slice_dim(xp: Any, dim: int, cells: Any) -> Index:
    return (*(slice(None),) * dim, to_device_index(xp, cells))


def to_device_index(xp: Any, cells: Any) -> Any:
    """Return `cells` as an array of the module `xp` if it is an index array. Return a slice unchanged."""
    plain = isinstance(cells, slice) or xp is np or getattr(xp, "holds_no_data", False)
    return cells if plain else xp.asarray(cells)
