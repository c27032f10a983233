"""Windows over images, and pooling of fields."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

from fsdpx.array.kernels.dispatch import kernel

__all__ = [
    "avg_pool", "avg_pool_backward", "conv2d", "conv2d_backward_input", "conv2d_backward_params", "max_pool",
    "max_pool_backward",
]  # fmt: skip


@dataclass(frozen=True)
class SlidingWindow:
    """A window of `kernel` cells along each dim, as (height, width), that moves by `stride` over a field with `padding`
    around it."""

    kernel: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[int, ...]

    @property
    def size(self) -> int:
        """Places of the window."""
        return math.prod(self.kernel)

    def out(self, shape: Sequence[int]) -> tuple[int, ...]:
        """Cells of the result for a field of (samples, channels, *cells)."""
        sides = zip(shape[2:], self.kernel, self.stride, self.padding, strict=True)
        return tuple((size + 2 * p - k) // s + 1 for size, k, s, p in sides)

    def places(self, out: Sequence[int]) -> Iterator[tuple[slice, ...]]:
        """For each place of the window, the cells of the padded field under it, as a strided slice."""
        for place in product(*map(range, self.kernel)):
            cells = (slice(i, i + s * (n - 1) + 1, s) for i, s, n in zip(place, self.stride, out, strict=True))
            yield slice(None), slice(None), *cells

    def padded(self, xp: Any, x: Any, value: float) -> Any:
        if not any(self.padding):
            return x
        image = xp.full(self._padded_shape(x.shape), value, dtype=x.dtype)
        image[self._inside(x.shape)] = x
        return image

    def cut(self, image: Any, shape: Sequence[int]) -> Any:
        """The inverse of `padded`, as a view."""
        return image[self._inside(shape)]

    def empty_gradient(self, xp: Any, shape: Sequence[int], dtype: Any) -> Any:
        """Zeros in the shape of the padded field."""
        return xp.zeros(self._padded_shape(shape), dtype=dtype)

    def _padded_shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        return (*shape[:2], *(n + 2 * p for n, p in zip(shape[2:], self.padding, strict=True)))

    def _inside(self, shape: Sequence[int]) -> tuple[slice, ...]:
        cells = (slice(p, p + n) for n, p in zip(shape[2:], self.padding, strict=True))
        return slice(None), slice(None), *cells


@kernel(bits=False)
def max_pool(xp: Any, x: Any, window: SlidingWindow) -> tuple[Any, Any]:
    """The largest value of each window of x (samples, channels, *cells), NaN before all others, and its place
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
def max_pool_backward(xp: Any, dy: Any, winner: Any, window: SlidingWindow, shape: tuple[int, ...]) -> Any:
    """dy to the pixel that won, in an image of this shape."""
    image, nothing = window.empty_gradient(xp, shape, dy.dtype), xp.zeros((), dtype=dy.dtype)
    for n, place in enumerate(window.places(tuple(dy.shape[2:]))):
        image[place] += xp.where(winner == n, dy, nothing)
    return window.cut(image, shape)


@kernel(bits=False)
def avg_pool(xp: Any, x: Any, window: SlidingWindow) -> Any:
    """The mean of each window of x (samples, channels, *cells); padding counts as zeros."""
    out = window.out(x.shape)
    image = window.padded(xp, x, 0.0)
    y = xp.zeros((*x.shape[:2], *out), dtype=x.dtype)
    for place in window.places(out):
        y += image[place]
    y /= window.size
    return y


@kernel(bits=False)
def avg_pool_backward(xp: Any, dy: Any, window: SlidingWindow, shape: tuple[int, ...]) -> Any:
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
    for n, place in enumerate(window.places(out)):
        columns[:, n] = image[place].swapaxes(0, 1)
    return columns.reshape(x.shape[1] * window.size, x.shape[0] * math.prod(out))


def _matrix(weight: Any) -> Any:
    return weight.reshape(weight.shape[0], math.prod(weight.shape[1:]))


def _flat(dy: Any) -> Any:
    return dy.swapaxes(0, 1).reshape(dy.shape[1], dy.shape[0] * math.prod(dy.shape[2:]))
