"""Compiled group normalization with channels last in memory.

The moments of a channel are computed in one pass over memory: blocks of 32 cells are read into the cache, and the
moments of the blocks are merged in float64 (Chan et al. 1979). If a field has few channels, several cells are read as
one row, so that a row fills the vector registers."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from fsdpx.core.array import parallel
from fsdpx.core.array.jit import jit
from fsdpx.core.array.kernels.choice import register_compiled_kernel
from fsdpx.core.array.kernels.compiled.elements import (
    accumulation_dtype,
    accumulation_zero,
    as_contiguous,
    round_to_dtype_of,
    to_float,
    view_bits_as_bfloat16,
)
from fsdpx.core.array.kernels.compiled.memory_order import to_channels_last, view_channels_first
from fsdpx.core.array.kernels.compiled.norm import BLOCK_ROWS, add_channel_gradient_sums, affine_loop
from fsdpx.core.array.kernels.compiled.scalar import use_widest_vectors

__all__ = ["group_norm_affine", "group_norm_backward", "group_norm_gradient_sums", "group_norm_moments"]

ROW_ELEMENTS = 256
"""Number of elements that a row should have, so that the loops over it run at full speed."""


@jit
def _merge_moments_of_blocks(start, stop, x, out):
    """Compute out[0] = mean and out[1] = sum of squared deviations of the columns of x from `start` to `stop`."""
    size = stop - start
    mean, squares = np.full(size, accumulation_zero(x)), np.full(size, accumulation_zero(x))
    means, totals = out[0, start:stop], out[1, start:stop]
    for first in range(0, x.shape[0], BLOCK_ROWS):
        last = min(first + BLOCK_ROWS, x.shape[0])
        mean[:] = 0
        squares[:] = 0
        for i in range(first, last):
            row = x[i, start:stop]
            for j in range(size):
                mean[j] += to_float(row[j])
        part = mean.dtype.type(1) / mean.dtype.type(last - first)
        for j in range(size):
            mean[j] *= part
        for i in range(first, last):
            row = x[i, start:stop]
            for j in range(size):
                d = to_float(row[j]) - mean[j]
                squares[j] += d * d
        share = (last - first) / last
        for j in range(size):
            d = np.float64(mean[j]) - means[j]
            means[j] += d * share
            totals[j] += squares[j] + d * d * (first * share)


@jit
def _moments_loop(x, out):
    for n in range(x.shape[0]):
        _merge_moments_of_blocks(0, x.shape[2], x[n], out[n])


@jit
def _gradient_sums_loop(x, dy, mean, rstd, out):
    for n in range(x.shape[0]):
        add_channel_gradient_sums(0, x.shape[2], x[n], dy[n], mean[n], rstd[n], out[n])


@jit
def _affine_of_samples_loop(x, y, mean, scale, shift):
    for n in range(x.shape[0]):
        affine_loop(x[n], y[n], mean[n], scale[n], shift[n])


@jit
def _backward_loop(x, dy, dx, mean, scale, along, across):
    use_widest_vectors()
    for i in range(x.shape[0]):
        row, slope, out = x[i], dy[i], dx[i]
        for j in range(mean.size):
            centred = (to_float(row[j]) - mean[j]) * across[j]
            out[j] = round_to_dtype_of(out, to_float(slope[j]) * scale[j] - along[j] - centred)


@jit
def _backward_of_samples_loop(x, dy, dx, mean, scale, along, across):
    for n in range(x.shape[0]):
        _backward_loop(x[n], dy[n], dx[n], mean[n], scale[n], along[n], across[n])


def _count_cells_per_row(x: np.ndarray) -> int:
    """Return how many neighboring cells of x (samples, *cells, channels) the loops read as one row."""
    cells, channels = math.prod(x.shape[1:-1]), x.shape[-1]
    wanted = max(ROW_ELEMENTS // max(channels, 1), 1)
    return next((n for n in range(wanted, 1, -1) if cells % n == 0), 1)


def _view_as_rows(x: np.ndarray, per_row: int) -> np.ndarray:
    """Return a view (samples, rows, elements) of x (samples, *cells, channels), with `per_row` cells in each row."""
    return x.reshape(x.shape[0], math.prod(x.shape[1:-1]) // per_row, per_row * x.shape[-1])


def _repeat_for_row(a: np.ndarray, x: np.ndarray, per_row: int) -> np.ndarray:
    """Repeat values (samples, channels) for each cell of a row, in the dtype in which the kernels compute for x."""
    values = as_contiguous(view_bits_as_bfloat16(a), accumulation_dtype(x.dtype))
    return values if per_row == 1 else np.tile(values, (1, per_row))


def _run_over_samples(loop: Callable[..., Any], of_sample: Callable[..., Any], arrays: tuple[Any, ...]) -> None:
    """Call `loop(*arrays)` with the samples split over threads or, if there are fewer samples than threads, call
    `of_sample` with the arrays of one sample at a time."""
    if arrays[0].shape[0] >= parallel.get_threads():
        parallel.parallel_for_rows(loop, arrays)
        return
    for sample in zip(*arrays, strict=True):
        of_sample(sample)


@register_compiled_kernel(lambda x, w, s: (x.reshape(2, 1, 3),))
def group_norm_moments(xp: Any, x: np.ndarray) -> np.ndarray:
    field = to_channels_last(x)
    per_row = _count_cells_per_row(field)
    rows = _view_as_rows(field, per_row)
    out = np.zeros((rows.shape[0], 2, rows.shape[2]))
    _run_over_samples(_moments_loop, lambda s: parallel.parallel_for_columns(_merge_moments_of_blocks, *s), (rows, out))
    moments = out.transpose(1, 0, 2)
    if per_row == 1:
        return moments
    means, squares = moments.reshape(2, rows.shape[0], per_row, x.shape[1])
    mean = means.mean(axis=1)
    apart = np.square(means - mean[:, None]).sum(axis=1)
    return np.stack([mean, squares.sum(axis=1) + rows.shape[1] * apart])


@register_compiled_kernel(lambda x, w, s: (x.reshape(2, 1, 3), *(np.zeros((2, 1), s.dtype),) * 3))
def group_norm_affine(xp: Any, x: np.ndarray, mean: Any, scale: Any, shift: Any) -> np.ndarray:
    field = to_channels_last(x)
    per_row = _count_cells_per_row(field)
    rows, y = _view_as_rows(field, per_row), np.empty_like(field)
    values = [_repeat_for_row(a, x, per_row) for a in (mean, scale, shift)]
    _run_over_samples(
        _affine_of_samples_loop,
        lambda s: parallel.parallel_for_rows(affine_loop, s[:2], *s[2:]),
        (rows, _view_as_rows(y, per_row), *values),
    )
    return view_channels_first(y)


@register_compiled_kernel(lambda x, w, s: (x.reshape(2, 1, 3), x.reshape(2, 1, 3), *(np.zeros((2, 1), s.dtype),) * 2))
def group_norm_gradient_sums(xp: Any, dy: np.ndarray, x: np.ndarray, mean: Any, rstd: Any) -> np.ndarray:
    field, slope = to_channels_last(x), to_channels_last(dy)
    per_row = _count_cells_per_row(field)
    rows, values = _view_as_rows(field, per_row), [_repeat_for_row(a, x, per_row) for a in (mean, rstd)]
    out = np.zeros((rows.shape[0], 2, rows.shape[2]))
    _run_over_samples(
        _gradient_sums_loop,
        lambda s: parallel.parallel_for_columns(add_channel_gradient_sums, *s),
        (rows, _view_as_rows(slope, per_row), *values, out),
    )
    return out.reshape(rows.shape[0], 2, per_row, x.shape[1]).sum(axis=2).transpose(1, 0, 2)


@register_compiled_kernel(lambda x, w, s: (x.reshape(2, 1, 3), x.reshape(2, 1, 3), *(np.zeros((2, 1), s.dtype),) * 4))
def group_norm_backward(
    xp: Any, dy: np.ndarray, x: np.ndarray, mean: Any, scale: Any, along: Any, across: Any
) -> np.ndarray:
    field, slope = to_channels_last(x), to_channels_last(dy)
    per_row = _count_cells_per_row(field)
    rows, dx = _view_as_rows(field, per_row), np.empty_like(field)
    values = [_repeat_for_row(a, x, per_row) for a in (mean, scale, along, across)]
    _run_over_samples(
        _backward_of_samples_loop,
        lambda s: parallel.parallel_for_rows(_backward_loop, s[:3], *s[3:]),
        (rows, _view_as_rows(slope, per_row), _view_as_rows(dx, per_row), *values),
    )
    return view_channels_first(dx)
