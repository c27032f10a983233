"""Expert load of mixture-of-experts layers: how evenly routers distribute tokens over the experts."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from math import log, nan

from fsdpx.core.base.dataclass import dataclass
from fsdpx.core.base.messages import format_table
from fsdpx.core.trainer.call_runner import CallRunner

__all__ = [
    "METRICS",
    "ExpertLoad",
    "ExpertLoadMetrics",
    "format_expert_load",
    "gather_expert_load",
    "make_expert_load_by_layer",
    "sum_expert_load_over_ranks",
]

METRICS = ("expert_imbalance", "expert_dropped")
"""Names of the expert-load metrics that `fit` records at each validation."""


@dataclass(frozen=True)
class ExpertLoad:
    """How often a layer's router chose each expert, in the training steps since the last `reset_counters`.

    Attributes
    ----------
    chosen : number of times that the router chose each expert for this rank's tokens or, in a sum over ranks, for all
        ranks' tokens
    computed : for each rank that has the layer, the number of (token, expert) choices that it computed
    """

    chosen: tuple[int, ...]
    computed: tuple[int, ...]

    @property
    def imbalance(self) -> float:
        """Load of the most chosen expert, divided by the mean load. It is 1 if the load is even, and at most the number
        of experts."""
        return max(self.chosen) / self._mean_choices if self._mean_choices else nan

    @property
    def entropy(self) -> float:
        """Entropy of the load, divided by the logarithm of the number of experts. It is 0 if the same expert is always
        chosen, and 1 if the load is even."""
        shares = [n / sum(self.chosen) for n in self.chosen if n]
        return -sum(share * log(share) for share in shares) / log(len(self.chosen)) if len(self.chosen) > 1 else 1.0

    @property
    def dropped_choices(self) -> int:
        """Number of (token, expert) choices that were not computed. It is 0 for layers without a capacity limit, such
        as `nn.MoE`.

        If this object holds the load of only one of several ranks, choices that other ranks computed count as dropped.
        """
        return sum(self.chosen) - sum(self.computed)

    @property
    def rank_imbalance(self) -> float:
        """Number of (token, expert) choices that the busiest rank computed, divided by the mean over the ranks."""
        return max(self.computed) * len(self.computed) / sum(self.computed) if sum(self.computed) else nan

    def counts_since(self, earlier: ExpertLoad | None) -> ExpertLoad:
        """Return the load since an earlier reading, as the difference of the counts.

        Parameters
        ----------
        earlier : the earlier reading; if None, count from the beginning

        Returns
        -------
        ExpertLoad
            the difference, or all counts if counting was restarted after the earlier reading
        """
        if earlier is None or sum(earlier.chosen) > sum(self.chosen) or len(earlier.computed) != len(self.computed):
            return self
        pairs = (zip(self.chosen, earlier.chosen, strict=True), zip(self.computed, earlier.computed, strict=True))
        return ExpertLoad(*(tuple(now - then for now, then in pair) for pair in pairs))

    @property
    def _mean_choices(self) -> float:
        return sum(self.chosen) / len(self.chosen)


def make_expert_load_by_layer(tallies: Mapping[str, Sequence[int]]) -> dict[str, ExpertLoad]:
    """Return a dict from layer path to the load of the layer's experts on one rank.

    `tallies` maps the path of a layer to its counters: how often each expert was chosen, followed by the number of
    choices that the rank computed."""
    return {path: ExpertLoad(tuple(chosen), (computed,)) for path, (*chosen, computed) in tallies.items()}


def sum_expert_load_over_ranks(ranks: Iterable[Mapping[str, ExpertLoad]]) -> dict[str, ExpertLoad]:
    """Return a dict from layer path to the load of the layer's experts, summed over all ranks."""
    found: dict[str, ExpertLoad] = {}
    for each in ranks:
        for path, one in each.items():
            have = found.get(path, ExpertLoad((0,) * len(one.chosen), ()))
            chosen = tuple(a + b for a, b in zip(have.chosen, one.chosen, strict=True))
            found[path] = ExpertLoad(chosen, have.computed + one.computed)
    return found


class ExpertLoadMetrics:
    """Computes the expert-load metrics in the log of `fit`, each for the period since the previous validation.
    `metrics` are their names."""

    metrics = METRICS

    def __init__(self) -> None:
        self._before: dict[str, ExpertLoad] = {}

    def compute_metrics_since_last_call(self, routing: Mapping[str, ExpertLoad]) -> dict[str, float]:
        """Return a dict of two metrics for the period since the last call: the largest imbalance of any layer, and the
        number of dropped choices, summed over all layers."""
        before, self._before = self._before, dict(routing)
        new = [one.counts_since(before.get(path)) for path, one in routing.items()]
        values = max((one.imbalance for one in new), default=nan), float(sum(one.dropped_choices for one in new))
        return dict(zip(METRICS, values, strict=True))


def format_expert_load(routing: Mapping[str, ExpertLoad], all_ranks: bool) -> list[str]:
    """Return a table of expert load, as a list with one string. The list is empty if there are no experts.

    `all_ranks` is True if the load covers all ranks; if it is False, the number of dropped choices is unknown."""
    if not routing:
        return []
    ends = ("dropped", "busiest rank/mean") if all_ranks else ("computed here",)
    rows: list[tuple[str, ...]] = [("experts of", "choices", "most", "least", "most/mean", "entropy", *ends)]
    for path, one in routing.items():
        end = (f"{one.dropped_choices:,}", f"{one.rank_imbalance:.2f}") if all_ranks else (f"{sum(one.computed):,}",)
        shares = [f"{100 * n / max(sum(one.chosen), 1):.1f} %" for n in (max(one.chosen), min(one.chosen))]
        rows.append((path, f"{sum(one.chosen):,}", *shares, f"{one.imbalance:.2f}", f"{one.entropy:.3f}", *end))
    return [format_table(rows)]


def gather_expert_load(host: CallRunner) -> dict[str, ExpertLoad]:
    """Gather the expert loads of all ranks and return their sums, for `trainer.inspect.gather_expert_load`.
    Collective."""
    host.agree_on_call("gather_expert_load")
    return sum_expert_load_over_ranks(
        host.world.all_gather_value(make_expert_load_by_layer(host.placement.axes.counters.tallies))
    )
