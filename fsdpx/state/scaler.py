"""The loss scale: keeps 16-bit gradients from vanishing or overflowing on their way (Micikevicius et al., 2018)."""

from dataclasses import dataclass

from fsdpx.config import Precision
from fsdpx.errors import NumericsError

__all__ = ["Scaler"]

SMALLEST = 2.0**-40


@dataclass
class Scaler:
    """value: factor on the loss. good: steps since it last changed. Dynamic scales halve on overflow, else double."""

    value: float
    dynamic: bool
    growth_interval: int
    good: int = 0

    @classmethod
    def of(cls, precision: Precision) -> "Scaler":
        dynamic = precision.loss_scale == "dynamic"
        value = precision.initial_scale if precision.loss_scale == "dynamic" else float(precision.loss_scale)
        return cls(value, dynamic, precision.growth_interval)

    def saw(self, finite: bool) -> None:
        """Adapt to one step's gradients; every rank sees the same flag."""
        if not self.dynamic:
            return
        self.good = self.good + 1 if finite else 0
        if not finite:
            self.value /= 2
            if self.value < SMALLEST:
                raise NumericsError(
                    f"gradients are NaN or Inf at every loss scale down to {self.value:g}: "
                    "distribute(..., check_finite=True) names where they begin"
                )
        elif self.good >= self.growth_interval:
            self.value, self.good = self.value * 2, 0

    def state(self) -> tuple[float, int, bool]:
        """(value, good, dynamic): what a checkpoint holds."""
        return float(self.value), self.good, self.dynamic

    def restore(self, value: float, good: int) -> None:
        """Go on from a checkpoint; a scale that does not move stays what the precision says."""
        if self.dynamic:
            self.value, self.good = value, good
