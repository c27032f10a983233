"""Windows over images: convolution and pooling."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from fsdpx.array.kernels.dispatch import kernel

__all__ = [
    "SlidingWindow", "Sum", "avg_pool2d", "avg_pool2d_backward", "conv2d", "conv2d_backward_input",
    "conv2d_backward_params", "max_pool2d", "max_pool2d_backward", "put",
]  # fmt: skip


@dataclass(frozen=True)
class SlidingWindow:
    """A window of `kernel` (height, width) that moves by `stride` over an image with `padding` around it."""

    kernel: tuple[int, int]
    stride: tuple[int, int]
    padding: tuple[int, int]

    @property
    def size(self) -> int:
        """Places of the window."""
        return math.prod(self.kernel)

    @property
    def dot(self) -> bool:
        """Whether the window is one pixel, moved by one pixel at a time."""
        return (self.kernel, self.stride, self.padding) == ((1, 1), (1, 1), (0, 0))

    def out(self, shape: Sequence[int]) -> tuple[int, int]:
        """Height and width of the result for an image of (samples, channels, height, width)."""
        sides = zip(shape[2:], self.kernel, self.stride, self.padding, strict=True)
        height, width = ((size + 2 * p - k) // s + 1 for size, k, s, p in sides)
        return height, width

    def places(self, out: tuple[int, int]) -> Iterator[tuple[slice, ...]]:
        """For each place of the window, the pixels of the padded image under it, as a strided slice."""
        (height, width), (down, right) = out, self.stride
        for i in range(self.kernel[0]):
            for j in range(self.kernel[1]):
                rows = slice(i, i + down * (height - 1) + 1, down)
                yield slice(None), slice(None), rows, slice(j, j + right * (width - 1) + 1, right)

    def padded(self, xp: Any, x: Any, value: float) -> Any:
        if self.padding == (0, 0):
            return x
        image = xp.full(self._padded_shape(x.shape), value, dtype=x.dtype)
        image[self._inside(x.shape)] = x
        return image

    def cut(self, image: Any, shape: Sequence[int]) -> Any:
        """The inverse of `padded`, as a view."""
        return image[self._inside(shape)]

    def empty_gradient(self, xp: Any, shape: Sequence[int], dtype: Any) -> Any:
        """Zeros in the shape of the padded image."""
        return xp.zeros(self._padded_shape(shape), dtype=dtype)

    def _padded_shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        return (*shape[:2], shape[2] + 2 * self.padding[0], shape[3] + 2 * self.padding[1])

    def _inside(self, shape: Sequence[int]) -> tuple[slice, ...]:
        (top, left), (height, width) = self.padding, shape[2:]
        return slice(None), slice(None), slice(top, top + height), slice(left, left + width)


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
