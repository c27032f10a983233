"""Segments: which parameters a flat shard holds, and where."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import cached_property
from itertools import groupby, pairwise
from typing import Any

from fsdpx.core.array.sums import EXPANSION_PARTS, exact_sum, pad_expansion
from fsdpx.errors import ConfigError

__all__ = ["Exchange", "HyperparameterSpan", "ParamGroups", "ShardPeers", "ShardSegment", "ShardSegments"]

ParamGroups = Mapping[str, Mapping[str, float]]
"""Name pattern (fnmatch, on dotted names; the first that matches wins) -> {"weight_decay": ..., "lr_scale": ...}."""
NORMS = "<norms>"
"""In place of a pattern: the parameters of norms, by the kind of their layer."""

Exchange = Callable[[Mapping[str, Sequence[float]], int], Mapping[str, Sequence[Sequence[float]]]]
"""What this rank tells of each parameter that it has a part of, and how many numbers -> what all ranks told."""

Frozen = tuple[tuple[str, tuple[tuple[str, float], ...]], ...]


@dataclass(frozen=True)
class ShardSegment:
    """Elements [start, stop) of the shard are elements [offset, offset + stop - start) of parameter `name`.

    size: elements of the full parameter. shape: its shape, () where it does not matter. norm: it is of a norm. missed:
    updates that left it alone, while it was frozen; in update `step` of the trainer it is updated for the
    `step - missed`th time."""

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
            raise ConfigError(f"{self!r} does not lie inside its shard and its parameter")


@dataclass(frozen=True)
class HyperparameterSpan:
    """Elements [start, stop) of the shard have these hyperparameters. weight_decay: None: the optimiser's own. missed:
    as of `ShardSegment`."""

    start: int
    stop: int
    lr_scale: float = 1.0
    weight_decay: float | None = None
    missed: int = 0

    def decay_or(self, default: float) -> float:
        return default if self.weight_decay is None else self.weight_decay


@dataclass(frozen=True)
class ShardPeers:
    """The ranks that hold shards of the same flat array. hold: gives the segments of each; rank: which this one is.
    all_to_all: sends each of them its piece of an array, gets theirs, and returns when they are there; with how many
    elements go to each, and how many come."""

    hold: Callable[[], Sequence[tuple[ShardSegment, ...]]]
    rank: int
    all_to_all: Callable[[Any, Any, Sequence[int], Sequence[int]], None]

    @cached_property
    def peer_segments(self) -> Sequence[tuple[ShardSegment, ...]]:
        """Those segments; most optimisers ask for none of it."""
        return self.hold()

    @cached_property
    def split_parameters(self) -> list[ShardSegment]:
        """A segment of each parameter that several ranks have parts of."""
        seen: dict[str, ShardSegment] = {}
        torn: dict[str, ShardSegment] = {}
        for s in (s for items in self.peer_segments for s in items):
            (torn if s.name in seen else seen)[s.name] = s
        return list(torn.values())


@dataclass(frozen=True)
class ShardSegments:
    """What a shard holds: its segments in order, without gaps, from element 0 on; none if the shard is empty.

    exchange: sends a given count of numbers of each parameter to the ranks that hold shards of the same flat array, and
    gets theirs, for sums of a few numbers per parameter; peers: the same ranks, for what is large. None if there is
    one shard. Only optimisers that need something of full parameters use one of them: once per update, on every rank.
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
        """Elements of the shard."""
        return self.items[-1].stop if self.items else 0

    def count_missed(self, missed: Mapping[str, int]) -> "ShardSegments":
        """The same segments, with the updates that each parameter has missed: name -> how many, 0 if it is not
        there."""
        if not missed:
            return self
        key = tuple([missed.get(s.name, 0) for s in self.items])
        if not any(key):
            return self
        if key not in self._with_missed:
            items = tuple(replace(s, missed=n) for s, n in zip(self.items, key, strict=True))
            self._with_missed[key] = replace(self, items=items)
        return self._with_missed[key]

    @cached_property
    def _with_missed(self) -> dict[tuple[int, ...], "ShardSegments"]:
        return {}

    @cached_property
    def stretches_by_missed(self) -> list[tuple[slice, int, "ShardSegments"]]:
        """The shard as the fewest stretches of parameters that have missed the same updates: where each lies, how many
        these are, and what it holds."""
        spans = []
        for missed, same in groupby(self.items, key=lambda s: s.missed):
            items = list(same)
            spans.append(
                (slice(items[0].start, items[-1].stop), missed, self._cut_block(items[0].start, items[-1].stop))
            )
        return spans

    def hyperparameter_spans(self, groups: ParamGroups) -> tuple[HyperparameterSpan, ...]:
        """The shard as the fewest runs of equal hyperparameters."""
        return self._get_cached(_merge_spans, groups)

    def spans_per_segment(self, groups: ParamGroups) -> tuple[HyperparameterSpan, ...]:
        """The hyperparameters of each segment, one run per segment."""
        return self._get_cached(_make_spans, groups)

    def split_blocks(self, most: int) -> list[tuple[int, "ShardSegments"]]:
        """The shard in pieces of at most `most` elements: where each starts, and what it holds."""
        if most not in self._blocks_by_size:
            self._blocks_by_size[most] = [
                (start, self._cut_block(start, start + most)) for start in range(0, self.size, most)
            ]
        return self._blocks_by_size[most]

    def _cut_block(self, start: int, stop: int) -> "ShardSegments":
        cuts = [(s, max(s.start, start), min(s.stop, stop)) for s in self.items if s.start < stop and s.stop > start]
        return ShardSegments(
            tuple(replace(s, start=a - start, stop=b - start, offset=s.offset + a - s.start) for s, a, b in cuts)
        )

    @cached_property
    def _blocks_by_size(self) -> dict[int, list[tuple[int, "ShardSegments"]]]:
        return {}

    def _get_cached(
        self, make: Callable[..., tuple[HyperparameterSpan, ...]], groups: ParamGroups
    ) -> tuple[HyperparameterSpan, ...]:
        """Cached: every update needs them, and matching thousands of names takes longer than the update."""
        key = (make, freeze_groups(groups))
        if key not in self._cached_spans:
            self._cached_spans[key] = make(self.items, key[1])
        return self._cached_spans[key]

    @cached_property
    def _cached_spans(self) -> dict[Any, tuple[HyperparameterSpan, ...]]:
        return {}

    def exchange_parts(
        self, xp: Any, parts: Mapping[str, Any], sends: Callable[[ShardSegment], int], dtype: Any
    ) -> dict[str, list[tuple[ShardSegment, Any]]]:
        """What all ranks tell of the parameters in `parts`: name -> the segment and the flat array of each that has a
        part. One message to each rank that has another part of one of them; none at all where no parameter is cut.

        Parameters
        ----------
        parts : name -> what this rank tells, a flat array of `dtype`, of each parameter of which ranks tell something
        sends : elements of what a rank tells that has this segment; 0 where it tells nothing
        """
        parts_by_name = {s.name: [(s, parts[s.name])] for s in self.items if s.name in parts}
        if self.peers is None or not any(map(sends, self.peers.split_parameters)):
            return parts_by_name
        chosen = [[(theirs, mine) for theirs, mine in some if sends(mine)] for some in self._shared_segments]
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
        """Elements that this rank sends for that; None if there is no message."""
        if self.peers is None or not any(map(sends, self.peers.split_parameters)):
            return None
        return sum(sends(mine) for some in self._shared_segments for _, mine in some)

    @cached_property
    def _shared_segments(self) -> list[list[tuple[ShardSegment, ShardSegment]]]:
        """By rank, its segments of parameters of which this rank has another part, each with that."""
        assert self.peers is not None
        own_segments = {s.name: s for s in self.items}
        return [
            [(s, own_segments[s.name]) for s in items if s.name in own_segments] if rank != self.peers.rank else []
            for rank, items in enumerate(self.peers.peer_segments)
        ]

    def all_reduce_square_sums(self, *columns: Sequence[Sequence[float]]) -> tuple[list[float], ...]:
        """Sums over full parameters: per column and segment, of all partial sums of its parameter on all ranks.

        Each column has one list of partial sums per segment. The sums are correctly rounded, so they do not depend on
        how the partial sums lie in shards. `PARTS` numbers of each column and parameter are sent, see `gathers`."""
        own_sums = {
            s.name: [x for column in columns for x in pad_expansion(column[i])] for i, s in enumerate(self.items)
        }
        alone = {name: [row] for name, row in own_sums.items()}
        known = alone if self.exchange is None else self.exchange(own_sums, EXPANSION_PARTS * len(columns))
        return tuple(
            [
                exact_sum([x for row in known[s.name] for x in row[c * EXPANSION_PARTS : (c + 1) * EXPANSION_PARTS]])
                for s in self.items
            ]
            for c in range(len(columns))
        )


def is_in_group(name: str, norm: bool, pattern: str) -> bool:
    """Whether a group of this pattern is for a parameter of this name, which is of a norm or is not."""
    return norm if pattern == NORMS else fnmatchcase(name, pattern)


def freeze_groups(groups: ParamGroups) -> Frozen:
    return tuple((pattern, tuple(sorted(values.items()))) for pattern, values in groups.items())


def _make_spans(items: tuple[ShardSegment, ...], groups: Frozen) -> tuple[HyperparameterSpan, ...]:
    def make_span(s: ShardSegment) -> HyperparameterSpan:
        values = next((values for pattern, values in groups if is_in_group(s.name, s.norm, pattern)), ())
        return HyperparameterSpan(s.start, s.stop, missed=s.missed, **dict(values))

    return tuple(make_span(s) for s in items)


def _merge_spans(items: tuple[ShardSegment, ...], groups: Frozen) -> tuple[HyperparameterSpan, ...]:
    merged = []
    for values, same in groupby(_make_spans(items, groups), key=lambda r: (r.lr_scale, r.weight_decay, r.missed)):
        stretch = list(same)
        merged.append(HyperparameterSpan(stretch[0].start, stretch[-1].stop, *values))
    return tuple(run for run in merged if run.start < run.stop)
