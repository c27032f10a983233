"""The parts of tensors that a rank holds, and what codecs keep of gradients."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Protocol

from fsdpx.core.array.namespace import namespace_of
from fsdpx.core.state.flat_parameters import Page, Run
from fsdpx.core.state.ledger import Key, LedgerRow, saved_name, tensor_name
from fsdpx.core.state.placement import Placement
from fsdpx.core.state.train_state import TrainState
from fsdpx.nn.layer import Spec
from fsdpx.nn.sharding import share

__all__ = [
    "BLOCK", "Arrival", "Block", "ByteCount", "Held", "Name", "TensorPiece", "arrivals", "held", "in_blocks", "kept",
    "landed", "owned", "written",
]  # fmt: skip

BLOCK = 4 << 20
"""Bytes that are moved at a time: what saving and loading need beside the shard is a few of these."""


@dataclass(frozen=True)
class Block:
    """Consecutive elements of an array of this rank, and where they lie in the whole tensor."""

    array: Any
    runs: tuple[Run, ...]


class ByteCount:
    """Counts the bytes of parts that pass by."""

    def __init__(self) -> None:
        self.nbytes = 0

    def of(self, parts: Iterable[Held]) -> Iterator[Held]:
        """The same parts, which are counted."""
        for part in parts:
            self.nbytes += int(part.array.size) * int(part.array.dtype.itemsize)
            yield part


@dataclass(frozen=True)
class Held:
    """A part of tensor `name` that this rank holds: the flat `array` is elements [start, start + n) of what the rank's
    line of the tensor axis has of a tensor described by `spec`."""

    name: str
    array: Any
    start: int
    spec: Spec
    rank: int
    width: int

    def part(self, index: int, count: int) -> Held:
        """The part of number `index`, of `count` even ones."""
        first, last = share(int(self.array.size), index, count)
        return Held(self.name, self.array[first:last], self.start + first, self.spec, self.rank, self.width)

    def blocks(self, elements: int) -> Iterator[Block]:
        """In order, this many elements at a time."""
        for at in range(0, int(self.array.size), elements):
            array = self.array[at : at + elements]
            first, last = self.start + at, self.start + at + int(array.size)
            yield Block(array, tuple(self._runs(first, last)))

    def _runs(self, first: int, last: int) -> Iterator[Run]:
        if self.spec.cut is None or self.width == 1:
            return iter([(first, last)])
        return self.spec.cut.runs(self.spec.shape, self.rank, self.width, first, last)


class TensorPiece(Protocol):
    """A part of tensor `name` that can be written: what `Held` is, too."""

    @property
    def name(self) -> str: ...
    @property
    def array(self) -> Any: ...
    def blocks(self, elements: int) -> Iterator[Block]: ...


def in_blocks(piece: TensorPiece, itemsize: int) -> Iterator[Block]:
    """In order, what is moved at a time. itemsize: bytes of an element in the file; each run of them is one write."""
    return piece.blocks(BLOCK // max(itemsize, piece.array.dtype.itemsize))


def held(state: TrainState, replicas: int | None = None) -> Iterator[Held]:
    """All that this rank has of the train state, row by row of the ledger, but for what codecs keep: that is each
    rank's own, see `checkpoint.kept`. replicas: the number of saved states, where each replica has a state of its own:
    replica r of this run takes state r modulo `replicas`."""
    for row, array in state.ledger.saved():
        if row.key.kind != "memory":
            yield from _of_row(state.placement, row, array, replicas=replicas)


def owned(state: TrainState) -> Iterator[Held]:
    """The part of it that this rank writes: every element of every tensor is written by exactly one rank.

    Replicas hold the same and write an even part of it each; what each has of its own it writes alone. Parameters
    that the tensor axis does not cut are written by the first rank there: the others' shards of a page with cut
    parameters begin elsewhere. Copies of a tied parameter are written by the ranks that have the first one, running
    statistics by one rank of those that move them."""
    placement = state.placement
    place, axes = placement.axes.coordinates, placement.axes
    for row, array in state.ledger.saved():
        if row.key.kind == "memory" or row.key.page in placement.layout.copies:
            continue
        for one in _of_row(placement, row, array):
            if row.key.page is None:
                yield from [one] if (placement.statistics_home[one.name], 0, 0, 0) == place else []
            elif one.spec.cut is not None or place.tensor == 0:
                yield one.part(place.replica, axes.replica.size) if row.owner == "shard" else one


def _of_row(placement: Placement, row: LedgerRow, array: Any, replicas: int | None = None) -> Iterator[Held]:
    """The parts of tensors that lie in a row: of a page, pieces of its parameters; else a tensor by itself."""
    layout, (_, p, name) = placement.layout, row.key
    if p is None:
        yield Held(name, array.reshape(-1), 0, layout.specs[name], 0, 1)
        return
    replica = placement.axes.coordinates.replica
    before = saved_name(row, replica if replicas is None else replica % replicas)
    for field, start, part in layout.pages[p].held(array, row.span):
        name, spec = tensor_name(before, field.source), layout.specs[field.source]
        yield Held(name, part, start, spec, layout.spread.rank, layout.spread.width)


PATTERN = re.compile(r"codec\.(shard|replica)\.(\w+)\.(\d+)/(.+)")
Arrival = tuple[Held, Any | None]


class Name(NamedTuple):
    """axis: over which the codec sums. memory: the codec's name for it. who: the number of the rank that keeps it,
    among all that keep one; of what is alike along the axis, the number of the line. of: a parameter; or a page, where
    it is not by element."""

    axis: str
    memory: str
    who: int
    of: str

    def __str__(self) -> str:
        return f"codec.{self.axis}.{self.memory}.{self.who}/{self.of}"

    @classmethod
    def parse(cls, text: str) -> Name | None:
        """None for tensors of another kind."""
        found = PATTERN.fullmatch(text)
        return None if found is None else cls(found[1], found[2], int(found[3]), found[4])


@dataclass(frozen=True)
class SavedPart:
    """A tensor of a file as this rank has it. writes: this rank writes it, not another one that has the same."""

    name: Name
    held: Held
    writes: bool


def kept(state: TrainState, instead: Mapping[Key, Any] | None = None) -> Iterator[Held]:
    """All that codecs of this rank keep. instead: arrays for some rows, in place of the ledger's."""
    return (part.held for one in _rows(state, instead or {}) for part in one.parts())


def written(state: TrainState) -> Iterator[Held]:
    """The part of it that this rank writes: what several ranks have alike is written by the first."""
    return (part.held for one in _rows(state, {}) for part in one.parts() if part.writes)


def arrivals(state: TrainState, found: Mapping[str, tuple[int, ...]]) -> Iterator[Arrival]:
    """How this rank's part is made of the tensors `found`, name -> shape: arrays to be filled, and what each is to be
    added to then, None if it lies in its place. What no rank has is zero; what has no place here is left."""
    layout = state.placement.layout
    fields = {field.name for page in layout.pages for field in page.fields}
    known: dict[tuple[str, str], list[Name]] = defaultdict(list)
    for name in sorted(filter(None, map(Name.parse, found))):
        known[name.memory, name.of if name.of in fields else layout.canonical(name.of)].append(name)
    for one in _rows(state, {}):
        for part in one.parts():
            fitting = [n for n in known[part.name.memory, part.name.of] if found[str(n)] == part.held.spec.shape]
            sources, target = one.sources(part, fitting), part.held.array
            if not sources:
                target[...] = 0
            for i, source in enumerate(sources):
                array = namespace_of(target).empty_like(target) if i else target
                yield replace(part.held, name=str(source), array=array), target if i else None


def landed(arriving: Iterable[Arrival]) -> Iterator[Held]:
    """The arrays to be filled, piece by piece: each is in its place when the next is asked for."""
    for piece, target in arriving:
        yield piece
        if target is not None:
            target += piece.array


def _rows(state: TrainState, instead: Mapping[Key, Any]) -> Iterator[CodecMemory]:
    for row, array in state.ledger.saved():
        if row.key.kind == "memory":
            yield CodecMemory(state.placement, row, instead.get(row.key, array))


@dataclass(frozen=True)
class CodecMemory:
    """A row of a codec's memory."""

    placement: Placement
    row: LedgerRow
    array: Any

    @property
    def page(self) -> Page:
        assert self.row.key.page is not None
        return self.placement.layout.pages[self.row.key.page]

    @property
    def adds(self) -> bool:
        return self.placement.route(self.page.index).recut_of(self.row.key.name) == "sum"

    def parts(self) -> Iterator[SavedPart]:
        axis, memory = self._whose
        place, page, layout = self.placement.axes.coordinates, self.page, self.placement.layout
        if not self.adds:
            line, along = (place.replica, place.shard) if axis == "shard" else (place.shard, place.replica)
            name = Name(axis, memory, line * layout.spread.width + place.tensor, self.placement.name(page.index))
            yield SavedPart(name, Held(str(name), self.array, 0, Spec((int(self.array.size),)), 0, 1), along == 0)
            return
        for field, start, own in page.held(self.array, self.row.span):
            spec, (number, _) = layout.specs[field.source], self._number(axis, layout.specs[field.source])
            name = Name(axis, memory, number, field.name)
            part = Held(str(name), own, start, spec, layout.spread.rank, layout.spread.width)
            yield SavedPart(name, part, place.tensor == 0 or spec.cut is not None or page.partial)

    def sources(self, mine: SavedPart, known: Sequence[Name]) -> list[Name]:
        """The names of the saved tensors, among the `known` ones of the same kind, that this part is made of."""
        if not self.adds:
            return [mine.name] if mine.name in known else list(known[:1])
        place, name = self.placement, mine.name
        here = place.axes.summing
        wanted = [n for n in known if (n.axis if n.axis in here else here[0]) == name.axis]
        return [n for n in wanted if n.who % self._number(self._whose[0], mine.held.spec)[1] == name.who]

    @property
    def _whose(self) -> tuple[str, str]:
        """An axis, and the codec's name for what is kept."""
        axis, _, memory = self.row.key.name.partition("/")
        return axis, memory

    def _number(self, axis: str, spec: Spec) -> tuple[int, int]:
        """The number of this rank's tensor of a parameter, and how many tensors the parameter has, for an axis.
        Ranks of the tensor axis share the tensor of a parameter that is not cut, unless each of them
        finds a part of its gradient."""
        axes = self.placement.axes
        rank, size = (axes.data.rank, axes.data.size) if axis == "shard" else (axes.replica.rank, axes.replica.size)
        if spec.cut is None and self.page.partial:
            return rank * axes.tensor.size + axes.tensor.rank, size * axes.tensor.size
        return rank, size
