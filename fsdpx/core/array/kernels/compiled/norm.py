"""LayerNorm and RMSNorm row by row, with parameter gradients in blocks of rows; batch norm with channels last.

Batch norm adds up rows of channels in fixed blocks and is cut among threads by channels."""

from __future__ import annotations

from typing import Any

import numpy as np

from fsdpx.core.array.jit import REORDER, jit
from fsdpx.core.array.kernels.choice import form
from fsdpx.core.array.kernels.compiled.elements import number, owned, put, real, square_distance, total, wide, zero
from fsdpx.core.array.kernels.compiled.memory_order import rows_first, rows_of
from fsdpx.core.array.parallel import over, over_columns

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


@form(lambda x, w, s: (x, w, w, 1e-5))
def layer_norm(xp: Any, x: Any, weight: Any, bias: Any, eps: float) -> tuple[np.ndarray, ...]:
    return _normalise(x, weight, bias, eps, True)


@form(lambda x, w, s: (x, w, s[:2], s[:2], x))
def layer_norm_backward_input(xp: Any, x: Any, weight: Any, mean: Any, rstd: Any, dy: Any) -> np.ndarray:
    return _gradient(x, weight, True, mean, rstd, dy)


@form(lambda x, w, s: (x, s[:2], s[:2], x, s, s.copy()))
def layer_norm_backward_params(xp: Any, x: Any, mean: Any, rstd: Any, dy: Any, gw: Any, gb: Any) -> None:
    _add_sums(x, mean, rstd, dy, gw, gb)


@form(lambda x, w, s: (x, w, 1e-5))
def rms_norm(xp: Any, x: Any, weight: Any, eps: float) -> tuple[np.ndarray, ...]:
    y, _, rstd = _normalise(x, weight, None, eps, False)
    return y, rstd


@form(lambda x, w, s: (x, w, s[:2], x))
def rms_norm_backward_input(xp: Any, x: Any, weight: Any, rstd: Any, dy: Any) -> np.ndarray:
    return _gradient(x, weight, False, np.zeros_like(rstd), rstd, dy)


@form(lambda x, w, s: (x, s[:2], x, s))
def rms_norm_backward_params(xp: Any, x: Any, rstd: Any, dy: Any, gw: Any) -> None:
    _add_sums(x, np.zeros_like(rstd), rstd, dy, gw, None)


@jit
def _sums(start, stop, x, out):
    size = stop - start
    block, into = np.full(size, zero(x)), out[start:stop]
    for first in range(0, x.shape[0], BLOCK):
        block[:] = 0
        for i in range(first, min(first + BLOCK, x.shape[0])):
            row = x[i, start:stop]
            for j in range(size):
                block[j] += real(row[j])
        for j in range(size):
            into[j] += block[j]


@jit
def _squares(start, stop, x, mean, out):
    size = stop - start
    block, into, centre = np.full(size, zero(x)), out[start:stop], mean[start:stop].copy()
    for first in range(0, x.shape[0], BLOCK):
        block[:] = 0
        for i in range(first, min(first + BLOCK, x.shape[0])):
            row = x[i, start:stop]
            for j in range(size):
                d = real(row[j]) - centre[j]
                block[j] += d * d
        for j in range(size):
            into[j] += block[j]


@jit
def _sums_with(start, stop, x, dy, mean, rstd, out):
    size = stop - start
    plain, along = np.full(size, zero(x)), np.full(size, zero(x))
    centre, factor = mean[start:stop].copy(), rstd[start:stop].copy()
    first_out, second_out = out[0, start:stop], out[1, start:stop]
    for first in range(0, x.shape[0], BLOCK):
        plain[:] = 0
        along[:] = 0
        for i in range(first, min(first + BLOCK, x.shape[0])):
            row, slope = x[i, start:stop], dy[i, start:stop]
            for j in range(size):
                plain[j] += real(slope[j])
                along[j] += real(slope[j]) * ((real(row[j]) - centre[j]) * factor[j])
        for j in range(size):
            first_out[j] += plain[j]
            second_out[j] += along[j]


@jit
def _affine(x, y, mean, scale, shift):
    for i in range(x.shape[0]):
        row, out = x[i], y[i]
        for j in range(mean.size):
            out[j] = put(out, (real(row[j]) - mean[j]) * scale[j] + shift[j])


@jit
def _backward(x, dy, dx, mean, scale, along, across):
    for i in range(x.shape[0]):
        row, slope, out = x[i], dy[i], dx[i]
        for j in range(mean.size):
            out[j] = put(out, (real(slope[j]) - along[j] - (real(row[j]) - mean[j]) * across[j]) * scale[j])


@form(lambda x, w, s: (x,))
def channel_sums(xp: Any, x: np.ndarray) -> np.ndarray:
    out = np.zeros(x.shape[1])
    over_columns(_sums, rows_of(x), out)
    return out


@form(lambda x, w, s: (x, s))
def channel_squares(xp: Any, x: np.ndarray, mean: np.ndarray) -> np.ndarray:
    out = np.zeros(x.shape[1])
    over_columns(_squares, rows_of(x), _channels(mean, x), out)
    return out


@form(lambda x, w, s: (x, s, s, s))
def channel_affine(xp: Any, x: np.ndarray, mean: Any, scale: Any, shift: Any) -> np.ndarray:
    rows = rows_of(x)
    y = np.empty_like(rows)
    over(_affine, (rows, y), *(_channels(a, x) for a in (mean, scale, shift)))
    return rows_first(y, x.shape)


@form(lambda x, w, s: (x, x, s, s))
def channel_sums_with(xp: Any, dy: np.ndarray, x: np.ndarray, mean: Any, rstd: Any) -> np.ndarray:
    out = np.zeros((2, x.shape[1]))
    over_columns(_sums_with, rows_of(x), rows_of(dy), _channels(mean, x), _channels(rstd, x), out)
    return out.reshape(-1)


@form(lambda x, w, s: (x, x, s, s, s, s))
def channel_norm_backward(
    xp: Any, dy: np.ndarray, x: np.ndarray, mean: Any, scale: Any, along: Any, across: Any
) -> np.ndarray:
    rows = rows_of(x)
    dx = np.empty_like(rows)
    over(_backward, (rows, rows_of(dy), dx), *(_channels(a, x) for a in (mean, scale, along, across)))
    return rows_first(dx, x.shape)


def _channels(a: np.ndarray, x: np.ndarray) -> np.ndarray:
    """One value per channel, in the format in which x is computed."""
    return owned(number(a), wide(x.dtype))
