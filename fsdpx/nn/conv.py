"""Conv2d, MaxPool2d, AvgPool2d: sums over the places of a window, each place a strided view of the image."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from fsdpx.errors import ConfigError, ShapeError
from fsdpx.nn.check import pair, positive, want_image
from fsdpx.nn.init import Init, uniform
from fsdpx.nn.layer import Array, Env, Layer, Params, Spec
from fsdpx.nn.numeric import add_product, add_sum, product, wide

__all__ = ["AvgPool2d", "Conv2d", "MaxPool2d"]

Pair = int | tuple[int, int]


@dataclass(frozen=True)
class Window:
    """A window of `kernel` (height, width) that moves by `stride` over an image with `padding` around it."""

    kernel: tuple[int, int]
    stride: tuple[int, int]
    padding: tuple[int, int]

    def out(self, layer: Layer, x: Array) -> tuple[int, int]:
        """Height and width of the result; ShapeError if the window does not fit once."""
        sides = zip(x.shape[2:], self.kernel, self.stride, self.padding, strict=True)
        height, width = ((size + 2 * p - k) // s + 1 for size, k, s, p in sides)
        if height < 1 or width < 1:
            raise ShapeError(f"{layer!r}: the window does not fit into an image of shape {tuple(x.shape)}")
        return height, width

    def places(self, out: tuple[int, int]) -> Iterator[tuple[slice, ...]]:
        """For each place of the window, the pixels of the padded image under it, as a strided slice."""
        (height, width), (down, right) = out, self.stride
        for i in range(self.kernel[0]):
            for j in range(self.kernel[1]):
                rows = slice(i, i + down * (height - 1) + 1, down)
                yield slice(None), slice(None), rows, slice(j, j + right * (width - 1) + 1, right)

    def padded(self, xp: Any, x: Array, value: float) -> Array:
        if self.padding == (0, 0):
            return x
        image = xp.full(self._padded_shape(x.shape), value, dtype=x.dtype)
        image[self._inside(x.shape)] = x
        return image

    def cut(self, image: Array, shape: tuple[int, ...]) -> Array:
        """The inverse of `padded`, as a view."""
        return image[self._inside(shape)]

    def empty_gradient(self, xp: Any, shape: tuple[int, ...], dtype: Any) -> Array:
        """Zeros in the shape of the padded image."""
        return xp.zeros(self._padded_shape(shape), dtype=dtype)

    def _padded_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        return (*shape[:2], shape[2] + 2 * self.padding[0], shape[3] + 2 * self.padding[1])

    def _inside(self, shape: tuple[int, ...]) -> tuple[slice, ...]:
        (top, left), (height, width) = self.padding, shape[2:]
        return slice(None), slice(None), slice(top, top + height), slice(left, left + width)


class Conv2d(Layer):
    """Cross-correlation of `(samples, in_channels, height, width)` with a window, plus bias.

    Weights `weight (out_channels, in_channels, kh, kw)` and `bias (out_channels,)`, from U(-k, k) with k =
    1/sqrt(in_channels kh kw), as in PyTorch. The windows become the columns of one matrix product (im2col,
    Chellapilla et al. 2006); backward recomputes the columns.

    Parameters
    ----------
    in_channels, out_channels : size of dim 1 of the input and of the result
    kernel_size : height and width of the window, one number for both or a pair; so are the next two
    stride : by how many pixels the window moves
    padding : rows and columns of zeros on each side
    bias : whether there is a bias
    init : of `weight`, instead of the uniform distribution
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: Pair,
        stride: Pair = 1,
        padding: Pair = 0,
        bias: bool = True,
        *,
        init: Init | None = None,
    ) -> None:
        positive(self, in_channels=in_channels, out_channels=out_channels)
        self.in_channels, self.out_channels = in_channels, out_channels
        self.kernel_size, self.stride, self.padding = kernel_size, stride, padding
        self.bias = bool(bias)
        self.init = init
        self._window = _window(self, kernel_size, stride, padding)

    def specs(self) -> dict[str, Spec]:
        kernel = self._window.kernel
        default = uniform(1.0 / math.sqrt(self.in_channels * math.prod(kernel)))
        specs = {"weight": Spec((self.out_channels, self.in_channels, *kernel), self.init or default)}
        if self.bias:
            specs["bias"] = Spec((self.out_channels,), default)
        return specs

    def forward(self, env: Env, p: Params, x: Array) -> tuple[Array, Any]:
        want_image(self, x, self.in_channels)
        out = self._window.out(self, x)
        flat = product(env.xp, self._matrix(p["weight"]), self._columns(env.xp, x, out))
        y = env.xp.empty((x.shape[0], self.out_channels, *out), dtype=flat.dtype)
        y[...] = flat.reshape(self.out_channels, x.shape[0], *out).swapaxes(0, 1)
        if self.bias:
            y += p["bias"].reshape(1, -1, 1, 1)
        return y, (x,)

    def backward_input(self, env: Env, p: Params, saved: Any, dy: Array) -> tuple[Array, Any]:
        (x,) = saved
        out = tuple(dy.shape[2:])
        dcolumns = product(env.xp, self._matrix(p["weight"]).T, self._flat(dy))
        places = math.prod(self._window.kernel)
        dcolumns = dcolumns.reshape(self.in_channels, places, x.shape[0], *out)
        image = self._window.empty_gradient(env.xp, x.shape, wide(x.dtype))
        for n, place in enumerate(self._window.places(out)):
            image[place] += dcolumns[:, n].swapaxes(0, 1)
        return self._window.cut(image, x.shape).astype(x.dtype, copy=False), (x, dy)

    def backward_leaf(self, env: Env, p: Params, g: Params, saved: Any, dy: Array) -> None:
        self.backward_params(env, g, (*saved, dy))

    def backward_params(self, env: Env, g: Params, kept: Any) -> None:
        x, dy = kept
        if "weight" in g:
            columns = self._columns(env.xp, x, tuple(dy.shape[2:]))
            add_product(env.xp, g, "weight", self._flat(dy), columns.T)
        if "bias" in g:
            add_sum(env.xp, g["bias"], dy, (0, 2, 3))

    def _columns(self, xp: Any, x: Array, out: tuple[int, int]) -> Array:
        """`(in_channels kh kw, samples height width)`: one column per place of the result."""
        image = self._window.padded(xp, x, 0.0)
        places = math.prod(self._window.kernel)
        columns = xp.empty((self.in_channels, places, x.shape[0], *out), dtype=x.dtype)
        for n, place in enumerate(self._window.places(out)):
            columns[:, n] = image[place].swapaxes(0, 1)
        return columns.reshape(self.in_channels * places, x.shape[0] * math.prod(out))

    def _matrix(self, weight: Array) -> Array:
        return weight.reshape(self.out_channels, self.in_channels * math.prod(self._window.kernel))

    def _flat(self, dy: Array) -> Array:
        return dy.swapaxes(0, 1).reshape(self.out_channels, dy.shape[0] * math.prod(dy.shape[2:]))


class _Pool2d(Layer):
    """The options of MaxPool2d and AvgPool2d."""

    def __init__(self, kernel_size: Pair, stride: Pair | None = None, padding: Pair = 0) -> None:
        self.kernel_size, self.stride, self.padding = kernel_size, stride, padding
        window = _window(self, kernel_size, kernel_size if stride is None else stride, padding)
        if any(2 * p > k for p, k in zip(window.padding, window.kernel, strict=True)):
            name = type(self).__name__
            raise ConfigError(f"{name}: padding {padding!r} must be at most half of kernel_size {kernel_size!r}")
        self._window = window


class MaxPool2d(_Pool2d):
    """The largest value in each window of `(samples, channels, height, width)`; the first of equals has the gradient.

    Parameters
    ----------
    kernel_size : height and width of the window, one number for both or a pair; so are the next two
    stride : by how many pixels the window moves; None: kernel_size
    padding : rows and columns of -inf on each side, at most half of kernel_size
    """

    def forward(self, env: Env, p: Params, x: Array) -> tuple[Array, Any]:
        want_image(self, x)
        xp, out = env.xp, self._window.out(self, x)
        image = self._window.padded(xp, x, -math.inf)
        y = xp.full((*x.shape[:2], *out), -math.inf, dtype=x.dtype)
        winner = xp.zeros(y.shape, dtype="int32")
        for n, place in enumerate(self._window.places(out)):
            value = image[place]
            better = (value > y) | (value != value)  # NaN wins, so that it is seen
            y = xp.where(better, value, y)
            winner = xp.where(better, n, winner)
        return y, (tuple(x.shape), winner)

    def backward_input(self, env: Env, p: Params, saved: Any, dy: Array) -> tuple[Array, Any]:
        shape, winner = saved
        image = self._window.empty_gradient(env.xp, shape, dy.dtype)
        for n, place in enumerate(self._window.places(tuple(dy.shape[2:]))):
            image[place] += dy * (winner == n)
        return self._window.cut(image, shape), ()


class AvgPool2d(_Pool2d):
    """The mean of each window of `(samples, channels, height, width)`; padding counts as zeros.

    Parameters
    ----------
    kernel_size, stride, padding : as in `MaxPool2d`
    """

    def forward(self, env: Env, p: Params, x: Array) -> tuple[Array, Any]:
        want_image(self, x)
        out = self._window.out(self, x)
        image = self._window.padded(env.xp, x, 0.0)
        y = env.xp.zeros((*x.shape[:2], *out), dtype=wide(x.dtype))
        for place in self._window.places(out):
            y += image[place]
        y /= math.prod(self._window.kernel)
        return y.astype(x.dtype, copy=False), tuple(x.shape)

    def backward_input(self, env: Env, p: Params, saved: Any, dy: Array) -> tuple[Array, Any]:
        image = self._window.empty_gradient(env.xp, saved, wide(dy.dtype))
        share = dy / math.prod(self._window.kernel)
        for place in self._window.places(tuple(dy.shape[2:])):
            image[place] += share
        return self._window.cut(image, saved).astype(dy.dtype, copy=False), ()


def _window(layer: Layer, kernel: Pair, stride: Pair, padding: Pair) -> Window:
    return Window(
        pair(layer, "kernel_size", kernel, 1), pair(layer, "stride", stride, 1), pair(layer, "padding", padding, 0)
    )
