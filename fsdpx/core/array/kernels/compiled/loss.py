"""Numba implementations of losses, each computed in one pass, and of the gradient of an embedding lookup, summed in
batch order. The forward pass does not allocate any array that is as large as its arguments."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from fsdpx.core.array.jit import REORDER, jit
from fsdpx.core.array.kernels.choice import register_compiled_kernel
from fsdpx.core.array.kernels.compiled.elements import (
    accumulation_dtype,
    as_contiguous,
    exponentiate_in_place,
    find_max_of_vector,
    round_to_dtype_of,
    to_float,
    view_bits_as_bfloat16,
    widen_into,
)
from fsdpx.core.array.kernels.compiled.memory_order import (
    make_flat_views,
    make_flat_views_and_output,
    transpose_pixels_into,
    view_channels_last,
)
from fsdpx.core.array.kernels.compiled.scalar import exp, use_widest_vectors
from fsdpx.core.array.kernels.squares import BLOCK
from fsdpx.core.array.parallel import MIN_PARALLEL_SIZE, parallel_for_columns, parallel_for_range, parallel_for_rows
from fsdpx.errors import ShapeError

FIRST = np.zeros(2, np.int64)


@jit
def _find_position_of_index_out_of_range(index, rows):
    """Return the position in `index` of the first index that is not in [-rows, rows), or -1 if there is none."""
    for i in range(index.size):
        if not -rows <= index[i] < rows:
            return i
    return -1


@jit
def _scatter_add_rows(start, stop, dy, index, gw):
    for i in range(index.size):
        row = index[i] + gw.shape[0] if index[i] < 0 else index[i]
        into, part = gw[row, start:stop], dy[i, start:stop]
        for j in range(into.size):
            into[j] += to_float(part[j])


@register_compiled_kernel(lambda x, w, s: (np.zeros((2, 3), s.dtype), FIRST, x))
def embedding_backward(xp: Any, gw: Any, index: Any, dy: Any) -> None:
    index, dy = as_contiguous(index, np.int64), np.ascontiguousarray(dy)
    bad = _find_position_of_index_out_of_range(index, gw.shape[0])
    if bad >= 0:
        raise IndexError(f"embedding_backward: index {index[bad]} at {bad} is out of range for {gw.shape[0]} rows")
    direct = gw.dtype == accumulation_dtype(dy.dtype) and gw.flags.c_contiguous
    table = gw if direct else np.zeros(gw.shape, accumulation_dtype(dy.dtype))
    parallel_for_columns(_scatter_add_rows, dy, index, table)
    if not direct:
        into = view_bits_as_bfloat16(gw)
        into += table


@jit(fastmath=REORDER)
def _sum_row_in_float64(x):
    result = 0.0
    for j in range(x.size):
        result += np.float64(x[j])
    return result


@jit
def _count_targets_or_find_invalid(target, classes, ignored):
    """Return the number of rows whose target is not `ignored`. If there are invalid targets, return -1 - row instead,
    where `row` is the first row with an invalid target."""
    counted = 0
    for i in range(target.size):
        if target[i] != ignored:
            if not 0 <= target[i] < classes:
                return -1 - i
            counted += 1
    return counted


@jit
def _cross_entropy_loop(logits, target, lse, each, ignored, smoothing):
    use_widest_vectors()
    classes = logits.shape[1]
    row = np.empty(classes, lse.dtype)
    for i in range(logits.shape[0]):
        widen_into(logits[i], row)
        mean = _sum_row_in_float64(row) / classes if smoothing != 0.0 else 0.0
        top = find_max_of_vector(row)
        if top == -np.inf:  # avoid -inf - (-inf) = NaN if all elements are -inf
            top = lse.dtype.type(0)
        exponentiate_in_place(row, top)
        lse[i] = top + lse.dtype.type(np.log(_sum_row_in_float64(row)))
        if target[i] == ignored:
            each[i] = 0.0
            continue
        loss = np.float64(lse[i] - to_float(logits[i, target[i]]))
        if smoothing != 0.0:
            loss = (1.0 - smoothing) * loss + smoothing * (np.float64(lse[i]) - mean)
        each[i] = loss


@jit
def _cross_entropy_backward_loop(logits, target, lse, gradient, seed, ignored, target_probability, share):
    use_widest_vectors()
    for i in range(logits.shape[0]):
        if target[i] == ignored:
            gradient[i, :] = 0
            continue
        for j in range(logits.shape[1]):
            gradient[i, j] = round_to_dtype_of(gradient, (exp(to_float(logits[i, j]) - lse[i]) - share) * seed)
        if target[i] == logits.shape[1]:
            continue
        picked = exp(to_float(logits[i, target[i]]) - lse[i])
        gradient[i, target[i]] = round_to_dtype_of(gradient, (picked - target_probability - share) * seed)


def _prepare_logits_and_target(
    logits: Any, target: Any, ignored: int, extra_classes: int = 0
) -> tuple[np.ndarray, np.ndarray, int]:
    """Return the logits and the target in the memory layout that the loops expect, and the number of rows whose target
    is not `ignored`. Raise IndexError for an invalid target.

    `extra_classes` is 1 if a target may also be equal to the number of classes in `logits`. This value stands for a
    class whose logits are on another rank.
    """
    if target.shape != logits.shape[:1]:
        raise ShapeError(f"cross_entropy: {logits.shape[0]} rows of logits, and targets of shape {target.shape}")
    logits, target = np.ascontiguousarray(logits), as_contiguous(target, np.int64)
    counted = _count_targets_or_find_invalid(target, logits.shape[1] + extra_classes, ignored)
    if counted < 0:
        row = -1 - counted
        raise IndexError(f"cross_entropy: target {target[row]} of row {row} is not in [0, {logits.shape[1]})")
    return logits, target, counted


@register_compiled_kernel(lambda x, w, s: (x, FIRST))
def cross_entropy(
    xp: Any, logits: Any, target: Any, ignore_index: int = -100, label_smoothing: float = 0.0
) -> tuple[float, float, np.ndarray]:
    logits, target, counted = _prepare_logits_and_target(logits, target, ignore_index)
    lse, each = np.empty(logits.shape[0], accumulation_dtype(logits.dtype)), np.empty(logits.shape[0], np.float64)
    parallel_for_rows(_cross_entropy_loop, (logits, target, lse, each), ignore_index, float(label_smoothing))
    return float(np.sum(each)), float(counted), lse


@register_compiled_kernel(lambda x, w, s: (x, FIRST, s[:2], 1.0))
def cross_entropy_backward(
    xp: Any, logits: Any, target: Any, lse: Any, seed: float, ignore_index: int = -100, label_smoothing: float = 0.0,
    classes: int = 0,
) -> np.ndarray:  # fmt: skip
    logits, target, _ = _prepare_logits_and_target(logits, target, ignore_index, extra_classes=1)
    gradient, kind = np.empty_like(logits), accumulation_dtype(logits.dtype).type
    share, wanted = kind(label_smoothing / max(classes, logits.shape[1], 1)), kind(1.0 - label_smoothing)
    parallel_for_rows(
        _cross_entropy_backward_loop, (logits, target, lse, gradient), kind(seed), ignore_index, wanted, share
    )
    return gradient


@jit(fastmath=REORDER)
def _sum_errors(y, target, delta):
    """Return the sum of Huber's errors, or of absolute errors if `delta` is 0, or of squared errors if it is -1."""
    result = 0.0
    if delta < 0.0:
        for i in range(y.size):
            d = np.float64(to_float(y[i]) - to_float(target[i]))
            result += d * d
    elif delta == 0.0:
        for i in range(y.size):
            result += abs(np.float64(to_float(y[i]) - to_float(target[i])))
    else:
        for i in range(y.size):
            d = abs(np.float64(to_float(y[i]) - to_float(target[i])))
            near = delta if d > delta else d
            result += near * (d - near * 0.5)
    return result


@jit
def _set_error_slopes(y, target, dy, factor, delta):
    """Set dy to `factor` times the derivatives of the errors that `_sum_errors` adds. Those of squared errors are
    halved. `delta` has the dtype of `factor`."""
    if delta < 0:
        for i in range(y.size):
            dy[i] = round_to_dtype_of(dy, (to_float(y[i]) - to_float(target[i])) * factor)
    elif delta == 0:
        for i in range(y.size):
            d = to_float(y[i]) - to_float(target[i])
            slope = factor if d > 0 else -factor if d < 0 else d * factor
            dy[i] = round_to_dtype_of(dy, slope)
    else:
        for i in range(y.size):
            d = to_float(y[i]) - to_float(target[i])
            near = delta if d > delta else -delta if d < -delta else d
            dy[i] = round_to_dtype_of(dy, near * factor)


@jit
def _sum_errors_and_set_slopes_of_blocks(first, last, sums, y, target, dy, factor, delta):
    """For each block in the range [first, last), compute the gradient dy, and write the sum of errors to `sums`. If dy
    has no elements, compute only the sums."""
    for n in range(first, last):
        start, stop = n * BLOCK, min((n + 1) * BLOCK, y.size)
        sums[n] = _sum_errors(y[start:stop], target[start:stop], np.float64(delta))
        if dy.size:
            _set_error_slopes(y[start:stop], target[start:stop], dy[start:stop], factor, delta)


@jit
def _sum_errors_and_set_slopes_of_cells(first, last, sums, y, target, dy, factor, delta):
    """For each block in the range [first, last), compute the gradient dy, and write the sum of errors to `sums`. If dy
    has no elements, compute only the sums. y and dy have channels last; `target` has the shape (samples, channels,
    cells). Each block lies within one sample, and consists of whole cells."""
    channels, cells = target.shape[1], target.shape[2]
    block = np.empty((BLOCK // channels, channels), target.dtype)
    for n in range(first, last):
        start, cell = n * BLOCK, n * block.shape[0]
        transpose_pixels_into(target[cell // cells], cell % cells, block, False)
        part, flat = slice(start, start + BLOCK), block.reshape(BLOCK)
        sums[n] = _sum_errors(y[part], flat, np.float64(delta))
        if dy.size:
            _set_error_slopes(y[part], flat, dy[part], factor, delta)


def _sum_errors_and_make_gradient(
    y: np.ndarray, target: np.ndarray, factor: float, delta: float, with_gradient: bool
) -> tuple[np.ndarray, float]:
    """Return the gradient and the sum of errors. If `with_gradient` is false, the gradient has no elements."""
    sums, loop = np.empty(-(-y.size // BLOCK)), _sum_errors_and_set_slopes_of_blocks
    dy, flat = np.empty(0, y.dtype), list[np.ndarray]()
    if _has_blocks_of_cells(y, target):
        loop, shape = _sum_errors_and_set_slopes_of_cells, (*y.shape[:2], math.prod(y.shape[2:]))
        flat = [view_channels_last(y).reshape(-1), target.reshape(shape), dy]
        if with_gradient:
            dy = np.empty_like(y)
            flat[2] = view_channels_last(dy).reshape(-1)
    elif with_gradient:
        arrays, dy = make_flat_views_and_output(y, target)
        flat = list(map(as_contiguous, arrays))  # `as_contiguous` copies a target that is read-only or not aligned
    else:
        flat = [*make_flat_views(y, target), dy]
    number = accumulation_dtype(y.dtype).type
    if y.size < MIN_PARALLEL_SIZE:
        loop(0, sums.size, sums, *flat, number(factor), number(delta))
    else:
        parallel_for_range(loop, 0, sums.size, sums, *flat, number(factor), number(delta))
    return dy, float(np.add.reduce(sums))


def _make_error_gradient(y: np.ndarray, target: np.ndarray, factor: float, delta: float) -> np.ndarray:
    flat, dy = make_flat_views_and_output(y, target)
    number = accumulation_dtype(y.dtype).type
    parallel_for_rows(_set_error_slopes, tuple(map(as_contiguous, flat)), number(factor), number(delta))
    return dy


def _make_examples(x: np.ndarray, *arguments: float) -> list[tuple[Any, ...]]:
    """Return arguments for which kernels are compiled: arrays in one memory order, and in two."""
    y, target = np.zeros((1, BLOCK // 4, 4), x.dtype).transpose(0, 2, 1), np.zeros((1, 4, BLOCK // 4), x.dtype)
    return [(x, x, *arguments), (y, target, *arguments)]


@register_compiled_kernel(lambda x, w, s: _make_examples(x))
def squared_error(xp: Any, y: np.ndarray, target: np.ndarray) -> float:
    return _sum_errors_and_make_gradient(y, target, 0.0, -1.0, False)[1]


@register_compiled_kernel(lambda x, w, s: (x, x, 1.0))
def squared_error_backward(xp: Any, y: np.ndarray, target: np.ndarray, factor: float) -> np.ndarray:
    return _make_error_gradient(y, target, factor, -1.0)


@register_compiled_kernel(lambda x, w, s: _make_examples(x, 1.0))
def squared_error_gradient_and_sum(
    xp: Any, y: np.ndarray, target: np.ndarray, factor: float
) -> tuple[np.ndarray, float]:
    return _sum_errors_and_make_gradient(y, target, factor, -1.0, True)


@register_compiled_kernel(lambda x, w, s: _make_examples(x, 1.0))
def huber_error(xp: Any, y: np.ndarray, target: np.ndarray, delta: float) -> float:
    return _sum_errors_and_make_gradient(y, target, 0.0, delta, False)[1]


@register_compiled_kernel(lambda x, w, s: (x, x, 1.0, 1.0))
def huber_error_backward(xp: Any, y: np.ndarray, target: np.ndarray, delta: float, factor: float) -> np.ndarray:
    return _make_error_gradient(y, target, factor, delta)


@register_compiled_kernel(lambda x, w, s: _make_examples(x, 1.0, 1.0))
def huber_error_gradient_and_sum(
    xp: Any, y: np.ndarray, target: np.ndarray, delta: float, factor: float
) -> tuple[np.ndarray, float]:
    return _sum_errors_and_make_gradient(y, target, factor, delta, True)


def _has_blocks_of_cells(y: np.ndarray, target: np.ndarray) -> bool:
    """Return whether y is contiguous with channels last, `target` with channels first, and each block of the sum
    consists of whole cells of one sample."""
    if y.ndim < 3 or y.shape != target.shape or not y.size or y.shape[1] < 2:
        return False
    fits = BLOCK % y.shape[1] == 0 and y[0].size % BLOCK == 0
    return fits and target.flags.carray and view_channels_last(y).flags.carray
