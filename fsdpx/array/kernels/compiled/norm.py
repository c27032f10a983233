"""LayerNorm and RMSNorm row by row; parameter gradients in blocks of rows."""

from typing import Any

import numpy as np

from fsdpx.array.kernels.compiled.arrays import owned
from fsdpx.array.kernels.compiled.bits import number, put, real, wide, zero
from fsdpx.array.kernels.compiled.rows import square_distance, total
from fsdpx.array.parallel import over, over_columns
from fsdpx.native.compiled import REORDER, jit

__all__ = [
    "layer_norm", "layer_norm_backward_input", "layer_norm_backward_params", "rms_norm", "rms_norm_backward_input",
    "rms_norm_backward_params",
]  # fmt: skip

BLOCK = 32  # rows added up before they are added to the total: rounding grows with rows / BLOCK + BLOCK


@jit
def _forward(x, y, mean, rstd, weight, bias, eps, centred):
    one, width = mean.dtype.type(1), mean.dtype.type(x.shape[1])
    for i in range(x.shape[0]):
        if centred:
            mean[i] = total(x[i]) / width
        m = mean[i]
        r = one / np.sqrt(square_distance(x[i], m) / width + eps)
        rstd[i] = r
        for j in range(x.shape[1]):
            y[i, j] = put(y, (real(x[i, j]) - m) * r * weight[j] + bias[j])


@jit(fastmath=REORDER)
def _along(x, weight, mean, rstd, dy):
    """sum(h) and sum(h n) of one row."""
    sum_h = sum_hn = zero(x)
    for j in range(x.size):
        h = real(dy[j]) * weight[j]
        sum_h += h
        sum_hn += h * ((real(x[j]) - mean) * rstd)
    return sum_h, sum_hn


@jit
def _backward_input(x, mean, rstd, dy, dx, weight, centred):
    width = mean.dtype.type(x.shape[1])
    for i in range(x.shape[0]):
        m, r = mean[i], rstd[i]
        sum_h, sum_hn = _along(x[i], weight, m, r, dy[i])
        mean_h = sum_h / width if centred else zero(x)
        mean_hn = sum_hn / width
        for j in range(x.shape[1]):
            h, n = real(dy[i, j]) * weight[j], (real(x[i, j]) - m) * r
            dx[i, j] = put(dx, (h - mean_h - n * mean_hn) * r)


@jit
def _backward_params(start, stop, x, dy, mean, rstd, gw, gb):
    size = stop - start
    block_w, block_b = np.empty(size, mean.dtype), np.empty(size, mean.dtype)
    for first in range(0, x.shape[0], BLOCK):
        block_w[:] = 0
        block_b[:] = 0
        for i in range(first, min(first + BLOCK, x.shape[0])):
            m, r, row, drow = mean[i], rstd[i], x[i, start:stop], dy[i, start:stop]
            for j in range(size):
                block_w[j] += real(drow[j]) * ((real(row[j]) - m) * r)
                block_b[j] += real(drow[j])
        into_w, into_b = gw[start:stop], gb[start:stop]
        for j in range(size):
            into_w[j] += block_w[j]
            into_b[j] += block_b[j]


def _or(weight: np.ndarray | None, default: float, x: np.ndarray) -> np.ndarray:
    """`weight`, or an array of the neutral value `default` if it is None, so that one compiled loop serves both."""
    dtype = wide(x.dtype)
    return np.full(x.shape[1], default, dtype) if weight is None else owned(number(weight), dtype)


def _normalise(x: np.ndarray, weight: Any, bias: Any, eps: float, centred: bool) -> tuple[np.ndarray, ...]:
    x = np.ascontiguousarray(x)
    dtype = wide(x.dtype)
    y, mean, rstd = np.empty_like(x), np.zeros(x.shape[0], dtype), np.empty(x.shape[0], dtype)
    over(_forward, (x, y, mean, rstd), _or(weight, 1.0, x), _or(bias, 0.0, x), dtype.type(eps), centred)
    return y, mean, rstd


def _gradient(x: Any, weight: Any, centred: bool, mean: Any, rstd: Any, dy: Any) -> np.ndarray:
    x, dy = np.ascontiguousarray(x), np.ascontiguousarray(dy)
    dx = np.empty_like(x)
    over(_backward_input, (x, mean, rstd, dy, dx), _or(weight, 1.0, x), centred)
    return dx


def _add_sums(x: Any, mean: Any, rstd: Any, dy: Any, gw: Any, gb: Any) -> None:
    """Add the sums into gw and gb, directly where the loop can write there."""
    x, dy = np.ascontiguousarray(x), np.ascontiguousarray(dy)
    sums = [g if _direct(g, x) else np.zeros(x.shape[1], wide(x.dtype)) for g in (gw, gb)]
    over_columns(_backward_params, x, dy, mean, rstd, *sums)
    for g, total_g in zip((gw, gb), sums, strict=True):
        if g is not None and g is not total_g:
            into = number(g)
            into[...] = total_g + into


def _direct(g: Any, x: np.ndarray) -> bool:
    return g is not None and g.dtype == wide(x.dtype) and g.flags.c_contiguous


def layer_norm(xp: Any, x: Any, weight: Any, bias: Any, eps: float) -> tuple[np.ndarray, ...]:
    return _normalise(x, weight, bias, eps, True)


def layer_norm_backward_input(xp: Any, x: Any, weight: Any, mean: Any, rstd: Any, dy: Any) -> np.ndarray:
    return _gradient(x, weight, True, mean, rstd, dy)


def layer_norm_backward_params(xp: Any, x: Any, mean: Any, rstd: Any, dy: Any, gw: Any, gb: Any) -> None:
    _add_sums(x, mean, rstd, dy, gw, gb)


def rms_norm(xp: Any, x: Any, weight: Any, eps: float) -> tuple[np.ndarray, ...]:
    y, _, rstd = _normalise(x, weight, None, eps, False)
    return y, rstd


def rms_norm_backward_input(xp: Any, x: Any, weight: Any, rstd: Any, dy: Any) -> np.ndarray:
    return _gradient(x, weight, False, np.zeros_like(rstd), rstd, dy)


def rms_norm_backward_params(xp: Any, x: Any, rstd: Any, dy: Any, gw: Any) -> None:
    _add_sums(x, np.zeros_like(rstd), rstd, dy, gw, None)
