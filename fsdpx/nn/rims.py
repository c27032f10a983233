"""What a rank needs of a field beside its own cells, as slabs: neither its part nor its gradient is ever copied.

The slabs of a dim span what is needed along the dims before it, and own cells along those behind it, so that corners
ride along. Messages are those of `widen` and `fold`; the first of them fly while the layer works on own cells."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from fsdpx.nn.layer import Array, Env
from fsdpx.nn.parts import HALO, HALO_GRADIENT, Reach, add_to, at_dim, buffer, line_of, on_device, run_of

__all__ = ["Box", "Rims", "fold_rims"]


class Box(NamedTuple):
    """Cells, and where they begin among those that are needed, for each dim."""

    at: tuple[int, ...]
    cells: Array


class Around(NamedTuple):
    """One dim of what a rank needs: where own cells begin in it, its size, (start, stop) of slabs, and what lies in
    these: own cells (slab, into, cells), and others' (owner, length, (slab, into, which)). sends: (rank, cells,
    length)."""

    dim: int
    at: int
    size: int
    slabs: tuple[tuple[int, int], ...]
    own: tuple[tuple[int, Any, Any], ...]
    arriving: tuple[tuple[int, int, tuple[tuple[int, Any, Any], ...]], ...]
    leaving: tuple[tuple[int, Any, int], ...]


@lru_cache(1 << 10)
def _around(reach: Reach, me: int) -> Around:
    (start, stop), (first, last), n = reach.needs[me], reach.cuts[me : me + 2], reach.cuts[-1]
    size = max(stop - start, 0)
    low, high = (min(max(-start, 0), size), min(max(n - start, 0), size)) if reach.mode == "zeros" else (0, size)
    begin, end = (min(max(cell - start, low), high) for cell in (first, last))
    slabs = tuple((a, b) for a, b in ((low, begin), (end, high)) if b > a)
    own, arriving, leaving = [], [], []
    for piece in reach.pieces():
        if piece.needs == me:
            into, cells = _indices(piece.into, piece.length), _indices(piece.cells, piece.length)
            parts = []
            for number, (a, b) in enumerate(slabs):
                some = np.flatnonzero((into >= a) & (into < b))
                if some.size:
                    from_them = cells[some] if piece.owner == me else some
                    parts.append((number, run_of(into[some] - a), run_of(from_them)))
            if piece.owner == me:
                own += parts
            else:
                arriving.append((piece.owner, piece.length, tuple(parts)))
        elif piece.owner == me:
            leaving.append((piece.needs, piece.cells, piece.length))
    return Around(reach.dim, first - start, size, slabs, tuple(own), tuple(arriving), tuple(leaving))


def _indices(cells: Any, length: int) -> np.ndarray:
    return np.arange(cells.start, cells.stop) if isinstance(cells, slice) else cells


Line = tuple[Any, Around]
"""The ranks along a dim that is cut, or None, and what this one needs along it."""


def _lines(env: Env, moves: Sequence[Reach]) -> list[Line]:
    lines = [(line_of(env, reach), reach) for reach in moves if not reach.still]
    return [(line, _around(reach, 0 if line is None else line.rank)) for line, reach in lines]


def _met(
    xp: Any, boxes: Sequence[Box], done: Sequence[Line], around: Around, cells: Any, into: Any
) -> Iterator[Any]:
    """Which cells of a message along a dim lie in which box: (box, place in the message, place in the box)."""
    for number, box in enumerate(boxes):
        there, here = [slice(None)] * box.cells.ndim, [slice(None)] * box.cells.ndim
        there[around.dim], here[around.dim] = on_device(xp, into), on_device(xp, cells)
        for _, before in done:
            at = box.at[before.dim - 2]
            a, b = max(at, 0), min(at + box.cells.shape[before.dim], before.size)
            there[before.dim], here[before.dim] = slice(a, max(b, a)), slice(a - at, max(b, a) - at)
        yield number, tuple(there), tuple(here)


class Rims:
    """The exchange of what a rank lacks of a field, whose first messages are on their way when this is made.

    boxes: own cells, and the slabs that are here."""

    def __init__(self, env: Env, x: Array, moves: Sequence[Reach]) -> None:
        self._env, self._what, self._lines = env, env.random.path, _lines(env, moves)
        at = [0] * (x.ndim - 2)
        for _, around in self._lines:
            at[around.dim - 2] = around.at
        self.boxes = [Box(tuple(at), x)]
        self._sizes, self._done = list(x.shape), 0
        self._begun = self._begin()

    def rest(self) -> list[Box]:
        """The slabs. Waits for the ranks that have them."""
        while self._begun is not None:
            self._finish(*self._begun)
            self._begun = self._begin()
        return self.boxes[1:]

    def _begin(self) -> Any:
        """Send what others lack along the next dim, and make the slabs of it; None: there is none."""
        if self._done == len(self._lines):
            return None
        line, around = self._lines[self._done]
        slabs = [self._buffer(around.dim, b - a) for a, b in around.slabs]
        arriving, leaving = [], []
        for owner, length, parts in around.arriving:
            flat, cells = self._buffer(around.dim, length)
            arriving.append((line.recv(flat, owner, HALO, what=self._what), cells, parts))
        for rank, cells, length in around.leaving:
            flat, message = self._buffer(around.dim, length)
            self._take(message, around, cells, slice(None))
            leaving.append(line.send(flat, rank, HALO, what=self._what))
        for number, into, cells in around.own:
            self._take(slabs[number][1], around, cells, into)
        return around, [cells for _, cells in slabs], arriving, leaving

    def _finish(self, around: Around, slabs: list[Array], arriving: list[Any], leaving: list[Any]) -> None:
        xp = self._env.xp
        for handle, cells, parts in arriving:
            handle.wait()
            for number, into, which in parts:
                slabs[number][at_dim(xp, around.dim, into)] = cells[at_dim(xp, around.dim, which)]
        for handle in leaving:
            handle.wait()
        for (start, _), cells in zip(around.slabs, slabs, strict=True):
            at = list(self.boxes[0].at)
            for _, before in self._lines[: self._done]:
                at[before.dim - 2] = 0
            at[around.dim - 2] = start
            self.boxes.append(Box(tuple(at), cells))
        self._sizes[around.dim] = around.size
        self._done += 1

    def _buffer(self, dim: int, size: int) -> tuple[Array, Array]:
        sizes = (*self._sizes[:dim], size, *self._sizes[dim + 1 :])
        flat, cells = buffer(self._env.xp, sizes, self.boxes[0].cells.dtype)
        if self._done:
            flat[...] = 0  # beyond the ends of the dims before, nothing comes
        return flat, cells

    def _take(self, message: Array, around: Around, cells: Any, into: Any) -> None:
        """Copy cells of all boxes that are here to where they come."""
        for number, there, here in _met(self._env.xp, self.boxes, self._lines[: self._done], around, cells, into):
            message[there] = self.boxes[number].cells[here]


def fold_rims(env: Env, moves: Sequence[Reach], boxes: list[Box], own: Callable[[], Array]) -> Array:
    """The gradient of this rank's part. boxes: the gradients of all slabs, behind the box of own cells, whose gradient
    `own` computes while messages fly. Slabs go back to the owners of their cells, who add them in the order of
    ranks."""
    lines, found, boxes = _lines(env, moves), None, list(boxes)
    for n in reversed(range(len(lines))):
        (line, around), done, kept = lines[n], lines[:n], len(boxes) - len(lines[n][1].slabs)
        slabs, boxes = [box.cells for box in boxes[kept:]], boxes[:kept]
        arriving, leaving = _gradients_on_their_way(env, line, around, done, boxes[0].cells, slabs)
        if found is None:
            found = own()
            boxes[0] = Box(boxes[0].at, found)
        for number, into, cells in around.own:
            _add(env.xp, boxes, done, around, cells, slabs[number], into)
        for handle, cells, message in arriving:
            handle.wait()
            _add(env.xp, boxes, done, around, cells, message, slice(None))
        for handle in leaving:
            handle.wait()
    return own() if found is None else found


def _gradients_on_their_way(
    env: Env, line: Any, around: Around, done: list[Line], own: Array, slabs: list[Array]
) -> tuple[list[Any], list[Any]]:
    """Messages with the gradients of copies of own cells that arrive, and handles of those that leave."""
    xp, dim, what, arriving, leaving = env.xp, around.dim, env.random.path, [], []
    shape = list(own.shape)
    for _, before in done:
        shape[before.dim] = before.size
    for rank, cells, length in around.leaving:
        flat, message = buffer(xp, (*shape[:dim], length, *shape[dim + 1 :]), own.dtype)
        arriving.append((line.recv(flat, rank, HALO_GRADIENT, what=what), cells, message))
    for owner, length, parts in around.arriving:
        flat, message = buffer(xp, (*shape[:dim], length, *shape[dim + 1 :]), own.dtype)
        for number, into, which in parts:
            message[at_dim(xp, dim, which)] = slabs[number][at_dim(xp, dim, into)]
        leaving.append(line.send(flat, owner, HALO_GRADIENT, what=what))
    return arriving, leaving


def _add(
    xp: Any, boxes: list[Box], done: list[Line], around: Around, cells: Any, message: Array, which: Any
) -> None:
    """Add the gradients of a message to those of the cells that it is made of; `which` of them belong to `cells`."""
    for number, there, here in _met(xp, boxes, done, around, cells, which):
        rest = list(here)
        rest[around.dim] = slice(None)
        add_to(boxes[number].cells[tuple(rest)], around.dim, cells, message[there])
