"""What is cut over the tensor axis, and how: parameters, values, and the layers between them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from copy import copy
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from fsdpx.core.array.namespace import namespace_of
from fsdpx.errors import ConfigError

__all__ = [
    "ColumnParallel",
    "Cuts",
    "FieldPartition",
    "Kind",
    "LayerDefault",
    "Mark",
    "Replicated",
    "RowParallel",
    "ShardSpec",
    "ShardedBatch",
    "ShardedFeatures",
    "ShardedSequence",
    "ShardingContext",
    "Sides",
    "VocabParallel",
    "bind_partition",
    "shard_bounds",
]  # fmt: skip


def shard_bounds(count: int, rank: int, width: int) -> tuple[int, int]:
    """The part of `count` things that falls to `rank` of `width`: [floor(count r/n), floor(count (r+1)/n))."""
    return count * rank // width, count * (rank + 1) // width


@dataclass(frozen=True)
class ShardSpec:
    """How a dim is cut over n ranks: of k grains in each block, rank r holds [floor(k r/n), floor(k (r+1)/n)).

    Parameters
    ----------
    dim : of the full array
    blocks : equal blocks one after the other, each cut by itself; queries, keys and values are 3
    grain : elements that must stay on one rank, such as those of one head
    """

    dim: int
    blocks: int = 1
    grain: int = 1

    def ranges_of_rank(self, shape: tuple[int, ...], rank: int, width: int) -> list[tuple[int, int]]:
        """Where in dim `dim` of a full array of `shape` the pieces of `rank` lie: (start, stop) per block."""
        size = shape[self.dim] // self.blocks
        start, stop = shard_bounds(self.count_grains(shape), rank, width)
        return [(b * size + self.grain * start, b * size + self.grain * stop) for b in range(self.blocks)]

    def count_grains(self, shape: tuple[int, ...]) -> int:
        """How many grains a block of dim `dim` has; ConfigError if dim is not a multiple of blocks and grain."""
        count, rest = divmod(shape[self.dim], self.blocks * self.grain)
        if rest:
            raise ConfigError(f"{self}: {shape[self.dim]} is not {self.blocks} blocks of multiples of {self.grain}")
        return count

    def local_shape(self, shape: tuple[int, ...], rank: int, width: int) -> tuple[int, ...]:
        """The shape of what `rank` holds of a full array of `shape`."""
        dims = list(shape)
        dims[self.dim] = sum(stop - start for start, stop in self.ranges_of_rank(shape, rank, width))
        return tuple(dims)

    def take_shard(self, array: Any, rank: int, width: int) -> Any:
        """What `rank` holds of a full `array`: a view where that is one piece, else a copy."""
        parts = [array[self._slice_dim(start, stop)] for start, stop in self.ranges_of_rank(array.shape, rank, width)]
        return parts[0] if len(parts) == 1 else namespace_of(array).concatenate(parts, axis=self.dim)

    def put_shard(self, full: Any, local: Any, rank: int, width: int) -> None:
        """Write what `rank` holds into its places of `full`."""
        offset = 0
        for start, stop in self.ranges_of_rank(full.shape, rank, width):
            full[self._slice_dim(start, stop)] = local[self._slice_dim(offset, offset + stop - start)]
            offset += stop - start

    def iterate_intervals(
        self, shape: tuple[int, ...], rank: int, width: int, start: int, stop: int
    ) -> Iterator[tuple[int, int]]:
        """The runs (start, stop) of flat elements of the full array that are local flat elements [start, stop), in
        order. One run per row for a cut of dim 1."""
        inner = math.prod(shape[self.dim + 1 :])
        pieces = [(a * inner, b * inner) for a, b in self.ranges_of_rank(shape, rank, width)]
        row, whole = sum(b - a for a, b in pieces), shape[self.dim] * inner
        if row == 0:
            return
        last: tuple[int, int] | None = None
        for outer in range(start // row, -(-stop // row)):
            for first, end in self._clip_pieces(pieces, start - outer * row, stop - outer * row):
                run = (outer * whole + first, outer * whole + end)
                if last is not None and last[1] == run[0]:
                    last = (last[0], run[1])
                    continue
                if last is not None:
                    yield last
                last = run
        if last is not None:
            yield last

    def _clip_pieces(self, pieces: list[tuple[int, int]], start: int, stop: int) -> Iterator[tuple[int, int]]:
        """The parts of `pieces`, laid end to end, that lie in [start, stop)."""
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
    """A value that every rank holds in full."""

    def __str__(self) -> str:
        return "a whole input"


@dataclass(frozen=True)
class ShardedSequence:
    """A value of which each rank holds some positions: it is cut along dim 1, the sequence."""

    def __str__(self) -> str:
        return "a part of the sequence"


@dataclass(frozen=True)
class ShardedBatch:
    """A value of which each rank holds some samples: it is cut along dim 0."""

    def __str__(self) -> str:
        return "a part of the samples"


@dataclass(frozen=True)
class ShardedFeatures:
    """A value of which each rank holds some features: it is cut along its last dim.

    Parameters
    ----------
    total : size of the last dim in the full value
    blocks, grain : how that dim is cut, see `ShardSpec`
    source : path of the layer that cut it
    ends : whether it may be the output of the model, as logits may
    """

    total: int
    blocks: int = 1
    grain: int = 1
    source: str = field(default="", compare=False)
    ends: bool = field(default=False, compare=False)

    def __str__(self) -> str:
        return f"features that {self.source!r} cut"


Cuts = tuple[int, ...]

Sides = tuple[int, int]
"""Cells before and after a part."""


@dataclass(frozen=True)
class FieldPartition:
    """How a field is cut: along each of its dims rank r of a line has the cells [cuts[r], cuts[r + 1]).

    ghosts: cells that arrays bring on each side beyond these, along each dim for each rank of a line; (): none.
    periods: whether each dim is periodic, by which ghost cells are filled; (): not known. letters: of the dims in the
    layout of the caller; "": none were given.
    """

    cuts: tuple[Cuts, ...]
    ghosts: tuple[tuple[Sides, ...], ...] = ()
    periods: tuple[bool, ...] = ()
    letters: str = ""

    @classmethod
    def on_one_rank(cls, shape: Sequence[int]) -> FieldPartition:
        """A field that one rank has all of."""
        return cls(tuple((0, int(n)) for n in shape))

    def __str__(self) -> str:
        return f"a part of a field of {' x '.join(map(str, self.shape))} cells"

    @cached_property
    def is_uncut(self) -> bool:
        """Whether one rank has all of it."""
        return all(len(cuts) == 2 for cuts in self.cuts)

    @cached_property
    def shape(self) -> tuple[int, ...]:
        """Cells of the whole field."""
        return tuple(cuts[-1] for cuts in self.cuts)

    @cached_property
    def largest_part_cells(self) -> int:
        """Cells of the largest part."""
        return math.prod(max(b - a for a, b in zip(cuts, cuts[1:], strict=False)) for cuts in self.cuts)

    def with_cuts(self, cuts: tuple[Cuts, ...]) -> FieldPartition:
        """Return a field of the same dims that is cut so, without ghost cells."""
        return FieldPartition(cuts, letters=self.letters)

    def join_on_one_rank(self) -> FieldPartition:
        """Return the same field as one rank would have it, with the ghost cells beyond its ends."""
        ghosts = []
        for cuts, sides in zip(self.cuts, self.ghosts, strict=False):
            rows = list(zip(cuts, cuts[1:], sides, strict=False))
            low = max(0, *(before - a for a, _, (before, _) in rows))
            ghosts.append(((low, max(0, *(b + after - cuts[-1] for _, b, (_, after) in rows))),))
        return replace(self, cuts=tuple((0, cuts[-1]) for cuts in self.cuts), ghosts=tuple(ghosts))

    def without_ghosts(self) -> FieldPartition:
        """Return the same parts without ghost cells."""
        return replace(self, ghosts=(), periods=())

    def locate_part(self, lines: Sequence[Any]) -> dict[int, tuple[int, int]]:
        """Return for each dim of (samples, channels, *cells) that is cut where this rank's cells begin, and how many
        the whole field has. lines: the ranks along each dim of cells."""
        return {2 + d: (cuts[lines[d].rank], cuts[-1]) for d, cuts in enumerate(self.cuts) if len(cuts) > 2}

    def dim_name(self, dim: int) -> str:
        """Name a dim of cells in errors: by its letter, or by its place in (samples, channels, *cells)."""
        return f"dim {self.letters[dim]}" if self.letters else f"dim {dim + 2}"

    def ghosts_along(self, dim: int) -> tuple[Sides, ...]:
        """The ghost cells along a dim, for each rank of a line; (): none of them has any."""
        ghosts = self.ghosts[dim] if self.ghosts else ()
        return ghosts if any(map(any, ghosts)) else ()

    def local_shape(self, place: Sequence[int]) -> tuple[int, ...]:
        """Cells of the part at a place of the grid."""
        return tuple(cuts[r + 1] - cuts[r] for cuts, r in zip(self.cuts, place, strict=True))


def bind_partition(owner: Any, parts: FieldPartition) -> Any:
    """A layer or a loss, whose `parts` says how its input is cut, on a part of a field that is cut so."""
    clone = copy(owner)
    clone.parts = parts
    return clone


Kind = Replicated | ShardedSequence | ShardedBatch | ShardedFeatures | FieldPartition
"""How a value lies over the ranks of the tensor axis, or of the grid that holds a field."""


@dataclass(frozen=True)
class ColumnParallel:
    """A Linear becomes a `ColumnParallelLinear`: activations after it are cut along the features until a RowParallel
    sums them.

    Without options it takes those that the plan of the layer around it has for this Linear.

    Parameters
    ----------
    gather_output : all-gather them at once instead
    blocks, grain : for results of equal blocks, or with features that must stay on one rank, see `ShardSpec`
    """

    gather_output: bool = False
    blocks: int = 1
    grain: int = 1


@dataclass(frozen=True)
class RowParallel:
    """A Linear that reads cut features becomes a `RowParallelLinear`."""


@dataclass(frozen=True)
class VocabParallel:
    """An Embedding or TokenEmbedding is cut by rows. A Linear that ends the model returns logits that are cut by
    classes for `CrossEntropyLoss` and all-gathered for any other loss."""


@dataclass(frozen=True)
class LayerDefault:
    """The layer's own plan: MultiHeadAttention is cut by heads, MLP by hidden features, MoE by experts, and so are
    those inside the layer; in a GPT the embedding and the head are cut by vocabulary too."""


Mark = ColumnParallel | RowParallel | VocabParallel | LayerDefault


@dataclass(frozen=True)
class ShardingContext:
    """What `Layer.shard_over_ranks` is asked: how the layer's inputs are cut, and what the plan wants of it.

    Parameters
    ----------
    path : the layer's dotted path in the model, for errors
    kinds : of the inputs, in their order
    width : ranks of the tensor axis
    mark : the plan's mark for this layer; None: it has none
    sequence : the argument `sequence` of `parallelise`
    """

    path: str
    kinds: Sequence[Kind]
    width: int
    mark: Mark | None = None
    sequence: str | None = None

    @property
    def unsharded_kind(self) -> Replicated | ShardedSequence:
        """How values are cut where no layer has cut their features."""
        return Replicated() if self.sequence is None else ShardedSequence()

    def refuse_mark(self, layer: object) -> None:
        """ConfigError if there is a mark."""
        if self.mark is not None:
            raise ConfigError(
                f"{self.path!r} {layer!r} cannot be cut as {type(self.mark).__name__}: ColumnParallel and RowParallel "
                "take a Linear, "
                "Vocab an Embedding, TokenEmbedding or the Linear that ends the model, and LayerDefault attention, "
                "MLP, MoE and "
                "what contains them"
            )

    def require_same_kind(self, layer: object) -> Kind:
        """How all inputs are cut; ConfigError unless they are cut alike. A layer without inputs gets whole ones."""
        kind = self.kinds[0] if self.kinds else Replicated()
        if any(other != kind for other in self.kinds):
            got = ", ".join(map(str, self.kinds))
            if all(isinstance(other, FieldPartition) for other in self.kinds):
                raise ConfigError(
                    f"{self.path!r} {layer!r} reads {got} together, which must have as many cells: along each dim take "
                    "a multiple of the product of the strides before it, such as 2**depth for a UNet"
                )
            raise ConfigError(
                f"{self.path!r} {layer!r} reads {got} together: close features that are cut with a RowParallel first, "
                "or cut "
                "both"
            )
        return kind

    def require_unsharded_features(self, layer: object) -> Kind:
        """How the first input is cut; ConfigError if along its features."""
        kind = self.kinds[0]
        if isinstance(kind, ShardedFeatures):
            raise ConfigError(f"{self.path!r} {layer!r} reads {kind}: close them with a RowParallel before it")
        return kind

    def require_enough(self, count: int, things: str, instead: str = "") -> None:
        """ConfigError if there are fewer things to deal out than ranks."""
        if count < self.width:
            way = f", or {instead}" if instead else ""
            raise ConfigError(
                f"{self.path!r} has {count} {things}, fewer than the {self.width} ranks of the tensor axis: use "
                f"Mesh(tensor={max(count, 1)}) or less{way}"
            )
