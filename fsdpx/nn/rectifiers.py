"""Variants of ReLU: LeakyReLU, ELU and Softplus."""

from __future__ import annotations

from typing import Any

from fsdpx.core.array import kernels
from fsdpx.errors import ConfigError
from fsdpx.nn.layer import Array, Layer, LayerContext, Params, require_finite_arguments

__all__ = ["ELU", "LeakyReLU", "Softplus"]


class LeakyReLU(Layer):
    """Leaky rectified linear unit (Maas et al. 2013): x where x > 0, and `negative_slope * x` elsewhere.

    Parameters
    ----------
    negative_slope : factor for elements that are not positive; default 0.01
    """

    acts_on = "element"
    kernel_names = ("leaky_relu", "leaky_relu_backward")

    def __init__(self, negative_slope: float = 0.01) -> None:
        require_finite_arguments(self, negative_slope=negative_slope)
        self.negative_slope = float(negative_slope)

    def forward(self, env: LayerContext, p: Params, x: Array) -> tuple[Array, Any]:
        return kernels.leaky_relu(env.xp, x, self.negative_slope), (x,)

    def backward_input(self, env: LayerContext, p: Params, saved: Any, dy: Array) -> tuple[Array, Any]:
        return kernels.leaky_relu_backward(env.xp, saved[0], dy, self.negative_slope), ()


class ELU(Layer):
    """Exponential linear unit (Clevert et al. 2016): x where x > 0, and `alpha * (exp(x) - 1)` elsewhere.

    Parameters
    ----------
    alpha : scale of the negative results, which approach -alpha for large negative x; default 1
    """

    acts_on = "element"
    kernel_names = ("elu", "elu_backward")

    def __init__(self, alpha: float = 1.0) -> None:
        require_finite_arguments(self, alpha=alpha)
        self.alpha = float(alpha)

    def forward(self, env: LayerContext, p: Params, x: Array) -> tuple[Array, Any]:
        return kernels.elu(env.xp, x, self.alpha), (x,)

    def backward_input(self, env: LayerContext, p: Params, saved: Any, dy: Array) -> tuple[Array, Any]:
        return kernels.elu_backward(env.xp, saved[0], dy, self.alpha), ()


class Softplus(Layer):
    """Smooth form of ReLU with positive results: `log(1 + exp(beta * x)) / beta` for each element.

    Parameters
    ----------
    beta : sharpness; the larger beta is, the closer the result is to ReLU; default 1
    threshold : where `beta * x` exceeds this number, the result is x, as in PyTorch; default 20
    """

    acts_on = "element"
    kernel_names = ("softplus", "softplus_backward")

    def __init__(self, beta: float = 1.0, threshold: float = 20.0) -> None:
        require_finite_arguments(self, beta=beta)
        if not beta > 0:
            raise ConfigError(f"Softplus: beta must be above 0, got {beta!r}")
        self.beta, self.threshold = float(beta), float(threshold)

    def forward(self, env: LayerContext, p: Params, x: Array) -> tuple[Array, Any]:
        return kernels.softplus(env.xp, x, self.beta, self.threshold), (x,)

    def backward_input(self, env: LayerContext, p: Params, saved: Any, dy: Array) -> tuple[Array, Any]:
        return kernels.softplus_backward(env.xp, saved[0], dy, self.beta, self.threshold), ()
