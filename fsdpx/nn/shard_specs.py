"""Descriptions of how parameters and values are sharded over the tensor axis, and the marks that a tensor plan uses to
select the sharding of layers."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from copy import copy
from functools import cached_property, lru_cache
from typing import Any, ClassVar

from fsdpx.core.array.namespace import namespace_of
from fsdpx.core.base.dataclass import dataclass, field, replace
from fsdpx.errors import ConfigError

__all__ = [
    "ColumnParallel", "Cuts", "FieldPartition", "GhostWidths", "Kind", "LayerDefault", "Mark", "Replicated",
    "RowParallel", "ShardSpec", "ShardedBatch", "ShardedFeatures", "ShardedSequence", "ShardingContext",
    "VocabParallel", "bind_partition", "shard_bounds",
]  # fmt: skip


def shard_bounds(count: int, rank: int, width: int) -> tuple[int, int]:
    """Return the range (start, stop) of items that `rank` gets if `count` items are divided among `width` ranks in
    order. Rank r gets the items from `floor(count * r / width)` up to, but not including,
    `floor(count * (r + 1) / width)`."""
    return count * rank // width, count * (rank + 1) // width


@dataclass(frozen=True)
class ShardSpec:
    """The sharding of one dim of an array over n ranks. The dim consists of equal blocks. Each block consists of k
    grains, which are groups of elements that are never split. In every block, rank r holds the grains from
    `floor(k * r / n)` up to, but not including, `floor(k * (r + 1) / n)`.

    Parameters
    ----------
    dim : the sharded dim of the full array
    blocks : number of equal blocks along the dim, each of which is sharded separately; 3 for stacked queries, keys and
        values
    grain : number of consecutive elements that must stay on one rank, such as the elements of one head
    """

    dim: int
    blocks: int = 1
    grain: int = 1

    def ranges_of_rank_along_dim(self, shape: tuple[int, ...], rank: int, width: int) -> list[tuple[int, int]]:
        """Return the ranges along dim `dim` that a rank holds: one range for each block.

        Parameters
        ----------
        shape : shape of the full array
        rank, width : rank on the tensor axis, and size of the axis

        Returns
        -------
        list of (start, stop)
            one range of elements of `dim` per block; the range is empty if there are too few grains (groups of elements
            that stay together) for this rank to get one

        Raises
        ------
        ConfigError
            if the dim is not a multiple of `blocks * grain`
        """
        size = shape[self.dim] // self.blocks
        start, stop = shard_bounds(self.count_grains(shape), rank, width)
        return [(b * size + self.grain * start, b * size + self.grain * stop) for b in range(self.blocks)]

    def count_grains(self, shape: tuple[int, ...]) -> int:
        """Return the number of grains (groups of elements that stay on one rank) in each block of dim `dim`.

        Parameters
        ----------
        shape : shape of the full array

        Returns
        -------
        int
            shape[dim] / (blocks * grain)

        Raises
        ------
        ConfigError
            if the dim is not a multiple of `blocks * grain`
        """
        count, rest = divmod(shape[self.dim], self.blocks * self.grain)
        if rest:
            raise ConfigError(f"{self}: {shape[self.dim]} is not {self.blocks} blocks of multiples of {self.grain}")
        return count

    def local_shape(self, shape: tuple[int, ...], rank: int, width: int) -> tuple[int, ...]:
        """Return the shape of a rank's shard.

        Parameters
        ----------
        shape : shape of the full array
        rank, width : rank on the tensor axis, and size of the axis

        Returns
        -------
        tuple of int
            `shape`, with the size of dim `dim` replaced by the number of elements that the rank holds
        """
        dims = list(shape)
        dims[self.dim] = sum(stop - start for start, stop in self.ranges_of_rank_along_dim(shape, rank, width))
        return tuple(dims)

    def take_shard(self, array: Any, rank: int, width: int) -> Any:
        """Return a rank's shard of a full array.

        Parameters
        ----------
        array : the full array
        rank, width : rank on the tensor axis, and size of the axis

        Returns
        -------
        array
            a view of `array` if the shard is one range (blocks = 1), else a copy
        """
        parts = [
            array[self._slice_dim(start, stop)]
            for start, stop in self.ranges_of_rank_along_dim(array.shape, rank, width)
        ]
        return parts[0] if len(parts) == 1 else namespace_of(array).concatenate(parts, axis=self.dim)

    def put_shard(self, full: Any, local: Any, rank: int, width: int) -> None:
        """Write a rank's shard into its ranges of a full array.

        Parameters
        ----------
        full : the full array, which is written in place
        local : the rank's shard, with the shape `local_shape(full.shape, rank, width)`
        rank, width : rank on the tensor axis, and size of the axis
        """
        offset = 0
        for start, stop in self.ranges_of_rank_along_dim(full.shape, rank, width):
            full[self._slice_dim(start, stop)] = local[self._slice_dim(offset, offset + stop - start)]
            offset += stop - start

    def iterate_full_intervals(
        self, shape: tuple[int, ...], rank: int, width: int, start: int, stop: int
    ) -> Iterator[tuple[int, int]]:
        """Yield the ranges of flat indices into the full array that correspond to a range of flat indices into a rank's
        shard.

        Adjacent intervals are merged. For a shard along dim 1, there is one interval per row.

        Parameters
        ----------
        shape : shape of the full array
        rank, width : rank on the tensor axis, and size of the axis
        start, stop : range of flat indices into the rank's shard

        Returns
        -------
        iterator of (start, stop)
            ranges of flat indices into the full array, in ascending order
        """
        inner = math.prod(shape[self.dim + 1 :])
        pieces = [(a * inner, b * inner) for a, b in self.ranges_of_rank_along_dim(shape, rank, width)]
        row, whole = sum(b - a for a, b in pieces), shape[self.dim] * inner
        if row == 0:
            return
        last: tuple[int, int] | None = None
        for outer in range(start // row, -(-stop // row)):
            for first, end in self._slice_concatenated_ranges(pieces, start - outer * row, stop - outer * row):
                run = (outer * whole + first, outer * whole + end)
                if last is not None and last[1] == run[0]:
                    last = (last[0], run[1])
                    continue
                if last is not None:
                    yield last
                last = run
        if last is not None:
            yield last

    def _slice_concatenated_ranges(
        self, pieces: list[tuple[int, int]], start: int, stop: int
    ) -> Iterator[tuple[int, int]]:
        """Yield the parts of the ranges `pieces` that lie at positions [start, stop), where positions are counted as if
        all ranges were concatenated."""
        offset = 0
        for first, end in pieces:
            a, b = max(start - offset, 0), min(stop - offset, end - first)
            if a < b:
                yield first + a, first + b
            offset += end - first

    def _slice_dim(self, start: int, stop: int) -> tuple[slice, ...]:
        return (*(slice(None),) * self.dim, slice(start, stop))


@dataclass(frozen=True)
class Replicated:
    """Marks a value that every rank holds in full."""

    def __str__(self) -> str:
        return "a whole input"


@dataclass(frozen=True)
class ShardedSequence:
    """Marks a value that is sharded along the sequence (dim 1): each rank holds some positions."""

    def __str__(self) -> str:
        return "a part of the sequence"


@dataclass(frozen=True)
class ShardedBatch:
    """Marks a value that is sharded along the samples (dim 0): each rank holds some samples."""

    def __str__(self) -> str:
        return "a part of the samples"


@dataclass(frozen=True)
class ShardedFeatures:
    """Marks a value that is sharded along its last dim: each rank holds some features.

    Parameters
    ----------
    total : size of the last dim of the full value
    blocks, grain : sharding of the last dim, see `ShardSpec`
    source : path of the layer that sharded the value, for error messages
    ends : whether the value may be the output of the model, such as logits that are sharded by classes
    """

    total: int
    blocks: int = 1
    grain: int = 1
    source: str = field(default="", compare=False)
    ends: bool = field(default=False, compare=False)

    def __str__(self) -> str:
        return f"features that {self.source!r} cut"


Cuts = tuple[int, ...]

GhostWidths = tuple[int, int]
"""Numbers of ghost cells before and after a shard of a field along one dim."""


@dataclass(frozen=True)
class FieldPartition:
    """Domain decomposition of a field over a grid of ranks. Along each dim, rank r holds the cells from cuts[r] up to,
    but not including, cuts[r + 1].

    Parameters
    ----------
    cuts : for each dim, the first cell of each rank along the dim, followed by the number of cells of the full field
        along the dim
    ghosts : for each dim and each rank along it, the numbers of ghost cells before and after the rank's own cells in
        the caller's arrays; () if there are no ghost cells
    periods : for each dim, whether the dim is periodic; this determines how ghost cells are filled; () if unknown
    letters : names of the dims in the caller's layout, one letter each; "" if not given
    """

    cuts: tuple[Cuts, ...]
    ghosts: tuple[tuple[GhostWidths, ...], ...] = ()
    periods: tuple[bool, ...] = ()
    letters: str = ""

    has_cells: ClassVar[bool] = True
    """Whether arrays are (samples, channels, *cells). Otherwise they are (samples, rows, features)."""

    @staticmethod
    def on_one_rank(shape: Sequence[int]) -> FieldPartition:
        """Return the trivial partition of a field of `shape` cells: one rank holds all of it."""
        return _make_partition_on_one_rank(tuple(shape))

    def __str__(self) -> str:
        return f"a part of a field of {' x '.join(map(str, self.shape))} cells"

    @cached_property
    def is_on_one_rank(self) -> bool:
        """Whether a single rank holds the full field."""
        return all(len(cuts) == 2 for cuts in self.cuts)

    @cached_property
    def shape(self) -> tuple[int, ...]:
        """Number of cells of the full field along each dim."""
        return tuple(cuts[-1] for cuts in self.cuts)

    @cached_property
    def largest_part_cells(self) -> int:
        """Number of cells of the largest shard."""
        return math.prod(max(b - a for a, b in zip(cuts, cuts[1:], strict=False)) for cuts in self.cuts)

    def with_cuts(self, cuts: tuple[Cuts, ...]) -> FieldPartition:
        """Return a partition with the given cuts and this partition's dim letters, but without ghost cells and without
        `periods`."""
        return FieldPartition(cuts, letters=self.letters)

    def make_single_rank_partition(self) -> FieldPartition:
        """Return the trivial partition of the same field on one rank. Only ghost cells beyond the ends of the field are
        kept."""
        ghosts = []
        for cuts, sides in zip(self.cuts, self.ghosts, strict=False):
            rows = list(zip(cuts, cuts[1:], sides, strict=False))
            low = max(0, *(before - a for a, _, (before, _) in rows))
            ghosts.append(((low, max(0, *(b + after - cuts[-1] for _, b, (_, after) in rows))),))
        return replace(self, cuts=tuple((0, cuts[-1]) for cuts in self.cuts), ghosts=tuple(ghosts))

    def without_ghosts(self) -> FieldPartition:
        """Return the same partition without ghost cells and without `periods`."""
        return replace(self, ghosts=(), periods=())

    def can_run_unchanged(self, layer: Any) -> bool:
        """Return whether a layer gives the right result if each rank runs it unchanged on its shard of the field."""
        return layer.acts_on == "element" or bool(layer.fields)

    def explain_unsupported_layer(self, layer: Any) -> str:
        """Return a message that explains why a layer cannot run on a shard of the field, and what to do instead."""
        what = "field" if self.has_cells else "mesh"
        return (
            f"acts on each {layer.acts_on} as a whole (Layer.acts_on): it must see the whole {what}; put it into a "
            "model without domain="
        )

    def can_run_bound(self, layer: Any) -> bool:
        """Return whether a layer that must know how its input is partitioned can be bound to this partition (see
        `bind_partition`)."""
        return True

    @classmethod
    def to_channels_first(cls, array: Any) -> Any:
        """Return a view of a field array, with the dims reordered so that channels are dim 1. A second call on this
        view restores the original order of the dims."""
        return array

    def bind_loss(self, loss: Any) -> Any:
        """Return the loss to use if each rank holds a shard of the output."""
        return loss.bind_partition(self)

    def get_first_cells_and_field_sizes(self, lines: Sequence[Any]) -> dict[int, tuple[int, int]]:
        """Return {dim: (first cell of this rank's array, number of cells of the full field)} for each dim of an array
        (samples, channels, *cells) that is partitioned or has ghost cells. The array includes the ghost cells, so it
        may begin or end outside the field.

        `lines` contains, for each cell dim, the ranks along that dim."""
        found = {}
        for d, cuts in enumerate(self.cuts):
            rank = lines[d].rank if len(cuts) > 2 else 0
            if len(cuts) > 2 or self.ghosts:
                found[2 + d] = cuts[rank] - (self.ghosts[d][rank][0] if self.ghosts else 0), cuts[-1]
        return found

    def get_random_numbers(self, random: Any, shape: tuple[int, ...], lines: Sequence[Any]) -> Any:
        """Return random numbers from `random`, a `core.array.random.Random`, for this rank's shard of a field array,
        including ghost cells. Each cell gets the same numbers that it would get on a single rank. Ghost cells outside
        the field get the numbers of the cells at the opposite end of the field. `lines` is as in
        `get_first_cells_and_field_sizes`."""
        cuts = self.get_first_cells_and_field_sizes(lines)
        return random.get_number_subarray(shape, cuts) if cuts else random.get_number_range(shape)

    def get_dim_name(self, dim: int) -> str:
        """Return the name of a cell dim for error messages: "dim x" if the dims have letters, otherwise the index of
        the dim in an array (samples, channels, *cells)."""
        return f"dim {self.letters[dim]}" if self.letters else f"dim {dim + 2}"

    def get_ghosts_along(self, dim: int) -> tuple[GhostWidths, ...]:
        """For each rank along a dim, return the numbers of ghost cells before and after its own cells. Return () if no
        rank has ghost cells."""
        ghosts = self.ghosts[dim] if self.ghosts else ()
        return ghosts if any(map(any, ghosts)) else ()

    def local_shape(self, place: Sequence[int]) -> tuple[int, ...]:
        """Return the shape of the shard of the rank with grid coordinates `place`: the number of cells along each dim,
        without ghost cells."""
        return tuple(cuts[r + 1] - cuts[r] for cuts, r in zip(self.cuts, place, strict=True))


@lru_cache(1 << 10)
def _make_partition_on_one_rank(shape: tuple[int, ...]) -> FieldPartition:
    return FieldPartition(tuple((0, int(n)) for n in shape))


def bind_partition(owner: Any, parts: FieldPartition) -> Any:
    """Return a copy of a layer or loss that runs on this rank's shard of a partitioned field. The partition is stored
    in the attribute `parts` of the copy."""
    clone = copy(owner)
    clone.parts = parts
    return clone


Kind = Replicated | ShardedSequence | ShardedBatch | ShardedFeatures | FieldPartition
"""How a value is distributed over the ranks of the tensor axis, or over the grid of ranks that holds a field."""


@dataclass(frozen=True)
class ColumnParallel:
    """Tensor-plan mark that replaces a Linear with a `ColumnParallelLinear`. The output stays sharded along the
    features until a layer with the mark RowParallel sums over the features.

    A mark without options takes the options that the built-in plan of the enclosing layer defines for this Linear.

    Parameters
    ----------
    gather_output : whether to all-gather the output, so that every rank has all features
    blocks, grain : options for outputs that consist of several equal blocks, or whose features must stay together in
        groups, see `ShardSpec`
    """

    gather_output: bool = False
    blocks: int = 1
    grain: int = 1


@dataclass(frozen=True)
class RowParallel:
    """Tensor-plan mark that replaces a Linear with a `RowParallelLinear`. The input must be sharded along the features.
    """


@dataclass(frozen=True)
class VocabParallel:
    """Tensor-plan mark that shards an Embedding or TokenEmbedding by rows. The last layer of the model may be a Linear
    with this mark. `CrossEntropyLoss` is then computed on logits that are sharded by classes; for any other loss, the
    logits are all-gathered."""


@dataclass(frozen=True)
class LayerDefault:
    """Tensor-plan mark that applies the built-in plans of a layer and of all layers inside it: MultiHeadAttention is
    sharded by heads, MLP by hidden features, and MoE by experts. In a GPT, the embedding and the head are also sharded
    by vocabulary."""


Mark = ColumnParallel | RowParallel | VocabParallel | LayerDefault


@dataclass(frozen=True)
class ShardingContext:
    """The argument of `Layer.shard_over_ranks`: the sharding of the layer's inputs, and the tensor plan's mark for the
    layer.

    Parameters
    ----------
    path : dotted path of the layer in the model, for error messages
    kinds : sharding of each input, in order
    width : number of ranks on the tensor axis
    mark : the tensor plan's mark for this layer, such as `ColumnParallel`, or None if the layer has no mark
    sequence : the argument `sequence` of `parallelize`
    redistribution_functions : the functions with which `ShardingWalk` chooses redistributions (inserted layers that
        change the sharding of a value); needed by layers that contain a model and shard it themselves
    """

    path: str
    kinds: Sequence[Kind]
    width: int
    mark: Mark | None = None
    sequence: str | None = None
    redistribution_functions: Sequence[Any] = ()

    @property
    def unsharded_kind(self) -> Replicated | ShardedSequence:
        """Sharding of a value whose features are not sharded. The value is sharded along the sequence if `sequence` is
        set, and replicated otherwise."""
        return Replicated() if self.sequence is None else ShardedSequence()

    def require_no_tensor_plan_mark(self, layer: object) -> None:
        """Raise ConfigError if the tensor plan has a mark for a layer that supports none.

        Parameters
        ----------
        layer : the layer, for the error message
        """
        if self.mark is not None:
            raise ConfigError(
                f"{self.path!r} {layer!r} cannot be sharded as {type(self.mark).__name__}: ColumnParallel and "
                "RowParallel take a Linear, VocabParallel an Embedding, a TokenEmbedding or the Linear that ends the "
                "model, and LayerDefault attention, MLP, MoE and what contains them"
            )

    def get_common_input_sharding(self, layer: object) -> Kind:
        """Return the common sharding of all inputs; `Replicated` for a layer without inputs.

        Parameters
        ----------
        layer : the layer, for the error message

        Returns
        -------
        Kind
            the sharding of every input

        Raises
        ------
        ConfigError
            if two inputs are sharded differently
        """
        kind = self.kinds[0] if self.kinds else Replicated()
        if any(other != kind for other in self.kinds):
            got = ", ".join(map(str, self.kinds))
            if any(isinstance(other, FieldPartition) and not other.has_cells for other in self.kinds):
                raise ConfigError(
                    f"{self.path!r} {layer!r} reads {got} together: GatherNodes brings values of nodes to edges, "
                    "Aggregate those of edges to nodes, and FiLM or ConcatScalars scalars to nodes"
                )
            if all(isinstance(other, FieldPartition) for other in self.kinds):
                raise ConfigError(
                    f"{self.path!r} {layer!r} reads {got} together, which must have as many cells: along each dim take "
                    "a multiple of the product of the strides before it"
                )
            raise ConfigError(
                f"{self.path!r} {layer!r} reads {got} together: close features that are cut with a RowParallel first, "
                "or cut "
                "both"
            )
        return kind

    def require_unsharded_features(self, layer: object) -> Kind:
        """Return the sharding of the first input, which must not be sharded along its features.

        Parameters
        ----------
        layer : the layer, for the error message

        Returns
        -------
        Kind
            any sharding except `ShardedFeatures`

        Raises
        ------
        ConfigError
            if the first input is sharded along its features
        """
        kind = self.kinds[0]
        if isinstance(kind, ShardedFeatures):
            raise ConfigError(f"{self.path!r} {layer!r} reads {kind}: close them with a RowParallel before it")
        return kind

    def require_at_least_one_per_rank(self, count: int, things: str, instead: str = "") -> None:
        """Raise ConfigError unless every rank of the tensor axis gets at least one item.

        Parameters
        ----------
        count : number of items to distribute
        things : name of the items for the error message, such as "heads"
        instead : for the error message, a remedy other than a smaller tensor axis, or "" if there is none
        """
        if count < self.width:
            way = f", or {instead}" if instead else ""
            raise ConfigError(
                f"{self.path!r} has {count} {things}, fewer than the {self.width} ranks of the tensor axis: use "
                f"Mesh(tensor={max(count, 1)}) or less{way}"
            )
