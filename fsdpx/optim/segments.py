"""Segments: which parameters a flat shard holds, and where."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cached_property
from itertools import groupby, pairwise
from typing import Any

from fsdpx.array.sums import exact_sum, expansion
from fsdpx.errors import ConfigError

__all__ = ["Groups", "Run", "Segment", "Segments"]

Groups = Mapping[str, Mapping[str, float]]
"""Name pattern (fnmatch, on dotted names; the first that matches wins) -> {"weight_decay": ..., "lr_scale": ...}."""

Frozen = tuple[tuple[str, tuple[tuple[str, float], ...]], ...]


@dataclass(frozen=True)
class Segment:
    """Elements [start, stop) of the shard are elements [offset, offset + stop - start) of parameter `name`.

    size: elements of the full parameter. shape: its shape, () where it does not matter."""

    name: str
    start: int
    stop: int
    offset: int
    size: int
    shape: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if not (0 <= self.start <= self.stop and 0 <= self.offset <= self.offset + self.stop - self.start <= self.size):
            raise ConfigError(f"{self!r} does not lie inside its shard and its parameter")


@dataclass(frozen=True)
class Run:
    """Elements [start, stop) of the shard have these hyperparameters. weight_decay: None: the optimiser's own."""

    start: int
    stop: int
    lr_scale: float = 1.0
    weight_decay: float | None = None

    def decay(self, default: float) -> float:
        return default if self.weight_decay is None else self.weight_decay


@dataclass(frozen=True)
class Segments:
    """What a shard holds: its segments in order, without gaps, from element 0 on; none if the shard is empty.

    exchange: `comm.all_gather_object` of the ranks that hold shards of the same flat array; None if there is one shard.
    Only optimisers that need norms of full parameters call it: once per update, on every rank."""

    items: tuple[Segment, ...]
    exchange: Callable[[Any], list[Any]] | None = None

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

    def runs(self, groups: Groups) -> tuple[Run, ...]:
        """The shard as the fewest runs of equal hyperparameters."""
        return self._made(_runs, groups)

    def overrides(self, groups: Groups) -> tuple[Run, ...]:
        """The hyperparameters of each segment, one run per segment."""
        return self._made(_overrides, groups)

    def blocks(self, most: int) -> list[tuple[int, "Segments"]]:
        """The shard in pieces of at most so many elements: where each starts, and what it holds."""
        if most not in self._blocks:
            self._blocks[most] = [(start, self._block(start, start + most)) for start in range(0, self.size, most)]
        return self._blocks[most]

    def _block(self, start: int, stop: int) -> "Segments":
        cuts = [(s, max(s.start, start), min(s.stop, stop)) for s in self.items if s.start < stop and s.stop > start]
        return Segments(
            tuple(Segment(s.name, a - start, b - start, s.offset + a - s.start, s.size, s.shape) for s, a, b in cuts)
        )

    @cached_property
    def _blocks(self) -> dict[int, list[tuple[int, "Segments"]]]:
        return {}

    def _made(self, make: Callable[..., tuple[Run, ...]], groups: Groups) -> tuple[Run, ...]:
        """Cached: every update needs them, and matching thousands of names takes longer than the update."""
        key = (make, freeze(groups))
        if key not in self._known:
            self._known[key] = make(self.items, key[1])
        return self._known[key]

    @cached_property
    def _known(self) -> dict[Any, tuple[Run, ...]]:
        return {}

    def whole(self, parts: Mapping[str, Any], empty: Callable[[Any, int], Any]) -> dict[str, Any]:
        """Full arrays from what ranks have of some parameters: name -> this rank's part, with its elements along the
        last dim. empty: makes one, for a part, of so many elements. Of parameters that this rank has no part of it gets
        none."""
        known = self.everyone([(s.name, (s.offset, parts[s.name])) for s in self.items if s.name in parts])
        full = {s.name: empty(parts[s.name], s.size) for s in self.items if s.name in parts}
        for name, array in full.items():
            for offset, part in known[name]:
                array[..., offset : offset + part.shape[-1]] = part
        return full

    def everyone(self, mine: Sequence[tuple[str, Any]]) -> dict[str, list[Any]]:
        """What all ranks say, this one (name, anything) `mine`, of the parameters that this rank has a part of."""
        rows = [mine] if self.exchange is None else self.exchange(mine)
        known: dict[str, list[Any]] = {s.name: [] for s in self.items}
        for name, said in (entry for row in rows for entry in row):
            if name in known:
                known[name].append(said)
        return known

    def square_sums(self, *columns: Sequence[Sequence[float]]) -> tuple[list[float], ...]:
        """Sums over full parameters: per column and segment, of all partial sums of its parameter on all ranks.

        Each column has one list of partial sums per segment. The sums are correctly rounded, so they do not depend on
        how the partial sums lie in shards."""
        mine = [(s.name, [expansion(column[i]) for column in columns]) for i, s in enumerate(self.items)]
        known = self.everyone(mine)
        return tuple(
            [exact_sum([number for said in known[s.name] for number in said[c]]) for s in self.items]
            for c in range(len(columns))
        )


def freeze(groups: Groups) -> Frozen:
    return tuple((pattern, tuple(sorted(values.items()))) for pattern, values in groups.items())


def _overrides(items: tuple[Segment, ...], groups: Frozen) -> tuple[Run, ...]:
    def of(s: Segment) -> Run:
        values = next((values for pattern, values in groups if fnmatchcase(s.name, pattern)), ())
        return Run(s.start, s.stop, **dict(values))

    return tuple(of(s) for s in items)


def _runs(items: tuple[Segment, ...], groups: Frozen) -> tuple[Run, ...]:
    merged = []
    for values, same in groupby(_overrides(items, groups), key=lambda r: (r.lr_scale, r.weight_decay)):
        stretch = list(same)
        merged.append(Run(stretch[0].start, stretch[-1].stop, *values))
    return tuple(run for run in merged if run.start < run.stop)
