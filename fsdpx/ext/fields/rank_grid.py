"""Reconstructs the Cartesian grid of ranks from the cells that each rank holds. Ranks may be numbered in any order."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import product
from typing import NamedTuple

from fsdpx.errors import ConfigError

__all__ = ["RankGrid", "find_rank_grid_of_parts"]

Interval = tuple[int, int]
Part = tuple[Interval, ...]
"""The range [start, stop) of a rank's cells along each dim."""


class RankGrid(NamedTuple):
    """A Cartesian grid of ranks: the number of ranks along each dim, and the rank at each position in C order."""

    dims: tuple[int, ...]
    ranks: tuple[int, ...]


def find_rank_grid_of_parts(parts: Sequence[Part], letters: str, rank0: int = 0) -> RankGrid:
    """Return the Cartesian grid of ranks that the parts of a field form.

    Parameters
    ----------
    parts : for each rank of a field, the range [start, stop) of cells that it holds along each dim
    letters : names of the dims, for error messages
    rank0 : first rank of the communicator that holds a part of the field, for error messages; default 0

    Returns
    -------
    RankGrid

    Raises
    ------
    ConfigError : if parts overlap, leave a gap, or do not form a Cartesian grid
    """
    _require_distinct_parts(parts, letters, rank0)
    lines = [_find_rank_intervals_along_dim(parts, dim, letters, rank0) for dim in range(len(letters))]
    dims = tuple(map(len, lines))
    left: dict[Part, list[int]] = {}
    for rank, part in enumerate(parts):
        left.setdefault(part, []).append(rank)
    ranks = []
    for part in product(*lines):
        if not left.get(part):
            raise ConfigError(f"Grid: the parts leave a gap: no rank has the cells {_format_cells(part, letters)}")
        ranks.append(left[part].pop(0))
    if len(ranks) != len(parts):
        _raise_parts_do_not_form_grid(parts, letters, rank0)
    return RankGrid(dims, tuple(ranks))


def _find_rank_intervals_along_dim(parts: Sequence[Part], dim: int, letters: str, rank0: int) -> list[Interval]:
    """Return the slabs of a dim in the order of their positions. Slabs are the intervals [start, stop) into which the
    ranks divide the dim. Raise ConfigError if slabs overlap or leave a gap.

    Each slab is held by the same number of ranks. Several slabs without cells may be at the same position."""
    counts, stop, before = Counter(part[dim] for part in parts), 0, None
    for interval in sorted(counts):
        if interval[0] != stop:
            _raise_slab_mismatch_error(parts, dim, before, interval, letters, rank0)
        stop, before = interval[1], interval
    ranks = min((count for (a, b), count in counts.items() if b > a), default=min(counts.values()))
    if any(count % ranks or (b > a and count > ranks) for (a, b), count in counts.items()):
        _raise_parts_do_not_form_grid(parts, letters, rank0)
    return [interval for interval in sorted(counts) for _ in range(counts[interval] // ranks)]


def _require_distinct_parts(parts: Sequence[Part], letters: str, rank0: int) -> None:
    seen: dict[Part, int] = {}
    for rank, part in enumerate(parts):
        other = seen.setdefault(part, rank)
        if other != rank and all(b > a for a, b in part):
            raise ConfigError(
                f"Grid: rank {rank0 + rank} has the same cells as rank {rank0 + other}, "
                f"{_format_cells(part, letters)}: "
                "offsets= is where each rank's part begins in the whole field. Members of an ensemble need dims= as "
                "well, the ranks of one of them along each dim"
            )


def _raise_slab_mismatch_error(
    parts: Sequence[Part], dim: int, before: Interval | None, after: Interval, letters: str, rank0: int
) -> None:
    """Raise ConfigError because slab `after` does not begin where slab `before` ends."""
    later, along = [r for r, part in enumerate(parts) if part[dim] == after], f"along dim {letters[dim]}"
    if after[0] < 0:
        raise ConfigError(
            f"Grid: rank {rank0 + later[0]} begins at {after[0]} {along}: offsets count the field's own cells, from 0 "
            "on, without ghost cells"
        )
    stop = 0 if before is None else before[1]
    if before is None or after[0] > stop:
        raise ConfigError(
            f"Grid: the parts leave a gap: {along} no rank has the cells {stop} to {after[0]}, before those of rank "
            f"{rank0 + later[0]}"
        )
    for one in (r for r, part in enumerate(parts) if part[dim] == before):
        for other in later:
            if all(max(a[0], b[0]) < min(a[1], b[1]) for a, b in zip(parts[one], parts[other], strict=True)):
                raise ConfigError(
                    f"Grid: the parts overlap: {along} rank {rank0 + one} has the cells {before[0]} to {before[1]}, "
                    f"and rank {rank0 + other} those from {after[0]} to {after[1]}. shape= and offsets= are without "
                    "ghost cells"
                )
    _raise_parts_do_not_form_grid(parts, letters, rank0)


def _raise_parts_do_not_form_grid(parts: Sequence[Part], letters: str, rank0: int) -> None:
    """Raise ConfigError because the parts do not form a grid. The message lists the ranks with inconsistent parts."""
    for dim, letter in enumerate(letters):
        ends = sorted((part[dim], rank) for rank, part in enumerate(parts))
        for ((_, stop), one), (after, other) in zip(ends, ends[1:], strict=False):
            if after[0] < stop and after != parts[one][dim]:
                raise ConfigError(
                    f"Grid: the parts do not form a Cartesian grid: along dim {letter} rank {rank0 + one} has the "
                    f"cells {_format_interval(parts[one][dim])}, and rank {rank0 + other} those "
                    f"{_format_interval(after)}: use slabs that span the full field"
                )
    counts = [Counter(part[dim] for part in parts) for dim in range(len(letters))]
    uneven = max(range(len(letters)), key=lambda dim: len(set(counts[dim].values())))
    (few, fewest), (many, most) = (pick(counts[uneven].items(), key=lambda row: row[1]) for pick in (min, max))
    rank = next(r for r, part in enumerate(parts) if part[uneven] == few)
    raise ConfigError(
        f"Grid: the parts do not form a Cartesian grid: along dim {letters[uneven]} {fewest} ranks, such as rank "
        f"{rank0 + rank}, have the cells {_format_interval(few)}, and {most} those {_format_interval(many)}"
    )


def _format_interval(interval: Interval) -> str:
    return f"from {interval[0]} to {interval[1]}"


def _format_cells(part: Iterable[Interval], letters: str) -> str:
    return ", ".join(f"{letter} {_format_interval(one)}" for letter, one in zip(letters, part, strict=True))
