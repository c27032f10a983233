"""Adam (Kingma & Ba 2015) and AdamW (Loshchilov & Hutter 2019), as implemented in `torch.optim`."""

from typing import Any, ClassVar

import numpy as np

from fsdpx.core.base.dataclass import dataclass, field
from fsdpx.core.base.name_hints import wrap_constructor_with_option_check
from fsdpx.optim.optimizer import (
    Elementwise,
    LearningRate,
    Slots,
    declare_update_formula,
    lerp_,
    lerp_square_,
    require_number_in_range,
    require_valid_betas,
    scale_and_add_decay,
)
from fsdpx.optim.segments import ParamGroups

__all__ = ["Adam", "AdamW", "adam"]


@declare_update_formula
def adam(xp, a, b, p, g, m, v, scale, l2, keep, share1, beta2, share2, unbias, eps, rate):
    scale_and_add_decay(xp, a, b, p, g, scale, l2)
    lerp_(xp, m, a, b, share1)
    lerp_square_(xp, v, a, b, beta2, share2)
    xp.sqrt(v, out=b)
    b *= unbias
    b += eps
    xp.divide(m, b, out=a)
    a *= rate
    if keep != 1:
        p *= keep
    p -= a


@adam.register_loop
def _adam_loop(p, g, m, v, scale, l2, keep, share1, beta2, share2, unbias, eps, rate):
    for i in range(p.size):
        x = p[i]
        a = g[i] * scale
        if l2 != 0:
            a = a + x * l2
        mi = m[i] + (a - m[i]) * share1
        vi = v[i] * beta2 + (a * a) * share2
        m[i] = mi
        v[i] = vi
        p[i] = x * keep - (mi / (np.sqrt(vi) * unbias + eps)) * rate


@dataclass(frozen=True)
class _AdamBase(Elementwise):
    """Base class of Adam and AdamW, which differ only in weight decay."""

    lr: LearningRate = 1e-3
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.0
    groups: ParamGroups = field(default_factory=dict)
    slots = ("m", "v")
    decoupled: ClassVar[bool]

    def __post_init__(self) -> None:
        super().__post_init__()
        require_valid_betas(self, self.betas)
        require_number_in_range(self, "eps", self.eps)

    def _update_span(self, xp: Any, p: Any, g: Any, slots: Slots, step: int, **rates: float) -> None:
        lr, decay, (beta1, beta2) = rates["lr"], rates["weight_decay"], self.betas
        l2, keep = (0.0, 1.0 - lr * decay) if self.decoupled else (decay, 1.0)
        unbias, rate = (1.0 - beta2**step) ** -0.5, lr / (1.0 - beta1**step)
        numbers = rates["scale"], l2, keep, 1.0 - beta1, beta2, 1.0 - beta2, unbias, self.eps, rate
        adam(xp, (p, g, slots["m"], slots["v"]), numbers)


@wrap_constructor_with_option_check
@dataclass(frozen=True)
class Adam(_AdamBase):
    """Adam (Kingma & Ba 2015): `p -= lr * m / (sqrt(v) + eps)`, where m and v are the bias-corrected moving averages of
    g and g^2. Slots (state arrays): m, v.

    Parameters
    ----------
    lr : a number, or a schedule: a function that takes the step, counted from 1, and returns a number
    betas : decay of m and of v per step, each in [0, 1)
    eps : number that is added to the square root
    weight_decay : coefficient; weight_decay * p is added to g
    groups : dict that maps name patterns (fnmatch) to dicts with `weight_decay`, `lr_scale` or both, for the matching
        parameters
    """

    decoupled = False


@wrap_constructor_with_option_check
@dataclass(frozen=True)
class AdamW(_AdamBase):
    """Adam with decoupled weight decay (Loshchilov & Hutter 2019): `p *= 1 - lr * weight_decay` before each step.

    Parameters
    ----------
    lr, betas, eps, groups : as in `Adam`
    weight_decay : coefficient; lr * weight_decay * p is subtracted from p in each step
    """

    weight_decay: float = 0.01
    decoupled = True
