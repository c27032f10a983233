"""Grid: which part of a field each rank of a Cartesian communicator has, as the solver cut it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from fsdpx.errors import ConfigError, DataError
from fsdpx.nn.cut import Parts

__all__ = ["Grid"]

LETTERS = "zyx"


class Grid:
    """A field that is cut over a Cartesian grid of ranks. Collective.

    Parts may be of any sizes, also empty; each rank says the size of its own, and all of them learn of the others'.

    Parameters
    ----------
    comm : a Cartesian communicator of mpi4py (`comm.Create_cart(...)`), or any communicator together with `dims`
    shape : cells of this rank's part along each dim of the grid
    layout : order of the dims of arrays, one letter for each dim of the grid and "c" for the channels, such as "yxc",
        "cyx" or "zyxc"; without "c", arrays have no dim of channels, and the model sees one. Default: channels last
    dims : ranks along each dim, where `comm` is not Cartesian; the last dim varies fastest from rank to rank

    Raises
    ------
    ConfigError : on all ranks, where the parts do not make a rectangle, or ranks say different things
    """

    def __init__(
        self, comm: Any, shape: Sequence[int], *, layout: str | None = None, dims: Sequence[int] | None = None
    ) -> None:
        own, (width, rank, size) = tuple(int(n) for n in shape), _counts(comm, dims)
        count = len(width)
        layout = LETTERS[3 - count :] + "c" if layout is None else layout
        problem = _problem(own, width, size, layout)
        facts = _gathered(comm, (own, layout, width, problem))
        for other, (_, _, _, wrong) in enumerate(facts):
            if wrong:
                raise ConfigError(f"Grid: rank {other}: {wrong}")
        for other, (_, order, grid, _) in enumerate(facts):
            if (order, grid) != facts[0][1:3]:
                raise ConfigError(
                    f"Grid: rank 0 has layout {facts[0][1]!r} on {facts[0][2]} ranks, rank {other} {order!r} on {grid}"
                )
        self.comm, self.dims, self.layout = comm, tuple(width), layout
        self.place = _place(rank, width)
        self.parts = Parts(_cuts([fact[0] for fact in facts], self.dims))

    def __repr__(self) -> str:
        return f"Grid({self.shape} cells over {self.dims} ranks, layout={self.layout!r})"

    @property
    def shape(self) -> tuple[int, ...]:
        """Cells of the whole field."""
        return self.parts.shape

    @property
    def offsets(self) -> tuple[int, ...]:
        """Where this rank's part begins, along each dim."""
        return tuple(cuts[r] for cuts, r in zip(self.parts.cuts, self.place, strict=True))

    def local(self, array: Any) -> Any:
        """This rank's part of an array of the whole field in the grid's layout, a view; or of a mask, without
        channels."""
        return array[self._index(self.place, array.ndim)]

    def everyone(self, value: Any) -> list[Any]:
        """The plain values of all ranks, by rank, on every rank. Collective."""
        return _gathered(self.comm, value)

    def gather(self, array: Any) -> Any:
        """The whole field from the parts of all ranks, on every rank: for small things. Collective."""
        first = array.ndim - len(self.layout)
        sizes = [math.prod(self._shape_of(rank, array.shape)) for rank in range(math.prod(self.dims))]
        flat, mine = np.empty(sum(sizes), array.dtype), np.ascontiguousarray(array).reshape(-1)
        if hasattr(self.comm, "all_gather"):
            self.comm.all_gather(mine, flat, sizes, what="a field").wait()
        else:
            flat = np.concatenate(self.comm.allgather(mine))
        ends = np.cumsum(sizes)
        shape = list(array.shape)
        for d, letter in enumerate(self._letters):
            shape[first + self.layout.index(letter)] = self.shape[d]
        whole = np.empty(shape, array.dtype)
        for rank, (end, size) in enumerate(zip(ends, sizes, strict=True)):
            index = self._index(_place(rank, self.dims), array.ndim)
            whole[index] = flat[end - size : end].reshape(self._shape_of(rank, array.shape))
        return whole

    def _index(self, place: Sequence[int], ndim: int) -> tuple[slice, ...]:
        """Where the part of a place of the grid lies in an array of the whole field."""
        index, letters = [slice(None)] * ndim, self._letters if ndim < len(self.layout) else self.layout
        for cuts, letter, r in zip(self.parts.cuts, self._letters, place, strict=True):
            index[ndim - len(letters) + letters.index(letter)] = slice(cuts[r], cuts[r + 1])
        return tuple(index)

    def _shape_of(self, rank: int, shape: Sequence[int]) -> tuple[int, ...]:
        """The shape of a rank's part of an array, from that of this rank's."""
        found, cells = list(shape), self.parts.local(_place(rank, self.dims))
        for letter, size in zip(self._letters, cells, strict=True):
            found[len(shape) - len(self.layout) + self.layout.index(letter)] = size
        return tuple(found)

    def entering(self, array: Any, parts: Parts, name: str) -> Any:
        """An array as the caller holds it, as (samples, channels, *cells), a view; DataError if it is no such part."""
        own, letters = parts.local(self.place), self.layout
        sizes = dict(zip(self._letters, own, strict=True))
        given = array.shape[array.ndim - len(letters) :] if array.ndim in (len(letters), len(letters) + 1) else ()
        if not given or any(n != sizes.get(letter, n) for n, letter in zip(given, letters, strict=True)):
            wanted = ", ".join(str(sizes.get(letter, "channels")) for letter in letters)
            raise DataError(
                f"{name} has shape {tuple(array.shape)}, but this rank's part, in layout {letters!r}, is ({wanted}), "
                "or has a dim of samples before these"
            )
        whole = array if array.ndim > len(letters) else array[None]
        if "c" not in letters:
            return whole[:, None]
        return whole.transpose(0, 1 + letters.index("c"), *(1 + letters.index(letter) for letter in self._letters))

    def leaving(self, array: Any, batched: bool) -> Any:
        """The inverse of `entering`, a view."""
        if "c" not in self.layout:
            found = array[:, 0]
        else:
            places = {"c": 1} | {letter: 2 + d for d, letter in enumerate(self._letters)}
            found = array.transpose(0, *(places[letter] for letter in self.layout))
        return found if batched else found[0]

    def batched(self, array: Any) -> bool:
        """Whether an array has a dim of samples."""
        return bool(array.ndim > len(self.layout))

    @property
    def _letters(self) -> str:
        return self.layout.replace("c", "")


def _place(rank: int, dims: Sequence[int]) -> tuple[int, ...]:
    """Where a rank stands; the last dim varies fastest."""
    return tuple(int(i) for i in np.unravel_index(rank, dims))


def _counts(comm: Any, dims: Sequence[int] | None) -> tuple[tuple[int, ...], int, int]:
    """Ranks along each dim, this rank and the number of all."""
    if hasattr(comm, "Get_topo"):
        return tuple(comm.Get_topo()[0]), comm.Get_rank(), comm.Get_size()
    rank, size = (comm.rank, comm.size)
    return (size,) if dims is None else tuple(int(n) for n in dims), rank, size


def _problem(own: tuple[int, ...], width: Sequence[int], size: int, layout: str) -> str:
    """What is wrong with this rank's arguments, as text."""
    if not 1 <= len(width) <= 3:
        return f"a grid of {len(width)} dims: 1 to 3 are taken"
    if int(np.prod(width)) != size:
        return f"dims={tuple(width)} are {int(np.prod(width))} ranks, the communicator has {size}"
    if len(own) != len(width) or min(own) < 0:
        return f"shape={own}: give the cells of this rank's part along each of the {len(width)} dims of the grid"
    letters = layout.replace("c", "", 1)
    if len(letters) != len(width) or len(set(layout)) != len(layout) or not letters.isalpha() or "c" in letters:
        return f"layout={layout!r}: name each of the {len(width)} dims by a letter, and the channels 'c', as 'yxc'"
    return ""


def _cuts(own: Sequence[tuple[int, ...]], dims: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
    """The bounds of parts along each dim; ConfigError where they make no rectangle."""
    made = []
    for d, width in enumerate(dims):
        sizes: list[int | None] = [None] * width
        for rank, shape in enumerate(own):
            place = _place(rank, dims)[d]
            first = sizes[place]
            if first is not None and first != shape[d]:
                other = next(r for r in range(rank) if _place(r, dims)[d] == place)
                raise ConfigError(
                    f"Grid: the parts make no rectangle: along dim {d} rank {rank} has {shape[d]} cells, and rank "
                    f"{other}, which stands beside it, {first}"
                )
            sizes[place] = shape[d]
        made.append((0, *(int(n) for n in np.cumsum(np.array(sizes, np.int64)))))
    return tuple(made)


def _gathered(comm: Any, value: Any) -> list[Any]:
    """The values of all ranks."""
    if hasattr(comm, "all_gather_plain"):
        return list(comm.all_gather_plain(value))
    return list(comm.allgather(value))
