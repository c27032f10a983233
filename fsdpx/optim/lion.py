"""Lion, "evolved sign momentum" (Chen et al. 2023, Symbolic discovery of optimization algorithms)."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

from fsdpx.optim import kernels
from fsdpx.optim.optimizer import Rate, demand_betas, demand_groups, demand_number, demand_rate, demand_shard
from fsdpx.optim.segments import Groups, Segments

__all__ = ["Lion"]


@dataclass(frozen=True)
class Lion:
    """p = (1 - lr weight_decay) p - lr sign(beta1 m + (1 - beta1) g); m = beta2 m + (1 - beta2) g.

    lr: number or schedule, 3 to 10 times smaller than AdamW's. groups: name pattern -> {"weight_decay",
    "lr_scale"}. One slot, m: half of Adam's state.
    """

    lr: Rate = 1e-4
    betas: tuple[float, float] = (0.9, 0.99)
    weight_decay: float = 0.0
    groups: Groups = field(default_factory=dict)
    slots: ClassVar[tuple[str, ...]] = ("m",)

    def __post_init__(self) -> None:
        demand_rate(self, self.lr)
        demand_betas(self, self.betas)
        demand_number(self, "weight_decay", self.weight_decay)
        demand_groups(self, self.groups)

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
            kernels.lion(
                xp,
                p[at],
                g[at],
                slots["m"][at],
                lr=lr * run.lr_scale,
                beta1=self.betas[0],
                beta2=self.betas[1],
                weight_decay=run.decay(self.weight_decay),
                scale=scale,
            )
