"""Losses that grow linearly for large errors: L1Loss, HuberLoss and SmoothL1Loss."""

from typing import Any

from fsdpx.errors import ConfigError
from fsdpx.nn.layer import Array, require_finite_arguments
from fsdpx.nn.losses import WeightedElementwiseLoss

__all__ = ["HuberLoss", "L1Loss", "SmoothL1Loss"]


class L1Loss(WeightedElementwiseLoss):
    """Absolute error: the sum of |y - target| for y and target of equal shape. The weight is defined as in `MSELoss`.

    Parameters
    ----------
    weights, skipna : as in `RelativeL2`
    """

    def compute_errors(self, xp: Any, apart: Array) -> Array:
        return xp.abs(apart)

    def compute_slopes(self, xp: Any, apart: Array) -> Array:
        return xp.sign(apart)


class HuberLoss(WeightedElementwiseLoss):
    """Squared error for small errors, absolute error for large ones (Huber 1964). With `d = |y - target|`, the loss is
    the sum of `d^2 / 2` where `d <= delta`, and of `delta * (d - delta / 2)` elsewhere. The weight is defined as in
    `MSELoss`.

    Parameters
    ----------
    delta : the error above which the loss grows linearly; default 1
    weights, skipna : as in `RelativeL2`
    """

    def __init__(self, delta: float = 1.0, weights: Any = None, skipna: bool = False) -> None:
        super().__init__(weights, skipna)
        require_finite_arguments(self, delta=delta)
        if not delta > 0:
            raise ConfigError(f"HuberLoss: delta must be above 0, got {delta!r}")
        self.delta = float(delta)

    def compute_errors(self, xp: Any, apart: Array) -> Array:
        near = xp.clip(apart, -self.delta, self.delta)
        return near * (apart - near * 0.5)

    def compute_slopes(self, xp: Any, apart: Array) -> Array:
        return xp.clip(apart, -self.delta, self.delta)


class SmoothL1Loss(WeightedElementwiseLoss):
    """`HuberLoss` with delta = beta, where the loss is divided by beta (Girshick 2015). With `d = |y - target|`, the
    loss is the sum of `d^2 / (2 * beta)` where `d < beta`, and of `d - beta / 2` elsewhere. The weight is defined as in
    `MSELoss`.

    Parameters
    ----------
    beta : the error above which the loss grows linearly; with 0, the loss is `L1Loss`; default 1
    weights, skipna : as in `RelativeL2`
    """

    def __init__(self, beta: float = 1.0, weights: Any = None, skipna: bool = False) -> None:
        super().__init__(weights, skipna)
        require_finite_arguments(self, beta=beta)
        if not beta >= 0:
            raise ConfigError(f"SmoothL1Loss: beta must be at least 0, got {beta!r}")
        self.beta = float(beta)

    def compute_errors(self, xp: Any, apart: Array) -> Array:
        slopes = self.compute_slopes(xp, apart)
        return slopes * (apart - slopes * (0.5 * self.beta))

    def compute_slopes(self, xp: Any, apart: Array) -> Array:
        return xp.clip(apart * (1.0 / self.beta), -1.0, 1.0) if self.beta else xp.sign(apart)
