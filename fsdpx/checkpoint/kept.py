"""What codecs keep of gradients, as tensors with names: in checkpoints, and on the way to other ranks.

Of an error feedback each rank has its own, of whole parameters. So there is a tensor of a parameter's shape for every
rank that keeps something of it, and on other ranks they are redistributed: number i of n goes to number i mod m of m,
which adds up what it gets. The same number of ranks finds the same bits, any other number the same sum.

With chunks each chunk has its own, whichever rank computes it: the same chunks find the same bits on any ranks."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from fsdpx.array.namespace import namespace_of
from fsdpx.checkpoint.pieces import Held
from fsdpx.layout.pages import Page
from fsdpx.nn.layer import Spec
from fsdpx.state.ledger import Key, LedgerRow
from fsdpx.state.placement import Placement
from fsdpx.state.rows import recut_of
from fsdpx.state.state import TrainState

__all__ = ["Arrival", "Name", "arrivals", "kept", "landed", "written"]

PATTERN = re.compile(r"codec\.(shard|replica|chunk)\.(\w+)\.(\d+)/(.+)")
DIGITS = "0123456789"
Arrival = tuple[Held, Any | None]


class Name(NamedTuple):
    """axis: over which the codec sums, or "chunk". memory: the codec's name for it. who: the number of the rank that
    keeps it, among all that keep one, or of the chunk; of what is alike along the axis, the number of the line. of: a
    parameter; or a page, where it is not by element."""

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
    """writes: this rank does, of those that have the same."""

    name: Name
    held: Held
    writes: bool


def kept(state: TrainState, instead: Mapping[Key, Any] | None = None) -> Iterator[Held]:
    """All that codecs of this rank keep. instead: arrays that take the place of those of some rows."""
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
        return recut_of(self.placement, self.row.key) == "sum"

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
            name = Name(axis.rstrip(DIGITS), memory, number, field.name)
            part = Held(str(name), own, start, spec, layout.spread.rank, layout.spread.width)
            yield SavedPart(name, part, place.tensor == 0 or spec.cut is not None or page.partial)

    def sources(self, mine: SavedPart, known: Sequence[Name]) -> list[Name]:
        """Which of the `known` tensors of the same kind come to this part."""
        if not self.adds:
            return [mine.name] if mine.name in known else list(known[:1])
        place, name = self.placement, mine.name
        here = place.axes.summing if place.accumulation.apart is None else ("chunk",)
        wanted = [n for n in known if (n.axis if n.axis in here else here[0]) == name.axis]
        return [n for n in wanted if n.who % self._number(self._whose[0], mine.held.spec)[1] == name.who]

    @property
    def _whose(self) -> tuple[str, str]:
        """An axis or a chunk, and the codec's name for what is kept."""
        axis, _, memory = self.row.key.name.partition("/")
        return axis, memory

    def _number(self, axis: str, spec: Spec) -> tuple[int, int]:
        """Which of how many tensors of a parameter this rank keeps, of an axis or of a chunk ("chunk5"). Ranks of the
        tensor axis have the same of what is not cut, unless each finds a part of its gradient."""
        axes = self.placement.axes
        rank, size = (axes.data.rank, axes.data.size) if axis == "shard" else (axes.replica.rank, axes.replica.size)
        if axis.startswith("chunk"):
            rank, size = int(axis.removeprefix("chunk")), self.placement.options.chunks or 1
        if spec.cut is None and self.page.partial:
            return rank * axes.tensor.size + axes.tensor.rank, size * axes.tensor.size
        return rank, size
