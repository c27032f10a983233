"""LayerNorm and RMSNorm row by row; parameter gradients in blocks of rows."""

from typing import Any

import numpy as np

from fsdpx.array.kernels.compiled.jit import REORDER, jit
from fsdpx.array.kernels.compiled.rows import square_distance, total

__all__ = [
    "layer_norm",
    "layer_norm_backward_input",
    "layer_norm_backward_params",
    "rms_norm",
    "rms_norm_backward_input",
    "rms_norm_backward_params",
]

BLOCK = 32  # rows added up before they are added to the total: rounding grows with rows / BLOCK + BLOCK


@jit
def _forward(x, weight, bias, eps, centred, y, mean, rstd):
    one, width = x.dtype.type(1), x.dtype.type(x.shape[1])
    for i in range(x.shape[0]):
        if centred:
            mean[i] = total(x[i]) / width
        m = mean[i]
        r = one / np.sqrt(square_distance(x[i], m) / width + eps)
        rstd[i] = r
        for j in range(x.shape[1]):
            y[i, j] = (x[i, j] - m) * r * weight[j] + bias[j]


@jit(fastmath=REORDER)
def _along(x, weight, mean, rstd, dy):
    """sum(h) and sum(h n) of one row."""
    sum_h = sum_hn = x.dtype.type(0)
    for j in range(x.size):
        h = dy[j] * weight[j]
        sum_h += h
        sum_hn += h * ((x[j] - mean) * rstd)
    return sum_h, sum_hn


@jit
def _backward_input(x, weight, centred, mean, rstd, dy, dx):
    width = x.dtype.type(x.shape[1])
    for i in range(x.shape[0]):
        m, r = mean[i], rstd[i]
        sum_h, sum_hn = _along(x[i], weight, m, r, dy[i])
        mean_h = sum_h / width if centred else x.dtype.type(0)
        mean_hn = sum_hn / width
        for j in range(x.shape[1]):
            dx[i, j] = (dy[i, j] * weight[j] - mean_h - (x[i, j] - m) * r * mean_hn) * r


@jit
def _backward_params(x, mean, rstd, dy, gw, gb):
    block_w, block_b = np.empty_like(gw), np.empty_like(gb)
    for start in range(0, x.shape[0], BLOCK):
        block_w[:] = 0
        block_b[:] = 0
        for i in range(start, min(start + BLOCK, x.shape[0])):
            m, r = mean[i], rstd[i]
            for j in range(x.shape[1]):
                block_w[j] += dy[i, j] * ((x[i, j] - m) * r)
                block_b[j] += dy[i, j]
        for j in range(x.shape[1]):
            gw[j] += block_w[j]
            gb[j] += block_b[j]


def _or(weight: np.ndarray | None, default: float, x: np.ndarray) -> np.ndarray:
    """A missing weight as an array that changes nothing: one compiled form serves all."""
    return np.full(x.shape[1], default, x.dtype) if weight is None else np.ascontiguousarray(weight)


def _normalise(x: np.ndarray, weight: Any, bias: Any, eps: float, centred: bool) -> tuple[np.ndarray, ...]:
    x = np.ascontiguousarray(x)
    y, mean, rstd = np.empty_like(x), np.zeros(x.shape[0], x.dtype), np.empty(x.shape[0], x.dtype)
    _forward(x, _or(weight, 1.0, x), _or(bias, 0.0, x), x.dtype.type(eps), centred, y, mean, rstd)
    return y, mean, rstd


def _gradient(x: Any, weight: Any, centred: bool, mean: Any, rstd: Any, dy: Any) -> np.ndarray:
    x, dy = np.ascontiguousarray(x), np.ascontiguousarray(dy)
    dx = np.empty_like(x)
    _backward_input(x, _or(weight, 1.0, x), centred, mean, rstd, dy, dx)
    return dx


def _sums(x: Any, mean: Any, rstd: Any, dy: Any) -> tuple[np.ndarray, np.ndarray]:
    gw, gb = np.zeros(x.shape[1], x.dtype), np.zeros(x.shape[1], x.dtype)
    _backward_params(np.ascontiguousarray(x), mean, rstd, np.ascontiguousarray(dy), gw, gb)
    return gw, gb


def layer_norm(xp: Any, x: Any, weight: Any, bias: Any, eps: float) -> tuple[np.ndarray, ...]:
    return _normalise(x, weight, bias, eps, True)


def layer_norm_backward_input(xp: Any, x: Any, weight: Any, mean: Any, rstd: Any, dy: Any) -> np.ndarray:
    return _gradient(x, weight, True, mean, rstd, dy)


def layer_norm_backward_params(xp: Any, x: Any, mean: Any, rstd: Any, dy: Any, gw: Any, gb: Any) -> None:
    sum_w, sum_b = _sums(x, mean, rstd, dy)
    if gw is not None:
        gw += sum_w
    if gb is not None:
        gb += sum_b


def rms_norm(xp: Any, x: Any, weight: Any, eps: float) -> tuple[np.ndarray, ...]:
    y, _, rstd = _normalise(x, weight, None, eps, False)
    return y, rstd


def rms_norm_backward_input(xp: Any, x: Any, weight: Any, rstd: Any, dy: Any) -> np.ndarray:
    return _gradient(x, weight, False, np.zeros_like(rstd), rstd, dy)


def rms_norm_backward_params(xp: Any, x: Any, rstd: Any, dy: Any, gw: Any) -> None:
    gw += _sums(x, np.zeros_like(rstd), rstd, dy)[0]
