"""Stochastic gradient descent, with momentum as in PyTorch (no dampening)."""

from typing import Any

from fsdpx.core.base.dataclass import dataclass, field
from fsdpx.core.base.name_hints import wrap_constructor_with_option_check
from fsdpx.errors import ConfigError
from fsdpx.optim.optimizer import (
    Elementwise,
    LearningRate,
    Slots,
    declare_update_formula,
    require_number_in_range,
    scale_and_add_decay,
)  # fmt: skip
from fsdpx.optim.segments import ParamGroups

__all__ = ["SGD", "momentum", "sgd"]


@declare_update_formula
def sgd(xp, a, b, p, g, scale, l2, lr):
    scale_and_add_decay(xp, a, b, p, g, scale, l2)
    a *= lr
    p -= a


@sgd.register_loop
def _sgd_loop(p, g, scale, l2, lr):
    for i in range(p.size):
        a = g[i] * scale
        if l2 != 0:
            a = a + p[i] * l2
        p[i] = p[i] - a * lr


@declare_update_formula
def momentum(xp, a, b, p, g, m, scale, l2, lr, mu, nesterov):
    scale_and_add_decay(xp, a, b, p, g, scale, l2)
    m *= mu
    m += a
    if nesterov != 0:
        xp.multiply(m, mu, out=b)
        a += b
        a *= lr
    else:
        xp.multiply(m, lr, out=a)
    p -= a


@momentum.register_loop
def _momentum_loop(p, g, m, scale, l2, lr, mu, nesterov):
    for i in range(p.size):
        a = g[i] * scale
        if l2 != 0:
            a = a + p[i] * l2
        buf = m[i] * mu + a
        m[i] = buf
        if nesterov != 0:
            a = a + buf * mu
        else:
            a = buf
        p[i] = p[i] - a * lr


@wrap_constructor_with_option_check
@dataclass(frozen=True)
class SGD(Elementwise):
    """Stochastic gradient descent, optionally with momentum (Sutskever et al. 2013), as in `torch.optim.SGD`.

    `d = g + weight_decay * p`, then `m = momentum * m + d`, then `p -= lr * m`. With Nesterov momentum, the last step
    is `p -= lr * (d + momentum * m)`.

    Slots (state arrays): momentum; no slots if `momentum` is 0.

    Parameters
    ----------
    lr : a number, or a schedule: a function that takes the step, counted from 1, and returns a number
    momentum : decay of m per step, in [0, 1)
    weight_decay : coefficient; weight_decay * p is added to g
    nesterov : whether to use Nesterov momentum; `momentum` must then be above 0
    groups : dict that maps name patterns (fnmatch) to dicts with `weight_decay`, `lr_scale` or both, for the matching
        parameters
    """

    lr: LearningRate = 1e-3
    momentum: float = 0.0
    weight_decay: float = 0.0
    nesterov: bool = False
    groups: ParamGroups = field(default_factory=dict)

    def __post_init__(self) -> None:
        super().__post_init__()
        require_number_in_range(self, "momentum", self.momentum, below=1.0)
        if self.nesterov and self.momentum == 0:
            raise ConfigError("SGD(nesterov=True) needs a momentum above 0")

    @property
    def slots(self) -> tuple[str, ...]:
        return ("momentum",) if self.momentum else ()

    def _update_span(self, xp: Any, p: Any, g: Any, slots: Slots, step: int, **rates: float) -> None:
        numbers = rates["scale"], rates["weight_decay"], rates["lr"]
        if self.momentum:
            momentum(xp, (p, g, slots["momentum"]), (*numbers, self.momentum, self.nesterov))
        else:
            sgd(xp, (p, g), numbers)
