"""Variants of ReLU, and the gradients of sigmoid and tanh."""

from __future__ import annotations

from typing import Any

from fsdpx.core.array.kernels.activation import sigmoid
from fsdpx.core.array.kernels.dispatch import kernel

__all__ = [
    "elu", "elu_backward", "leaky_relu", "leaky_relu_backward", "sigmoid_backward", "softplus", "softplus_backward",
    "tanh_backward",
]  # fmt: skip


@kernel()
def leaky_relu(xp: Any, x: Any, slope: float) -> Any:
    """Return x where x > 0, and `slope * x` elsewhere (Maas et al. 2013)."""
    return xp.where(x > 0, x, x * slope)


@kernel()
def leaky_relu_backward(xp: Any, x: Any, dy: Any, slope: float) -> Any:
    """Return the gradient of `leaky_relu`: dy where x > 0, and `slope * dy` elsewhere."""
    return xp.where(x > 0, dy, dy * slope)


@kernel()
def elu(xp: Any, x: Any, alpha: float) -> Any:
    """Return x where x > 0, and `alpha * (exp(x) - 1)` elsewhere (Clevert et al. 2016)."""
    return xp.where(x > 0, x, xp.expm1(xp.minimum(x, 0)) * alpha)


@kernel()
def elu_backward(xp: Any, x: Any, dy: Any, alpha: float) -> Any:
    """Return the gradient of `elu`: dy where x > 0, and `dy * alpha * exp(x)` elsewhere."""
    return xp.where(x > 0, dy, dy * (xp.exp(xp.minimum(x, 0)) * alpha))


@kernel()
def softplus(xp: Any, x: Any, beta: float, threshold: float) -> Any:
    """Return `log(1 + exp(beta * x)) / beta`, or x where `beta * x > threshold`."""
    steep = x * beta
    y = (xp.maximum(steep, 0) + xp.log1p(xp.exp(-xp.abs(steep)))) * (1.0 / beta)
    return xp.where(steep > threshold, x, y)


@kernel()
def softplus_backward(xp: Any, x: Any, dy: Any, beta: float, threshold: float) -> Any:
    """Return the gradient of `softplus`: `dy * sigmoid(beta * x)`, or dy where `beta * x > threshold`."""
    steep = x * beta
    return xp.where(steep > threshold, dy, dy * sigmoid.__wrapped__(xp, steep))  # type: ignore[attr-defined]


@kernel()
def sigmoid_backward(xp: Any, y: Any, dy: Any) -> Any:
    """Return the gradient of the sigmoid, given its result y: `dy * y * (1 - y)`."""
    return dy * (y * (1 - y))


@kernel()
def tanh_backward(xp: Any, y: Any, dy: Any) -> Any:
    """Return the gradient of tanh, given its result y: `dy * (1 - y^2)`."""
    return dy * (1 - y * y)
