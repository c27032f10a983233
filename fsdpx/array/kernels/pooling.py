"""Max and mean of windows of images, with their gradients."""

import math
from typing import Any

from fsdpx.array.kernels.dispatch import kernel
from fsdpx.array.kernels.window import SlidingWindow

__all__ = ["avg_pool2d", "avg_pool2d_backward", "max_pool2d", "max_pool2d_backward"]


@kernel(bits=False)
def max_pool2d(xp: Any, x: Any, window: SlidingWindow) -> tuple[Any, Any]:
    """The largest value of each window of x (samples, channels, height, width), NaN before all others, and its place
    in the window, int32: the first of equals."""
    out = window.out(x.shape)
    image = window.padded(xp, x, -math.inf)
    y = xp.full((*x.shape[:2], *out), -math.inf, dtype=x.dtype)
    winner = xp.zeros(y.shape, dtype="int32")
    for n, place in enumerate(window.places(out)):
        value = image[place]
        better = (value > y) | (value != value)
        y = xp.where(better, value, y)
        winner = xp.where(better, n, winner)
    return y, winner


@kernel(bits=False)
def max_pool2d_backward(xp: Any, dy: Any, winner: Any, window: SlidingWindow, shape: tuple[int, ...]) -> Any:
    """dy to the pixel that won, in an image of this shape."""
    image, nothing = window.empty_gradient(xp, shape, dy.dtype), xp.zeros((), dtype=dy.dtype)
    for n, place in enumerate(window.places(tuple(dy.shape[2:]))):
        image[place] += xp.where(winner == n, dy, nothing)
    return window.cut(image, shape)


@kernel(bits=False)
def avg_pool2d(xp: Any, x: Any, window: SlidingWindow) -> Any:
    """The mean of each window of x (samples, channels, height, width); padding counts as zeros."""
    out = window.out(x.shape)
    image = window.padded(xp, x, 0.0)
    y = xp.zeros((*x.shape[:2], *out), dtype=x.dtype)
    for place in window.places(out):
        y += image[place]
    y /= window.size
    return y


@kernel(bits=False)
def avg_pool2d_backward(xp: Any, dy: Any, window: SlidingWindow, shape: tuple[int, ...]) -> Any:
    """dy to all pixels of its window in equal parts, in an image of this shape."""
    image = window.empty_gradient(xp, shape, dy.dtype)
    share = dy / window.size
    for place in window.places(tuple(dy.shape[2:])):
        image[place] += share
    return window.cut(image, shape)
