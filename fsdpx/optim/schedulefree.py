"""AdamW without a schedule: it trains at a mean of its iterates and of their average (Defazio et al. 2024)."""

from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any, ClassVar

from fsdpx.errors import ConfigError
from fsdpx.optim import kernels
from fsdpx.optim.elementwise import Elementwise
from fsdpx.optim.optimizer import Rate, Slots, rate
from fsdpx.optim.segments import Groups

__all__ = ["AdamWScheduleFree"]


@dataclass(frozen=True)
class AdamWScheduleFree(Elementwise):
    """z -= lr (g / (sqrt(v) + eps) + weight_decay y); x = (1 - c) x + c z; y = (1 - beta1) z + beta1 x, with
    lr = lr_t sqrt(1 - beta2^t), v the mean of g^2 and c = lr^2 / (the sum of all lr^2 so far) (Defazio et al. 2024).

    The parameters are y, where the gradient is taken. Evaluate and save x: `evaluate(..., with_="average")`. The rate
    stays constant after a warm-up, `lr=optim.schedules.WarmUp(100, 2.5e-3)`.

    Slots: v, and ahead = z - y; so x = y - ahead (1 - beta1) / beta1.

    Parameters
    ----------
    lr : a number, or a schedule from 1-based step to number; 1 to 10 times AdamW's
    betas : share of the average in y, above 0, and decay of v per step, each below 1
    eps : added to the square root
    weight_decay : share of y that is taken off z per step, times lr
    groups : name pattern (fnmatch) -> {"weight_decay", "lr_scale"} for the parameters that match
    """

    lr: Rate = 2.5e-3
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.0
    groups: Groups = field(default_factory=dict)
    slots: ClassVar[tuple[str, ...]] = ("v", "ahead")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.betas[0] == 0:
            raise ConfigError("AdamWScheduleFree(betas[0]=0): a share of the average above 0 is needed; Adam has none")

    @property
    def average(self) -> tuple[str, float]:
        """x = p + factor slot."""
        return "ahead", (self.betas[0] - 1.0) / self.betas[0]

    def _apply(self, xp: Any, p: Any, g: Any, slots: Slots, step: int, **rates: float) -> None:
        options = {"beta1": self.betas[0], "beta2": self.betas[1], "eps": self.eps, "share": self._share(step), **rates}
        options["lr"] *= (1.0 - self.betas[1] ** step) ** 0.5
        kernels.schedule_free(xp, p, g, slots["v"], slots["ahead"], **options)

    def _share(self, step: int) -> float:
        """c. A function of the step alone, so nothing need be saved; 1 as long as no rate was above 0."""
        sums = self.__dict__.get("_sums", (0.0,))
        if len(sums) <= step:
            squares = (rate(self, t) ** 2 * (1.0 - self.betas[1] ** t) for t in range(len(sums), step + 1))
            sums = (*sums[:-1], *accumulate(squares, initial=sums[-1]))
            self.__dict__["_sums"] = sums  # never changed, only replaced: ranks that are threads share the optimiser
        return (sums[step] - sums[step - 1]) / sums[step] if sums[step] > 0 else 1.0
