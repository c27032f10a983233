"""What a rank needs of a field beside its own cells: as slabs, so that neither its part nor its gradient is copied, or
with them as one array.

The slabs of a dim span what is needed along the dims before it, and own cells along those behind it, so that corners
ride along. Their messages fly while a layer works on own cells."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from fsdpx.ext.fields.halo import Reach, line_of, rank_along, run_of
from fsdpx.nn.layer import Array, Env, Layer, Params
from fsdpx.nn.sharding import Parts

__all__ = ["Box", "Rims", "Shift", "at_dim", "fold", "fold_rims", "widen"]

HALO, HALO_GRADIENT = 2, 3
"""Tags of messages that carry cells to ranks that need them, and the gradients of these back."""


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
    (start, stop), (first, last), ends = reach.needs[me], reach.held[me], reach.ends
    size = max(stop - start, 0)
    low, high = [min(max(end.cell - start, 0), size) for end in ends] if reach.mode == "zeros" else (0, size)
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


class Line(NamedTuple):
    """A dim along which this rank needs more than it has: the ranks along it, None where this one has all; what it
    needs; the shape of all that is here before, and (at, shape) of each slab."""

    ranks: Any
    around: Around
    before: tuple[int, ...]
    slabs: tuple[tuple[tuple[int, ...], tuple[int, ...]], ...]

    def message(self, length: int) -> tuple[int, ...]:
        """The shape of so many cells along the dim."""
        return (*self.before[: self.around.dim], length, *self.before[self.around.dim + 1 :])


def _lines(env: Env, moves: Sequence[Reach], shape: Sequence[int]) -> tuple[tuple[int, ...], list[Line]]:
    """Where own cells, of `shape`, begin among those that are needed, and the dims to go along."""
    ranks = [(line_of(env, reach), reach) for reach in moves if not reach.still]
    known = [(line, _around(reach, 0 if line is None else line.rank)) for line, reach in ranks]
    at, sizes, lines = [0] * (len(shape) - 2), list(shape), []
    for _, around in known:
        at[around.dim - 2] = around.at
    first = tuple(at)
    for line, around in known:
        d, before, slabs = around.dim, tuple(sizes), []
        for start, stop in around.slabs:
            at[d - 2], sizes[d] = start, stop - start
            slabs.append((tuple(at), tuple(sizes)))
        at[d - 2], sizes[d] = 0, around.size
        lines.append(Line(line, around, before, tuple(slabs)))
    return first, lines


def _clipped(at: int, count: int, size: int) -> tuple[slice, slice]:
    """Of `count` cells from `at` on those that lie among `size`: where there, and which of them."""
    a = max(at, 0)
    b = max(min(at + count, size), a)
    return slice(a, b), slice(a - at, b - at)


def _inside(at: Sequence[int], shape: Sequence[int], sizes: Sequence[int]) -> tuple[tuple[slice, ...], ...]:
    """The same for all dims of cells of a box."""
    rows = [_clipped(*row) for row in zip(at, shape[2:], sizes[2:], strict=True)]
    return tuple((slice(None), slice(None), *one) for one in zip(*rows, strict=True))


def _met(
    xp: Any, boxes: Sequence[Box], done: Sequence[Line], around: Around, cells: Any, into: Any
) -> Iterator[Any]:
    """Which cells of a message along a dim lie in which box: (box, place in the message, place in the box)."""
    for number, box in enumerate(boxes):
        there, here = [slice(None)] * box.cells.ndim, [slice(None)] * box.cells.ndim
        there[around.dim], here[around.dim] = on_device(xp, into), on_device(xp, cells)
        for line in done:
            d, size = line.around.dim, line.around.size
            there[d], here[d] = _clipped(box.at[d - 2], box.cells.shape[d], size)
        yield number, tuple(there), tuple(here)


class Rims:
    """The exchange of what a rank lacks of a field, whose first messages are on their way when this is made.

    boxes: own cells, and the slabs that are here. beyond: what lies beyond the ends in mode "zeros"."""

    def __init__(self, env: Env, x: Array, moves: Sequence[Reach], beyond: float = 0.0) -> None:
        self._env, self._beyond, self._done = env, beyond, 0
        at, self._lines = _lines(env, moves, x.shape)
        self.boxes = [Box(at, x)]
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
        line, what = self._lines[self._done], self._env.random.path
        slabs = [Box(at, self._buffer(shape)[1]) for at, shape in line.slabs]
        arriving, leaving = [], []
        for owner, length, parts in line.around.arriving:
            flat, cells = self._buffer(line.message(length))
            arriving.append((line.ranks.recv(flat, owner, HALO, what=what), cells, parts))
        for rank, cells, length in line.around.leaving:
            flat, message = self._buffer(line.message(length))
            self._take(message, line.around, cells, slice(None))
            leaving.append(line.ranks.send(flat, rank, HALO, what=what))
        for number, into, cells in line.around.own:
            self._take(slabs[number].cells, line.around, cells, into)
        return slabs, arriving, leaving

    def _finish(self, slabs: list[Box], arriving: list[Any], leaving: list[Any]) -> None:
        xp, dim = self._env.xp, self._lines[self._done].around.dim
        for handle, cells, parts in arriving:
            handle.wait()
            for number, into, which in parts:
                slabs[number].cells[at_dim(xp, dim, into)] = cells[at_dim(xp, dim, which)]
        for handle in leaving:
            handle.wait()
        self.boxes += slabs
        self._done += 1

    def _buffer(self, shape: tuple[int, ...]) -> tuple[Array, Array]:
        flat, cells = _buffer(self._env.xp, shape, self.boxes[0].cells.dtype)
        if self._done:
            flat[...] = self._beyond  # past the ends of the dims before, nothing comes
        return flat, cells

    def _take(self, message: Array, around: Around, cells: Any, into: Any) -> None:
        """Copy cells of all boxes that are here to where they come."""
        for number, there, here in _met(self._env.xp, self.boxes, self._lines[: self._done], around, cells, into):
            message[there] = self.boxes[number].cells[here]


def fold_rims(env: Env, moves: Sequence[Reach], boxes: list[Box], own: Callable[[], Array]) -> Array:
    """The gradient of this rank's part. boxes: the gradients of all slabs, behind the box of own cells, whose gradient
    `own` computes while messages fly. Slabs go back to the owners of their cells, who add them in the order of
    ranks."""
    (_, lines), found, boxes = _lines(env, moves, boxes[0].cells.shape), None, list(boxes)
    for n in reversed(range(len(lines))):
        line, done, kept = lines[n], lines[:n], len(boxes) - len(lines[n].slabs)
        slabs, boxes = [box.cells for box in boxes[kept:]], boxes[:kept]
        arriving, leaving = _gradients_on_their_way(env, line, boxes[0].cells.dtype, slabs)
        if found is None:
            found = own()
            boxes[0] = Box(boxes[0].at, found)
        for number, into, cells in line.around.own:
            _add(env.xp, boxes, done, line.around, cells, slabs[number], into)
        for handle, cells, message in arriving:
            handle.wait()
            _add(env.xp, boxes, done, line.around, cells, message, slice(None))
        for handle in leaving:
            handle.wait()
    return own() if found is None else found


def _gradients_on_their_way(
    env: Env, line: Line, dtype: Any, slabs: list[Array]
) -> tuple[list[Any], list[Any]]:
    """Messages with the gradients of copies of own cells that arrive, and handles of those that leave."""
    xp, dim, what, arriving, leaving = env.xp, line.around.dim, env.random.path, [], []
    for rank, cells, length in line.around.leaving:
        flat, message = _buffer(xp, line.message(length), dtype)
        arriving.append((line.ranks.recv(flat, rank, HALO_GRADIENT, what=what), cells, message))
    for owner, length, parts in line.around.arriving:
        flat, message = _buffer(xp, line.message(length), dtype)
        for number, into, which in parts:
            message[at_dim(xp, dim, which)] = slabs[number][at_dim(xp, dim, into)]
        leaving.append(line.ranks.send(flat, owner, HALO_GRADIENT, what=what))
    return arriving, leaving


def _add(
    xp: Any, boxes: list[Box], done: list[Line], around: Around, cells: Any, message: Array, which: Any
) -> None:
    """Add the gradients of a message to those of the cells that it is made of; `which` of them belong to `cells`. A
    cell that is named several times gets the sum of all."""
    for number, there, here in _met(xp, boxes, done, around, slice(None), which):
        out, values = boxes[number].cells[here], message[there]
        if isinstance(cells, slice):
            out[at_dim(xp, around.dim, cells)] += values
            continue
        for i, cell in enumerate(cells):
            out[at_dim(xp, around.dim, slice(cell, cell + 1))] += values[at_dim(xp, around.dim, slice(i, i + 1))]


def widen(env: Env, x: Array, moves: Sequence[Reach], beyond: float = 0.0) -> Array:
    """The cells that this rank needs of a field, `x` if these are its part. What lies beyond the ends in mode "zeros"
    is `beyond`. Communicates with the ranks that have what it lacks."""
    for reach in moves:
        if reach.ghosts:
            x = x[at_dim(env.xp, reach.dim, reach.kept(rank_along(env, reach.cuts, reach.dim - 2)))]
    rims = Rims(env, x, [reach for reach in moves if not reach.brought], beyond)
    rims.rest()
    if not rims._lines:
        return x
    last = rims._lines[-1]
    y = _empty_like(env.xp, x, last.message(last.around.size))
    places = [_inside(box.at, box.cells.shape, y.shape) for box in rims.boxes]
    if sum(math.prod(y[there].shape) for there, _ in places) < math.prod(y.shape):
        y[...] = beyond
    for box, (there, here) in zip(rims.boxes, places, strict=True):
        y[there] = box.cells[here]
    return y


def fold(env: Env, dy: Array, moves: Sequence[Reach]) -> Array:
    """The adjoint of `widen`: the gradient of each copy goes back to the owner of its cell."""
    shape, mine = list(dy.shape), [reach for reach in moves if not reach.brought]
    for reach in mine:
        start, stop = reach.held[rank_along(env, reach.cuts, reach.dim - 2)]
        shape[reach.dim] = stop - start
    at, lines = _lines(env, mine, shape)
    if lines:
        boxes = [Box(one, _empty_like(env.xp, dy, size)) for one, size in ((at, shape), *(
            slab for line in lines for slab in line.slabs
        ))]
        for box in boxes:
            there, here = _inside(box.at, box.cells.shape, dy.shape)
            box.cells[...] = 0
            box.cells[here] = dy[there]
        dy = fold_rims(env, mine, boxes, lambda: boxes[0].cells)
    for reach in moves:
        if reach.ghosts:
            me, whole = rank_along(env, reach.cuts, reach.dim - 2), list(dy.shape)
            whole[reach.dim] = reach.cuts[me + 1] - reach.cuts[me] + sum(reach.ghosts[me])
            inner, dy = dy, env.xp.zeros(tuple(whole), dtype=dy.dtype)
            dy[at_dim(env.xp, reach.dim, reach.kept(me))] = inner
    return dy


def _buffer(xp: Any, shape: Sequence[int], dtype: Any) -> tuple[Array, Array]:
    """Memory for a message, and as an array of this shape: channels come last in messages, as in most kernels."""
    flat = xp.empty((math.prod(shape),), dtype=dtype)
    cells = flat.reshape(shape[0], *shape[2:], shape[1])
    return flat, cells.transpose(0, cells.ndim - 1, *range(1, cells.ndim - 1))


def _empty_like(xp: Any, x: Array, shape: Sequence[int]) -> Array:
    """Of another shape, with channels last in memory where those of x are."""
    last = xp is np and x.shape[1] > 1 and x.strides[1] == x.itemsize
    return _buffer(xp, shape, x.dtype)[1] if last else xp.empty(tuple(shape), dtype=x.dtype)


def at_dim(xp: Any, dim: int, cells: Any) -> tuple[Any, ...]:
    return (*(slice(None),) * dim, on_device(xp, cells))


def on_device(xp: Any, cells: Any) -> Any:
    """A slice as it is; numbers of cells go to where the arrays lie."""
    return cells if isinstance(cells, slice) else xp.asarray(cells)


class Shift(Layer):
    """A field that is cut in one way comes to lie as another is cut, and loses the ghost cells that it brings.

    Parameters
    ----------
    parts, wanted : who has which cells, before and after
    """

    takes = "passed"

    def __init__(self, parts: Parts, wanted: Parts) -> None:
        self.parts, self.wanted = parts, wanted
        self._moves = tuple(
            Reach(d + 2, cuts, tuple(zip(out, out[1:], strict=False)), ghosts=parts.around(d))
            for d, (cuts, out) in enumerate(zip(parts.cuts, wanted.cuts, strict=True))
        )

    def forward(self, env: Env, p: Params, x: Array) -> tuple[Array, Any]:
        return widen(env, x, self._moves), ()

    def backward_input(self, env: Env, p: Params, saved: Any, dy: Array) -> tuple[Array, Any]:
        return fold(env, dy, self._moves), ()
