"""Losses that grow linearly for large errors: L1Loss, HuberLoss and SmoothL1Loss."""

from abc import abstractmethod
from typing import Any

import numpy as np

from fsdpx.core.array import kernels
from fsdpx.errors import ConfigError
from fsdpx.nn.layer import Array, LayerContext, require_finite_arguments
from fsdpx.nn.losses import WeightedElementwiseLoss

__all__ = ["HuberLoss", "L1Loss", "SmoothL1Loss"]


MIN_DELTA = 1e-30
"""Below this delta, which float32 can hardly represent, errors are computed without the kernels."""


class _RobustLoss(WeightedElementwiseLoss):
    """Base class for losses that are `scale` times Huber's error for `delta`, or times the absolute error if `delta` is
    0. The kernels compute them if elements have no weights."""

    kernel_names = ("huber_error", "huber_error_backward", "huber_error_gradient_and_sum")

    @abstractmethod
    def get_delta_and_scale(self) -> tuple[float, float]:
        """Return the numbers `delta` and `scale`."""

    def forward(self, env: LayerContext, y: Array, target: Array) -> tuple[float, float, Any]:
        if not self._can_use_kernels(y):
            return super().forward(env, y, target)
        delta, scale = self.get_delta_and_scale()
        target = target.astype(y.dtype, copy=False)
        return kernels.huber_error(env.xp, y, target, delta) * scale, float(y.size), (y, target)

    def backward(self, env: LayerContext, saved: Any, seed: float) -> Array:
        if len(saved) > 2:
            return super().backward(env, saved, seed)
        delta, scale = self.get_delta_and_scale()
        return kernels.huber_error_backward(env.xp, *saved, delta, seed * scale)

    def forward_and_backward(
        self, env: LayerContext, y: Array, target: Array, seed: float
    ) -> tuple[float, float, Array]:
        if not (env.xp is np and self._can_use_kernels(y)):
            return super().forward_and_backward(env, y, target, seed)
        delta, scale = self.get_delta_and_scale()
        target = target.astype(y.dtype, copy=False)
        gradient, total = kernels.huber_error_gradient_and_sum(env.xp, y, target, delta, seed * scale)
        return total * scale, float(y.size), gradient

    @property
    def reads_any_memory_order(self) -> bool:
        """True if the kernels compute the loss, unless y has 16 bits."""
        own = type(self) in (L1Loss, HuberLoss, SmoothL1Loss)  # other classes may define other errors
        delta = self.get_delta_and_scale()[0] if own else 0.0
        return own and self.weights is None and not self.skipna and (delta >= MIN_DELTA or not delta)

    def _can_use_kernels(self, y: Array) -> bool:
        return self.reads_any_memory_order and y.dtype.itemsize > 2  # array code does not round targets to 16 bits


class L1Loss(_RobustLoss):
    """Absolute error: the sum of |y - target| for y and target of equal shape. The weight is defined as in `MSELoss`.

    Parameters
    ----------
    weights, skipna : as in `RelativeL2`
    """

    def get_delta_and_scale(self) -> tuple[float, float]:
        return 0.0, 1.0

    def compute_errors(self, xp: Any, apart: Array) -> Array:
        return xp.abs(apart)

    def compute_slopes(self, xp: Any, apart: Array) -> Array:
        return xp.sign(apart)


class HuberLoss(_RobustLoss):
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

    def get_delta_and_scale(self) -> tuple[float, float]:
        return self.delta, 1.0

    def compute_errors(self, xp: Any, apart: Array) -> Array:
        near = xp.clip(apart, -self.delta, self.delta)
        return near * (apart - near * 0.5)

    def compute_slopes(self, xp: Any, apart: Array) -> Array:
        return xp.clip(apart, -self.delta, self.delta)


class SmoothL1Loss(_RobustLoss):
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

    def get_delta_and_scale(self) -> tuple[float, float]:
        return self.beta, 1.0 / self.beta if self.beta else 1.0

    def compute_errors(self, xp: Any, apart: Array) -> Array:
        slopes = self.compute_slopes(xp, apart)
        return slopes * (apart - slopes * (0.5 * self.beta))

    def compute_slopes(self, xp: Any, apart: Array) -> Array:
        return xp.clip(apart * (1.0 / self.beta), -1.0, 1.0) if self.beta else xp.sign(apart)
