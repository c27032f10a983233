"""Stochastic gradient descent, with momentum as PyTorch has it (no dampening)."""

from dataclasses import dataclass, field
from typing import Any

from fsdpx.errors import ConfigError
from fsdpx.optim import kernels
from fsdpx.optim.optimizer import Elementwise, Rate, Slots
from fsdpx.optim.segments import Groups

__all__ = ["SGD"]


@dataclass(frozen=True)
class SGD(Elementwise):
    """d = g + weight_decay p; m = momentum m + d; p -= lr m, or lr (d + momentum m) with Nesterov
    (Sutskever et al. 2013, in the form of `torch.optim.SGD`).

    Slots: momentum, or none without momentum.

    Parameters
    ----------
    lr : a number, or a schedule from 1-based step to number
    momentum : decay of m per step, in [0, 1)
    weight_decay : times p, is added to g
    nesterov : look ahead by one step of momentum, which must be above 0
    groups : name pattern (fnmatch) -> {"weight_decay", "lr_scale"} for the parameters that match
    """

    lr: Rate = 1e-3
    momentum: float = 0.0
    weight_decay: float = 0.0
    nesterov: bool = False
    groups: Groups = field(default_factory=dict)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.nesterov and self.momentum == 0:
            raise ConfigError("SGD(nesterov=True) needs a momentum above 0")

    @property
    def slots(self) -> tuple[str, ...]:
        return ("momentum",) if self.momentum else ()

    def _apply(self, xp: Any, p: Any, g: Any, slots: Slots, step: int, **rates: float) -> None:
        kernels.sgd(xp, p, g, slots.get("momentum"), momentum=self.momentum, nesterov=self.nesterov, **rates)
