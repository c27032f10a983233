"""The parts of tensors that a rank holds, and what codecs keep of gradients."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Protocol

from fsdpx.core.array.namespace import namespace_of
from fsdpx.core.state.flat_parameters import Interval, Page
from fsdpx.core.state.ledger import LedgerKey, LedgerRow, get_saved_name, get_tensor_name
from fsdpx.core.state.placement import Placement
from fsdpx.core.state.train_state import TrainState
from fsdpx.nn.layer import ParameterSpec
from fsdpx.nn.shard_specs import shard_bounds

__all__ = [
    "BLOCK_BYTES",
    "ByteCounter",
    "CodecArrival",
    "CodecMemoryName",
    "LocalShard",
    "ShardBlock",
    "TensorPiece",
    "codec_memory",
    "codec_memory_to_write",
    "fill_as_received",
    "iterate_blocks",
    "local_shards",
    "plan_codec_reads",
    "shards_to_write",
]  # fmt: skip

BLOCK_BYTES = 4 << 20
"""Bytes that are moved at a time: what saving and loading need beside the shard is a few of these."""


@dataclass(frozen=True)
class ShardBlock:
    """Consecutive elements of an array of this rank, and where they lie in the whole tensor."""

    array: Any
    runs: tuple[Interval, ...]


class ByteCounter:
    """Counts the bytes of parts that pass by."""

    def __init__(self) -> None:
        self.nbytes = 0

    def count_shards(self, parts: Iterable[LocalShard]) -> Iterator[LocalShard]:
        """The same parts, which are counted."""
        for part in parts:
            self.nbytes += int(part.array.size) * int(part.array.dtype.itemsize)
            yield part


@dataclass(frozen=True)
class LocalShard:
    """A part of tensor `name` that this rank holds: the flat `array` is elements [start, start + n) of what the rank's
    line of the tensor axis has of a tensor described by `spec`."""

    name: str
    array: Any
    start: int
    spec: ParameterSpec
    rank: int
    width: int

    def take_part(self, index: int, count: int) -> LocalShard:
        """The part of number `index`, of `count` even ones."""
        first, last = shard_bounds(int(self.array.size), index, count)
        return LocalShard(self.name, self.array[first:last], self.start + first, self.spec, self.rank, self.width)

    def iterate_blocks(self, elements: int) -> Iterator[ShardBlock]:
        """In order, this many elements at a time."""
        for offset in range(0, int(self.array.size), elements):
            array = self.array[offset : offset + elements]
            first, last = self.start + offset, self.start + offset + int(array.size)
            yield ShardBlock(array, tuple(self._iterate_intervals(first, last)))

    def _iterate_intervals(self, first: int, last: int) -> Iterator[Interval]:
        if self.spec.cut is None or self.width == 1:
            return iter([(first, last)])
        return self.spec.cut.iterate_intervals(self.spec.shape, self.rank, self.width, first, last)


class TensorPiece(Protocol):
    """A part of tensor `name` that can be written: what `LocalShard` is, too."""

    @property
    def name(self) -> str: ...
    @property
    def array(self) -> Any: ...
    def iterate_blocks(self, elements: int) -> Iterator[ShardBlock]: ...


def iterate_blocks(piece: TensorPiece, itemsize: int) -> Iterator[ShardBlock]:
    """In order, what is moved at a time. itemsize: bytes of an element in the file; each run of them is one write."""
    return piece.iterate_blocks(BLOCK_BYTES // max(itemsize, piece.array.dtype.itemsize))


def local_shards(state: TrainState, replicas: int | None = None) -> Iterator[LocalShard]:
    """All that this rank has of the train state, row by row of the ledger, but for what codecs keep: that is each
    rank's own, see `checkpoint.kept`. replicas: the number of saved states, where each replica has a state of its own:
    replica r of this run takes state r modulo `replicas`."""
    for row, array in state.ledger.iterate_saved_rows():
        if row.key.kind != "memory":
            yield from _shards_of_row(state.placement, row, array, replicas=replicas)


def shards_to_write(state: TrainState) -> Iterator[LocalShard]:
    """The part of it that this rank writes: every element of every tensor is written by exactly one rank.

    Replicas hold the same and write an even part of it each; what each has of its own it writes alone. Parameters
    that the tensor axis does not cut are written by the first rank there: the others' shards of a page with cut
    parameters begin elsewhere. Copies of a tied parameter are written by the ranks that have the first one, running
    statistics by one rank of those that move them."""
    placement = state.placement
    place, axes = placement.axes.coordinates, placement.axes
    for row, array in state.ledger.iterate_saved_rows():
        if row.key.kind == "memory" or row.key.page in placement.layout.tied_copy_pages:
            continue
        for shard in _shards_of_row(placement, row, array):
            if row.key.page is None:
                yield from [shard] if (placement.statistic_ranks[shard.name], 0, 0, 0) == place else []
            elif shard.spec.cut is not None or place.tensor == 0:
                yield shard.take_part(place.replica, axes.replica.size) if row.owner == "shard" else shard


def _shards_of_row(
    placement: Placement, row: LedgerRow, array: Any, replicas: int | None = None
) -> Iterator[LocalShard]:
    """The parts of tensors that lie in a row: of a page, pieces of its parameters; else a tensor by itself."""
    layout, (_, p, name) = placement.layout, row.key
    if p is None:
        yield LocalShard(name, array.reshape(-1), 0, layout.specs[name], 0, 1)
        return
    replica = placement.axes.coordinates.replica
    before = get_saved_name(row, replica if replicas is None else replica % replicas)
    for field, start, part in layout.pages[p].iterate_fields(array, row.span):
        name, spec = get_tensor_name(before, field.source), layout.specs[field.source]
        yield LocalShard(name, part, start, spec, layout.spread.rank, layout.spread.width)


PATTERN = re.compile(r"codec\.(shard|replica)\.(\w+)\.(\d+)/(.+)")
CodecArrival = tuple[LocalShard, Any | None]


class CodecMemoryName(NamedTuple):
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
    def parse(cls, text: str) -> CodecMemoryName | None:
        """None for tensors of another kind."""
        match = PATTERN.fullmatch(text)
        return None if match is None else cls(match[1], match[2], int(match[3]), match[4])


@dataclass(frozen=True)
class SavedPart:
    """A tensor of a file as this rank has it. writes: this rank writes it, not another one that has the same."""

    name: CodecMemoryName
    held: LocalShard
    writes: bool


def codec_memory(state: TrainState, instead: Mapping[LedgerKey, Any] | None = None) -> Iterator[LocalShard]:
    """All that codecs of this rank keep. instead: arrays for some rows, in place of the ledger's."""
    return (part.held for one in _iterate_codec_memory(state, instead or {}) for part in one.iterate_parts())


def codec_memory_to_write(state: TrainState) -> Iterator[LocalShard]:
    """The part of it that this rank writes: what several ranks have alike is written by the first."""
    return (part.held for one in _iterate_codec_memory(state, {}) for part in one.iterate_parts() if part.writes)


def plan_codec_reads(state: TrainState, found: Mapping[str, tuple[int, ...]]) -> Iterator[CodecArrival]:
    """Yield the arrays to be filled from a checkpoint so that they make up this rank's codec memory.

    found: name -> shape of the checkpoint's tensors. Each array comes with the one to which it is then added, None if
    it is filled in place. Memory that the checkpoint lacks is set to zero; tensors without a place here are ignored."""
    layout = state.placement.layout
    fields = {field.name for page in layout.pages for field in page.fields}
    known: dict[tuple[str, str], list[CodecMemoryName]] = defaultdict(list)
    for name in sorted(filter(None, map(CodecMemoryName.parse, found))):
        known[name.memory, name.of if name.of in fields else layout.canonical_name(name.of)].append(name)
    for row in _iterate_codec_memory(state, {}):
        for part in row.iterate_parts():
            fitting = [n for n in known[part.name.memory, part.name.of] if found[str(n)] == part.held.spec.shape]
            sources, target = row.find_sources(part, fitting), part.held.array
            if not sources:
                target[...] = 0
            for i, source in enumerate(sources):
                array = namespace_of(target).empty_like(target) if i else target
                yield replace(part.held, name=str(source), array=array), target if i else None


def fill_as_received(arriving: Iterable[CodecArrival]) -> Iterator[LocalShard]:
    """The arrays to be filled, piece by piece: each is in its place when the next is asked for."""
    for piece, target in arriving:
        yield piece
        if target is not None:
            target += piece.array


def _iterate_codec_memory(state: TrainState, instead: Mapping[LedgerKey, Any]) -> Iterator[CodecMemory]:
    for row, array in state.ledger.iterate_saved_rows():
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
    def is_summed(self) -> bool:
        return self.placement.get_codec_route(self.page.index).get_reshard_rule(self.row.key.name) == "sum"

    def iterate_parts(self) -> Iterator[SavedPart]:
        axis, memory = self._axis_and_name
        place, page, layout = self.placement.axes.coordinates, self.page, self.placement.layout
        if not self.is_summed:
            line, along = (place.replica, place.shard) if axis == "shard" else (place.shard, place.replica)
            name = CodecMemoryName(
                axis, memory, line * layout.spread.width + place.tensor, self.placement.format_page_name(page.index)
            )
            yield SavedPart(
                name, LocalShard(str(name), self.array, 0, ParameterSpec((int(self.array.size),)), 0, 1), along == 0
            )
            return
        for field, start, own_array in page.iterate_fields(self.array, self.row.span):
            spec, (number, _) = layout.specs[field.source], self._rank_and_count(axis, layout.specs[field.source])
            name = CodecMemoryName(axis, memory, number, field.name)
            part = LocalShard(str(name), own_array, start, spec, layout.spread.rank, layout.spread.width)
            yield SavedPart(name, part, place.tensor == 0 or spec.cut is not None or page.partial)

    def find_sources(self, mine: SavedPart, known: Sequence[CodecMemoryName]) -> list[CodecMemoryName]:
        """The names of the saved tensors, among the `known` ones of the same kind, that this part is made of."""
        if not self.is_summed:
            return [mine.name] if mine.name in known else list(known[:1])
        place, name = self.placement, mine.name
        here = place.axes.reduction_axes
        wanted = [n for n in known if (n.axis if n.axis in here else here[0]) == name.axis]
        return [
            n for n in wanted if n.who % self._rank_and_count(self._axis_and_name[0], mine.held.spec)[1] == name.who
        ]

    @property
    def _axis_and_name(self) -> tuple[str, str]:
        """An axis, and the codec's name for what is kept."""
        axis, _, memory = self.row.key.name.partition("/")
        return axis, memory

    def _rank_and_count(self, axis: str, spec: ParameterSpec) -> tuple[int, int]:
        """The number of this rank's tensor of a parameter, and how many tensors the parameter has, for an axis.
        Ranks of the tensor axis share the tensor of a parameter that is not cut, unless each of them
        finds a part of its gradient."""
        axes = self.placement.axes
        rank, size = (axes.data.rank, axes.data.size) if axis == "shard" else (axes.replica.rank, axes.replica.size)
        if spec.cut is None and self.page.partial:
            return rank * axes.tensor.size + axes.tensor.rank, size * axes.tensor.size
        return rank, size
