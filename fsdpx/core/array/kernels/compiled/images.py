"""Fields with the channels of a cell next to each other in memory, (samples, *cells, channels), and max and
mean of the windows of fields of one to three dims, sample by sample."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from fsdpx.core.array.jit import jit
from fsdpx.core.array.kernels.choice import form
from fsdpx.core.array.kernels.compiled.half import owned
from fsdpx.core.array.kernels.correlation import Strides, put
from fsdpx.core.array.lazy_numba import register_jitable
from fsdpx.core.array.parallel import over

__all__ = ["alike", "as_first", "as_last", "cells_last", "put_first", "rows_first", "rows_of"]

BLOCK, RUN = 64, 16  # pixels and channels of a block that is turned inside the cache


@jit
def _turn(x, out, add):
    """out[n, p, c] (+)= x[n, c, p]."""
    for n in range(x.shape[0]):
        for start in range(0, x.shape[2], BLOCK):
            stop = min(start + BLOCK, x.shape[2])
            if add or x.shape[1] > x.shape[2]:
                for p in range(start, stop):
                    for c in range(x.shape[1]):
                        if add:
                            out[n, p, c] += x[n, c, p]
                        else:
                            out[n, p, c] = x[n, c, p]
                continue
            for first in range(0, x.shape[1], RUN):  # rows a power of two apart have few lines of the cache
                for c in range(first, min(first + RUN, x.shape[1])):
                    for p in range(start, stop):
                        out[n, p, c] = x[n, c, p]


def as_last(x: np.ndarray) -> np.ndarray:
    """(samples, channels, *cells) as (samples, *cells, channels): a view, without the price of `numpy.moveaxis`."""
    return x.transpose(0, *range(2, x.ndim), 1)


def as_first(cells: np.ndarray) -> np.ndarray:
    """The way back: a view."""
    return cells.transpose(0, cells.ndim - 1, *range(1, cells.ndim - 1))


def cells_last(x: np.ndarray) -> np.ndarray:
    """(samples, channels, *cells) as (samples, *cells, channels), contiguous; copied where needed."""
    turned = as_last(x)
    if turned.strides[-1] == x.itemsize:  # of a field, or of some channels of one
        return owned(turned)
    x, out = owned(x), np.empty(turned.shape, x.dtype)
    n, channels, cells = *x.shape[:2], math.prod(x.shape[2:])
    over(_turn, (x.reshape(n, channels, cells), out.reshape(n, cells, channels)), False)
    return out


def put_first(into: Any, cells: np.ndarray) -> None:
    """Write or add an array with channels last to where a gradient with channels first goes."""
    out, add = into
    n, channels, size = cells.shape[0], cells.shape[-1], math.prod(cells.shape[1:-1])
    if out.dtype == cells.dtype and out.flags.c_contiguous and out.flags.aligned:
        over(_turn, (cells.reshape(n, size, channels), out.reshape(n, channels, size)), add)
    else:
        put(into, as_first(cells))


def rows_of(x: np.ndarray) -> np.ndarray:
    """(samples, channels, ...) as rows of channels, one per sample and place, contiguous."""
    return cells_last(x).reshape(x.shape[0] * math.prod(x.shape[2:]), x.shape[1])


def rows_first(rows: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """Rows of channels as (samples, channels, ...): a view."""
    return as_first(rows.reshape(shape[0], *shape[2:], shape[1]))


def _in_memory(*arrays: np.ndarray) -> list[np.ndarray] | None:
    """Arrays of one shape as 1-D views in the order in which they lie in memory, if that is one order without gaps."""
    if all(a.flags.c_contiguous for a in arrays):
        return [a.reshape(-1) for a in arrays]
    strides = arrays[0].strides
    order = sorted(range(arrays[0].ndim), key=strides.__getitem__, reverse=True)
    turned = [a.transpose(order) for a in arrays]
    if any(a.strides != strides for a in arrays) or not turned[0].flags.c_contiguous:
        return None
    return [a.reshape(-1) for a in turned]


def alike(*arrays: np.ndarray) -> tuple[tuple[np.ndarray, ...], np.ndarray]:
    """Arrays of one shape, and a new one like the first, as 1-D views in one order; and the new one. Fields that lie in
    several orders come with channels last."""
    out = np.empty_like(arrays[0])
    flat = _in_memory(*arrays, out)
    if flat is None and out.ndim > 2:
        turned = [cells_last(a) for a in arrays]
        rows = np.empty_like(turned[0])
        flat, out = [a.reshape(-1) for a in (*turned, rows)], as_first(rows)
    elif flat is None:
        out = np.empty(out.shape, out.dtype)
        flat = [np.ascontiguousarray(a).reshape(-1) for a in (*arrays, out)]
    return tuple(flat), out


@register_jitable
def _under(window, d, at, size):
    """Of output `at` along dim d of `size` cells: the cell of place 0, how far those of the next places are apart, and
    the places inside, from one on to before another."""
    many, step, apart, first = window[d]
    first += at * step
    return first, apart, max(-(first // apart), 0), min((size - 1 - first) // apart + 1, many)


@jit
def _largest(field, y, winner, window):
    for n in range(field.shape[0]):
        for p in range(y.shape[1]):
            front, deep, i0, i1 = _under(window, 0, p, field.shape[1])
            for q in range(y.shape[2]):
                top, down, j0, j1 = _under(window, 1, q, field.shape[2])
                for r in range(y.shape[3]):
                    left, right, k0, k1 = _under(window, 2, r, field.shape[3])
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
def _to_largest(field, dy, winner, window):
    for n in range(field.shape[0]):
        for p in range(dy.shape[1]):
            front, deep, i0, i1 = _under(window, 0, p, field.shape[1])
            for q in range(dy.shape[2]):
                top, down, j0, j1 = _under(window, 1, q, field.shape[2])
                for r in range(dy.shape[3]):
                    left, right, k0, k1 = _under(window, 2, r, field.shape[3])
                    slope, place = dy[n, p, q, r], winner[n, p, q, r]
                    for i in range(i0, i1):
                        for j in range(j0, j1):
                            for k in range(k0, k1):
                                number = np.int32((i * window[1, 0] + j) * window[2, 0] + k)
                                cell = field[n, front + i * deep, top + j * down, left + k * right]
                                for c in range(slope.size):
                                    cell[c] += slope[c] if place[c] == number else slope.dtype.type(0)


@jit
def _mean(field, y, window, divisor):
    for n in range(field.shape[0]):
        for p in range(y.shape[1]):
            front, deep, i0, i1 = _under(window, 0, p, field.shape[1])
            for q in range(y.shape[2]):
                top, down, j0, j1 = _under(window, 1, q, field.shape[2])
                for r in range(y.shape[3]):
                    left, right, k0, k1 = _under(window, 2, r, field.shape[3])
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
def _to_all(field, dy, window, divisor):
    for n in range(field.shape[0]):
        for p in range(dy.shape[1]):
            front, deep, i0, i1 = _under(window, 0, p, field.shape[1])
            for q in range(dy.shape[2]):
                top, down, j0, j1 = _under(window, 1, q, field.shape[2])
                for r in range(dy.shape[3]):
                    left, right, k0, k1 = _under(window, 2, r, field.shape[3])
                    slope = dy[n, p, q, r]
                    for i in range(i0, i1):
                        for j in range(j0, j1):
                            for k in range(k0, k1):
                                cell = field[n, front + i * deep, top + j * down, left + k * right]
                                for c in range(slope.size):
                                    cell[c] += slope[c] / slope.dtype.type(divisor)


PAIRS = Strides((2,), (2,), (1,), (0,), 1)


def _pairs(x: Any, kind: Any = None) -> Any:
    return np.zeros((2, 3, 2), kind or x.dtype)


@form(lambda x, w, s: (_pairs(x), PAIRS, (1,)))
def max_pool(xp: Any, x: np.ndarray, strides: Strides, sizes: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
    y = np.empty((x.shape[0], *sizes, x.shape[1]), x.dtype)
    winner = np.empty(y.shape, np.int32)
    over(_largest, (_deep(cells_last(x)), _deep(y), _deep(winner)), _numbers(strides))
    return as_first(y), as_first(winner)


@form(lambda x, w, s: (_pairs(x), _pairs(x, np.int32), PAIRS, (2, 3, 4)))
def max_pool_backward(xp: Any, dy: Any, winner: Any, strides: Strides, shape: tuple[int, ...]) -> np.ndarray:
    field = np.zeros((shape[0], *shape[2:], shape[1]), dy.dtype)
    places = owned(np.moveaxis(winner, 1, -1), np.int32)
    over(_to_largest, (_deep(field), _deep(cells_last(dy)), _deep(places)), _numbers(strides))
    return as_first(field)


@form(lambda x, w, s: (_pairs(x), PAIRS, (1,), 2))
def avg_pool(xp: Any, x: np.ndarray, strides: Strides, sizes: Sequence[int], divisor: int) -> np.ndarray:
    y = np.empty((x.shape[0], *sizes, x.shape[1]), x.dtype)
    over(_mean, (_deep(cells_last(x)), _deep(y)), _numbers(strides), divisor)
    return as_first(y)


@form(lambda x, w, s: (_pairs(x), PAIRS, (2, 3, 4), 2))
def avg_pool_backward(
    xp: Any, dy: np.ndarray, strides: Strides, shape: tuple[int, ...], divisor: int
) -> np.ndarray:
    field = np.zeros((shape[0], *shape[2:], shape[1]), dy.dtype)
    over(_to_all, (_deep(field), _deep(cells_last(dy))), _numbers(strides), divisor)
    return as_first(field)


def _numbers(strides: Strides) -> np.ndarray:
    """(3 dims, 4): kernel, stride, dilation, and the first cell."""
    rows = [*zip(*strides[:4], strict=True)]
    return np.array([(1, 1, 1, 0)] * (3 - len(rows)) + rows)


def _deep(cells: np.ndarray) -> np.ndarray:
    """Of three dims of cells."""
    return cells.reshape(cells.shape[0], *(1,) * (5 - cells.ndim), *cells.shape[1:])
