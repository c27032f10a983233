"""Compiled weighted sums of cells along one dim of a field, with channels last in memory."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from fsdpx.core.array.jit import jit
from fsdpx.core.array.kernels.choice import register_compiled_kernel
from fsdpx.core.array.kernels.compiled.memory_order import to_channels_last, view_channels_first
from fsdpx.core.array.kernels.compiled.scalar import use_widest_vectors
from fsdpx.core.array.parallel import parallel_for_range
from fsdpx.ext.fields.kernels.resample import CellMatrix

__all__ = ["multiply_along_dim"]


@jit
def _compute_weighted_cell_sums(first, last, x, y, starts, sources, weights):
    """Compute the rows `first` to `last` of y (lines, outputs, elements) from x (lines, cells, elements). A row is one
    output of one line."""
    use_widest_vectors()
    outputs, size = y.shape[1], y.shape[2]
    for row in range(first, last):
        line, o = row // outputs, row % outputs
        begin, end, out = starts[o], starts[o + 1], y[line, o]
        if end - begin == 2:  # the most common case: linear interpolation
            a, b, v, w = x[line, sources[begin]], x[line, sources[begin + 1]], weights[begin], weights[begin + 1]
            for j in range(size):
                out[j] = v * a[j] + w * b[j]
            continue
        if end == begin:
            out[:] = 0
            continue
        a, v = x[line, sources[begin]], weights[begin]
        for j in range(size):
            out[j] = v * a[j]
        for entry in range(begin + 1, end):
            cell, weight = x[line, sources[entry]], weights[entry]
            for j in range(size):
                out[j] += weight * cell[j]


def _make_example_matrix() -> CellMatrix:
    return CellMatrix(np.arange(2), np.zeros(1, np.int64), np.ones(1), 1)


@register_compiled_kernel(lambda x, w, s: (x.reshape(2, 1, 3)[:, :, :1], 2, _make_example_matrix()))
def multiply_along_dim(xp: Any, x: np.ndarray, dim: int, matrix: CellMatrix) -> np.ndarray:
    field = to_channels_last(x)
    before, after = field.shape[: dim - 1], field.shape[dim:]
    lines, elements = math.prod(before), math.prod(after)
    y = np.empty((*before, matrix.output_count, *after), x.dtype)
    arrays = field.reshape(lines, matrix.cells, elements), y.reshape(lines, matrix.output_count, elements)
    entries = matrix.starts, matrix.sources, matrix.weights.astype(x.dtype)
    parallel_for_range(_compute_weighted_cell_sums, 0, lines * matrix.output_count, *arrays, *entries)
    return view_channels_first(y)
