"""Stochastic gradient descent, with momentum as PyTorch has it (no dampening)."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from fsdpx.errors import ConfigError
from fsdpx.optim import kernels
from fsdpx.optim.optimizer import Rate, demand_groups, demand_number, demand_rate, demand_shard
from fsdpx.optim.segments import Groups, Segments

__all__ = ["SGD"]


@dataclass(frozen=True)
class SGD:
    """d = g + weight_decay p; m = momentum m + d; p -= lr m, or lr (d + momentum m) with Nesterov
    (Sutskever et al. 2013, in the form of `torch.optim.SGD`).

    lr: number or schedule. groups: name pattern -> {"weight_decay", "lr_scale"}. One slot, none without
    momentum.
    """

    lr: Rate = 1e-3
    momentum: float = 0.0
    weight_decay: float = 0.0
    nesterov: bool = False
    groups: Groups = field(default_factory=dict)

    def __post_init__(self) -> None:
        demand_rate(self, self.lr)
        demand_number(self, "momentum", self.momentum, below=1.0)
        demand_number(self, "weight_decay", self.weight_decay)
        demand_groups(self, self.groups)
        if self.nesterov and self.momentum == 0:
            raise ConfigError("SGD(nesterov=True) needs a momentum above 0")

    @property
    def slots(self) -> tuple[str, ...]:
        return ("momentum",) if self.momentum else ()

    def update(
        self,
        xp: Any,
        p: Any,
        g: Any,
        slots: Mapping[str, Any],
        *,
        lr: float,
        step: int,
        segments: Segments,
        scale: float = 1.0,
    ) -> None:
        demand_shard(self, p, g, slots, step, segments)
        for run in segments.runs(self.groups):
            at = slice(run.start, run.stop)
            kernels.sgd(
                xp,
                p[at],
                g[at],
                slots["momentum"][at] if self.momentum else None,
                lr=lr * run.lr_scale,
                momentum=self.momentum,
                nesterov=self.nesterov,
                weight_decay=run.decay(self.weight_decay),
                scale=scale,
            )
