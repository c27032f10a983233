"""Numba implementations of LayerNorm, RMSNorm and batch norm.

The gradients of parameters and the channel sums of batch norm are computed as sums over fixed blocks of rows. Batch
norm stores channels last, and its work is split over threads by channels.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from fsdpx.core.array.jit import REORDER, jit
from fsdpx.core.array.kernels.choice import register_compiled_kernel
from fsdpx.core.array.kernels.compiled.column_loops import (
    make_column_loop,
    sum_block,
    sum_block_gradients,
    sum_block_squares,
)
from fsdpx.core.array.kernels.compiled.elements import (
    accumulation_dtype,
    accumulation_zero,
    as_contiguous,
    round_to_dtype_of,
    sum_row,
    sum_squared_deviations,
    to_float,
    view_bits_as_bfloat16,
)
from fsdpx.core.array.kernels.compiled.memory_order import to_channel_rows, view_rows_channels_first
from fsdpx.core.array.parallel import parallel_for_columns, parallel_for_rows

# number of rows per partial sum; rounding errors are proportional to rows / BLOCK_ROWS + BLOCK_ROWS
BLOCK_ROWS = 32


@jit
def _norm_loop(x, y, mean, rstd, weight, bias, eps, centred):
    one, width = mean.dtype.type(1), mean.dtype.type(x.shape[1])
    for i in range(x.shape[0]):
        if centred:
            mean[i] = sum_row(x[i]) / width
        m = mean[i]
        r = one / np.sqrt(sum_squared_deviations(x[i], m) / width + eps)
        rstd[i] = r
        for j in range(x.shape[1]):
            y[i, j] = round_to_dtype_of(y, (to_float(x[i, j]) - m) * r * weight[j] + bias[j])


@jit(fastmath=REORDER)
def _sum_row_gradient_products(x, weight, mean, rstd, dy):
    """Return the sums of `h` and of `h * n` over one row, where `h = dy * weight` and n is the normalized row."""
    sum_h = sum_hn = accumulation_zero(x)
    for j in range(x.size):
        h = to_float(dy[j]) * weight[j]
        sum_h += h
        sum_hn += h * ((to_float(x[j]) - mean) * rstd)
    return sum_h, sum_hn


@jit
def _norm_backward_loop(x, mean, rstd, dy, dx, weight, centred):
    width = mean.dtype.type(x.shape[1])
    for i in range(x.shape[0]):
        m, r = mean[i], rstd[i]
        sum_h, sum_hn = _sum_row_gradient_products(x[i], weight, m, r, dy[i])
        mean_h = sum_h / width if centred else accumulation_zero(x)
        mean_hn = sum_hn / width
        for j in range(x.shape[1]):
            h, n = to_float(dy[i, j]) * weight[j], (to_float(x[i, j]) - m) * r
            dx[i, j] = round_to_dtype_of(dx, (h - mean_h - n * mean_hn) * r)


@jit
def _add_column_gradients(start, stop, x, dy, mean, rstd, gw, gb):
    size = stop - start
    block_w, block_b = np.empty(size, mean.dtype), np.empty(size, mean.dtype)
    for first in range(0, x.shape[0], BLOCK_ROWS):
        block_w[:] = 0
        block_b[:] = 0
        for i in range(first, min(first + BLOCK_ROWS, x.shape[0])):
            m, r, row, drow = mean[i], rstd[i], x[i, start:stop], dy[i, start:stop]
            for j in range(size):
                block_w[j] += to_float(drow[j]) * ((to_float(row[j]) - m) * r)
                block_b[j] += to_float(drow[j])
        into_w, into_b = gw[start:stop], gb[start:stop]
        for j in range(size):
            into_w[j] += block_w[j]
            into_b[j] += block_b[j]


def _fill_missing_weight(weight: np.ndarray | None, default: float, x: np.ndarray) -> np.ndarray:
    """Return `weight`, or an array filled with `default` if `weight` is None, so that one compiled loop serves both
    cases."""
    dtype = accumulation_dtype(x.dtype)
    return (
        np.full(x.shape[1], default, dtype) if weight is None else as_contiguous(view_bits_as_bfloat16(weight), dtype)
    )


def _apply_layer_or_rms_norm(
    x: np.ndarray, weight: Any, bias: Any, eps: float, centred: bool
) -> tuple[np.ndarray, ...]:
    x = np.ascontiguousarray(x)
    dtype = accumulation_dtype(x.dtype)
    y, mean, rstd = np.empty_like(x), np.zeros(x.shape[0], dtype), np.empty(x.shape[0], dtype)
    parallel_for_rows(
        _norm_loop,
        (x, y, mean, rstd),
        _fill_missing_weight(weight, 1.0, x),
        _fill_missing_weight(bias, 0.0, x),
        dtype.type(eps),
        centred,
    )
    return y, mean, rstd


def _compute_input_gradient(x: Any, weight: Any, centred: bool, mean: Any, rstd: Any, dy: Any) -> np.ndarray:
    x, dy = np.ascontiguousarray(x), np.ascontiguousarray(dy)
    dx = np.empty_like(x)
    parallel_for_rows(_norm_backward_loop, (x, mean, rstd, dy, dx), _fill_missing_weight(weight, 1.0, x), centred)
    return dx


def _add_weight_and_bias_gradients(x: Any, mean: Any, rstd: Any, dy: Any, gw: Any, gb: Any) -> None:
    """Add the gradients of weight and bias to gw and gb, without a temporary array if the loop can write to them
    directly."""
    x, dy = np.ascontiguousarray(x), np.ascontiguousarray(dy)
    sums = [g if _can_write_directly(g, x) else np.zeros(x.shape[1], accumulation_dtype(x.dtype)) for g in (gw, gb)]
    parallel_for_columns(_add_column_gradients, x, dy, mean, rstd, *sums)
    for g, total_g in zip((gw, gb), sums, strict=True):
        if g is not None and g is not total_g:
            into = view_bits_as_bfloat16(g)
            into[...] = total_g + into


def _can_write_directly(g: Any, x: np.ndarray) -> bool:
    return g is not None and g.dtype == accumulation_dtype(x.dtype) and g.flags.c_contiguous


@register_compiled_kernel(lambda x, w, s: (x, w, w, 1e-5))
def layer_norm(xp: Any, x: Any, weight: Any, bias: Any, eps: float) -> tuple[np.ndarray, ...]:
    return _apply_layer_or_rms_norm(x, weight, bias, eps, True)


@register_compiled_kernel(lambda x, w, s: (x, w, s[:2], s[:2], x))
def layer_norm_backward_input(xp: Any, x: Any, weight: Any, mean: Any, rstd: Any, dy: Any) -> np.ndarray:
    return _compute_input_gradient(x, weight, True, mean, rstd, dy)


@register_compiled_kernel(lambda x, w, s: (x, s[:2], s[:2], x, s, s.copy()))
def layer_norm_backward_params(xp: Any, x: Any, mean: Any, rstd: Any, dy: Any, gw: Any, gb: Any) -> None:
    _add_weight_and_bias_gradients(x, mean, rstd, dy, gw, gb)


@register_compiled_kernel(lambda x, w, s: (x, w, 1e-5))
def rms_norm(xp: Any, x: Any, weight: Any, eps: float) -> tuple[np.ndarray, ...]:
    y, _, rstd = _apply_layer_or_rms_norm(x, weight, None, eps, False)
    return y, rstd


@register_compiled_kernel(lambda x, w, s: (x, w, s[:2], x))
def rms_norm_backward_input(xp: Any, x: Any, weight: Any, rstd: Any, dy: Any) -> np.ndarray:
    return _compute_input_gradient(x, weight, False, np.zeros_like(rstd), rstd, dy)


@register_compiled_kernel(lambda x, w, s: (x, s[:2], x, s))
def rms_norm_backward_params(xp: Any, x: Any, rstd: Any, dy: Any, gw: Any) -> None:
    _add_weight_and_bias_gradients(x, np.zeros_like(rstd), rstd, dy, gw, None)


@jit
def _add_channel_sums(start, stop, x, out):
    block, into = np.full(stop - start, accumulation_zero(x)), out[start:stop]
    for first in range(0, x.shape[0], BLOCK_ROWS):
        sum_block((x,), first, min(first + BLOCK_ROWS, x.shape[0]), start, stop, (), (block,))
        for j in range(block.size):
            into[j] += block[j]


@jit
def _add_channel_squared_deviations(start, stop, x, mean, out):
    block, into = np.empty(stop - start, mean.dtype), out[start:stop]
    centre = mean[start:stop]
    for first in range(0, x.shape[0], BLOCK_ROWS):
        sum_block_squares((x,), first, min(first + BLOCK_ROWS, x.shape[0]), start, stop, (centre,), (block,))
        for j in range(block.size):
            into[j] += block[j]


@jit
def add_channel_gradient_sums(start, stop, x, dy, mean, rstd, out):
    plain, along = np.empty(stop - start, mean.dtype), np.empty(stop - start, mean.dtype)
    centre, factor = mean[start:stop], rstd[start:stop]
    first_out, second_out = out[0, start:stop], out[1, start:stop]
    for first in range(0, x.shape[0], BLOCK_ROWS):
        last = min(first + BLOCK_ROWS, x.shape[0])
        sum_block_gradients((x, dy), first, last, start, stop, (centre, factor), (plain, along))
        for j in range(plain.size):
            first_out[j] += plain[j]
            second_out[j] += along[j]


def _emit_affine(builder: Any, cells: list[Any], values: list[Any]) -> list[Any]:
    mean, scale, shift = values
    scaled = builder.fmul(builder.fsub(cells[0], mean), scale, flags=["contract"])
    return [builder.fadd(scaled, shift, flags=["contract"])]


def _emit_channel_backward(builder: Any, cells: list[Any], values: list[Any]) -> list[Any]:
    (x, dy), (mean, scale, along, across) = cells, values
    centred = builder.fmul(builder.fsub(x, mean), across, flags=["contract"])
    return [builder.fmul(builder.fsub(builder.fsub(dy, along), centred, flags=["contract"]), scale)]


_write_affine = make_column_loop(_emit_affine, True)
_write_channel_backward = make_column_loop(_emit_channel_backward, True)


@jit
def affine_loop(x, y, mean, scale, shift):
    for first in range(0, x.shape[0], BLOCK_ROWS):
        last = min(first + BLOCK_ROWS, x.shape[0])
        _write_affine((x, y), first, last, 0, mean.size, (mean, scale, shift), ())


@jit
def _channel_backward_loop(x, dy, dx, mean, scale, along, across):
    for first in range(0, x.shape[0], BLOCK_ROWS):
        last = min(first + BLOCK_ROWS, x.shape[0])
        _write_channel_backward((x, dy, dx), first, last, 0, mean.size, (mean, scale, along, across), ())


@register_compiled_kernel(lambda x, w, s: (x,))
def channel_sums(xp: Any, x: np.ndarray) -> np.ndarray:
    out = np.zeros(x.shape[1])
    parallel_for_columns(_add_channel_sums, to_channel_rows(x), out)
    return out


@register_compiled_kernel(lambda x, w, s: (x, s))
def channel_squares(xp: Any, x: np.ndarray, mean: np.ndarray) -> np.ndarray:
    out = np.zeros(x.shape[1])
    parallel_for_columns(_add_channel_squared_deviations, to_channel_rows(x), _convert_channel_values(mean, x), out)
    return out


@register_compiled_kernel(lambda x, w, s: (x, s, s, s))
def channel_affine(xp: Any, x: np.ndarray, mean: Any, scale: Any, shift: Any) -> np.ndarray:
    rows = to_channel_rows(x)
    y = np.empty_like(rows)
    parallel_for_rows(affine_loop, (rows, y), *(_convert_channel_values(a, x) for a in (mean, scale, shift)))
    return view_rows_channels_first(y, x.shape)


@register_compiled_kernel(lambda x, w, s: (x, x, s, s))
def channel_gradient_sums(xp: Any, dy: np.ndarray, x: np.ndarray, mean: Any, rstd: Any) -> np.ndarray:
    out = np.zeros((2, x.shape[1]))
    parallel_for_columns(
        add_channel_gradient_sums,
        to_channel_rows(x),
        to_channel_rows(dy),
        _convert_channel_values(mean, x),
        _convert_channel_values(rstd, x),
        out,
    )
    return out.reshape(-1)


@register_compiled_kernel(lambda x, w, s: (x, x, s, s, s, s))
def channel_norm_backward_input(
    xp: Any, dy: np.ndarray, x: np.ndarray, mean: Any, scale: Any, along: Any, across: Any
) -> np.ndarray:
    rows = to_channel_rows(x)
    dx = np.empty_like(rows)
    parallel_for_rows(
        _channel_backward_loop,
        (rows, to_channel_rows(dy), dx),
        *(_convert_channel_values(a, x) for a in (mean, scale, along, across)),
    )
    return view_rows_channels_first(dx, x.shape)


def _convert_channel_values(a: np.ndarray, x: np.ndarray) -> np.ndarray:
    """Convert per-channel values `a` to the dtype used for computations with x."""
    return as_contiguous(view_bits_as_bfloat16(a), accumulation_dtype(x.dtype))
