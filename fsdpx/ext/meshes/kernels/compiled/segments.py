"""Reductions over segments of rows, compiled with Numba and parallel over segments or rows.

Rows are summed in order for any number of threads, so results are reproducible."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from fsdpx.core.array import parallel
from fsdpx.core.array.jit import jit
from fsdpx.core.array.kernels.choice import register_compiled_kernel
from fsdpx.core.array.kernels.compiled.elements import as_contiguous
from fsdpx.core.array.kernels.compiled.scalar import exp, use_widest_vectors

NO_ORDER = np.zeros(0, np.int64)


@jit
def _add_gathered_row_pairs_loop(start, stop, out, a, a_index, b, b_index):
    use_widest_vectors()
    for n in range(out.shape[0]):
        for i in range(start, stop):
            row, left, right = out[n, i], a[n, a_index[i]], b[n, b_index[i]]
            for c in range(row.size):
                row[c] += left[c] + right[c]


@jit
def _sum_loop(start, stop, values, y, offsets, order):
    use_widest_vectors()
    for n in range(values.shape[0]):
        for i in range(start, stop):
            out = y[n, i]
            out[:] = 0
            for k in range(offsets[i], offsets[i + 1]):
                row = values[n, order[k] if order.size else k]
                for c in range(out.size):
                    out[c] += row[c]


@jit
def _max_loop(start, stop, values, y, winner, offsets):
    for n in range(values.shape[0]):
        for i in range(start, stop):
            out, place = y[n, i], winner[n, i]
            out[:] = 0
            place[:] = -1
            for k in range(offsets[i], offsets[i + 1]):
                row = values[n, k]
                for c in range(out.size):
                    if place[c] < 0 or row[c] > out[c] or row[c] != row[c]:
                        out[c] = row[c]
                        place[c] = k


@jit
def _softmax_loop(start, stop, scores, y, offsets):
    use_widest_vectors()
    most, total = np.empty(y.shape[2], y.dtype), np.empty(y.shape[2], y.dtype)
    for n in range(scores.shape[0]):
        for i in range(start, stop):
            most[:] = -np.inf
            total[:] = 0
            for k in range(offsets[i], offsets[i + 1]):
                row = scores[n, k]
                for c in range(row.size):
                    most[c] = max(most[c], row[c])
            for k in range(offsets[i], offsets[i + 1]):
                row, out = scores[n, k], y[n, k]
                for c in range(row.size):
                    out[c] = exp(row[c] - most[c])
                    total[c] += out[c]
            for k in range(offsets[i], offsets[i + 1]):
                out = y[n, k]
                for c in range(out.size):
                    out[c] /= total[c]


@jit
def _softmax_backward_loop(start, stop, y, dy, dx, offsets):
    use_widest_vectors()
    total = np.empty(y.shape[2], y.dtype)
    for n in range(y.shape[0]):
        for i in range(start, stop):
            total[:] = 0
            for k in range(offsets[i], offsets[i + 1]):
                row, slope = y[n, k], dy[n, k]
                for c in range(row.size):
                    total[c] += row[c] * slope[c]
            for k in range(offsets[i], offsets[i + 1]):
                row, slope, out = y[n, k], dy[n, k], dx[n, k]
                for c in range(row.size):
                    out[c] = row[c] * (slope[c] - total[c])


def _run_loop_in_threads(loop: Callable[..., Any], count: int, work: int, *arguments: Any) -> None:
    """Call `loop(start, stop, *arguments)` for ranges [start, stop) that together cover [0, count). Uses several
    threads if `work`, the number of elements to read, is large enough."""
    if work < parallel.MIN_PARALLEL_SIZE:
        loop(0, count, *arguments)
    else:
        parallel.parallel_for_range(loop, 0, count, *arguments)


def _make_example(x: Any) -> Any:
    return np.zeros((2, 3, 2), x.dtype)


INDEX, OFFSETS = np.array([0, 2, 1]), np.array([0, 1, 1, 3])


@register_compiled_kernel(lambda x, w, s: (_make_example(x), _make_example(x), INDEX, _make_example(x), INDEX))
def add_gathered_row_pairs(
    xp: Any, y: np.ndarray, a: np.ndarray, a_index: np.ndarray, b: np.ndarray, b_index: np.ndarray
) -> np.ndarray:
    y = as_contiguous(y)
    arrays = y, as_contiguous(a, y.dtype), a_index, as_contiguous(b, y.dtype), b_index
    _run_loop_in_threads(_add_gathered_row_pairs_loop, y.shape[1], y.size, *arrays)
    return y


@register_compiled_kernel(lambda x, w, s: (_make_example(x), OFFSETS, None, 2))
def segment_sum(xp: Any, values: np.ndarray, offsets: np.ndarray, order: np.ndarray | None, most: int) -> np.ndarray:
    y = np.empty((values.shape[0], offsets.size - 1, values.shape[2]), values.dtype)
    order = NO_ORDER if order is None else order
    _run_loop_in_threads(_sum_loop, offsets.size - 1, values.size, as_contiguous(values), y, offsets, order)
    return y


@register_compiled_kernel(lambda x, w, s: (_make_example(x), OFFSETS, 2))
def segment_max(xp: Any, values: np.ndarray, offsets: np.ndarray, most: int) -> tuple[np.ndarray, np.ndarray]:
    y = np.empty((values.shape[0], offsets.size - 1, values.shape[2]), values.dtype)
    winner = np.empty(y.shape, np.int64)
    _run_loop_in_threads(_max_loop, offsets.size - 1, values.size, as_contiguous(values), y, winner, offsets)
    return y, winner


@register_compiled_kernel(lambda x, w, s: (_make_example(x), OFFSETS, INDEX, 2))
def segment_softmax(xp: Any, scores: np.ndarray, offsets: np.ndarray, segments: np.ndarray, most: int) -> np.ndarray:
    y = np.empty(scores.shape, scores.dtype)
    _run_loop_in_threads(_softmax_loop, offsets.size - 1, y.size, as_contiguous(scores), y, offsets)
    return y


@register_compiled_kernel(lambda x, w, s: (_make_example(x), _make_example(x), OFFSETS, INDEX, 2))
def segment_softmax_backward(
    xp: Any, y: np.ndarray, dy: np.ndarray, offsets: np.ndarray, segments: np.ndarray, most: int
) -> np.ndarray:
    dx = np.empty(y.shape, y.dtype)
    arrays = as_contiguous(y), as_contiguous(dy, y.dtype), dx
    _run_loop_in_threads(_softmax_backward_loop, offsets.size - 1, y.size, *arrays, offsets)
    return dx
