"""Compiled group normalization. Channels are last in memory, with one exception: if one rank holds a full field with
channels first, the loops over groups read this field as it is, because each group is contiguous in memory.

If one rank holds the whole field, it is normalized sample by sample, so a sample that fits into the cache is read from
memory only once.

The moments of a channel are computed in one pass over memory: the cells of a block of 32 are summed relative to the
first of them, and the moments of the blocks are merged in float64 (Chan et al. 1979). If a field has few channels,
several cells are read together as one row, so that a row fills the vector registers."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import numpy as np

from fsdpx.core.array import parallel
from fsdpx.core.array.jit import jit
from fsdpx.core.array.kernels.choice import register_compiled_kernel
from fsdpx.core.array.kernels.compiled.column_loops import make_column_loop
from fsdpx.core.array.kernels.compiled.elements import (
    accumulation_dtype,
    accumulation_zero,
    as_contiguous,
    round_to_dtype_of,
    to_float,
    view_bits_as_bfloat16,
)
from fsdpx.core.array.kernels.compiled.memory_order import to_channels_first, to_channels_last, view_channels_first
from fsdpx.core.array.kernels.compiled.norm import BLOCK_ROWS, add_channel_gradient_sums, affine_loop
from fsdpx.core.array.kernels.compiled.scalar import use_widest_vectors
from fsdpx.ext.fields.kernels.group_norm import MIN_ROW_ELEMENTS, has_rows_of_channels

__all__ = [
    "channel_means_and_square_deviations", "group_norm", "group_norm_affine", "group_norm_backward",
    "group_norm_backward_input", "group_norm_gradient_sums_by_channel",
]  # fmt: skip

ROW_ELEMENTS = 64
"""Target number of elements in a row. The column loops hold the values of this many columns in registers, so they can
process whole rows in turn and read memory sequentially."""


def _emit_moments(builder: Any, cells: list[Any], values: list[Any]) -> list[Any]:
    apart = builder.fsub(cells[0], values[0])
    return [apart, builder.fmul(apart, apart, flags=["contract"])]


_sum_block_moments = make_column_loop(_emit_moments, False)


@jit
def _compute_column_moments_into(start, stop, x, out):
    """Write the mean of each of the columns `start` to `stop` of x to out[0], and the sum of squared deviations of each
    column to out[1]."""
    zero = accumulation_zero(x)
    centre, along, squares = np.full(stop - start, zero), np.full(stop - start, zero), np.full(stop - start, zero)
    means, totals = out[0, start:stop], out[1, start:stop]
    for first in range(0, x.shape[0], BLOCK_ROWS):
        last = min(first + BLOCK_ROWS, x.shape[0])
        for j in range(centre.size):
            centre[j] = to_float(x[first, start + j])
            if not np.isfinite(centre[j]):
                centre[j] = zero
        _sum_block_moments((x,), first, last, start, stop, (centre,), (along, squares))
        part, share = 1.0 / (last - first), (last - first) / last
        for j in range(centre.size):
            apart = along[j] * part
            d = centre[j] + apart - means[j]
            # an infinite mean stays infinite, unless a block with the opposite infinity or NaN follows
            means[j] += d * share if np.isfinite(means[j]) else centre[j] + apart
            totals[j] += squares[j] - apart * along[j] + d * d * (first * share)


@jit
def _moments_loop(x, out):
    for n in range(x.shape[0]):
        _compute_column_moments_into(0, x.shape[2], x[n], out[n])


@jit
def _gradient_sums_loop(x, dy, mean, rstd, out):
    for n in range(x.shape[0]):
        add_channel_gradient_sums(0, x.shape[2], x[n], dy[n], mean[n], rstd[n], out[n])


@jit
def _affine_of_samples_loop(x, y, mean, scale, shift):
    for n in range(x.shape[0]):
        affine_loop(x[n], y[n], mean[n], scale[n], shift[n])


def _emit_backward(builder: Any, cells: list[Any], values: list[Any]) -> list[Any]:
    (x, dy), (mean, scale, along, across) = cells, values
    centred = builder.fmul(builder.fsub(x, mean), across, flags=["contract"])
    scaled = builder.fsub(builder.fmul(dy, scale, flags=["contract"]), along, flags=["contract"])
    return [builder.fsub(scaled, centred, flags=["contract"])]


_write_backward = make_column_loop(_emit_backward, True)


@jit
def _backward_loop(x, dy, dx, mean, scale, along, across):
    # in reverse order: the loop that computed the sums read the end of the field last, so the end is still in the cache
    for first in range((x.shape[0] - 1) // BLOCK_ROWS * BLOCK_ROWS, -1, -BLOCK_ROWS):
        last = min(first + BLOCK_ROWS, x.shape[0])
        _write_backward((x, dy, dx), first, last, 0, mean.size, (mean, scale, along, across), ())


@jit
def _backward_of_samples_loop(x, dy, dx, mean, scale, along, across):
    for n in range(x.shape[0]):
        _backward_loop(x[n], dy[n], dx[n], mean[n], scale[n], along[n], across[n])


@jit
def _finish_statistics(moments, rows, groups, eps, weight, bias, mean, rstd, values):
    """For one sample, compute `mean` and `rstd`, which is `1 / sqrt(var + eps)`, both (channels,). Also compute the
    `values` that `affine_loop` takes. `moments`, (2, columns), holds the moments of each column of the sample over its
    `rows` rows."""
    channels, columns = mean.size, moments.shape[1]
    size = channels // groups
    for g in range(groups):
        total = squares = 0.0
        for at in range(0, columns, channels):
            for c in range(at + g * size, at + (g + 1) * size):
                total += moments[0, c]
        centre = total / (columns // groups)
        for at in range(0, columns, channels):
            for c in range(at + g * size, at + (g + 1) * size):
                d = moments[0, c] - centre
                squares += moments[1, c] + rows * (d * d)
        for c in range(g * size, (g + 1) * size):
            mean[c] = centre
            rstd[c] = 1.0 / np.sqrt(squares / max(columns // groups * rows, 1) + eps)
    for at in range(0, columns, channels):
        for c in range(channels):
            values[0, at + c], values[1, at + c], values[2, at + c] = mean[c], rstd[c] * weight[c], bias[c]


@jit
def _normalize_samples_loop(x, y, mean, rstd, groups, eps, weight, bias):
    moments, values = np.empty((2, x.shape[2])), np.empty((3, x.shape[2]), mean.dtype)
    for n in range(x.shape[0]):
        moments[:] = 0
        _compute_column_moments_into(0, x.shape[2], x[n], moments)
        _finish_statistics(moments, x.shape[1], groups, eps, weight, bias, mean[n], rstd[n], values)
        affine_loop(x[n], y[n], values[0], values[1], values[2])


@jit
def _compute_gradient_sums_from_columns(of_columns, rows, groups, weight, mean, rstd, sums, values):
    """For one sample, compute the `sums` (2, channels) that `group_norm_gradient_sums_by_channel` returns, and the
    `values` (4, columns) that `_backward_loop` takes. `of_columns`, (2, columns), contains the sums of each column of
    the sample over its `rows` rows."""
    channels, columns = mean.size, of_columns.shape[1]
    size = channels // groups
    sums[:] = 0
    for at in range(0, columns, channels):
        for c in range(channels):
            sums[0, c] += of_columns[0, at + c]
            sums[1, c] += of_columns[1, at + c]
    for g in range(groups):
        along = across = 0.0
        for c in range(g * size, (g + 1) * size):
            along += sums[0, c] * weight[c]
            across += sums[1, c] * weight[c]
        count = max(columns // groups * rows, 1)
        for at in range(0, columns, channels):
            for c in range(g * size, (g + 1) * size):
                values[0, at + c], values[1, at + c] = mean[c], rstd[c] * weight[c]
                values[2, at + c], values[3, at + c] = along / count * rstd[c], across / count * rstd[c] * rstd[c]


@jit
def _backward_input_of_samples_loop(x, dy, dx, mean, rstd, sums, groups, weight):
    of_columns, values = np.empty((2, x.shape[2])), np.empty((4, x.shape[2]), mean.dtype)
    for n in range(x.shape[0]):
        of_columns[:] = 0
        for at in range(0, x.shape[2], mean.shape[1]):
            for c in range(mean.shape[1]):
                values[0, at + c], values[1, at + c] = mean[n, c], rstd[n, c]
        add_channel_gradient_sums(0, x.shape[2], x[n], dy[n], values[0], values[1], of_columns)
        _compute_gradient_sums_from_columns(of_columns, x.shape[1], groups, weight, mean[n], rstd[n], sums[n], values)
        _backward_loop(x[n], dy[n], dx[n], values[0], values[1], values[2], values[3])


@jit
def _normalize_groups_loop(start, stop, x, y, mean, rstd, groups, eps, weight, bias):
    """Normalize the groups from `start` to `stop`, counted over all samples. x and y are (samples, channels, rows,
    elements)."""
    use_widest_vectors()
    rows, elements, size = x.shape[2], x.shape[3], x.shape[1] // groups
    moments, values = np.empty((2, elements)), np.empty((3, elements), mean.dtype)
    for group in range(start, stop):
        n, first = group // groups, group % groups * size
        one, whole = slice(first, first + 1), x[n, first : first + size].reshape(size * rows, elements)
        moments[:] = 0
        _compute_column_moments_into(0, elements, whole, moments)
        _finish_statistics(moments, size * rows, 1, eps, weight[one], bias[one], mean[n, one], rstd[n, one], values)
        for c in range(first, first + size):
            mean[n, c], rstd[n, c] = mean[n, first], rstd[n, first]
            cells, into = x[n, c].reshape(rows * elements), y[n, c].reshape(rows * elements)
            centre, scale, shift = mean[n, c], rstd[n, c] * weight[c], bias[c]
            for i in range(cells.size):
                into[i] = round_to_dtype_of(into, (to_float(cells[i]) - centre) * scale + shift)


@jit
def _sum_by_halves(values):
    """Return the sum of an array whose size is a power of 2. Change the array. Vectors of numbers are added at once."""
    half = values.size // 2
    while half:
        for j in range(half):
            values[j] += values[half + j]
        half //= 2
    return values[0]


@jit
def _backward_input_of_groups_loop(start, stop, x, dy, dx, mean, rstd, sums, groups, weight):
    """Compute the gradient of the input for the groups from `start` to `stop`, counted as in
    `_normalize_groups_loop`."""
    use_widest_vectors()
    rows, elements, size = x.shape[2], x.shape[3], x.shape[1] // groups
    of_columns, of_channels = np.empty((2, elements)), np.empty((2, size))
    values, same = np.empty((4, size), mean.dtype), np.empty((2, elements), mean.dtype)
    for group in range(start, stop):
        n, first = group // groups, group % groups * size
        same[0, :], same[1, :] = mean[n, first], rstd[n, first]
        for k in range(size):
            of_columns[:] = 0
            add_channel_gradient_sums(0, elements, x[n, first + k], dy[n, first + k], same[0], same[1], of_columns)
            of_channels[0, k], of_channels[1, k] = _sum_by_halves(of_columns[0]), _sum_by_halves(of_columns[1])
        own = slice(first, first + size)
        _compute_gradient_sums_from_columns(
            of_channels, rows * elements, 1, weight[own], mean[n, own], rstd[n, own], sums[n, :, own], values
        )
        for k in range(size):
            cells, slopes = x[n, first + k].reshape(rows * elements), dy[n, first + k].reshape(rows * elements)
            into = dx[n, first + k].reshape(rows * elements)
            centre, scale, along, across = values[0, k], values[1, k], values[2, k], values[3, k]
            for i in range(cells.size):
                centred = (to_float(cells[i]) - centre) * across
                into[i] = round_to_dtype_of(into, to_float(slopes[i]) * scale - along - centred)


def _run_loop_over_groups(loop: Callable[..., Any], shape: tuple[int, ...], groups: int, *arguments: Any) -> None:
    """Call `loop` for the groups of all samples in a field of shape `shape`. If the field is large, divide the groups
    among threads."""
    # use this loop even if there are fewer groups than threads. The loops over samples can split rows and so use more
    # threads, but they add in a different order, so choosing the loop by the number of threads would make the bits of
    # results depend on this number
    count = shape[0] * groups
    if math.prod(shape) < parallel.MIN_PARALLEL_SIZE:
        loop(0, count, *arguments)
    else:
        parallel.parallel_for_range(loop, 0, count, *arguments)


@lru_cache(1 << 10)
def _find_shape_of_rows(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the shape (samples, channels, rows, elements) in which the loops over groups read a field of `shape` with
    channels first in memory."""
    cells = math.prod(shape[2:])
    elements = next(n for n in (ROW_ELEMENTS, 32, MIN_ROW_ELEMENTS) if cells % n == 0)
    return *shape[:2], cells // elements, elements


@lru_cache(1 << 10)
def _find_loop_row_size_and_shape(shape: tuple[int, ...]) -> tuple[int, tuple[int, int, int]]:
    """Return the number of neighboring cells of a field (samples, *cells, channels) that the loops read as one row, and
    the shape (samples, rows, elements) of the field divided into such rows."""
    cells, channels = math.prod(shape[1:-1]), shape[-1]
    wanted = max(ROW_ELEMENTS // max(channels, 1), 1)
    per_row = next((n for n in range(wanted, 1, -1) if cells % n == 0), 1)
    return per_row, (shape[0], cells // per_row, per_row * channels)


def _repeat_for_row(a: np.ndarray, x: np.ndarray, per_row: int) -> np.ndarray:
    """Repeat values (samples, channels) for each cell of a row, and cast them to the dtype that the kernels use to
    compute with the field x."""
    values = as_contiguous(view_bits_as_bfloat16(a), accumulation_dtype(x.dtype))
    return values if per_row == 1 else np.tile(values, (1, per_row))


def _run_loop_over_samples_in_threads(
    loop: Callable[..., Any], of_sample: Callable[..., Any], arrays: tuple[Any, ...], *options: Any
) -> None:
    """Call `loop(*arrays, *options)` with the samples split over threads. If there are fewer samples than threads, call
    `of_sample` instead, with the arrays of one sample at a time."""
    if arrays[0].shape[0] >= parallel.get_threads():
        parallel.parallel_for_rows(loop, arrays, *options)
        return
    for sample in zip(*arrays, strict=True):
        of_sample(sample)


@register_compiled_kernel(lambda x, w, s: (x.reshape(2, 1, 3),))
def channel_means_and_square_deviations(xp: Any, x: np.ndarray) -> np.ndarray:
    field = to_channels_last(x)
    per_row, shape = _find_loop_row_size_and_shape(field.shape)
    rows = field.reshape(shape)
    out = np.zeros((rows.shape[0], 2, rows.shape[2]))
    _run_loop_over_samples_in_threads(
        _moments_loop, lambda s: parallel.parallel_for_columns(_compute_column_moments_into, *s), (rows, out)
    )
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
    per_row, shape = _find_loop_row_size_and_shape(field.shape)
    rows, y = field.reshape(shape), np.empty_like(field)
    values = [_repeat_for_row(a, x, per_row) for a in (mean, scale, shift)]
    _run_loop_over_samples_in_threads(
        _affine_of_samples_loop,
        lambda s: parallel.parallel_for_rows(affine_loop, s[:2], *s[2:]),
        (rows, y.reshape(shape), *values),
    )
    return view_channels_first(y)


@register_compiled_kernel(lambda x, w, s: (x.reshape(2, 1, 3), x.reshape(2, 1, 3), *(np.zeros((2, 1), s.dtype),) * 2))
def group_norm_gradient_sums_by_channel(xp: Any, dy: np.ndarray, x: np.ndarray, mean: Any, rstd: Any) -> np.ndarray:
    field, slope = to_channels_last(x), to_channels_last(dy)
    per_row, shape = _find_loop_row_size_and_shape(field.shape)
    rows, values = field.reshape(shape), [_repeat_for_row(a, x, per_row) for a in (mean, rstd)]
    out = np.zeros((rows.shape[0], 2, rows.shape[2]))
    _run_loop_over_samples_in_threads(
        _gradient_sums_loop,
        lambda s: parallel.parallel_for_columns(add_channel_gradient_sums, *s),
        (rows, slope.reshape(shape), *values, out),
    )
    return out.reshape(rows.shape[0], 2, per_row, x.shape[1]).sum(axis=2).transpose(1, 0, 2)


@register_compiled_kernel(lambda x, w, s: (x.reshape(2, 1, 3), x.reshape(2, 1, 3), *(np.zeros((2, 1), s.dtype),) * 4))
def group_norm_backward(
    xp: Any, dy: np.ndarray, x: np.ndarray, mean: Any, scale: Any, along: Any, across: Any
) -> np.ndarray:
    field, slope = to_channels_last(x), to_channels_last(dy)
    per_row, shape = _find_loop_row_size_and_shape(field.shape)
    rows, dx = field.reshape(shape), np.empty_like(field)
    values = [_repeat_for_row(a, x, per_row) for a in (mean, scale, along, across)]
    _run_loop_over_samples_in_threads(
        _backward_of_samples_loop,
        lambda s: parallel.parallel_for_rows(_backward_loop, s[:3], *s[3:]),
        (rows, slope.reshape(shape), dx.reshape(shape), *values),
    )
    return view_channels_first(dx)


def _convert_or_fill(values: np.ndarray | None, default: float, x: np.ndarray) -> np.ndarray:
    """Return one value per channel, in the dtype in which the kernels accumulate for the field x. If `values` is None,
    each value is `default`."""
    dtype = accumulation_dtype(x.dtype)
    if values is None:
        return np.full(x.shape[1], default, dtype)
    return as_contiguous(view_bits_as_bfloat16(values), dtype)


def _make_example_rows(x: Any) -> Any:
    """Return a field with channels first in memory, as an example argument for compiling a kernel."""
    return np.zeros((1, 2, MIN_ROW_ELEMENTS), x.dtype)


@register_compiled_kernel(
    lambda x, w, s: [
        (x.reshape(2, 1, 3), np.ones(1, s.dtype), None, 1, 1e-5), (_make_example_rows(x), None, None, 1, 1e-5)
    ]
)  # fmt: skip
def group_norm(xp: Any, x: np.ndarray, weight: Any, bias: Any, groups: int, eps: float) -> tuple[np.ndarray, ...]:
    statistics = np.empty((2, *x.shape[:2]), accumulation_dtype(x.dtype))
    options = groups, float(eps), _convert_or_fill(weight, 1.0, x), _convert_or_fill(bias, 0.0, x)
    if has_rows_of_channels(x):
        shape, y = _find_shape_of_rows(x.shape), np.empty(x.shape, x.dtype)
        rows = as_contiguous(x).reshape(shape), y.reshape(shape)
        _run_loop_over_groups(_normalize_groups_loop, x.shape, groups, *rows, *statistics, *options)
        return y, *statistics
    field = to_channels_last(x)
    shape, y = _find_loop_row_size_and_shape(field.shape)[1], np.empty_like(field)
    arrays = field.reshape(shape), y.reshape(shape), *statistics

    def normalize_sample(sample: tuple[np.ndarray, ...]) -> None:
        rows, out, mean, rstd = sample
        moments, values = np.zeros((2, rows.shape[1])), np.empty((3, rows.shape[1]), mean.dtype)
        parallel.parallel_for_columns(_compute_column_moments_into, rows, moments)
        _finish_statistics(moments, rows.shape[0], *options, mean, rstd, values)
        parallel.parallel_for_rows(affine_loop, (rows, out), *values)

    _run_loop_over_samples_in_threads(_normalize_samples_loop, normalize_sample, arrays, *options)
    return view_channels_first(y), *statistics


@register_compiled_kernel(
    lambda x, w, s: [
        (x.reshape(2, 1, 3), x.reshape(2, 1, 3), *np.zeros((2, 2, 1), s.dtype), np.ones(1, s.dtype), 1),
        (_make_example_rows(x), _make_example_rows(x), *np.zeros((2, 1, 2), s.dtype), None, 1),
    ]
)
def group_norm_backward_input(
    xp: Any, dy: np.ndarray, x: np.ndarray, mean: Any, rstd: Any, weight: Any, groups: int
) -> tuple[np.ndarray, np.ndarray]:
    sums, options = np.empty((x.shape[0], 2, x.shape[1])), (groups, _convert_or_fill(weight, 1.0, x))
    statistics = as_contiguous(mean), as_contiguous(rstd), sums
    if has_rows_of_channels(x):
        shape, dx = _find_shape_of_rows(x.shape), np.empty(x.shape, x.dtype)
        rows = as_contiguous(x).reshape(shape), to_channels_first(dy).reshape(shape), dx.reshape(shape)
        _run_loop_over_groups(_backward_input_of_groups_loop, x.shape, groups, *rows, *statistics, *options)
        return dx, sums.transpose(1, 0, 2)
    field, slope = to_channels_last(x), to_channels_last(dy)
    (per_row, shape), dx = _find_loop_row_size_and_shape(field.shape), np.empty_like(field)
    arrays = *(a.reshape(shape) for a in (field, slope, dx)), *statistics

    def differentiate_sample(sample: tuple[np.ndarray, ...]) -> None:
        rows, drows, out, centre, factor, into = sample
        of_columns, values = np.zeros((2, rows.shape[1])), np.empty((4, rows.shape[1]), centre.dtype)
        repeated = np.tile(centre, per_row), np.tile(factor, per_row)
        parallel.parallel_for_columns(add_channel_gradient_sums, rows, drows, *repeated, of_columns)
        _compute_gradient_sums_from_columns(of_columns, rows.shape[0], *options, centre, factor, into, values)
        parallel.parallel_for_rows(_backward_loop, (rows, drows, out), *values)

    _run_loop_over_samples_in_threads(_backward_input_of_samples_loop, differentiate_sample, arrays, *options)
    return view_channels_first(dx), sums.transpose(1, 0, 2)
