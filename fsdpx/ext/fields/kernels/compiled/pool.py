"""Max and average pooling of fields of one to three dims, compiled with Numba and parallel over samples."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from fsdpx.core.array.jit import jit
from fsdpx.core.array.kernels.choice import register_compiled_kernel
from fsdpx.core.array.kernels.compiled.elements import as_contiguous
from fsdpx.core.array.kernels.compiled.memory_order import to_channels_last, view_channels_first
from fsdpx.core.array.lazy_numba import register_jitable
from fsdpx.core.array.parallel import parallel_for_rows
from fsdpx.ext.fields.kernels.convolution import WindowStrides


@register_jitable
def _locate_window(window, d, output, size):
    """Return the position of an output's window along dim `d`: the cell at window offset 0, the number of cells from
    one offset to the next, and the range [from, to) of offsets inside the field."""
    many, step, apart, first = window[d]
    first += output * step
    return first, apart, max(-(first // apart), 0), min((size - 1 - first) // apart + 1, many)


@jit
def _max_pool_loop(field, y, winner, window):
    for n in range(field.shape[0]):
        for p in range(y.shape[1]):
            front, deep, i0, i1 = _locate_window(window, 0, p, field.shape[1])
            for q in range(y.shape[2]):
                top, down, j0, j1 = _locate_window(window, 1, q, field.shape[2])
                for r in range(y.shape[3]):
                    left, right, k0, k1 = _locate_window(window, 2, r, field.shape[3])
                    best, place = y[n, p, q, r], winner[n, p, q, r]
                    best[:] = -np.inf
                    place[:] = 0
                    for i in range(i0, i1):
                        for j in range(j0, j1):
                            for k in range(k0, k1):
                                number = np.int32((i * window[1, 0] + j) * window[2, 0] + k)
                                cell = field[n, front + i * deep, top + j * down, left + k * right]
                                for c in range(best.size):
                                    better = cell[c] > best[c] or cell[c] != cell[c]
                                    best[c] = cell[c] if better else best[c]
                                    place[c] = number if better else place[c]


@jit
def _max_pool_backward_loop(field, dy, winner, window):
    for n in range(field.shape[0]):
        for p in range(dy.shape[1]):
            front, deep, i0, i1 = _locate_window(window, 0, p, field.shape[1])
            for q in range(dy.shape[2]):
                top, down, j0, j1 = _locate_window(window, 1, q, field.shape[2])
                for r in range(dy.shape[3]):
                    left, right, k0, k1 = _locate_window(window, 2, r, field.shape[3])
                    slope, place = dy[n, p, q, r], winner[n, p, q, r]
                    for i in range(i0, i1):
                        for j in range(j0, j1):
                            for k in range(k0, k1):
                                number = np.int32((i * window[1, 0] + j) * window[2, 0] + k)
                                cell = field[n, front + i * deep, top + j * down, left + k * right]
                                for c in range(slope.size):
                                    cell[c] += slope[c] if place[c] == number else slope.dtype.type(0)


@jit
def _avg_pool_loop(field, y, window, divisor):
    for n in range(field.shape[0]):
        for p in range(y.shape[1]):
            front, deep, i0, i1 = _locate_window(window, 0, p, field.shape[1])
            for q in range(y.shape[2]):
                top, down, j0, j1 = _locate_window(window, 1, q, field.shape[2])
                for r in range(y.shape[3]):
                    left, right, k0, k1 = _locate_window(window, 2, r, field.shape[3])
                    into = y[n, p, q, r]
                    into[:] = 0
                    for i in range(i0, i1):
                        for j in range(j0, j1):
                            for k in range(k0, k1):
                                cell = field[n, front + i * deep, top + j * down, left + k * right]
                                for c in range(into.size):
                                    into[c] += cell[c]
                    for c in range(into.size):
                        into[c] /= into.dtype.type(divisor)


@jit
def _avg_pool_backward_loop(field, dy, window, divisor):
    for n in range(field.shape[0]):
        for p in range(dy.shape[1]):
            front, deep, i0, i1 = _locate_window(window, 0, p, field.shape[1])
            for q in range(dy.shape[2]):
                top, down, j0, j1 = _locate_window(window, 1, q, field.shape[2])
                for r in range(dy.shape[3]):
                    left, right, k0, k1 = _locate_window(window, 2, r, field.shape[3])
                    slope = dy[n, p, q, r]
                    for i in range(i0, i1):
                        for j in range(j0, j1):
                            for k in range(k0, k1):
                                cell = field[n, front + i * deep, top + j * down, left + k * right]
                                for c in range(slope.size):
                                    cell[c] += slope[c] / slope.dtype.type(divisor)


PAIRS = WindowStrides((2,), (2,), (1,), (0,), 1)


def _make_example_pairs(x: Any, dtype: Any = None) -> Any:
    return np.zeros((2, 3, 2), dtype or x.dtype)


@register_compiled_kernel(lambda x, w, s: (_make_example_pairs(x), PAIRS, (1,)))
def max_pool(xp: Any, x: np.ndarray, strides: WindowStrides, sizes: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
    y = np.empty((x.shape[0], *sizes, x.shape[1]), x.dtype)
    winner = np.empty(y.shape, np.int32)
    parallel_for_rows(
        _max_pool_loop,
        (_to_three_dims(to_channels_last(x)), _to_three_dims(y), _to_three_dims(winner)),
        _make_window_table(strides),
    )
    return view_channels_first(y), view_channels_first(winner)


@register_compiled_kernel(lambda x, w, s: (_make_example_pairs(x), _make_example_pairs(x, np.int32), PAIRS, (2, 3, 4)))
def max_pool_backward(xp: Any, dy: Any, winner: Any, strides: WindowStrides, shape: tuple[int, ...]) -> np.ndarray:
    field = np.zeros((shape[0], *shape[2:], shape[1]), dy.dtype)
    places = as_contiguous(np.moveaxis(winner, 1, -1), np.int32)
    parallel_for_rows(
        _max_pool_backward_loop,
        (_to_three_dims(field), _to_three_dims(to_channels_last(dy)), _to_three_dims(places)),
        _make_window_table(strides),
    )
    return view_channels_first(field)


@register_compiled_kernel(lambda x, w, s: (_make_example_pairs(x), PAIRS, (1,), 2))
def avg_pool(xp: Any, x: np.ndarray, strides: WindowStrides, sizes: Sequence[int], divisor: int) -> np.ndarray:
    y = np.empty((x.shape[0], *sizes, x.shape[1]), x.dtype)
    parallel_for_rows(
        _avg_pool_loop,
        (_to_three_dims(to_channels_last(x)), _to_three_dims(y)),
        _make_window_table(strides),
        divisor,
    )
    return view_channels_first(y)


@register_compiled_kernel(lambda x, w, s: (_make_example_pairs(x), PAIRS, (2, 3, 4), 2))
def avg_pool_backward(
    xp: Any, dy: np.ndarray, strides: WindowStrides, shape: tuple[int, ...], divisor: int
) -> np.ndarray:
    field = np.zeros((shape[0], *shape[2:], shape[1]), dy.dtype)
    parallel_for_rows(
        _avg_pool_backward_loop,
        (_to_three_dims(field), _to_three_dims(to_channels_last(dy))),
        _make_window_table(strides),
        divisor,
    )
    return view_channels_first(field)


def _make_window_table(strides: WindowStrides) -> np.ndarray:
    """Return an array of shape (3, 4) with a row for each dim: kernel size, stride, dilation and first cell."""
    rows = [*zip(*strides[:4], strict=True)]
    return np.array([(1, 1, 1, 0)] * (3 - len(rows)) + rows)


def _to_three_dims(cells: np.ndarray) -> np.ndarray:
    """Reshape (samples, *cells, channels) to exactly three cell dims by adding dims of size 1."""
    return cells.reshape(cells.shape[0], *(1,) * (5 - cells.ndim), *cells.shape[1:])
