"""Which rank holds which elements: parts of tensors without their data, and elements that no rank holds."""

from __future__ import annotations

import math
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from fsdpx.checkpoint.pieces import Held, held, kept
from fsdpx.nn.cut import Cut
from fsdpx.nn.layer import Spec
from fsdpx.state.ledger import Key
from fsdpx.state.state import TrainState

__all__ = ["Descriptor", "Gaps", "Runs", "describe", "live", "meet", "missing", "moving", "runs", "uncovered"]

Gaps = tuple[np.ndarray, np.ndarray]
"""Runs [start, stop) of a tensor that no rank has, in order."""
GAPS = 4
"""Gaps of one tensor that are listed; the rest are counted."""


class Descriptor(NamedTuple):
    """A `Held` without its array, of the tensor `name` of `shape`: `size` elements from `start` on of what line `rank`
    of `width` of the tensor axis has by `cut`. cut: None where that is the whole tensor."""

    name: str
    start: int
    size: int
    rank: int
    width: int
    shape: tuple[int, ...]
    cut: Cut | None
    dtype: str

    @property
    def frame(self) -> tuple[int, int, Cut | None]:
        """Parts of one tensor with the same frame lie in the same flat array."""
        return self.rank, self.width, self.cut

    @property
    def stop(self) -> int:
        return self.start + self.size

    @property
    def span(self) -> tuple[int, int]:
        """The range of the whole tensor in which all elements of this piece lie."""
        return (self.start, self.stop) if self.cut is None else (0, math.prod(self.shape))


class Runs(NamedTuple):
    """Elements [start[i], stop[i]) of a whole tensor, in order, are those from at[i] on of a local flat array."""

    start: np.ndarray
    stop: np.ndarray
    at: np.ndarray


def describe(part: Held) -> Descriptor:
    spec, dtype = part.spec, sys.intern(part.array.dtype.name)
    is_cut = spec.cut is not None and part.width > 1
    rank, width, cut = (part.rank, part.width, spec.cut) if is_cut else (0, 1, None)
    return Descriptor(part.name, part.start, int(part.array.size), rank, width, spec.shape, cut, dtype)


def runs(part: Descriptor) -> Runs:
    """The same elements as `Cut.runs`, all at once: a cut of dim 1 has one run per row."""
    first, last, cut = part.start, part.stop, part.cut
    if cut is None:
        found = np.array([[first], [last], [0]], np.int64)
        return Runs(*(found if part.size else found[:, :0]))
    inner = math.prod(part.shape[cut.dim + 1 :])
    blocks = np.array(cut.ranges(part.shape, part.rank, part.width), np.int64) * inner
    lengths = blocks[:, 1] - blocks[:, 0]
    row = max(int(lengths.sum()), 1)
    rows = np.arange(first // row, -(-last // row), dtype=np.int64)[:, None]
    local = rows * row + (np.cumsum(lengths) - lengths)
    begin, end = np.maximum(local, first), np.minimum(local + lengths, last)
    start = rows * (part.shape[cut.dim] * inner) + blocks[:, 0] + begin - local
    there = begin < end
    return Runs(start[there], (start + end - begin)[there], begin[there] - first)


def live(state: TrainState, before: Mapping[Key, Any] | None = None) -> Iterator[Held]:
    """The parts of the train state that are up to date here: running statistics only where the pipe moves them.

    before: arrays in place of some rows as they are, see `moving`: those of a step that did not come to its end are
    spoilt."""
    home, here = state.placement.statistics_home, state.placement.axes.coordinates.pipe
    for part in held(state):
        if part.name not in home:
            yield part
        elif home[part.name] == here:
            array = (before or {}).get(Key("statistic", None, part.name), part.array)
            yield replace(part, array=array.reshape(-1))
    yield from kept(state, before)


def moving(state: TrainState) -> Iterator[tuple[Key, Any]]:
    """Rows that change before all ranks agree on a step: running statistics in forward, what codecs keep in reduces."""
    return ((row.key, array) for row, array in state.ledger.saved() if row.key.kind in ("statistic", "memory"))


def missing(have: Iterable[Iterable[Descriptor]], want: Mapping[str, Spec]) -> list[str]:
    """The tensors of `want` of which no rank holds some element, as text: "0.weight: elements 12..24 of 48".

    have: of each rank. Pure: ranks that know the same say the same."""
    parts, texts = _by_name(part for some in have for part in some), []
    for name, spec in want.items():
        start, stop = uncovered(parts[name], spec.size)
        if start.size:
            gaps = [f"{a}..{b}" for a, b in zip(start[:GAPS].tolist(), stop[:GAPS].tolist(), strict=True)]
            more = f" and {start.size - GAPS} more runs" if start.size > GAPS else ""
            texts.append(f"{name}: elements {', '.join(gaps)}{more} of {spec.size}")
    return texts


def uncovered(parts: Sequence[Descriptor], size: int) -> Gaps:
    """The elements of a tensor of `size` elements that are in none of `parts`."""
    found = [runs(part) for part in parts]
    start = np.concatenate([*(r.start for r in found), [size]]).astype(np.int64)
    stop = np.concatenate([*(r.stop for r in found), [size]]).astype(np.int64)
    order = np.argsort(start, kind="stable")
    reach = np.concatenate([[0], np.maximum.accumulate(stop[order])[:-1]])
    gap = start[order] > reach
    return reach[gap], start[order][gap]


def meet(gaps: Gaps, part: Descriptor) -> bool:
    """Whether an element of `part` is in one of the gaps."""
    start, stop = gaps
    some = runs(part)
    after = np.searchsorted(stop, some.start, "right")  # the first gap that ends after the start of each run
    there = after < start.size
    return bool(np.any(start[after[there]] < some.stop[there]))


def _by_name(parts: Iterable[Descriptor]) -> defaultdict[str, list[Descriptor]]:
    found: defaultdict[str, list[Descriptor]] = defaultdict(list)
    for part in parts:
        found[part.name].append(part)
    return found
