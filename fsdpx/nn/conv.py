"""Conv2d, MaxPool2d, AvgPool2d: windows that move over images."""

import math
from typing import Any

from fsdpx.array import kernels
from fsdpx.array.kernels.convolution import SlidingWindow
from fsdpx.errors import ConfigError, ShapeError
from fsdpx.nn.init import Init, uniform
from fsdpx.nn.layer import Array, Env, Layer, Params, Spec, pair, positive, want_image
from fsdpx.nn.numeric import destination

__all__ = ["AvgPool2d", "Conv2d", "MaxPool2d"]

Pair = int | tuple[int, int]


class Conv2d(Layer):
    """Cross-correlation of `(samples, in_channels, height, width)` with a window, plus bias.

    Weights `weight (out_channels, in_channels, kh, kw)` and `bias (out_channels,)`, from U(-k, k) with k =
    1/sqrt(in_channels kh kw), as in PyTorch. On CPUs 3 x 3 windows that move by 1 pixel, of a multiple of 16 channels,
    need a quarter of the multiplications (Winograd's F(4 x 4, 3 x 3)), with errors of a few 1e-6 in float32.

    Parameters
    ----------
    in_channels, out_channels : size of dim 1 of the input and of the result
    kernel_size : height and width of the window, one number for both or a pair; so are the next two
    stride : by how many pixels the window moves
    padding : rows and columns of zeros on each side
    bias : whether there is a bias
    init : of `weight`, instead of the uniform distribution
    """

    runs = ("conv2d", "conv2d_backward_input", "conv2d_backward_params")

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
        _check_fit(self, self._window, x)
        return kernels.conv2d(env.xp, x, p["weight"], p.get("bias"), self._window), (x,)

    def backward_input(self, env: Env, p: Params, saved: Any, dy: Array) -> tuple[Array, Any]:
        (x,) = saved
        return kernels.conv2d_backward_input(env.xp, p["weight"], dy, self._window, tuple(x.shape)), (x, dy)

    def backward_leaf(self, env: Env, p: Params, g: Params, saved: Any, dy: Array) -> None:
        self.backward_params(env, g, (*saved, dy))

    def backward_params(self, env: Env, g: Params, kept: Any) -> None:
        x, dy = kept
        weight, bias = destination(g, "weight"), destination(g, "bias")
        kernels.conv2d_backward_params(env.xp, x, dy, self._window, weight, bias)


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

    runs = ("max_pool2d", "max_pool2d_backward")

    def forward(self, env: Env, p: Params, x: Array) -> tuple[Array, Any]:
        want_image(self, x)
        _check_fit(self, self._window, x)
        y, winner = kernels.max_pool2d(env.xp, x, self._window)
        return y, (tuple(x.shape), winner)

    def backward_input(self, env: Env, p: Params, saved: Any, dy: Array) -> tuple[Array, Any]:
        shape, winner = saved
        return kernels.max_pool2d_backward(env.xp, dy, winner, self._window, shape), ()


class AvgPool2d(_Pool2d):
    """The mean of each window of `(samples, channels, height, width)`; padding counts as zeros.

    Parameters
    ----------
    kernel_size, stride, padding : as in `MaxPool2d`
    """

    runs = ("avg_pool2d", "avg_pool2d_backward")

    def forward(self, env: Env, p: Params, x: Array) -> tuple[Array, Any]:
        want_image(self, x)
        _check_fit(self, self._window, x)
        return kernels.avg_pool2d(env.xp, x, self._window), tuple(x.shape)

    def backward_input(self, env: Env, p: Params, saved: Any, dy: Array) -> tuple[Array, Any]:
        return kernels.avg_pool2d_backward(env.xp, dy, self._window, saved), ()


def _check_fit(layer: Layer, window: SlidingWindow, x: Array) -> None:
    """ShapeError if the window does not fit once."""
    if min(window.out(x.shape)) < 1:
        raise ShapeError(f"{layer!r}: the window does not fit into an image of shape {tuple(x.shape)}")


def _window(layer: Layer, kernel: Pair, stride: Pair, padding: Pair) -> SlidingWindow:
    return SlidingWindow(
        pair(layer, "kernel_size", kernel, 1), pair(layer, "stride", stride, 1), pair(layer, "padding", padding, 0)
    )
