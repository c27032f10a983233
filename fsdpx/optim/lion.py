"""Lion, "evolved sign momentum" (Chen et al. 2023, Symbolic discovery of optimization algorithms)."""

from typing import Any

import numpy as np

from fsdpx.core.base.dataclass import dataclass, field
from fsdpx.core.base.name_hints import wrap_constructor_with_option_check
from fsdpx.optim.optimizer import Elementwise, LearningRate, Slots, declare_update_formula, lerp_, require_valid_betas
from fsdpx.optim.segments import ParamGroups

__all__ = ["Lion", "lion"]


@declare_update_formula
def lion(xp, a, b, p, g, m, scale, keep, share1, share2, lr):
    xp.multiply(g, scale, out=a)
    xp.subtract(a, m, out=b)
    b *= share1
    b += m
    xp.sign(b, out=b)
    b *= lr
    if keep != 1:
        p *= keep
    p -= b
    lerp_(xp, m, a, b, share2)


@lion.register_loop
def _lion_loop(p, g, m, scale, keep, share1, share2, lr):
    for i in range(p.size):
        a = g[i] * scale
        b = (a - m[i]) * share1 + m[i]
        p[i] = p[i] * keep - np.sign(b) * lr
        m[i] = m[i] + (a - m[i]) * share2


@wrap_constructor_with_option_check
@dataclass(frozen=True)
class Lion(Elementwise):
    """Lion (Chen et al. 2023): `p = (1 - lr * weight_decay) * p - lr * sign(beta1 * m + (1 - beta1) * g)`, then
    `m = beta2 * m + (1 - beta2) * g`.

    Slots (state arrays): only m, so the state is half the size of Adam's.

    Parameters
    ----------
    lr : a number, or a schedule: a function that takes the step, counted from 1, and returns a number. The learning
        rate is typically 3 to 10 times smaller than for AdamW
    betas : weight of m in the update, and decay of m per step, each in [0, 1)
    weight_decay : coefficient; lr * weight_decay * p is subtracted from p in each step
    groups : dict that maps name patterns (fnmatch) to dicts with `weight_decay`, `lr_scale` or both, for the matching
        parameters
    """

    lr: LearningRate = 1e-4
    betas: tuple[float, float] = (0.9, 0.99)
    weight_decay: float = 0.0
    groups: ParamGroups = field(default_factory=dict)
    slots = ("m",)

    def __post_init__(self) -> None:
        super().__post_init__()
        require_valid_betas(self, self.betas)

    def _update_span(self, xp: Any, p: Any, g: Any, slots: Slots, step: int, **rates: float) -> None:
        lr, keep = rates["lr"], 1.0 - rates["lr"] * rates["weight_decay"]
        lion(xp, (p, g, slots["m"]), (rates["scale"], keep, 1.0 - self.betas[0], 1.0 - self.betas[1], lr))
