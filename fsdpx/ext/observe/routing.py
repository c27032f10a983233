"""How layers with experts share positions out among them, as they count it themselves."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import log, nan

from fsdpx.core.base.messages import format_table
from fsdpx.core.trainer.call_runner import CallRunner

__all__ = [
    "METRICS",
    "ExpertLoad",
    "ExpertLoadMetrics",
    "collect_expert_load",
    "format_expert_load",
    "gather_expert_load",
    "sum_expert_load",
]

METRICS = ("expert_imbalance", "expert_dropped")
"""The metrics of experts that `fit` records at validations."""


@dataclass(frozen=True)
class ExpertLoad:
    """How the positions of one layer were shared out among experts, in training steps since the last `reset`.

    chosen: how often each expert was chosen, by this rank's positions or those of all ranks. computed: how many of
    these choices experts have computed on each rank that has the layer."""

    chosen: tuple[int, ...]
    computed: tuple[int, ...]

    @property
    def imbalance(self) -> float:
        """Choices of the expert that was chosen most, over their mean: 1 is even, the number of experts the worst."""
        return max(self.chosen) / self._mean_choices if self._mean_choices else nan

    @property
    def entropy(self) -> float:
        """The entropy of the load of experts, divided by the logarithm of their number: 0 if one expert is always
        chosen, 1 if all are chosen alike."""
        shares = [n / sum(self.chosen) for n in self.chosen if n]
        return -sum(share * log(share) for share in shares) / log(len(self.chosen)) if len(self.chosen) > 1 else 1.0

    @property
    def dropped_choices(self) -> int:
        """Choices that no expert has computed; of one rank of several, those that others computed count among them."""
        return sum(self.chosen) - sum(self.computed)

    @property
    def rank_imbalance(self) -> float:
        """Rows of the rank that computed most, over their mean."""
        return max(self.computed) * len(self.computed) / sum(self.computed) if sum(self.computed) else nan

    def counts_since(self, earlier: ExpertLoad | None) -> ExpertLoad:
        """The counts added since `earlier`; all of them, if counting was restarted."""
        if earlier is None or sum(earlier.chosen) > sum(self.chosen) or len(earlier.computed) != len(self.computed):
            return self
        pairs = (zip(self.chosen, earlier.chosen, strict=True), zip(self.computed, earlier.computed, strict=True))
        return ExpertLoad(*(tuple(now - then for now, then in pair) for pair in pairs))

    @property
    def _mean_choices(self) -> float:
        return sum(self.chosen) / len(self.chosen)


def collect_expert_load(tallies: Mapping[str, Sequence[int]]) -> dict[str, ExpertLoad]:
    """By the path of a layer, from what layers counted on one rank: choices of each expert, and rows computed."""
    return {path: ExpertLoad(tuple(chosen), (computed,)) for path, (*chosen, computed) in tallies.items()}


def sum_expert_load(ranks: Iterable[Mapping[str, ExpertLoad]]) -> dict[str, ExpertLoad]:
    """The routing of each layer, with the counts of all ranks added up."""
    found: dict[str, ExpertLoad] = {}
    for each in ranks:
        for path, one in each.items():
            have = found.get(path, ExpertLoad((0,) * len(one.chosen), ()))
            chosen = tuple(a + b for a, b in zip(have.chosen, one.chosen, strict=True))
            found[path] = ExpertLoad(chosen, have.computed + one.computed)
    return found


class ExpertLoadMetrics:
    """The load between one look and the next. metrics: names of what it tells."""

    metrics = METRICS

    def __init__(self) -> None:
        self._before: dict[str, ExpertLoad] = {}

    def metrics_since(self, routing: Mapping[str, ExpertLoad]) -> dict[str, float]:
        """`METRICS` of the steps since the last look: the largest imbalance of a layer, and all choices dropped."""
        before, self._before = self._before, dict(routing)
        new = [one.counts_since(before.get(path)) for path, one in routing.items()]
        values = max((one.imbalance for one in new), default=nan), float(sum(one.dropped_choices for one in new))
        return dict(zip(METRICS, values, strict=True))


def format_expert_load(routing: Mapping[str, ExpertLoad], whole: bool) -> list[str]:
    """A table, or nothing without experts. whole: of all ranks, so that choices and rows computed add up."""
    if not routing:
        return []
    ends = ("dropped", "busiest rank/mean") if whole else ("computed here",)
    rows: list[tuple[str, ...]] = [("experts of", "choices", "most", "least", "most/mean", "entropy", *ends)]
    for path, one in routing.items():
        end = (f"{one.dropped_choices:,}", f"{one.rank_imbalance:.2f}") if whole else (f"{sum(one.computed):,}",)
        shares = [f"{100 * n / max(sum(one.chosen), 1):.1f} %" for n in (max(one.chosen), min(one.chosen))]
        rows.append((path, f"{sum(one.chosen):,}", *shares, f"{one.imbalance:.2f}", f"{one.entropy:.3f}", *end))
    return [format_table(rows)]


def gather_expert_load(host: CallRunner) -> dict[str, ExpertLoad]:
    """What `trainer.inspect.gather_expert_load` returns. Collective."""
    host.agree_on_call("routing")
    return sum_expert_load(host.world.all_gather_data(collect_expert_load(host.placement.axes.counters.tallies)))
