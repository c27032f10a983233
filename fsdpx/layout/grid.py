"""Grid: which part of a field each rank of a Cartesian communicator has, as the solver cut it."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from copy import copy
from math import prod
from typing import Any, NamedTuple

import numpy as np

from fsdpx.comm.default import demand_member
from fsdpx.comm.local import single
from fsdpx.errors import ConfigError, DataError
from fsdpx.nn.cut import Parts

__all__ = ["Grid"]

LETTERS = "zyx"


class GridFacts(NamedTuple):
    """What a rank says of a grid. own: cells of its part. wrong: what is wrong with its arguments, as text."""

    own: tuple[int, ...]
    layout: str
    dims: tuple[int, ...]
    periods: tuple[bool, ...]
    ghosts: tuple[int, ...]
    wrong: str


class Grid:
    """A field that is cut over a Cartesian grid of ranks. Collective.

    Parts may be of any sizes, also empty; each rank says the size of its own, and all of them learn of the others'. On
    a communicator of several times as many ranks as the grid has there are several fields, the members of an ensemble:
    its first ranks have the parts of the first one.

    Parameters
    ----------
    comm : a Cartesian communicator of mpi4py (`comm.Create_cart(...)`), or any communicator together with `dims`
    shape : cells of this rank's part along each dim of the grid, without ghost cells
    layout : order of the dims of arrays, one letter for each dim of the grid and "c" for the channels, such as "yxc",
        "cyx" or "zyxc"; without "c", arrays have no dim of channels, and the model sees one. Default: channels last
    dims : ranks along each dim, where `comm` is not Cartesian; the last dim varies fastest from rank to rank
    ghosts : cells that arrays have on each side beyond the part, for all dims or for each; convolutions that read the
        field first, or behind layers that act on each cell, take what lies there instead of their padding
    periods : whether each dim is periodic, where `comm` is not Cartesian; `Rollout` fills ghost cells by it

    Raises
    ------
    ConfigError : on all ranks, where the parts do not make a rectangle, or ranks say different things
    """

    def __init__(
        self,
        comm: Any,
        shape: Sequence[int],
        *,
        layout: str | None = None,
        dims: Sequence[int] | None = None,
        ghosts: int | Sequence[int] = 0,
        periods: Sequence[bool] | None = None,
    ) -> None:
        demand_member(comm)
        if not hasattr(comm, "allgather") and not hasattr(comm, "all_gather_plain"):
            raise ConfigError(f"Grid: {comm!r} is no communicator: give mpi4py's, as comm.Create_cart(...), or fsdpx's")
        rank, size = (comm.Get_rank(), comm.Get_size()) if hasattr(comm, "Get_rank") else (comm.rank, comm.size)
        try:
            width, closed = _topology(comm, dims, periods, size)
            around: Any = ghosts if np.ndim(ghosts) else (ghosts,) * len(width)
            letters = f"{LETTERS[3 - len(width) :]}c" if layout is None else str(layout)
            mine = GridFacts(_whole(shape), letters, width, closed, _whole(around), "")
            mine = mine._replace(wrong=_problem(mine, size))
        except TypeError as error:
            wrong = f"shape={shape!r}, dims={dims!r}, ghosts={ghosts!r}, periods={periods!r}: {error}"
            mine = GridFacts((), "", (), (), (), wrong)
        facts = [GridFacts(*fact) for fact in _gathered(comm, tuple(mine))]
        _demand_alike(facts)
        self.comm, (self.layout, self.dims, self.periods, self.ghosts) = comm, mine[1:5]
        ranks = prod(self.dims)
        self.member, at = divmod(rank, ranks)
        self.place = _place(at, self.dims)
        fields = [_cuts(facts[i : i + ranks], i) for i in range(0, size, ranks)]
        self.parts = Parts(fields[self.member])
        self._own = [fact.own for fact in facts]

    @classmethod
    def even(
        cls,
        shape: Sequence[int],
        dims: Sequence[int],
        rank: int = 0,
        *,
        layout: str | None = None,
        ghosts: int | Sequence[int] = 0,
        periods: Sequence[bool] | None = None,
    ) -> Grid:
        """A field of `shape` cells, cut as evenly as can be, as rank `rank` of a job that does not run sees it: for
        `fsdpx.dry_run(space=)`. `dims` and the other parameters are those of `Grid`."""
        one = (1,) * len(dims)
        if len(shape) != len(dims) or min((*dims, *shape), default=0) < 1:
            raise ConfigError(f"{tuple(shape)} cells over {tuple(dims)} ranks: give a number above 0 for each dim")
        made = cls(single(), shape, layout=layout, dims=one, ghosts=ghosts, periods=periods)
        made.dims = tuple(dims)
        made.parts = Parts(tuple(tuple(n * r // d for r in range(d + 1)) for n, d in zip(shape, dims, strict=True)))
        return made.seen_by(rank)

    def seen_by(self, rank: int) -> Grid:
        """This grid, as rank `rank` of a job that does not run sees it."""
        made = copy(self)
        made.comm, made.place = None, _place(rank % prod(self.dims), self.dims)
        return made

    @property
    def busiest(self) -> tuple[int, ...]:
        """A rank with the most cells along each dim, and one with the most neighbours where that is another one."""
        most: list[list[int]] = [[], []]
        for cuts, width, closed in zip(self.parts.cuts, self.dims, self.periods, strict=True):
            sizes = [(cuts[r + 1] - cuts[r], closed or 0 < r < width - 1) for r in range(width)]
            for place, order in zip(most, (1, -1), strict=True):
                place.append(max(range(width), key=lambda r: sizes[r][::order]))
        return tuple(dict.fromkeys(int(np.ravel_multi_index(place, self.dims)) for place in most))

    def part(self, shape: Sequence[int], ghosts: bool = False) -> tuple[int, ...]:
        """The shape of this rank's part of arrays of the whole field, with or without ghost cells."""
        if len(shape) < len(self.layout):  # no field
            return tuple(shape)
        return self._sized(_around(self.own, self.ghosts) if ghosts else self.own, shape)

    def __repr__(self) -> str:
        ghosts = f", ghosts={self.ghosts}" if any(self.ghosts) else ""
        return f"Grid({self.shape} cells over {self.dims} ranks, layout={self.layout!r}{ghosts})"

    @property
    def shape(self) -> tuple[int, ...]:
        """Cells of the whole field."""
        return self.parts.shape

    @property
    def own(self) -> tuple[int, ...]:
        """Cells of this rank's part, without ghost cells."""
        return self.parts.local(self.place)

    @property
    def offsets(self) -> tuple[int, ...]:
        """Where this rank's part begins, along each dim."""
        return tuple(cuts[r] for cuts, r in zip(self.parts.cuts, self.place, strict=True))

    @property
    def entered(self) -> Parts:
        """How inputs of the model are cut, with the ghost cells that they bring."""
        return Parts(self.parts.cuts, self.ghosts, self.periods) if any(self.ghosts) else self.parts

    def ranks(self, rank: int) -> tuple[int, ...] | None:
        """What the ranks of this field give as `rank`, in the order of the grid; None: they do not exist. Collective
        over `comm`."""
        if self.comm is None:
            return None
        width = prod(self.dims)
        return tuple(int(r) for r in _gathered(self.comm, rank)[self.member * width : (self.member + 1) * width])

    def local(self, what: Any) -> Any:
        """This rank's part of an array of the whole field in the grid's layout, without ghost cells, a view; or of a
        mask, which has no channels.

        Or, for a tuple of whole numbers and slices, which are cells of the whole field along each dim, where the same
        cells lie in this rank's arrays, ghost cells counted; None: none of them is here."""
        if isinstance(what, tuple):
            return self._here(what)
        self._demand("local", what.shape, self.shape, "the whole field")
        return what[self._index(self.place, what.ndim)]

    def _here(self, index: tuple[Any, ...]) -> tuple[Any, ...] | None:
        if len(index) != len(self.dims):
            raise DataError(f"Grid.local{index}: give a number or a slice for each of the {len(self.dims)} dims")
        found: list[Any] = []
        for d, (cuts, r, g, one) in enumerate(zip(self.parts.cuts, self.place, self.ghosts, index, strict=True)):
            (a, b), n = cuts[r : r + 2], cuts[-1]
            if isinstance(one, slice):
                start, stop, step = one.indices(n)
                if step < 1:
                    raise DataError(f"Grid.local: dim {d}: {one} goes backwards")
                first = start + -(-max(a - start, 0) // step) * step
                here, place = first < min(stop, b), slice(first - a + g, min(stop, b) - a + g, step)
            else:
                if not hasattr(one, "__index__") or not -n <= one < n:
                    raise DataError(f"Grid.local: dim {d} has {n} cells, and no cell {one}")
                here, place = a <= one % n < b, one % n - a + g
            if not here:
                return None
            found.append(place)
        return tuple(found)

    def everyone(self, value: Any) -> list[Any]:
        """The plain values of all ranks, by rank, on every rank. Collective."""
        return _gathered(self.comm, value)

    def gather(self, array: Any) -> Any:
        """The whole field, or a mask, without ghost cells, from the parts of its ranks, on every rank: for small
        things. Collective over `comm`."""
        array = self.interior(np.asarray(array))
        everyone = [(tuple(shape), dtype) for shape, dtype in self.everyone((array.shape, array.dtype.str))]
        shapes = []
        for rank, (own, (shape, dtype)) in enumerate(zip(self._own, everyone, strict=True)):
            self._demand("gather", shape, own, f"the part of rank {rank}")
            shapes.append(self._sized(own, everyone[0][0]))
            if (shape, dtype) != (shapes[rank], everyone[0][1]):
                raise DataError(f"Grid.gather: rank 0 has {everyone[0]}, and rank {rank} {(shape, dtype)}")
        sizes = [prod(shape) for shape in shapes]
        flat, mine = np.empty(sum(sizes), array.dtype), np.ascontiguousarray(array).reshape(-1)
        if hasattr(self.comm, "all_gather"):
            self.comm.all_gather(mine, flat, sizes, what="a field").wait()
        else:
            flat = np.concatenate(self.comm.allgather(mine))
        whole = np.empty(self._sized(self.shape, array.shape), array.dtype)
        ends, width = np.cumsum(sizes), prod(self.dims)
        for rank in range(self.member * width, (self.member + 1) * width):
            found = flat[ends[rank] - sizes[rank] : ends[rank]].reshape(shapes[rank])
            whole[self._index(_place(rank % width, self.dims), array.ndim)] = found
        return whole

    def interior(self, array: Any) -> Any:
        """An array that brings ghost cells, without them, a view; others as they are."""
        if not self._has(array, _around(self.own, self.ghosts)):
            return array
        index = [slice(None)] * array.ndim
        for dim, n, g in zip(self._dims(array.ndim), self.own, self.ghosts, strict=True):
            index[dim] = slice(g, g + n)
        return array[tuple(index)]

    def entering(self, array: Any, parts: Parts, name: str) -> Any:
        """An array as the caller holds it, as (samples, channels, *cells), a view; DataError if it is no such part."""
        cells, letters = parts.local(self.place), self.layout
        if parts.ghosts:
            cells = _around(cells, parts.ghosts)
        if array.ndim > len(letters) + 1 or not self._has(array, cells):
            wanted = ", ".join(map(str, self._sized(cells, ["channels"] * len(letters))))
            ghosts = ", with ghost cells" if parts.ghosts else ""
            raise DataError(
                f"{name} has shape {tuple(array.shape)}, but this rank's part{ghosts}, in layout {letters!r}, is "
                f"({wanted}), or has a dim of samples before these"
            )
        whole = array if array.ndim > len(letters) else array[None]
        if "c" not in letters:
            return whole[:, None]
        return whole.transpose(0, 1 + letters.index("c"), *(1 + letters.index(letter) for letter in self._letters))

    def leaving(self, array: Any, batched: bool) -> Any:
        """The inverse of `entering`, a view."""
        if "c" not in self.layout:
            if array.shape[1] != 1:
                raise DataError(
                    f"the result has {array.shape[1]} channels, and the grid's layout {self.layout!r} has room for "
                    "one: put 'c' into it"
                )
            found = array[:, 0]
        else:
            places = {"c": 1} | {letter: 2 + d for d, letter in enumerate(self._letters)}
            found = array.transpose(0, *(places[letter] for letter in self.layout))
        return found if batched else found[0]

    def batched(self, array: Any) -> bool:
        """Whether an array has a dim of samples."""
        return np.ndim(array) > len(self.layout)

    @property
    def _letters(self) -> str:
        return self.layout.replace("c", "")

    def _has(self, array: Any, cells: Sequence[int]) -> bool:
        """Whether an array of the layout has so many cells."""
        return array.ndim >= len(self.layout) and self._sized(cells, array.shape) == tuple(array.shape)

    def _index(self, place: Sequence[int], ndim: int) -> tuple[slice, ...]:
        """Where the part of a place of the grid lies in an array of the whole field."""
        index = [slice(None)] * ndim
        for cuts, dim, r in zip(self.parts.cuts, self._dims(ndim), place, strict=True):
            index[dim] = slice(cuts[r], cuts[r + 1])
        return tuple(index)

    def _sized(self, cells: Sequence[int], shape: Sequence[Any]) -> tuple[Any, ...]:
        """The shape of an array of so many cells, from that of this rank's part."""
        found = list(shape)
        for dim, size in zip(self._dims(len(shape)), cells, strict=True):
            found[dim] = size
        return tuple(found)

    def _dims(self, ndim: int) -> list[int]:
        """Where the cells are among the dims of an array; one with fewer dims than the layout has no channels."""
        letters = self._letters if ndim < len(self.layout) else self.layout
        return [ndim - len(letters) + letters.index(letter) for letter in self._letters]

    def _demand(self, call: str, shape: tuple[int, ...], cells: Sequence[int], what: str) -> None:
        """DataError unless an array of `shape` has so many cells."""
        if len(shape) < len(cells) or self._sized(cells, shape) != shape:
            sizes = dict(zip(self._letters, cells, strict=True))
            raise DataError(
                f"Grid.{call}: an array of shape {tuple(shape)} is not {what}, which has {sizes} in layout "
                f"{self.layout!r}"
            )


def _around(cells: Sequence[int], ghosts: Sequence[int]) -> tuple[int, ...]:
    """Cells with ghost cells on both sides."""
    return tuple(n + 2 * g for n, g in zip(cells, ghosts, strict=True))


def _place(rank: int, dims: Sequence[int]) -> tuple[int, ...]:
    """Where a rank stands; the last dim varies fastest."""
    return tuple(int(i) for i in np.unravel_index(rank, dims))


def _whole(numbers: Sequence[int]) -> tuple[int, ...]:
    return tuple(operator.index(n) for n in numbers)


def _topology(
    comm: Any, dims: Sequence[int] | None, periods: Sequence[bool] | None, size: int
) -> tuple[tuple[int, ...], tuple[bool, ...]]:
    """Ranks along each dim, and whether each is periodic."""
    if hasattr(comm, "Get_topo"):
        dims, closed, _ = comm.Get_topo()
        periods = closed if periods is None else periods
    width = (size,) if dims is None else _whole(dims)
    return width, (False,) * len(width) if periods is None else tuple(map(bool, periods))


def _problem(facts: GridFacts, size: int) -> str:
    """What is wrong with this rank's arguments, as text."""
    width, layout, count = facts.dims, facts.layout, len(facts.dims)
    if not 1 <= count <= 3:
        return f"a grid of {count} dims: 1 to 3 are taken"
    if min(width) < 1 or size % prod(width):
        return f"dims={width} are {prod(width)} ranks, the communicator has {size}"
    if len(facts.own) != count or min(facts.own) < 0:
        return f"shape={facts.own}: give the cells of this rank's part along each of the {count} dims of the grid"
    letters = layout.replace("c", "", 1)
    if len(letters) != count or len(set(layout)) != len(layout) or not letters.isalpha() or "c" in letters:
        return f"layout={layout!r}: name each of the {count} dims by a letter, and the channels 'c', as 'yxc'"
    if len(facts.ghosts) != count or min(facts.ghosts) < 0:
        return f"ghosts={facts.ghosts}: give the cells beyond each side along each of the {count} dims, at least 0"
    if len(facts.periods) != count:
        return f"periods={facts.periods}: say for each of the {count} dims whether it is periodic"
    return ""


def _demand_alike(facts: Sequence[GridFacts]) -> None:
    """ConfigError for wrong arguments of any rank, and where ranks say different things."""
    for rank, fact in enumerate(facts):
        if fact.wrong:
            raise ConfigError(f"Grid: rank {rank}: {fact.wrong}")
    first = facts[0]
    for rank, fact in enumerate(facts):
        if (fact.layout, fact.dims) != (first.layout, first.dims):
            raise ConfigError(
                f"Grid: rank 0 has layout {first.layout!r} on {first.dims} ranks, rank {rank} {fact.layout!r} on "
                f"{fact.dims}"
            )
        for d, (ours, theirs) in enumerate(zip(_sides(first), _sides(fact), strict=True)):
            if ours != theirs:
                raise ConfigError(f"Grid: along dim {d} rank 0 has {ours}, rank {rank} {theirs}")


def _sides(fact: GridFacts) -> list[str]:
    """What each dim is like, in words."""
    kinds = ("walls", "a periodic field")
    return [f"{kinds[p]} and {g} ghost cells" for p, g in zip(fact.periods, fact.ghosts, strict=True)]


def _cuts(facts: Sequence[GridFacts], first: int) -> tuple[tuple[int, ...], ...]:
    """The bounds of parts along each dim; ConfigError where they make no rectangle. first: the rank that has the first
    part."""
    made = []
    dims = facts[0].dims
    for d, width in enumerate(dims):
        sizes: list[int | None] = [None] * width
        for rank, fact in enumerate(facts):
            place, shape = _place(rank, dims)[d], fact.own
            known = sizes[place]
            if known is not None and known != shape[d]:
                other = next(r for r in range(rank) if _place(r, dims)[d] == place)
                raise ConfigError(
                    f"Grid: the parts make no rectangle: along dim {d} rank {first + rank} has {shape[d]} cells, and "
                    f"rank {first + other}, which stands beside it, {known}"
                )
            sizes[place] = shape[d]
        made.append((0, *(int(n) for n in np.cumsum(np.array(sizes, np.int64)))))
    return tuple(made)


def _gathered(comm: Any, value: Any) -> list[Any]:
    """The values of all ranks."""
    if hasattr(comm, "all_gather_plain"):
        return list(comm.all_gather_plain(value))
    return list(comm.allgather(value))
