"""Max and mean of windows with channels last, sample by sample."""

from typing import Any

import numpy as np

from fsdpx.array.kernels.compiled.arrays import owned
from fsdpx.array.kernels.compiled.images import channels_first, channels_last
from fsdpx.array.kernels.convolution import SlidingWindow
from fsdpx.array.parallel import over
from fsdpx.native.compiled import jit

__all__ = ["avg_pool2d", "avg_pool2d_backward", "max_pool2d", "max_pool2d_backward"]


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
