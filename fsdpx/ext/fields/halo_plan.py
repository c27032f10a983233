"""The plan of a halo exchange, made once for each shape of a rank's part: its slabs, messages, and copies.

A slab along a dim covers the full needed range along the dims exchanged before, and own cells along the later ones, so
that corners arrive with the slabs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from fsdpx.ext.fields.halo import HaloPiece, HaloSpec, as_slice

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
    """Cells of a local box. box: its number. there: their index in a message or a slab. here: their index in the
    box."""

    box: int
    there: Index
    here: Index


class OwnCells(NamedTuple):
    """The cells that a slab or a message copies from local boxes.

    copies: all of them. adds: the same cells for adding their gradients back; a cell that is copied several times
    occurs in as many entries, so that it gets the sum of all."""

    copies: tuple[CellCopy, ...]
    adds: tuple[CellCopy, ...]


class SendMessage(NamedTuple):
    """A message to a rank along the line."""

    rank: int
    shape: Shape
    cells: OwnCells


class RecvMessage(NamedTuple):
    """A message from a rank along the line. parts: (slab, index in the slab, index in the message)."""

    rank: int
    shape: Shape
    parts: tuple[tuple[int, Index, Index], ...]


class HaloLine(NamedTuple):
    """The exchange along one dim.

    dim: of the array. whole: shape of all needed cells, up to this dim. slabs: (at, shape) of each. own: (slab, cells)
    that slabs copy from local boxes, such as the other end of a periodic field."""

    dim: int
    whole: Shape
    slabs: tuple[tuple[Shape, Shape], ...]
    own: tuple[tuple[int, OwnCells], ...]
    arriving: tuple[RecvMessage, ...]
    leaving: tuple[SendMessage, ...]


class HaloPlan(NamedTuple):
    """A rank's halo exchange. at: index of its own cells in the needed ones, along each dim of cells. lines: one dim
    after the other."""

    at: Shape
    lines: tuple[HaloLine, ...]


class _LineNeeds(NamedTuple):
    """The needs of a rank along one dim: its coordinate, the index of its own cells in the needed ones, the number of
    these, and (start, stop) of slabs."""

    reach: HaloSpec
    me: int
    at: int
    size: int
    slabs: tuple[tuple[int, int], ...]


class _Box(NamedTuple):
    at: Sequence[int]
    shape: Sequence[int]


@lru_cache(1 << 10)
def make_halo_plan(xp: Any, moves: tuple[HaloSpec, ...], shape: Shape, place: tuple[int, ...]) -> HaloPlan:
    """Return the exchange around a part of `shape`, (samples, channels, *cells), for the rank at coordinates
    `place`."""
    alongs = [
        _find_line_needs(reach, place[reach.dim - 2] if len(reach.cuts) > 2 else 0)
        for reach in moves
        if not reach.is_local
    ]
    at, sizes, lines = [0] * (len(shape) - 2), list(shape), []
    for along in alongs:
        at[along.reach.dim - 2] = along.at
    first = tuple(at)
    boxes, done = [_Box(first, shape)], list[_LineNeeds]()
    for along in alongs:
        line, before = along.reach.dim, list(sizes)
        slabs = []
        for start, stop in along.slabs:
            at[line - 2], sizes[line] = start, stop - start
            slabs.append(_Box(tuple(at), tuple(sizes)))
        at[line - 2], sizes[line] = 0, along.size
        lines.append(_plan_line(xp, along, before, slabs, boxes, done))
        boxes, done = boxes + slabs, [*done, along]
    return HaloPlan(first, tuple(lines))


def _find_line_needs(reach: HaloSpec, me: int) -> _LineNeeds:
    (start, stop), (first, last), ends = reach.needs[me], reach.available_intervals[me], reach.field_ends
    size = max(stop - start, 0)
    low, high = [min(max(end.cell - start, 0), size) for end in ends] if reach.mode == "zeros" else (0, size)
    begin, end = (min(max(cell - start, low), high) for cell in (first, last))
    return _LineNeeds(reach, me, first - start, size, tuple((a, b) for a, b in ((low, begin), (end, high)) if b > a))


def _plan_line(
    xp: Any,
    along: _LineNeeds,
    before: Sequence[int],
    slabs: Sequence[_Box],
    boxes: Sequence[_Box],
    done: Sequence[_LineNeeds],
) -> HaloLine:
    """Return the exchange along one dim. boxes: the boxes that are local before it. done: the dims already
    exchanged."""
    dim, own, arriving, leaving = (
        along.reach.dim,
        list[tuple[int, OwnCells]](),
        list[RecvMessage](),
        list[SendMessage](),
    )

    def with_length(length: int) -> Shape:
        return (*before[:dim], length, *before[dim + 1 :])

    for piece in along.reach.list_pieces():
        if piece.needs == along.me:
            parts = list(_iterate_overlaps(along, piece))
            if piece.owner == along.me:
                cells = _as_indices(piece.cells, piece.length)
                own += [
                    (n, _plan_own_cells(xp, dim, boxes, done, as_slice(cells[some]), into)) for n, into, some in parts
                ]
            else:
                rows = [(n, slice_dim(xp, dim, into), slice_dim(xp, dim, as_slice(some))) for n, into, some in parts]
                arriving.append(RecvMessage(piece.owner, with_length(piece.length), tuple(rows)))
        elif piece.owner == along.me:
            taken = _plan_own_cells(xp, dim, boxes, done, piece.cells, slice(0, piece.length))
            leaving.append(SendMessage(piece.needs, with_length(piece.length), taken))
    shapes = tuple((tuple(slab.at), tuple(slab.shape)) for slab in slabs)
    return HaloLine(dim, with_length(along.size), shapes, tuple(own), tuple(arriving), tuple(leaving))


def _iterate_overlaps(along: _LineNeeds, piece: HaloPiece) -> Iterator[tuple[int, Any, np.ndarray]]:
    """Yield (slab, index in the slab, indices in the piece) for the cells of a piece that fall into slabs."""
    into = _as_indices(piece.into, piece.length)
    for number, (a, b) in enumerate(along.slabs):
        some = np.flatnonzero((into >= a) & (into < b))
        if some.size:
            yield number, as_slice(into[some] - a), some


def _as_indices(cells: Any, length: int) -> np.ndarray:
    return np.arange(cells.start, cells.stop) if isinstance(cells, slice) else cells


def _plan_own_cells(
    xp: Any, dim: int, boxes: Sequence[_Box], done: Sequence[_LineNeeds], cells: Any, into: Any
) -> OwnCells:
    """Return the copies of `cells` along a dim of all boxes, to the index `into`."""
    pairs = [(cells, into)]
    if not isinstance(cells, slice):
        places = _as_indices(into, len(cells))
        pairs = [(slice(cell, cell + 1), slice(at, at + 1)) for cell, at in zip(cells, places, strict=True)]
    copies = tuple(_iterate_copies(xp, dim, boxes, done, cells, into))
    return OwnCells(copies, tuple(one for some, at in pairs for one in _iterate_copies(xp, dim, boxes, done, some, at)))


def _iterate_copies(
    xp: Any, dim: int, boxes: Sequence[_Box], done: Sequence[_LineNeeds], cells: Any, into: Any
) -> Iterator[CellCopy]:
    for number, box in enumerate(boxes):
        there, here = [slice(None)] * len(box.shape), [slice(None)] * len(box.shape)
        there[dim], here[dim] = to_device_index(xp, into), to_device_index(xp, cells)
        for along in done:
            d = along.reach.dim
            there[d], here[d] = find_overlap(box.at[d - 2], box.shape[d], along.size)
        yield CellCopy(number, tuple(there), tuple(here))


def find_overlap(at: int, count: int, size: int) -> tuple[slice, slice]:
    """Intersect `count` cells from `at` on with [0, size): return their slice there, and their slice among the `count`
    cells."""
    a = max(at, 0)
    b = max(min(at + count, size), a)
    return slice(a, b), slice(a - at, b - at)


def slice_dim(xp: Any, dim: int, cells: Any) -> Index:
    return (*(slice(None),) * dim, to_device_index(xp, cells))


def to_device_index(xp: Any, cells: Any) -> Any:
    """Return a slice unchanged, and an index array on the device of the arrays."""
    plain = isinstance(cells, slice) or xp is np or getattr(xp, "holds_no_data", False)
    return cells if plain else xp.asarray(cells)
