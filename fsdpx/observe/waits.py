"""Which rank waits for which, from the traces of all ranks: in each transfer, the last rank to come is waited for."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from fsdpx.observe.chrome import MICRO, RankTrace

__all__ = ["Spans", "Waits", "waits"]


@dataclass(frozen=True)
class Spans:
    """Seconds of one rank in the steps of a trace: in all, computing, and in the transfers that it waited for after all
    ranks had come."""

    whole: float
    computing: float
    moving: float


@dataclass(frozen=True)
class Waits:
    """matrix: seconds, by [waiting rank][rank waited for]. spans: by rank. steps: how many."""

    matrix: list[list[float]]
    spans: list[Spans]
    steps: int


def waits(ranks: Sequence[RankTrace]) -> Waits:
    """Over all steps in the traces."""
    come: dict[str, list[tuple[float, int]]] = defaultdict(list)  # key -> when each rank came
    for n, one in enumerate(ranks):
        for key, begin, _, _ in _slices(one):
            come[key].append((begin, n))
    last = {key: max(some) for key, some in come.items()}
    size = len(ranks)
    matrix, spans, steps = [[0.0] * size for _ in ranks], list[Spans](), 0
    for n, one in enumerate(ranks):
        moving = 0.0
        for key, begin, end, stops in _standing(one):
            late, who = last.get(key, (begin, n))
            came = min(max(late, begin), end)
            if who != n:
                matrix[n][who] += came - begin
            moving += end - came if stops or who != n else end - begin
        whole = sum(e["dur"] for e in one.events if e.get("cat") == "step") / MICRO
        computing = sum(e["dur"] for e in one.events if e.get("cat") in ("compute", "host")) / MICRO
        spans.append(Spans(whole, computing, moving))
        steps = sum(e.get("cat") == "step" for e in one.events)
    return Waits(matrix, spans, steps)


def _slices(one: RankTrace) -> Iterator[tuple[str, float, float, bool]]:
    """The transfers that other ranks take part in: key, begin and end on rank 0's clock, and whether this rank
    stood still."""
    for event in one.events:
        key = event.get("args", {}).get("key")
        if event["ph"] == "X" and event["cat"] != "wait" and key:
            yield (key, *_span(one, event), bool(event["args"]["stops"]))


def _standing(one: RankTrace) -> Iterator[tuple[str, float, float, bool]]:
    """Where the rank stood still: in transfers, and before actions that need one."""
    for key, begin, end, stops in _slices(one):
        if stops:
            yield key, begin, end, True
    for event in one.events:
        if event.get("cat") == "wait":
            yield (event["args"]["key"], *_span(one, event), False)


def _span(one: RankTrace, event: dict[str, Any]) -> tuple[float, float]:
    return one.aligned(event["ts"] / MICRO), one.aligned((event["ts"] + event["dur"]) / MICRO)
