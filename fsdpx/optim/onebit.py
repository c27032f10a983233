"""1-bit Adam (Tang et al. 2021, 1-bit Adam: communication efficient large-scale training with Adam's speed)."""

from dataclasses import dataclass, field
from typing import Any, ClassVar

from fsdpx.errors import ConfigError
from fsdpx.optim import kernels
from fsdpx.optim.elementwise import Elementwise
from fsdpx.optim.optimizer import Rate, Slots
from fsdpx.optim.segments import Groups

__all__ = ["OneBitAdam"]


@dataclass(frozen=True)
class OneBitAdam(Elementwise):
    """AdamW for `warmup_steps`, with gradients as they are; then v stays as it is, and what ranks send each other is m,
    in one bit with error feedback (Tang et al. 2021). Leave `codec` out, it is `OneBit(warmup_steps, betas[0])`; or say
    `fsdpx.Between` of that. Slots: m, v.

    The bias corrections of Adam go on, v's with that of the last step of the warm-up, so that steps change no length
    when it ends. What comes late in v never comes: schedules should have warmed up by then, and v settled. Elements
    that have had no gradient until then stay as they are, v = Inf.

    Parameters
    ----------
    lr : a number, or a schedule from 1-based step to number
    warmup_steps : steps of AdamW, 1 or more; the paper takes 15 to 25 % of all steps
    betas : decay of the two means per step, each in [0, 1)
    eps : added to the square root
    bound : after the warm-up no element moves by more than bound lr, as Adam's seldom do: signs are as large for
        elements whose v is small as for the others of a block, and would throw them far; inf is the paper's rule,
        which then needs an eps of some 1e-3
    weight_decay : share of p that is taken off per step, times lr
    groups : name pattern (fnmatch) -> {"weight_decay", "lr_scale"} for the parameters that match
    """

    lr: Rate = 1e-3
    warmup_steps: int = 100
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.01
    groups: Groups = field(default_factory=dict)
    bound: float = 1.0
    slots: ClassVar[tuple[str, ...]] = ("m", "v")

    def __post_init__(self) -> None:
        super().__post_init__()
        steps = self.warmup_steps
        if not isinstance(steps, int) or isinstance(steps, bool) or steps < 1:
            raise ConfigError(f"OneBitAdam(warmup_steps={steps!r}): a number of steps, 1 or more")
        if not self.bound > 0:
            raise ConfigError(f"OneBitAdam(bound={self.bound!r}): a positive number, or inf")

    @property
    def means(self) -> tuple[int, float]:
        """After how many steps what it is given are means of gradients over time, and how they decay per step."""
        return self.warmup_steps, self.betas[0]

    def _apply(self, xp: Any, p: Any, g: Any, slots: Slots, step: int, **rates: float) -> None:
        options: dict[str, Any] = {"beta1": self.betas[0], "beta2": self.betas[1], "eps": self.eps, **rates}
        if step <= self.warmup_steps:
            kernels.adam(xp, p, g, slots["m"], slots["v"], decoupled=True, step=step, **options)
            if step == self.warmup_steps:
                slots["v"][slots["v"] == 0] = xp.inf
        else:
            frozen, bound = self.warmup_steps, self.bound
            kernels.adam_of_mean(xp, p, g, slots["m"], slots["v"], step=step, frozen=frozen, bound=bound, **options)
