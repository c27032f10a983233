"""Softmax over the last dim, and its gradient."""

from typing import Any

from fsdpx.array.kernels.dispatch import kernel

__all__ = ["softmax", "softmax_backward"]


@kernel()
def softmax(xp: Any, x: Any) -> Any:
    """exp(x) / sum exp(x) over the last dim; x (rows, columns) or any shape with columns last."""
    y = xp.exp(x - xp.max(x, axis=-1, keepdims=True))
    y /= xp.sum(y, axis=-1, keepdims=True)
    return y


@kernel()
def softmax_backward(xp: Any, y: Any, dy: Any) -> Any:
    """y (dy - sum(y dy)): the gradient of `softmax` at its result y."""
    return y * (dy - xp.sum(y * dy, axis=-1, keepdims=True))
