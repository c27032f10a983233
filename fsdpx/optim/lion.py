"""Lion, "evolved sign momentum" (Chen et al. 2023, Symbolic discovery of optimization algorithms)."""

from dataclasses import dataclass, field
from typing import Any, ClassVar

from fsdpx.optim import kernels
from fsdpx.optim.optimizer import Elementwise, Rate, Slots
from fsdpx.optim.segments import Groups

__all__ = ["Lion"]


@dataclass(frozen=True)
class Lion(Elementwise):
    """p = (1 - lr weight_decay) p - lr sign(beta1 m + (1 - beta1) g); m = beta2 m + (1 - beta2) g (Chen et al. 2023).

    Slots: m, half of Adam's state.

    Parameters
    ----------
    lr : a number, or a schedule from 1-based step to number; 3 to 10 times smaller than AdamW's
    betas : weight of m in the update, and decay of m per step, each in [0, 1)
    weight_decay : share of p that is taken off per step, times lr
    groups : name pattern (fnmatch) -> {"weight_decay", "lr_scale"} for the parameters that match
    """

    lr: Rate = 1e-4
    betas: tuple[float, float] = (0.9, 0.99)
    weight_decay: float = 0.0
    groups: Groups = field(default_factory=dict)
    slots: ClassVar[tuple[str, ...]] = ("m",)

    def _apply(self, xp: Any, p: Any, g: Any, slots: Slots, step: int, **rates: float) -> None:
        kernels.lion(xp, p, g, slots["m"], beta1=self.betas[0], beta2=self.betas[1], **rates)
