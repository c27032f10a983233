"""The loss scale: keeps 16-bit gradients from vanishing or overflowing on their way (Micikevicius et al., 2018)."""

from dataclasses import dataclass, replace

from fsdpx.config import Precision
from fsdpx.errors import NumericsError

__all__ = ["Scaler"]

SMALLEST = 2.0**-40


@dataclass(frozen=True)
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

    def after(self, finite: bool) -> "Scaler":
        """The scale after a step whose gradients were finite, or not; every rank sees the same flag."""
        if not self.dynamic:
            return self
        if finite:
            grown = self.good + 1 >= self.growth_interval
            return replace(self, value=self.value * 2, good=0) if grown else replace(self, good=self.good + 1)
        if self.value / 2 < SMALLEST:
            raise NumericsError(
                f"gradients are NaN or Inf at every loss scale down to {self.value / 2:g}: "
                "distribute(..., check_finite=True) names where they begin"
            )
        return replace(self, value=self.value / 2, good=0)

    def restored(self, value: float, good: int) -> "Scaler":
        """The scale of a checkpoint; one that does not move stays what the precision says."""
        return replace(self, value=value, good=good) if self.dynamic else self
