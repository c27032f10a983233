"""Conversion between memory orders: fields with channels last, (samples, *cells, channels), and 1-D views of arrays in
memory order."""

from __future__ import annotations

import math

import numpy as np

from fsdpx.core.array.jit import jit
from fsdpx.core.array.kernels.compiled.elements import as_contiguous
from fsdpx.core.array.parallel import parallel_for_rows

__all__ = [
    "make_flat_views_and_output", "to_channel_rows", "to_channels_last", "transpose_channels_into",
    "view_channels_first", "view_channels_last", "view_rows_channels_first",
]  # fmt: skip

BLOCK, RUN = 64, 16  # block size, in pixels and channels, of a transposition in cache


@jit
def transpose_channels_into(x, out, add):
    """Transpose channels to the last dim: compute out[n, p, c] = x[n, c, p], or out[n, p, c] += x[n, c, p] if `add` is
    true."""
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
            # short runs, because rows that are a power of two apart map to few cache lines
            for first in range(0, x.shape[1], RUN):
                for c in range(first, min(first + RUN, x.shape[1])):
                    for p in range(start, stop):
                        out[n, p, c] = x[n, c, p]


def view_channels_last(x: np.ndarray) -> np.ndarray:
    """Return a view (samples, *cells, channels) of x (samples, channels, *cells). Faster than `numpy.moveaxis`."""
    return x.transpose(0, *range(2, x.ndim), 1)


def view_channels_first(cells: np.ndarray) -> np.ndarray:
    """Return a view (samples, channels, *cells) of `cells` (samples, *cells, channels)."""
    return cells.transpose(0, cells.ndim - 1, *range(1, cells.ndim - 1))


def to_channels_last(x: np.ndarray) -> np.ndarray:
    """Return x (samples, channels, *cells) as a contiguous array (samples, *cells, channels), copied if necessary."""
    turned = view_channels_last(x)
    if turned.strides[-1] == x.itemsize:  # channels are already last in memory
        return as_contiguous(turned)
    x, out = as_contiguous(x), np.empty(turned.shape, x.dtype)
    n, channels, cells = *x.shape[:2], math.prod(x.shape[2:])
    parallel_for_rows(transpose_channels_into, (x.reshape(n, channels, cells), out.reshape(n, cells, channels)), False)
    return out


def to_channel_rows(x: np.ndarray) -> np.ndarray:
    """Return x (samples, channels, ...) as a contiguous matrix with a column per channel and a row per sample and
    position."""
    return to_channels_last(x).reshape(x.shape[0] * math.prod(x.shape[2:]), x.shape[1])


def view_rows_channels_first(rows: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """View a matrix with a column per channel, as returned by `to_channel_rows`, as an array (samples, channels, ...)
    of `shape`."""
    return view_channels_first(rows.reshape(shape[0], *shape[2:], shape[1]))


def _flatten_in_memory_order(*arrays: np.ndarray) -> list[np.ndarray] | None:
    """Return arrays of one shape as 1-D views in memory order. Return None if the arrays have different memory orders
    or gaps."""
    if all(a.flags.c_contiguous for a in arrays):
        return [a.reshape(-1) for a in arrays]
    strides = arrays[0].strides
    order = sorted(range(arrays[0].ndim), key=strides.__getitem__, reverse=True)
    turned = [a.transpose(order) for a in arrays]
    if any(a.strides != strides for a in arrays) or not turned[0].flags.c_contiguous:
        return None
    return [a.reshape(-1) for a in turned]


def make_flat_views_and_output(*arrays: np.ndarray) -> tuple[tuple[np.ndarray, ...], np.ndarray]:
    """Return 1-D views of arrays of one shape, all in the same memory order, and of a new output array, followed by
    the output array itself. If the arrays have different memory orders, they are first converted to channels last."""
    out = np.empty_like(arrays[0])
    flat = _flatten_in_memory_order(*arrays, out)
    if flat is None and out.ndim > 2:
        turned = [to_channels_last(a) for a in arrays]
        rows = np.empty_like(turned[0])
        flat, out = [a.reshape(-1) for a in (*turned, rows)], view_channels_first(rows)
    elif flat is None:
        out = np.empty(out.shape, out.dtype)
        flat = [np.ascontiguousarray(a).reshape(-1) for a in (*arrays, out)]
    return tuple(flat), out
