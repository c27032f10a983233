"""Pages and their sharding. A page is a flat buffer that holds several parameters, like FSDP's FlatParameter."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from itertools import accumulate
from math import prod
from typing import Any

from fsdpx.core.array.sums import CHUNK_ELEMENTS
from fsdpx.core.base.dataclass import dataclass

__all__ = [
    "ElementRange",
    "Interval",
    "OverlapPiece",
    "Page",
    "PageField",
    "ShardedPage",
    "group_nearby_runs",
    "intersect_ranges",
    "split_page_into_shard_ranges",
]

Interval = tuple[int, int]
"""Indices [start, stop) of elements of a full tensor, in C order."""


@dataclass(frozen=True)
class ElementRange:
    """The elements of a flat array with indices in [start, stop)."""

    start: int
    stop: int

    @property
    def size(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True)
class OverlapPiece:
    """The overlap [start, stop) of two element ranges from two lists: the range with index `have` in the first list,
    and the range with index `want` in the second list."""

    have: int
    want: int
    start: int
    stop: int


def intersect_ranges(have: Sequence[ElementRange], want: Sequence[ElementRange]) -> list[OverlapPiece]:
    """Return all non-empty overlaps between a range in `have` and a range in `want`. Within each list, ranges must be
    sorted and disjoint. For lists of n and m ranges, this takes O(n + m) time.

    This function is used to load and reshard checkpoints, and to find the parameters in a shard."""
    pieces = []
    h = w = 0
    while h < len(have) and w < len(want):
        start, stop = max(have[h].start, want[w].start), min(have[h].stop, want[w].stop)
        if start < stop:
            pieces.append(OverlapPiece(h, w, start, stop))
        if have[h].stop <= want[w].stop:
            h += 1
        else:
            w += 1
    return pieces


@dataclass(frozen=True)
class PageField:
    """The position of a parameter in a page (flat parameter buffer): elements [offset, offset + size), in C order.

    Attributes
    ----------
    name : name of the parameter
    shape : shape of the part of the parameter that this tensor rank holds
    offset, size : index of the parameter's first element in the page, and number of elements
    source : name of the parameter whose values are stored here; it differs from `name` only for a copy of a parameter
        that is tied across ranks
    """

    name: str
    shape: tuple[int, ...]
    offset: int
    size: int
    source: str


@dataclass(frozen=True)
class Page:
    """A flat buffer of `size` elements that holds the parameters in `fields` without gaps.

    Attributes
    ----------
    index : position of the page in the model's list of pages
    fields : the parameters, in the order in which they are stored
    size : number of elements
    trainable : whether the parameters have gradients
    partial : whether each tensor rank computes only a partial sum of the gradient
    rule : index of the rule that determines how the gradient is compressed when it is reduced
    """

    index: int
    fields: tuple[PageField, ...]
    size: int
    trainable: bool
    partial: bool = False
    rule: int = 0

    @classmethod
    def from_shapes(
        cls,
        index: int,
        shapes: Sequence[tuple[str, tuple[int, ...]]],
        trainable: bool,
        partial: bool = False,
        sources: Mapping[str, str] | None = None,
        rule: int = 0,
    ) -> Page:
        """Make a page (flat parameter buffer) with the parameters in `shapes`, a list of (name, shape) pairs, stored in
        this order. `sources` maps the name of a tied copy to the name of the parameter that it copies."""
        sizes = [prod(shape) for _, shape in shapes]
        offsets = [0, *accumulate(sizes)]
        known = sources or {}
        fields = tuple(
            PageField(name, tuple(shape), o, n, known.get(name, name))
            for (name, shape), o, n in zip(shapes, offsets, sizes, strict=False)
        )
        return cls(index, fields, offsets[-1], trainable, partial, rule)

    def view_parameters_by_name(self, flat: Any) -> dict[str, Any]:
        """Return a dict that maps each parameter name to a view of `flat` with the parameter's shape. `flat` must hold
        all elements of the page (flat parameter buffer)."""
        return {f.name: flat[f.offset : f.offset + f.size].reshape(f.shape) for f in self.fields}

    def iterate_fields_in_range(self, flat: Any, elements: ElementRange) -> Iterator[tuple[PageField, int, Any]]:
        """Yield (field, start, view) for each parameter that overlaps a range of elements of the page (flat parameter
        buffer). `start` is the index of the overlap's first element in the parameter, and `view` is a view of the
        overlap in `flat`. `flat` must hold the elements of the range."""
        for piece in self.find_field_overlaps(elements):
            field = self.fields[piece.have]
            yield field, piece.start - field.offset, flat[piece.start - elements.start : piece.stop - elements.start]

    def find_field_overlaps(self, shard: ElementRange) -> list[OverlapPiece]:
        """Return one `OverlapPiece` for each parameter that overlaps a shard of this page (flat parameter buffer). In
        each piece, `have` is the index of the parameter in the page's `fields`."""
        return intersect_ranges([ElementRange(f.offset, f.offset + f.size) for f in self.fields], [shard])

    def list_tensor_shapes_in_range(self, elements: ElementRange) -> list[tuple[int, ...]]:
        """Return the shapes of the tensors in a range of elements, in order. If only part of a tensor is in the range,
        this part is split into up to three tensors: a vector for the incomplete row at its start, the complete rows,
        and a vector for the incomplete row at its end."""
        tensor_shapes: list[tuple[int, ...]] = []
        for piece in self.find_field_overlaps(elements):
            field = self.fields[piece.have]
            start, stop, row = piece.start - field.offset, piece.stop - field.offset, prod(field.shape[1:])
            if len(field.shape) < 2 or not row:
                tensor_shapes.append((stop - start,))
                continue
            top = -(-start // row)
            bottom = max(stop // row, top)
            before, after = min(top * row, stop) - start, max(stop - bottom * row, 0)
            tensor_shapes += [(before,), (bottom - top, *field.shape[1:]), (after,)]
        return [shape for shape in tensor_shapes if prod(shape)]

    def list_block_edges(self) -> list[int]:
        """Return the element indices at which a shard may begin without splitting a block (a fixed range of a
        parameter's elements). If all shards begin at these indices, the sum over each block does not depend on the
        number of shards."""
        edges = [edge for f in self.fields for edge in range(f.offset, f.offset + f.size, CHUNK_ELEMENTS)]
        return edges + [self.size]


def split_page_into_shard_ranges(page: Page, ranks: int, align_to_blocks: bool = False) -> tuple[ElementRange, ...]:
    """Split a page (flat parameter buffer) of n elements into `ranks` shards without padding. Rank r holds elements
    [floor(n r / ranks), floor(n (r+1) / ranks)).

    If `align_to_blocks` is True, each bound moves to the nearest block edge, so that blockwise sums do not depend on
    the number of shards."""
    bounds = [page.size * r // ranks for r in range(ranks + 1)]
    if align_to_blocks and ranks > 1:
        edges = page.list_block_edges()
        bounds = [0, *(_find_nearest_edge(edges, b) for b in bounds[1:-1]), page.size]
    return tuple(ElementRange(a, b) for a, b in zip(bounds, bounds[1:], strict=False))


def group_nearby_runs(
    runs: Iterable[Interval], max_size: int, max_sparsity: float = math.inf
) -> Iterator[list[Interval]]:
    """Merge neighboring (start, stop) runs into groups, because one call per group is cheaper than one call per run.
    The span of a group is its number of elements, including the gaps between runs. It is limited in two ways: to
    `max_size`, and to `max_sparsity` times the number of elements without the gaps."""
    group: list[Interval] = []
    inside = 0
    for run in runs:
        span = run[1] - (group or [run])[0][0]
        if group and (span > max_size or span > max_sparsity * (inside + run[1] - run[0])):
            yield group
            group, inside = [], 0
        group.append(run)
        inside += run[1] - run[0]
    if group:
        yield group


def _find_nearest_edge(edges: list[int], value: int) -> int:
    index = bisect_left(edges, value)
    left = edges[max(index - 1, 0)]
    right = edges[min(index, len(edges) - 1)]
    return left if value - left <= right - value else right


@dataclass(frozen=True)
class ShardedPage:
    """A page (flat parameter buffer) that is sharded over the shard axis.

    Attributes
    ----------
    page : the full page
    shards : the range of elements that each rank along the axis holds
    rank : this rank's index on the axis
    """

    page: Page
    shards: tuple[ElementRange, ...]
    rank: int

    @property
    def own_range(self) -> ElementRange:
        return self.shards[self.rank]

    @cached_property
    def counts(self) -> list[int]:
        return [r.size for r in self.shards]

    @property
    def size(self) -> int:
        return self.page.size
