"""Adam (Kingma & Ba 2015) and AdamW (Loshchilov & Hutter 2019), in the form of `torch.optim`."""

from dataclasses import dataclass, field
from typing import Any, ClassVar

from fsdpx.optim import kernels
from fsdpx.optim.optimizer import Elementwise, Rate, Slots
from fsdpx.optim.segments import Groups

__all__ = ["Adam", "AdamW"]


@dataclass(frozen=True)
class _Adam(Elementwise):
    """What Adam and AdamW share: they differ in how weights decay."""

    lr: Rate = 1e-3
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.0
    groups: Groups = field(default_factory=dict)
    slots: ClassVar[tuple[str, ...]] = ("m", "v")
    decoupled: ClassVar[bool]

    def _apply(self, xp: Any, p: Any, g: Any, slots: Slots, step: int, **rates: float) -> None:
        options = {"beta1": self.betas[0], "beta2": self.betas[1], "eps": self.eps, **rates}
        kernels.adam(xp, p, g, slots["m"], slots["v"], decoupled=self.decoupled, step=step, **options)


@dataclass(frozen=True)
class Adam(_Adam):
    """p -= lr m / (sqrt(v) + eps) with bias-corrected means m of g and v of g^2 (Kingma & Ba 2015). Slots: m, v.

    Parameters
    ----------
    lr : a number, or a schedule from 1-based step to number
    betas : decay of the two means per step, each in [0, 1)
    eps : added to the square root
    weight_decay : times p, is added to g
    groups : name pattern (fnmatch) -> {"weight_decay", "lr_scale"} for the parameters that match
    """

    decoupled = False


@dataclass(frozen=True)
class AdamW(_Adam):
    """Adam with decoupled weight decay: p *= 1 - lr weight_decay before the step (Loshchilov & Hutter 2019).

    Parameters
    ----------
    lr, betas, eps, groups : as in `Adam`
    weight_decay : share of p that is taken off per step, times lr
    """

    weight_decay: float = 0.01
    decoupled = True
