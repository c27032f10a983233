"""Adam (Kingma & Ba 2015) and AdamW (Loshchilov & Hutter 2019), in the form of `torch.optim`."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

from fsdpx.optim import kernels
from fsdpx.optim.optimizer import Rate, demand_betas, demand_groups, demand_number, demand_rate, demand_shard
from fsdpx.optim.segments import Groups, Segments

__all__ = ["Adam", "AdamW"]


@dataclass(frozen=True)
class Adam:
    """p -= lr m / (sqrt(v) + eps) with bias-corrected means m of g and v of g^2; weight decay is added to g.

    lr: number or schedule. groups: name pattern -> {"weight_decay", "lr_scale"}. Slots: m, v.
    """

    lr: Rate = 1e-3
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.0
    groups: Groups = field(default_factory=dict)
    slots: ClassVar[tuple[str, ...]] = ("m", "v")

    def __post_init__(self) -> None:
        _demand(self)

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
        _update(self, xp, p, g, slots, lr, step, segments, scale, decoupled=False)


@dataclass(frozen=True)
class AdamW:
    """Adam with decoupled weight decay: p *= 1 - lr weight_decay before the step.

    lr: number or schedule. groups: name pattern -> {"weight_decay", "lr_scale"}. Slots: m, v.
    """

    lr: Rate = 1e-3
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.01
    groups: Groups = field(default_factory=dict)
    slots: ClassVar[tuple[str, ...]] = ("m", "v")

    def __post_init__(self) -> None:
        _demand(self)

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
        _update(self, xp, p, g, slots, lr, step, segments, scale, decoupled=True)


def _demand(self: Adam | AdamW) -> None:
    demand_rate(self, self.lr)
    demand_betas(self, self.betas)
    demand_number(self, "eps", self.eps)
    demand_number(self, "weight_decay", self.weight_decay)
    demand_groups(self, self.groups)


def _update(
    self: Adam | AdamW,
    xp: Any,
    p: Any,
    g: Any,
    slots: Mapping[str, Any],
    lr: float,
    step: int,
    segments: Segments,
    scale: float,
    decoupled: bool,
) -> None:
    demand_shard(self, p, g, slots, step, segments)
    for run in segments.runs(self.groups):
        at = slice(run.start, run.stop)
        kernels.adam(
            xp,
            p[at],
            g[at],
            slots["m"][at],
            slots["v"][at],
            lr=lr * run.lr_scale,
            beta1=self.betas[0],
            beta2=self.betas[1],
            eps=self.eps,
            weight_decay=run.decay(self.weight_decay),
            decoupled=decoupled,
            step=step,
            scale=scale,
        )
