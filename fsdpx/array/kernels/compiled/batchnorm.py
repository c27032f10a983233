"""Batch norm with channels last: rows of channels, added up in fixed blocks and cut among threads by channels."""

from typing import Any

import numpy as np

from fsdpx.array.kernels.compiled.arrays import owned
from fsdpx.array.kernels.compiled.bits import number, put, real, wide, zero
from fsdpx.array.kernels.compiled.images import rows_first, rows_of
from fsdpx.array.parallel import over, over_columns
from fsdpx.native.compiled import jit

__all__ = ["channel_affine", "channel_norm_backward", "channel_squares", "channel_sums", "channel_sums_with"]

BLOCK = 32  # rows added up before they are added to the total, in float64


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


def channel_sums(xp: Any, x: np.ndarray) -> np.ndarray:
    out = np.zeros(x.shape[1])
    over_columns(_sums, rows_of(x), out)
    return out


def channel_squares(xp: Any, x: np.ndarray, mean: np.ndarray) -> np.ndarray:
    out = np.zeros(x.shape[1])
    over_columns(_squares, rows_of(x), _channels(mean, x), out)
    return out


def channel_affine(xp: Any, x: np.ndarray, mean: Any, scale: Any, shift: Any) -> np.ndarray:
    rows = rows_of(x)
    y = np.empty_like(rows)
    over(_affine, (rows, y), *(_channels(a, x) for a in (mean, scale, shift)))
    return rows_first(y, x.shape)


def channel_sums_with(xp: Any, dy: np.ndarray, x: np.ndarray, mean: Any, rstd: Any) -> np.ndarray:
    out = np.zeros((2, x.shape[1]))
    over_columns(_sums_with, rows_of(x), rows_of(dy), _channels(mean, x), _channels(rstd, x), out)
    return out.reshape(-1)


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
