"""Kernels compiled, or loaded from the cache, before the first step: by a call with a few numbers each."""

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from fsdpx.array import blas, kernels
from fsdpx.array.kernels import choice
from fsdpx.array.kernels.convolution import SlidingWindow
from fsdpx.array.kernels.correlation import Strides
from fsdpx.array.random import Stretch, normal

__all__ = ["SAMPLES", "warm"]

Sample = Callable[[Any, Any, Any], Any]
"""A call with rows (2, 3) and columns (3,) of the dtype computed in, and columns of that in which it is summed."""

WINDOW = SlidingWindow((2, 2), (2, 2), (0, 0))
STRIDES = Strides((2,), (1,), (1,), (0,), 1)
TARGET, NUMBERS = np.zeros(2, np.int64), Stretch(0, "", 0, 6)

SAMPLES: dict[str, Sample] = {
    "add": lambda x, w, s: kernels.add(np, x, x),
    "add_bias": lambda x, w, s: kernels.add_bias(np, x, w),
    "attention": lambda x, w, s: _attention(x),
    "attention_backward": lambda x, w, s: kernels.attention_backward(np, *_heads(x), True, 1.0),
    "bias_gelu": lambda x, w, s: kernels.bias_gelu(np, x, w),
    "bias_gelu tanh": lambda x, w, s: kernels.bias_gelu(np, x, w, "tanh"),
    "avg_pool": lambda x, w, s: kernels.avg_pool(np, _image(x), WINDOW),
    "avg_pool_backward": lambda x, w, s: kernels.avg_pool_backward(np, _image(x), WINDOW, (2, 3, 4, 4)),
    "channel_affine": lambda x, w, s: kernels.channel_affine(np, x, s, s, s),
    "channel_norm_backward": lambda x, w, s: kernels.channel_norm_backward(np, x, x, s, s, s, s),
    "channel_squares": lambda x, w, s: kernels.channel_squares(np, x, s),
    "channel_sums": lambda x, w, s: kernels.channel_sums(np, x),
    "channel_sums_with": lambda x, w, s: kernels.channel_sums_with(np, x, x, s, s),
    "conv2d": lambda x, w, s: [kernels.conv2d(np, *one[:2], None, one[2]) for one in _windows(x)],
    "conv2d_backward_input": lambda x, w, s: [
        kernels.conv2d_backward_input(np, k, _slope(y, k, window), window, y.shape) for y, k, window in _windows(x)
    ],
    "conv2d_backward_params": lambda x, w, s: [
        kernels.conv2d_backward_params(np, y, _slope(y, k, window), window, (k.astype(s.dtype), True), None)
        for y, k, window in _windows(x)
    ],
    "correlate": lambda x, w, s: kernels.correlate(np, *_field(x), None, STRIDES, (2,), _field(x)[0]),
    "correlate_backward_input": lambda x, w, s: kernels.correlate_backward_input(
        np, _field(x)[1], _field(x)[0], STRIDES, (2, 3, 3)
    ),
    "correlate_backward_params": lambda x, w, s: kernels.correlate_backward_params(
        np, _field(x)[0], _field(x)[0], STRIDES, (_field(x)[1].astype(s.dtype), True), None
    ),
    "cross_entropy": lambda x, w, s: kernels.cross_entropy(np, x, TARGET),
    "cross_entropy_backward": lambda x, w, s: kernels.cross_entropy_backward(np, x, TARGET, s[:2], 1.0),
    "drop": lambda x, w, s: kernels.drop(np, x, NUMBERS, 0.5),
    "drop_backward": lambda x, w, s: kernels.drop_backward(np, x, x > 0, 0.5),
    "embedding_backward": lambda x, w, s: kernels.embedding_backward(np, np.zeros((2, 3), s.dtype), TARGET, x),
    "gated": lambda x, w, s: kernels.gated(np, x, x),
    "gated gelu": lambda x, w, s: kernels.gated(np, x, x, "gelu"),
    "gated gelu tanh": lambda x, w, s: kernels.gated(np, x, x, "gelu tanh"),
    "gated_backward": lambda x, w, s: kernels.gated_backward(np, x, x, x),
    "gated_backward gelu": lambda x, w, s: kernels.gated_backward(np, x, x, x, "gelu"),
    "gated_backward gelu tanh": lambda x, w, s: kernels.gated_backward(np, x, x, x, "gelu tanh"),
    "gelu": lambda x, w, s: kernels.gelu(np, x),
    "gelu_backward": lambda x, w, s: kernels.gelu_backward(np, x, x),
    "gelu tanh": lambda x, w, s: kernels.gelu(np, x, "tanh"),
    "gelu_backward tanh": lambda x, w, s: kernels.gelu_backward(np, x, x, "tanh"),
    "gelu_recompute": lambda x, w, s: kernels.gelu_recompute(np, x, x.copy()),
    "gelu_recompute tanh": lambda x, w, s: kernels.gelu_recompute(np, x, x.copy(), "tanh"),
    "layer_norm": lambda x, w, s: kernels.layer_norm(np, x, w, w, 1e-5),
    "layer_norm_backward_input": lambda x, w, s: kernels.layer_norm_backward_input(np, x, w, s[:2], s[:2], x),
    "layer_norm_backward_params": lambda x, w, s: kernels.layer_norm_backward_params(
        np, x, s[:2], s[:2], x, s, s.copy()
    ),
    "linear": lambda x, w, s: _linear(x, w, s),
    "max_pool": lambda x, w, s: kernels.max_pool(np, _image(x), WINDOW),
    "max_pool_backward": lambda x, w, s: _max_pool(x),
    "normal": lambda x, w, s: normal(0, "", 0, 6),
    "relu": lambda x, w, s: kernels.relu(np, x),
    "relu_backward": lambda x, w, s: kernels.relu_backward(np, x, x),
    "rms_norm": lambda x, w, s: kernels.rms_norm(np, x, w, 1e-5),
    "rms_norm_backward_input": lambda x, w, s: kernels.rms_norm_backward_input(np, x, w, s[:2], x),
    "rms_norm_backward_params": lambda x, w, s: kernels.rms_norm_backward_params(np, x, s[:2], x, s),
    "rotate": lambda x, w, s: kernels.rotate(np, x[:, :2].reshape(1, 2, 1, 2), s[:2, None], s[:2, None]),
    "sigmoid": lambda x, w, s: kernels.sigmoid(np, x),
    "silu": lambda x, w, s: kernels.silu(np, x),
    "silu_backward": lambda x, w, s: kernels.silu_backward(np, x, x),
    "softmax": lambda x, w, s: kernels.softmax(np, x),
    "softmax_backward": lambda x, w, s: kernels.softmax_backward(np, x, x),
    "square_sum": lambda x, w, s: kernels.square_sum(np, w),
    "square_sums": lambda x, w, s: kernels.square_sums(np, w, 2),
    "squared_error": lambda x, w, s: kernels.squared_error(np, x, x),
    "squared_error_backward": lambda x, w, s: kernels.squared_error_backward(np, x, x, 1.0),
    "sum_rows": lambda x, w, s: kernels.sum_rows(np, x, s),
    "float16": lambda x, w, s: _through(x, "float16"),
    "bfloat16": lambda x, w, s: _through(x, "bf16"),
}


def warm(names: Iterable[str], dtype: Any) -> None:
    """Compile or load the kernels of these names for `dtype`. Unknown names, and kernels that run as plain code, cost
    nothing."""
    dtype = np.dtype(dtype)
    half_float = dtype.itemsize == 2
    x, w, s = np.zeros((2, 3), dtype), np.ones(3, dtype), np.ones(3, np.float32 if half_float else dtype)
    for name in dict.fromkeys([*names, *([dtype.name] if half_float else [])]):
        known = name.partition(" ")[0]
        if name in SAMPLES and (known not in choice.NUMBA or choice.chosen(known) == "numba"):
            SAMPLES[name](x.copy(), w.copy(), s.copy())


def _heads(x: Any) -> tuple[Any, ...]:
    """q, k, v, o, lse and the gradient of o: views as the layer passes them."""
    q, k, v = np.zeros((1, 2, 3, 1, 4), x.dtype).transpose(2, 0, 3, 1, 4)
    o, lse = kernels.attention(np, q, k, v, True, 1.0)
    return q, k, v, o, lse, o.copy()


def _attention(x: Any) -> None:
    """Of whole texts, and of a token behind others."""
    q, k, v, *_ = _heads(x)
    kernels.attention(np, q[:, :, :1], k, v, False, 1.0)


def _image(x: Any) -> Any:
    return np.zeros((2, 3, 2, 2), x.dtype)


def _field(x: Any) -> tuple[Any, Any]:
    """A field of one dim, channels last, and the weights of a window."""
    return np.zeros((2, 2, 3), x.dtype).transpose(0, 2, 1), np.zeros((3, 3, 2), x.dtype)


def _max_pool(x: Any) -> None:
    y, winner = kernels.max_pool(np, _image(x), WINDOW)
    kernels.max_pool_backward(np, y, winner, WINDOW, (2, 3, 2, 2))


def _windows(x: Any) -> list[Any]:
    """Images, weights and windows of the two ways that a convolution can go."""
    shapes = (
        ((2, 3, 4, 4), (3, 3, 2, 2), WINDOW),
        ((1, 16, 4, 4), (16, 16, 3, 3), SlidingWindow((3, 3), (1, 1), (1, 1))),
    )
    return [(np.zeros(image, x.dtype), np.zeros(weight, x.dtype), window) for image, weight, window in shapes]


def _slope(x: Any, weight: Any, window: SlidingWindow) -> Any:
    return np.zeros((x.shape[0], weight.shape[0], *window.out(x.shape)), x.dtype)


def _linear(x: Any, w: Any, s: Any) -> None:
    """The products of a Linear, which are not kernels but run by the chosen BLAS."""
    weight, y = np.zeros((3, 3), x.dtype), np.empty_like(x)
    if x.dtype.itemsize == 2:
        blas.halves.product(y, x, weight, bias=w)
        blas.halves.product(np.zeros((3, 3), np.float32), x.T, x)
        kernels.sum_rows(np, x, s)
        return
    blas.affine(y, x, weight, w)
    blas.gemm(y, x, weight)
    blas.linear_gradients((weight, False), (w.copy(), False), y, x)
    blas.linear_backward(np.empty_like(x), (weight, False), (w.copy(), False), y, x, weight.copy())


def _through(x: Any, name: str) -> None:
    from fsdpx.array.namespace import dtype

    h = kernels.narrowed(np, kernels.widened(np, x), dtype(name))
    wide = kernels.widened(np, h)
    kernels.store(np, h, wide)
    kernels.add_widened(np, h, wide)
