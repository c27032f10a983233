"""Convolution with channels last: Winograd's way where it is open, else windows as rows of one matrix (im2col)."""

import math
from collections.abc import Iterator
from typing import Any

import numpy as np

from fsdpx.array import blas
from fsdpx.array.kernels import addition
from fsdpx.array.kernels import convolution as plain
from fsdpx.array.kernels.compiled import winograd
from fsdpx.array.kernels.compiled.images import channels_first, channels_last, put_channels_first
from fsdpx.array.kernels.convolution import SlidingWindow
from fsdpx.array.parallel import over
from fsdpx.native.compiled import jit
from fsdpx.native.late import register_jitable

__all__ = ["conv2d", "conv2d_backward_input", "conv2d_backward_params"]

BLOCK = 1 << 21
"""Bytes of the rows that are made at a time, about: they stay in the cache until they are multiplied."""


@register_jitable
def _inside(first, kernel, size):
    """The part of a window from `first` that lies on [0, size), as a range of its `kernel` places; it may be empty."""
    start = min(max(-first, 0), kernel)
    return start, max(min(kernel, size - first), start)


@jit
def _unfold(image, rows, channels, kh, kw, down, right, top, left):
    """rows[n, y, x] = the window of result (y, x): kh kw pixels with their channels, 0 outside of the image, of which
    image[n, i] is row i, one pixel after the other."""
    width = image.shape[2] // channels
    for n in range(image.shape[0]):
        for y in range(rows.shape[1]):
            above, below = _inside(y * down - top, kh, image.shape[1])
            for x in range(rows.shape[2]):
                row, first = rows[n, y, x], x * right - left
                start, stop = _inside(first, kw, width)
                if below - above < kh or stop - start < kw:
                    row[:] = 0
                for i in range(above, below):
                    size, at, source = (
                        (stop - start) * channels,
                        (i * kw + start) * channels,
                        (first + start) * channels,
                    )
                    pixels, into = image[n, y * down - top + i, source : source + size], row[at : at + size]
                    for c in range(size):
                        into[c] = pixels[c]


@jit
def _fold(image, rows, channels, kh, kw, down, right, top, left):
    """Add each window back to the pixels that it was made of."""
    width = image.shape[2] // channels
    for n in range(image.shape[0]):
        for y in range(rows.shape[1]):
            above, below = _inside(y * down - top, kh, image.shape[1])
            for x in range(rows.shape[2]):
                row, first = rows[n, y, x], x * right - left
                start, stop = _inside(first, kw, width)
                for i in range(above, below):
                    size, at, target = (
                        (stop - start) * channels,
                        (i * kw + start) * channels,
                        (first + start) * channels,
                    )
                    into, pixels = image[n, y * down - top + i, target : target + size], row[at : at + size]
                    for c in range(size):
                        into[c] += pixels[c]


def conv2d(xp: Any, x: np.ndarray, weight: np.ndarray, bias: Any, window: SlidingWindow) -> np.ndarray:
    at = blas.pointer(x.dtype)
    if not at:
        return plain.conv2d.__wrapped__(xp, x, weight, bias, window)  # type: ignore[attr-defined]
    image, kernel = channels_last(x), channels_last(weight)
    if winograd.suits(x.shape, weight.shape, window):
        y = winograd.forward(at, image, kernel, window.padding[0])
    else:
        y = np.empty((x.shape[0], *window.out(x.shape), weight.shape[0]), x.dtype)
        for part, rows in _unfolded(image, window, y.shape[1:3]):
            blas.gemm(_flat(y[part]), rows, _matrix(kernel).T)
    if bias is not None:
        addition.add_bias(xp, y, bias)
    return channels_first(y)


def conv2d_backward_input(
    xp: Any, weight: np.ndarray, dy: np.ndarray, window: SlidingWindow, shape: tuple[int, ...]
) -> np.ndarray:
    if not blas.pointer(dy.dtype):
        return plain.conv2d_backward_input.__wrapped__(xp, weight, dy, window, shape)  # type: ignore[attr-defined]
    slope, kernel = channels_last(dy), channels_last(weight)
    if winograd.suits(shape, weight.shape, window):
        image = (shape[0], *shape[2:], shape[1])
        dx = winograd.backward_input(blas.pointer(dy.dtype), image, kernel, slope, window.padding[0])
    else:
        dx = _folded(slope, kernel, window, shape)
    return channels_first(dx)


def conv2d_backward_params(xp: Any, x: Any, dy: Any, window: SlidingWindow, weight: plain.Sum, bias: plain.Sum) -> None:
    slope = channels_last(dy)
    if bias is not None:
        total = np.empty(dy.shape[1], dy.dtype)
        addition.sum_rows(xp, _flat(slope), total, False)
        plain.put(bias, total)
    if weight is None:
        return
    if not blas.pointer(x.dtype):
        plain.conv2d_backward_params.__wrapped__(xp, x, dy, window, weight, None)  # type: ignore[attr-defined]
        return
    image, shape = channels_last(x), (dy.shape[1], x.shape[1], *window.kernel)
    if winograd.suits(x.shape, shape, window):
        dw = winograd.backward_weight(blas.pointer(x.dtype), image, slope, window.padding[0])
    else:
        dw = np.zeros((shape[0], *window.kernel, shape[1]), x.dtype)
        for part, rows in _unfolded(image, window, slope.shape[1:3]):
            blas.gemm(_matrix(dw), _flat(slope[part]).T, rows, True)
    put_channels_first(weight, dw)


def _unfolded(image: np.ndarray, window: SlidingWindow, out: tuple[int, ...]) -> Iterator[tuple[slice, np.ndarray]]:
    """Blocks of samples, each with its windows as rows of a matrix; valid until the next block."""
    if window.dot:
        yield slice(None), _flat(image)
        return
    samples, channels = image.shape[0], image.shape[3]
    for part, rows in _blocks(samples, (*out, window.size * channels), image.dtype):
        over(
            _unfold,
            (_lines(image[part]), rows),
            channels,
            *window.kernel,
            *window.stride,
            *window.padding,
            work=rows.size,
        )
        yield part, _flat(rows)


def _folded(slope: np.ndarray, kernel: np.ndarray, window: SlidingWindow, shape: tuple[int, ...]) -> np.ndarray:
    """The gradient of the image: the gradients of its windows, each added where it belongs."""
    samples, channels, height, width = shape
    dx = np.zeros((samples, height, width, channels), slope.dtype)
    if window.dot:
        blas.gemm(_flat(dx), _flat(slope), _matrix(kernel))
        return dx
    for part, rows in _blocks(samples, (*slope.shape[1:3], window.size * channels), slope.dtype):
        blas.gemm(_flat(rows), _flat(slope[part]), _matrix(kernel))
        over(_fold, (_lines(dx[part]), rows), channels, *window.kernel, *window.stride, *window.padding, work=rows.size)
    return dx


def _blocks(samples: int, shape: tuple[int, ...], dtype: Any) -> Iterator[tuple[slice, np.ndarray]]:
    """Runs of samples with memory for them, which is used again; the cut does not depend on the number of threads."""
    count = max(1, min(samples, BLOCK // max(math.prod(shape) * dtype.itemsize, 1)))
    memory = np.empty((count, *shape), dtype)
    for start in range(0, samples, count):
        stop = min(start + count, samples)
        yield slice(start, stop), memory[: stop - start]


def _lines(image: np.ndarray) -> np.ndarray:
    """The pixels of each row of an image one after the other."""
    return image.reshape(*image.shape[:2], image.shape[2] * image.shape[3])


def _flat(rows: np.ndarray) -> np.ndarray:
    return rows.reshape(math.prod(rows.shape[:-1]), rows.shape[-1])


def _matrix(kernel: np.ndarray) -> np.ndarray:
    return kernel.reshape(kernel.shape[0], math.prod(kernel.shape[1:]))
