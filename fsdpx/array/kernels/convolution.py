"""Cross-correlation of images with windows, and the two halves of its gradient.

Compiled code keeps the channels of a pixel together: results are (samples, channels, height, width) in shape, but
channels lie next to each other in memory. Arrays of either order are taken."""

import math
from typing import Any

from fsdpx.array.kernels.dispatch import kernel
from fsdpx.array.kernels.window import SlidingWindow

__all__ = ["Sum", "conv2d", "conv2d_backward_input", "conv2d_backward_params", "put"]

Sum = tuple[Any, bool] | None
"""Where a gradient goes, and whether it is added to what is there; None: it is not wanted."""


@kernel(bits=False)
def conv2d(xp: Any, x: Any, weight: Any, bias: Any, window: SlidingWindow) -> Any:
    """The windows of x (samples, in, height, width) times weight (out, in, kh, kw), plus bias (out,) or None.

    The windows become the columns of one matrix product (im2col, Chellapilla et al. 2006)."""
    out, outer = window.out(x.shape), weight.shape[0]
    flat = xp.matmul(_matrix(weight), _columns(xp, x, window, out))
    y = xp.empty((x.shape[0], outer, *out), dtype=flat.dtype)
    y[...] = flat.reshape(outer, x.shape[0], *out).swapaxes(0, 1)
    if bias is not None:
        y += bias.reshape(1, -1, 1, 1)
    return y


@kernel(bits=False)
def conv2d_backward_input(xp: Any, weight: Any, dy: Any, window: SlidingWindow, shape: tuple[int, ...]) -> Any:
    """The gradient of x, of this shape."""
    out = tuple(dy.shape[2:])
    columns = xp.matmul(_matrix(weight).T, _flat(dy)).reshape(weight.shape[1], window.size, shape[0], *out)
    image = window.empty_gradient(xp, shape, dy.dtype)
    for n, place in enumerate(window.places(out)):
        image[place] += columns[:, n].swapaxes(0, 1)
    return window.cut(image, shape)


@kernel(narrow=0, bits=False)
def conv2d_backward_params(xp: Any, x: Any, dy: Any, window: SlidingWindow, weight: Sum, bias: Sum) -> None:
    """The gradients of weight and bias."""
    if weight is not None:
        columns = _columns(xp, x, window, tuple(dy.shape[2:]))
        put(weight, xp.matmul(_flat(dy), columns.T).reshape(dy.shape[1], x.shape[1], *window.kernel))
    if bias is not None:
        put(bias, xp.sum(dy, axis=(0, 2, 3)))


def put(into: Any, value: Any) -> None:
    """Write or add a gradient to where it goes."""
    out, add = into
    if add:
        out += value.astype(out.dtype, copy=False)
    else:
        out[...] = value


def _columns(xp: Any, x: Any, window: SlidingWindow, out: tuple[int, ...]) -> Any:
    """`(in kh kw, samples height width)`: one column per place of the result."""
    image = window.padded(xp, x, 0.0)
    columns = xp.empty((x.shape[1], window.size, x.shape[0], *out), dtype=x.dtype)
    for n, place in enumerate(window.places((out[0], out[1]))):
        columns[:, n] = image[place].swapaxes(0, 1)
    return columns.reshape(x.shape[1] * window.size, x.shape[0] * math.prod(out))


def _matrix(weight: Any) -> Any:
    return weight.reshape(weight.shape[0], math.prod(weight.shape[1:]))


def _flat(dy: Any) -> Any:
    return dy.swapaxes(0, 1).reshape(dy.shape[1], dy.shape[0] * math.prod(dy.shape[2:]))
