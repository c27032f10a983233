"""Adam (Kingma & Ba 2015) and AdamW (Loshchilov & Hutter 2019), in the form of `torch.optim`."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

from fsdpx.optim import kernels
from fsdpx.optim.elementwise import Elementwise
from fsdpx.optim.optimizer import Rate
from fsdpx.optim.segments import Groups

__all__ = ["Adam", "AdamW"]


@dataclass(frozen=True)
class Adam(Elementwise):
    """p -= lr m / (sqrt(v) + eps) with bias-corrected means m of g and v of g^2 (Kingma & Ba 2015). Slots: m, v.

    Parameters
    ----------
    lr : a number, or a schedule from 1-based step to number
    betas : decay of the two means per step, each in [0, 1)
    eps : added to the square root
    weight_decay : times p, is added to g
    groups : name pattern (fnmatch) -> {"weight_decay", "lr_scale"} for the parameters that match
    """

    lr: Rate = 1e-3
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.0
    groups: Groups = field(default_factory=dict)
    slots: ClassVar[tuple[str, ...]] = ("m", "v")

    def _apply(self, xp: Any, p: Any, g: Any, slots: Mapping[str, Any], step: int, **rates: float) -> None:
        _adam(self, xp, p, g, slots, step, decoupled=False, **rates)


@dataclass(frozen=True)
class AdamW(Elementwise):
    """Adam with decoupled weight decay: p *= 1 - lr weight_decay before the step (Loshchilov & Hutter 2019).

    Parameters
    ----------
    lr, betas, eps, groups : as in `Adam`
    weight_decay : share of p that is taken off per step, times lr
    """

    lr: Rate = 1e-3
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.01
    groups: Groups = field(default_factory=dict)
    slots: ClassVar[tuple[str, ...]] = ("m", "v")

    def _apply(self, xp: Any, p: Any, g: Any, slots: Mapping[str, Any], step: int, **rates: float) -> None:
        _adam(self, xp, p, g, slots, step, decoupled=True, **rates)


def _adam(
    self: Adam | AdamW, xp: Any, p: Any, g: Any, slots: Mapping[str, Any], step: int, decoupled: bool, **rates: float
) -> None:
    beta1, beta2 = self.betas
    options = {"beta1": beta1, "beta2": beta2, "eps": self.eps}
    kernels.adam(xp, p, g, slots["m"], slots["v"], decoupled=decoupled, step=step, **options, **rates)
