"""The tensor shards that a rank saves and loads. They include shards of the arrays that compression codecs keep between
steps ("codec memory"), such as error-feedback residuals."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from fsdpx.core.array.namespace import namespace_of
from fsdpx.core.base.dataclass import dataclass, replace
from fsdpx.core.state.flat_parameters import Interval, Page
from fsdpx.core.state.ledger import LedgerKey, LedgerRow, get_saved_name_prefix, make_checkpoint_name
from fsdpx.core.state.placement import Placement
from fsdpx.core.state.train_state import TrainState
from fsdpx.nn.layer import ParameterSpec
from fsdpx.nn.shard_specs import shard_bounds

__all__ = [
    "BLOCK_BYTES", "ByteCounter", "CodecArrival", "CodecMemoryName", "LocalShard", "ShardBlock", "TensorPiece",
    "iterate_blocks", "iterate_codec_memory", "iterate_codec_memory_to_write", "iterate_codec_reads_and_zero_missing",
    "iterate_local_state_shards", "iterate_shards_then_add_to_targets", "iterate_shards_to_write",
]  # fmt: skip

BLOCK_BYTES = 4 << 20
"""Number of bytes that are read or written at a time. Saving and loading need extra memory for a few blocks of this
size."""


@dataclass(frozen=True)
class ShardBlock:
    """A block of consecutive elements of this rank's shard. `runs` are the positions of these elements in the full flat
    tensor, as ranges [start, stop)."""

    array: Any
    runs: tuple[Interval, ...]


class ByteCounter:
    """Counts the tensor bytes that a rank writes to files during a save, or reads from files during a load. The count
    includes bytes that are read only for verification. It also includes gaps between the ranges of the rank's shards,
    if they are read together with the ranges."""

    def __init__(self) -> None:
        self.nbytes = 0

    def iterate_and_count(self, parts: Iterable[LocalShard]) -> Iterator[LocalShard]:
        """Yield the shards in `parts` unchanged, and add the size of each to `nbytes`."""
        for part in parts:
            self.nbytes += int(part.array.size) * int(part.array.dtype.itemsize)
            yield part


@dataclass(frozen=True)
class LocalShard:
    """The shard of a tensor that this rank holds.

    Attributes
    ----------
    name : name of the tensor
    array : flat array of n elements
    start : `array` holds elements [start, start + n) of the part of the tensor that this tensor rank owns
    spec : specification of the full tensor
    rank, width : this rank's index on the tensor axis, and the number of tensor ranks; 0 and 1 if the tensor is not
        sharded over the tensor axis
    """

    name: str
    array: Any
    start: int
    spec: ParameterSpec
    rank: int
    width: int

    def get_equal_part(self, index: int, count: int) -> LocalShard:
        """Split this shard into `count` parts that are as equal as possible, and return part number `index`."""
        first, last = shard_bounds(int(self.array.size), index, count)
        return LocalShard(self.name, self.array[first:last], self.start + first, self.spec, self.rank, self.width)

    def iterate_blocks(self, elements: int) -> Iterator[ShardBlock]:
        """Yield consecutive blocks of at most `elements` elements."""
        for offset in range(0, int(self.array.size), elements):
            array = self.array[offset : offset + elements]
            first, last = self.start + offset, self.start + offset + int(array.size)
            yield ShardBlock(array, tuple(self._iterate_intervals(first, last)))

    def _iterate_intervals(self, first: int, last: int) -> Iterator[Interval]:
        if self.spec.cut is None or self.width == 1:
            return iter([(first, last)])
        return self.spec.cut.iterate_full_intervals(self.spec.shape, self.rank, self.width, first, last)


class TensorPiece(Protocol):
    """A part of the tensor `name` that can be written to a file, such as a `LocalShard`."""

    @property
    def name(self) -> str: ...
    @property
    def array(self) -> Any: ...
    def iterate_blocks(self, elements: int) -> Iterator[ShardBlock]: ...


def iterate_blocks(piece: TensorPiece, itemsize: int) -> Iterator[ShardBlock]:
    """Yield consecutive blocks, each of at most `BLOCK_BYTES` bytes both in memory and in the file. `itemsize` is the
    number of bytes per element in the file."""
    return piece.iterate_blocks(BLOCK_BYTES // max(itemsize, piece.array.dtype.itemsize))


def iterate_local_state_shards(state: TrainState, replicas: int | None = None) -> Iterator[LocalShard]:
    """Yield all shards of the training state on this rank, except arrays of compression codecs (see
    `iterate_codec_memory`).

    If each replica has its own state, `replicas` is the number of replicas whose state is in the checkpoint. Replica r
    of this run then loads the state of replica r modulo `replicas`."""
    for row, array in state.ledger.iterate_saved_rows():
        if row.key.kind != "memory":
            yield from _iterate_shards_of_ledger_row(state.placement, row, array, replicas=replicas)


def iterate_shards_to_write(state: TrainState) -> Iterator[LocalShard]:
    """Yield the shards that this rank writes. Each element of each tensor is written by exactly one rank.

    If all replicas have the same state, each writes an equal part of it; otherwise each writes its own state. A
    parameter that is not sharded over the tensor axis is written by the first tensor rank only, because the boundaries
    of its shards may differ between tensor ranks. A tied parameter is written by the ranks that hold its first copy,
    and running statistics are written by one of the ranks that update them."""
    placement = state.placement
    place, axes = placement.axes.coordinates, placement.axes
    for row, array in state.ledger.iterate_saved_rows():
        if row.key.kind == "memory" or row.key.page in placement.layout.tied_copy_pages:
            continue
        for shard in _iterate_shards_of_ledger_row(placement, row, array):
            if row.key.page is None:
                yield from [shard] if (placement.pipe_rank_by_statistic[shard.name], 0, 0, 0) == place else []
            elif shard.spec.cut is not None or place.tensor == 0:
                yield shard.get_equal_part(place.replica, axes.replica.size) if row.owner == "shard" else shard


def _iterate_shards_of_ledger_row(
    placement: Placement, row: LedgerRow, array: Any, replicas: int | None = None
) -> Iterator[LocalShard]:
    """Yield the shards in one array of the ledger (table of a rank's arrays). The array holds either a shard of a page
    (flat buffer of parameters), or a single tensor that does not belong to a page."""
    layout, (_, p, name) = placement.layout, row.key
    if p is None:
        yield LocalShard(name, array.reshape(-1), 0, layout.specs[name], 0, 1)
        return
    replica = placement.axes.coordinates.replica
    before = get_saved_name_prefix(row, replica if replicas is None else replica % replicas)
    for field, start, part in layout.pages[p].iterate_fields_in_range(array, row.span):
        name, spec = make_checkpoint_name(before, field.source), layout.specs[field.source]
        yield LocalShard(name, part, start, spec, layout.spread.rank, layout.spread.width)


CODEC_NAME_PATTERN = re.compile(r"codec\.(shard|replica)\.(\w+)\.(\d+)/(.+)")
CodecArrival = tuple[LocalShard, Any | None]


class CodecMemoryName(NamedTuple):
    """The checkpoint name of an array that a compression codec keeps between steps.

    Attributes
    ----------
    axis : axis over which the codec sums, "shard" or "replica"
    memory : the codec's name for the array
    rank_number : index that distinguishes the arrays of different ranks. If all ranks along the axis have the same
        array, they share one index
    tensor : name of the parameter. If the array does not have one element per parameter element, this is the name of
        the page (flat parameter buffer)
    """

    axis: str
    memory: str
    rank_number: int
    tensor: str

    def __str__(self) -> str:
        return f"codec.{self.axis}.{self.memory}.{self.rank_number}/{self.tensor}"

    @classmethod
    def parse(cls, text: str) -> CodecMemoryName | None:
        """Parse a tensor name from a checkpoint. Return None if the tensor does not belong to a codec."""
        match = CODEC_NAME_PATTERN.fullmatch(text)
        return None if match is None else cls(match[1], match[2], int(match[3]), match[4])


@dataclass(frozen=True)
class SavedPart:
    """This rank's part of an array that a compression codec keeps between steps. `writes` is False if another rank
    writes the same values to checkpoints, and True if this rank must write them."""

    name: CodecMemoryName
    held: LocalShard
    writes: bool


def iterate_codec_memory(state: TrainState, instead: Mapping[LedgerKey, Any] | None = None) -> Iterator[LocalShard]:
    """Yield the shards of the arrays that compression codecs keep on this rank. `instead` maps keys of the ledger
    (table of a rank's arrays) to arrays. These arrays replace the ledger's arrays that have the same keys."""
    return (part.held for one in _iterate_codec_rows(state, instead or {}) for part in one.iterate_saved_parts())


def iterate_codec_memory_to_write(state: TrainState) -> Iterator[LocalShard]:
    """Yield the shards of codec arrays that this rank writes. An array that several ranks share is written by the first
    of these ranks."""
    return (part.held for one in _iterate_codec_rows(state, {}) for part in one.iterate_saved_parts() if part.writes)


def iterate_codec_reads_and_zero_missing(
    state: TrainState, found: Mapping[str, tuple[int, ...]]
) -> Iterator[CodecArrival]:
    """Yield a pair (shard, target) for each shard that must be read from a checkpoint to fill this rank's codec arrays.
    Arrays that the checkpoint lacks are set to zero.

    A codec array may be the sum of several saved tensors. The first one is read directly into the codec array, and
    `target` is None. For each further saved tensor, `target` is the codec array, and the caller must add the shard to
    `target` after reading the shard.

    `found` maps the names of the tensors in the checkpoint to their shapes. Tensors that this rank does not need are
    ignored."""
    layout = state.placement.layout
    fields = {field.name for page in layout.pages for field in page.fields}
    known: dict[tuple[str, str], list[CodecMemoryName]] = defaultdict(list)
    for name in sorted(filter(None, map(CodecMemoryName.parse, found))):
        known[name.memory, name.tensor if name.tensor in fields else layout.canonical_name(name.tensor)].append(name)
    for row in _iterate_codec_rows(state, {}):
        for part in row.iterate_saved_parts():
            fitting = [n for n in known[part.name.memory, part.name.tensor] if found[str(n)] == part.held.spec.shape]
            sources, target = row.list_saved_tensor_names_summing_to_part(part, fitting), part.held.array
            if not sources:
                target[...] = 0
            for i, source in enumerate(sources):
                array = namespace_of(target).empty_like(target) if i else target
                yield replace(part.held, name=str(source), array=array), target if i else None


def iterate_shards_then_add_to_targets(arriving: Iterable[CodecArrival]) -> Iterator[LocalShard]:
    """Yield the shard of each pair (shard, target) in `arriving`. The caller must fill the shard before it asks for the
    next one. The filled shard is then added to `target`, unless `target` is None."""
    for piece, target in arriving:
        yield piece
        if target is not None:
            target += piece.array


def _iterate_codec_rows(state: TrainState, instead: Mapping[LedgerKey, Any]) -> Iterator[CodecMemory]:
    for row, array in state.ledger.iterate_saved_rows():
        if row.key.kind == "memory":
            yield CodecMemory(state.placement, row, instead.get(row.key, array))


@dataclass(frozen=True)
class CodecMemory:
    """An array of the ledger (table of a rank's arrays) that a compression codec keeps between steps, such as an
    error-feedback residual."""

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

    def iterate_saved_parts(self) -> Iterator[SavedPart]:
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
        for field, start, own_array in page.iterate_fields_in_range(self.array, self.row.span):
            spec, (number, _) = (
                layout.specs[field.source],
                self._get_saved_index_and_count(axis, layout.specs[field.source]),
            )
            name = CodecMemoryName(axis, memory, number, field.name)
            part = LocalShard(str(name), own_array, start, spec, layout.spread.rank, layout.spread.width)
            yield SavedPart(name, part, place.tensor == 0 or spec.cut is not None or page.partial)

    def list_saved_tensor_names_summing_to_part(
        self, part: SavedPart, names: Sequence[CodecMemoryName]
    ) -> list[CodecMemoryName]:
        """Return the names of the saved tensors whose sum is `part`; usually there is only one.

        `names` are the candidates: all saved tensors of the same codec array and the same parameter (or page) as `part`
        that have the shape of the full tensor."""
        if not self.is_summed:
            return [part.name] if part.name in names else list(names[:1])
        place, name = self.placement, part.name
        here = place.axes.reduction_axes
        wanted = [n for n in names if (n.axis if n.axis in here else here[0]) == name.axis]
        _, count = self._get_saved_index_and_count(self._axis_and_name[0], part.held.spec)
        return [n for n in wanted if n.rank_number % count == name.rank_number]

    @property
    def _axis_and_name(self) -> tuple[str, str]:
        """The axis over which the codec sums, and the codec's name for the array."""
        axis, _, memory = self.row.key.name.partition("/")
        return axis, memory

    def _get_saved_index_and_count(self, axis: str, spec: ParameterSpec) -> tuple[int, int]:
        """Return the index of the saved tensor that this rank uses, and the number of saved tensors. A checkpoint may
        store this codec array as several tensors per parameter.

        If the parameter is not sharded over the tensor axis, all tensor ranks usually use the same tensor. However, if
        each tensor rank computes only a partial sum of the parameter's gradient, each tensor rank has its own
        tensor."""
        axes = self.placement.axes
        rank, size = (axes.data.rank, axes.data.size) if axis == "shard" else (axes.replica.rank, axes.replica.size)
        if spec.cut is None and self.page.partial:
            return rank * axes.tensor.size + axes.tensor.rank, size * axes.tensor.size
        return rank, size
