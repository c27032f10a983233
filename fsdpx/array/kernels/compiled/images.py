"""Images with the channels of a pixel next to each other in memory, (samples, height, width, channels), and max and
mean of their windows, sample by sample."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from fsdpx.array.kernels.compiled.half import owned
from fsdpx.array.kernels.convolution import SlidingWindow
from fsdpx.array.parallel import over
from fsdpx.native.compiled import jit

__all__ = [
    "avg_pool2d", "avg_pool2d_backward", "channels_first", "channels_last", "max_pool2d", "max_pool2d_backward",
    "put_channels_first", "rows_first", "rows_of",
]  # fmt: skip

BLOCK = 64  # pixels of a block that is turned inside the cache


@jit
def _turn(x, out, add):
    """out[n, p, c] (+)= x[n, c, p]."""
    for n in range(x.shape[0]):
        for start in range(0, x.shape[2], BLOCK):
            stop = min(start + BLOCK, x.shape[2])
            for p in range(start, stop):
                for c in range(x.shape[1]):
                    if add:
                        out[n, p, c] += x[n, c, p]
                    else:
                        out[n, p, c] = x[n, c, p]


def channels_last(x: np.ndarray) -> np.ndarray:
    """(samples, channels, height, width) as (samples, height, width, channels), contiguous; copied where needed."""
    turned = x.transpose(0, 2, 3, 1)
    if turned.flags.c_contiguous:
        return owned(turned)
    x = owned(x)
    n, channels, height, width = x.shape
    out = np.empty((n, height, width, channels), x.dtype)
    pixels = height * width
    over(_turn, (x.reshape(n, channels, pixels), out.reshape(n, pixels, channels)), False)
    return out


def channels_first(rows: np.ndarray) -> np.ndarray:
    """(samples, height, width, channels) as (samples, channels, height, width): a view."""
    return rows.transpose(0, 3, 1, 2)


def put_channels_first(into: Any, rows: np.ndarray) -> None:
    """Write or add an array with channels last to where a gradient with channels first goes."""
    out, add = into
    n, height, width, channels = rows.shape
    if out.dtype == rows.dtype and out.flags.c_contiguous and out.flags.aligned:
        over(_turn, (rows.reshape(n, height * width, channels), out.reshape(n, channels, height * width)), add)
    elif add:
        out += channels_first(rows).astype(out.dtype)
    else:
        out[...] = channels_first(rows)


def rows_of(x: np.ndarray) -> np.ndarray:
    """(samples, channels, ...) as rows of channels, one per sample and place, contiguous."""
    if x.ndim == 2:
        return owned(x)
    flat = x if x.ndim == 4 else x.reshape(*x.shape[:2], math.prod(x.shape[2:]), 1)
    return channels_last(flat).reshape(x.shape[0] * math.prod(x.shape[2:]), x.shape[1])


def rows_first(rows: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """Rows of channels as (samples, channels, ...): a view."""
    return np.moveaxis(rows.reshape(shape[0], *shape[2:], shape[1]), -1, 1)


@jit
def _largest(image, y, winner, kh, kw, down, right, top, left):
    for n in range(image.shape[0]):
        for r in range(y.shape[1]):
            for q in range(y.shape[2]):
                best, place = y[n, r, q], winner[n, r, q]
                best[:] = -np.inf
                place[:] = 0
                for i in range(max(r * down - top, 0), min(r * down - top + kh, image.shape[1])):
                    for j in range(max(q * right - left, 0), min(q * right - left + kw, image.shape[2])):
                        pixel, number = image[n, i, j], np.int32((i - r * down + top) * kw + j - q * right + left)
                        for c in range(best.size):
                            better = pixel[c] > best[c] or pixel[c] != pixel[c]
                            best[c] = pixel[c] if better else best[c]
                            place[c] = number if better else place[c]


@jit
def _to_largest(image, dy, winner, kh, kw, down, right, top, left):
    for n in range(image.shape[0]):
        for r in range(dy.shape[1]):
            for q in range(dy.shape[2]):
                slope, place = dy[n, r, q], winner[n, r, q]
                for i in range(max(r * down - top, 0), min(r * down - top + kh, image.shape[1])):
                    for j in range(max(q * right - left, 0), min(q * right - left + kw, image.shape[2])):
                        pixel, number = image[n, i, j], np.int32((i - r * down + top) * kw + j - q * right + left)
                        for c in range(slope.size):
                            pixel[c] += slope[c] if place[c] == number else slope.dtype.type(0)


@jit
def _mean(image, y, kh, kw, down, right, top, left):
    size = y.dtype.type(kh * kw)
    for n in range(image.shape[0]):
        for r in range(y.shape[1]):
            for q in range(y.shape[2]):
                into = y[n, r, q]
                into[:] = 0
                for i in range(max(r * down - top, 0), min(r * down - top + kh, image.shape[1])):
                    for j in range(max(q * right - left, 0), min(q * right - left + kw, image.shape[2])):
                        pixel = image[n, i, j]
                        for c in range(into.size):
                            into[c] += pixel[c]
                for c in range(into.size):
                    into[c] /= size


@jit
def _to_all(image, dy, kh, kw, down, right, top, left):
    size = dy.dtype.type(kh * kw)
    for n in range(image.shape[0]):
        for r in range(dy.shape[1]):
            for q in range(dy.shape[2]):
                slope = dy[n, r, q]
                for i in range(max(r * down - top, 0), min(r * down - top + kh, image.shape[1])):
                    for j in range(max(q * right - left, 0), min(q * right - left + kw, image.shape[2])):
                        pixel = image[n, i, j]
                        for c in range(slope.size):
                            pixel[c] += slope[c] / size


def max_pool2d(xp: Any, x: np.ndarray, window: SlidingWindow) -> tuple[np.ndarray, np.ndarray]:
    image = channels_last(x)
    y = _empty(x, window)
    winner = np.empty(y.shape, np.int32)
    over(_largest, (image, y, winner), *_numbers(window))
    return channels_first(y), channels_first(winner)


def max_pool2d_backward(xp: Any, dy: Any, winner: Any, window: SlidingWindow, shape: tuple[int, ...]) -> np.ndarray:
    image = _zeros(dy, shape)
    over(_to_largest, (image, channels_last(dy), owned(winner.transpose(0, 2, 3, 1), np.int32)), *_numbers(window))
    return channels_first(image)


def avg_pool2d(xp: Any, x: np.ndarray, window: SlidingWindow) -> np.ndarray:
    y = _empty(x, window)
    over(_mean, (channels_last(x), y), *_numbers(window))
    return channels_first(y)


def avg_pool2d_backward(xp: Any, dy: np.ndarray, window: SlidingWindow, shape: tuple[int, ...]) -> np.ndarray:
    image = _zeros(dy, shape)
    over(_to_all, (image, channels_last(dy)), *_numbers(window))
    return channels_first(image)


def _numbers(window: SlidingWindow) -> tuple[int, ...]:
    return (*window.kernel, *window.stride, *window.padding)


def _empty(x: np.ndarray, window: SlidingWindow) -> np.ndarray:
    return np.empty((x.shape[0], *window.out(x.shape), x.shape[1]), x.dtype)


def _zeros(dy: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    return np.zeros((shape[0], *shape[2:], shape[1]), dy.dtype)
