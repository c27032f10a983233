"""Segments: the parameters, or parts of parameters, that a flat shard holds, and their positions in the shard."""

from collections.abc import Callable, Mapping, Sequence
from fnmatch import fnmatchcase
from functools import cached_property
from itertools import groupby, pairwise
from typing import Any

from fsdpx.core.array.sums import EXPANSION_PARTS, compute_padded_sum_expansion, sum_exactly
from fsdpx.core.base.dataclass import dataclass, replace
from fsdpx.errors import ConfigError

__all__ = ["Exchange", "HyperparameterSpan", "ParamGroups", "ShardPeers", "ShardSegment", "ShardSegments"]

ParamGroups = Mapping[str, Mapping[str, float]]
"""Dict that maps name patterns to {"weight_decay": ..., "lr_scale": ...}. Patterns are matched against dotted names by
fnmatch; the first match applies."""
NORMS = "<norms>"
"""A special pattern that matches the parameters of norms (`ParameterSpec.norm`), regardless of their names."""

Exchange = Callable[[Mapping[str, Sequence[float]], int], Mapping[str, Sequence[Sequence[float]]]]
"""Function that all-gathers a few numbers per parameter. Its arguments are a dict that maps parameter names to this
rank's numbers, and the count of numbers per parameter. It returns a dict that contains, for each parameter name, one
list of numbers for each rank that holds a part of the parameter."""

Frozen = tuple[tuple[str, tuple[tuple[str, float], ...]], ...]


@dataclass(frozen=True)
class ShardSegment:
    """A part of a parameter in a shard: elements [start, stop) of the shard are elements [offset, offset + stop -
    start) of parameter `name`.

    Parameters
    ----------
    name : dotted name of the parameter
    start, stop : range of elements of the shard
    offset : first element of the part in the flat parameter
    size : number of elements of the full parameter
    shape : shape of the full parameter; () if it is not needed
    norm : whether the parameter belongs to a normalization layer
    missed : number of updates that the parameter missed while frozen, so that step number `step` of the trainer is
        update number `step - missed` of the parameter
    """

    name: str
    start: int
    stop: int
    offset: int
    size: int
    shape: tuple[int, ...] = ()
    norm: bool = False
    missed: int = 0

    def __post_init__(self) -> None:
        if not (0 <= self.start <= self.stop and 0 <= self.offset <= self.offset + self.stop - self.start <= self.size):
            raise ConfigError(f"{self!r} is not inside its shard and its parameter")


@dataclass(frozen=True)
class HyperparameterSpan:
    """Hyperparameters of the elements [start, stop) of a shard.

    Parameters
    ----------
    start, stop : range of elements of the shard
    lr_scale : factor by which the learning rate is multiplied
    weight_decay : weight decay; if None, the weight decay of the optimizer
    missed : as in `ShardSegment`
    """

    start: int
    stop: int
    lr_scale: float = 1.0
    weight_decay: float | None = None
    missed: int = 0

    def get_weight_decay(self, default: float) -> float:
        return default if self.weight_decay is None else self.weight_decay


@dataclass(frozen=True)
class ShardPeers:
    """The ranks that hold the shards of one flat array, and how to exchange data with them.

    Parameters
    ----------
    get_segments : function that returns the segments (parts of parameters) that each rank holds
    rank : this rank's index among these ranks
    all_to_all : function (send array, receive array, elements sent to each rank, elements received from each rank) that
        returns when all elements have arrived
    """

    get_segments: Callable[[], Sequence[tuple[ShardSegment, ...]]]
    rank: int
    all_to_all: Callable[[Any, Any, Sequence[int], Sequence[int]], None]

    @cached_property
    def peer_segments(self) -> Sequence[tuple[ShardSegment, ...]]:
        """The segments (parts of parameters) of each rank. They are computed on first use, because most optimizers do
        not need them."""
        return self.get_segments()

    @cached_property
    def parameters_on_several_ranks(self) -> list[ShardSegment]:
        """One segment (part of a parameter) for each parameter that is split over several ranks."""
        seen: dict[str, ShardSegment] = {}
        split: dict[str, ShardSegment] = {}
        for s in (s for items in self.peer_segments for s in items):
            (split if s.name in seen else seen)[s.name] = s
        return list(split.values())


@dataclass(frozen=True)
class ShardSegments:
    """The contents of a shard: its segments (parts of parameters) in order, beginning at element 0 and without gaps.

    `exchange` and `peers` are used only by optimizers that need data of full parameters. Such an optimizer uses
    `exchange` or `peers` once per update on every rank.

    Parameters
    ----------
    items : the segments; () if the shard is empty
    exchange : function that all-gathers a few numbers per parameter among the ranks that hold shards of the same flat
        array, or None if there is only one shard
    peers : describes the ranks that hold shards of the same flat array, and provides an all-to-all among them for large
        transfers; None if there is only one shard
    """

    items: tuple[ShardSegment, ...]
    exchange: Exchange | None = None
    peers: ShardPeers | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "items", tuple(self.items))
        if self.items and self.items[0].start != 0:
            raise ConfigError(f"the first segment {self.items[0].name!r} starts at {self.items[0].start}, not at 0")
        for a, b in pairwise(self.items):
            if a.stop != b.start:
                raise ConfigError(f"segment {b.name!r} starts at {b.start}, but {a.name!r} before it ends at {a.stop}")

    @cached_property
    def size(self) -> int:
        """The number of elements of the shard."""
        return self.items[-1].stop if self.items else 0

    def with_missed_update_counts(self, missed: Mapping[str, int]) -> "ShardSegments":
        """Return these segments (parts of parameters), each with the number of updates that its parameter missed while
        frozen.

        Parameters
        ----------
        missed : maps parameter names to numbers of missed updates; 0 for parameters that are not listed

        Returns
        -------
        ShardSegments
            the segments; calls with equal counts return the same cached object
        """
        if not missed:
            return self
        key = tuple([missed.get(s.name, 0) for s in self.items])
        if not any(key):
            return self
        if key not in self._cached_by_missed:
            items = tuple(replace(s, missed=n) for s, n in zip(self.items, key, strict=True))
            self._cached_by_missed[key] = replace(self, items=items)
        return self._cached_by_missed[key]

    @cached_property
    def _cached_by_missed(self) -> dict[tuple[int, ...], "ShardSegments"]:
        return {}

    @cached_property
    def has_missed_updates(self) -> bool:
        """Whether any of the parameters has missed an update while it was frozen."""
        return any(s.missed for s in self.items)

    @cached_property
    def spans_by_missed_updates(self) -> list[tuple[slice, int, "ShardSegments"]]:
        """The spans of consecutive parameters that have missed the same number of updates. Each span is given as (slice
        of the shard, number of missed updates, segments of the span)."""
        spans = []
        for missed, same in groupby(self.items, key=lambda s: s.missed):
            items = list(same)
            spans.append(
                (slice(items[0].start, items[-1].stop), missed, self._slice_segments(items[0].start, items[-1].stop))
            )
        return spans

    def hyperparameter_spans(self, groups: ParamGroups) -> tuple[HyperparameterSpan, ...]:
        """Split the shard into the fewest spans of elements that have the same hyperparameters.

        Parameters
        ----------
        groups : the optimizer's hyperparameters, keyed by name pattern

        Returns
        -------
        tuple of HyperparameterSpan
            the nonempty spans in the order of the shard; cached
        """
        return self._get_or_make_hyperparameter_spans(_merge_equal_hyperparameter_spans, groups)

    def hyperparameters_per_segment(self, groups: ParamGroups) -> tuple[HyperparameterSpan, ...]:
        """Return the hyperparameters of each segment (part of a parameter).

        Parameters
        ----------
        groups : the optimizer's hyperparameters, keyed by name pattern

        Returns
        -------
        tuple of HyperparameterSpan
            one span per segment, in the order of `items`; cached
        """
        return self._get_or_make_hyperparameter_spans(_make_hyperparameter_spans, groups)

    def split_into_blocks(self, max_elements: int) -> list[tuple[int, "ShardSegments"]]:
        """Split the shard into blocks of at most `max_elements` elements.

        Parameters
        ----------
        max_elements : maximum number of elements in a block

        Returns
        -------
        list of (start, ShardSegments)
            index of each block's first element in the shard, and the segments of the block; cached
        """
        if max_elements not in self._blocks_by_size:
            starts = range(0, self.size, max_elements)
            self._blocks_by_size[max_elements] = [(i, self._slice_segments(i, i + max_elements)) for i in starts]
        return self._blocks_by_size[max_elements]

    def _slice_segments(self, start: int, stop: int) -> "ShardSegments":
        cuts = [(s, max(s.start, start), min(s.stop, stop)) for s in self.items if s.start < stop and s.stop > start]
        return ShardSegments(
            tuple(replace(s, start=a - start, stop=b - start, offset=s.offset + a - s.start) for s, a, b in cuts)
        )

    @cached_property
    def _blocks_by_size(self) -> dict[int, list[tuple[int, "ShardSegments"]]]:
        return {}

    def _get_or_make_hyperparameter_spans(
        self, make: Callable[..., tuple[HyperparameterSpan, ...]], groups: ParamGroups
    ) -> tuple[HyperparameterSpan, ...]:
        """Return `make(items, groups)`, and cache the result. Every update needs it, and matching thousands of
        parameter names again would take longer than the update."""
        key = (make, make_hashable_groups(groups))
        if key not in self._cached_spans:
            self._cached_spans[key] = make(self.items, key[1])
        return self._cached_spans[key]

    @cached_property
    def _cached_spans(self) -> dict[Any, tuple[HyperparameterSpan, ...]]:
        return {}

    def exchange_parts(
        self, xp: Any, parts: Mapping[str, Any], sends: Callable[[ShardSegment], int], dtype: Any
    ) -> dict[str, list[tuple[ShardSegment, Any]]]:
        """Exchange parts of parameters between the ranks that hold shards of the same flat array: every rank that holds
        a part of a parameter gets all parts of this parameter. Collective over these ranks.

        Each rank sends one message to each rank that it shares a parameter with. If no parameter is split, no message
        is sent.

        Parameters
        ----------
        xp : namespace of the arrays
        parts : maps the name of each parameter to be exchanged to the flat array of `dtype` that this rank contributes
        sends : function that takes a segment of any rank, and returns how many elements that rank contributes for it
            (may be 0)
        dtype : dtype of all arrays

        Returns
        -------
        dict
            maps parameter names to lists of (segment, flat array), with one pair for each rank that holds a part,
            starting with this rank
        """
        parts_by_name = {s.name: [(s, parts[s.name])] for s in self.items if s.name in parts}
        if self.peers is None or not any(map(sends, self.peers.parameters_on_several_ranks)):
            return parts_by_name
        chosen = [
            [(theirs, mine) for theirs, mine in some if sends(mine)]
            for some in self._segment_pairs_shared_with_each_rank
        ]
        outgoing = [parts[mine.name] for some in chosen for _, mine in some]
        incoming = xp.empty(sum(sends(theirs) for some in chosen for theirs, _ in some), dtype=dtype)
        self.peers.all_to_all(
            xp.concatenate(outgoing) if outgoing else xp.empty(0, dtype=dtype),
            incoming,
            [sum(sends(mine) for _, mine in some) for some in chosen],
            [sum(sends(theirs) for theirs, _ in some) for some in chosen],
        )
        offset = 0
        for theirs in (theirs for some in chosen for theirs, _ in some):
            parts_by_name[theirs.name].append((theirs, incoming[offset : offset + sends(theirs)]))
            offset += sends(theirs)
        return parts_by_name

    def count_sent_elements(self, sends: Callable[[ShardSegment], int]) -> int | None:
        """Return the number of elements that this rank sends in `exchange_parts`.

        Parameters
        ----------
        sends : as in `exchange_parts`

        Returns
        -------
        int or None
            the number of elements, or None if there is no message
        """
        if self.peers is None or not any(map(sends, self.peers.parameters_on_several_ranks)):
            return None
        return sum(sends(mine) for some in self._segment_pairs_shared_with_each_rank for _, mine in some)

    @cached_property
    def _segment_pairs_shared_with_each_rank(self) -> list[list[tuple[ShardSegment, ShardSegment]]]:
        """A list of pairs (that rank's segment, this rank's segment) for each rank. There is one pair for each
        parameter that both ranks hold a part of. The list for this rank itself is empty."""
        assert self.peers is not None
        own_segments = {s.name: s for s in self.items}
        return [
            [(s, own_segments[s.name]) for s in items if s.name in own_segments] if rank != self.peers.rank else []
            for rank, items in enumerate(self.peers.peer_segments)
        ]

    def all_reduce_square_sums(self, *columns: Sequence[Sequence[float]]) -> tuple[list[float], ...]:
        """Sum quantities over full parameters, given partial sums on each rank. Each argument is a column with the
        partial sums of one quantity: one list for each segment (part of a parameter) of this rank. The result has one
        column per argument, which contains, for each segment, the sum over the full parameter to which the segment
        belongs.

        The sums are correctly rounded, so they do not depend on how the partial sums are distributed over shards. Each
        rank sends `EXPANSION_PARTS` numbers per column and parameter. Collective over the ranks that hold shards of
        the same flat array."""
        own_sums = {
            s.name: [x for column in columns for x in compute_padded_sum_expansion(column[i])]
            for i, s in enumerate(self.items)
        }
        alone = {name: [row] for name, row in own_sums.items()}
        known = alone if self.exchange is None else self.exchange(own_sums, EXPANSION_PARTS * len(columns))
        return tuple(
            [
                sum_exactly([x for row in known[s.name] for x in row[c * EXPANSION_PARTS : (c + 1) * EXPANSION_PARTS]])
                for s in self.items
            ]
            for c in range(len(columns))
        )


def is_in_group(name: str, norm: bool, pattern: str) -> bool:
    """Return whether a parameter belongs to the hyperparameter group with this pattern. `norm` says whether the
    parameter belongs to a normalization layer; the special pattern NORMS matches these parameters."""
    return norm if pattern == NORMS else fnmatchcase(name, pattern)


def make_hashable_groups(groups: ParamGroups) -> Frozen:
    return tuple((pattern, tuple(sorted(values.items()))) for pattern, values in groups.items())


def _make_hyperparameter_spans(items: tuple[ShardSegment, ...], groups: Frozen) -> tuple[HyperparameterSpan, ...]:
    def make_span(s: ShardSegment) -> HyperparameterSpan:
        values = next((values for pattern, values in groups if is_in_group(s.name, s.norm, pattern)), ())
        return HyperparameterSpan(s.start, s.stop, missed=s.missed, **dict(values))

    return tuple(make_span(s) for s in items)


def _merge_equal_hyperparameter_spans(
    items: tuple[ShardSegment, ...], groups: Frozen
) -> tuple[HyperparameterSpan, ...]:
    merged = []
    spans = _make_hyperparameter_spans(items, groups)
    for values, same in groupby(spans, key=lambda r: (r.lr_scale, r.weight_decay, r.missed)):
        stretch = list(same)
        merged.append(HyperparameterSpan(stretch[0].start, stretch[-1].stop, *values))
    return tuple(run for run in merged if run.start < run.stop)
