"""Softmax row by row, each row staying in cache between its passes."""

import math
from typing import Any

import numpy as np

from fsdpx.array.kernels.compiled.bits import put, real, zero
from fsdpx.array.kernels.compiled.rows import dot, exponentials, largest, numbers, total
from fsdpx.array.kernels.compiled.scalar import widest
from fsdpx.array.parallel import over
from fsdpx.native.compiled import jit

__all__ = ["softmax", "softmax_backward"]


@jit
def _softmax_rows(x, y):
    widest()
    row = np.full(x.shape[1], zero(x))
    for i in range(x.shape[0]):
        numbers(x[i], row)
        exponentials(row, largest(row))
        share = row.dtype.type(1) / total(row)
        for j in range(x.shape[1]):
            y[i, j] = put(y, row[j] * share)


@jit
def _softmax_backward_rows(y, dy, dx):
    widest()
    for i in range(y.shape[0]):
        along = dot(y[i], dy[i])
        for j in range(y.shape[1]):
            dx[i, j] = put(dx, real(y[i, j]) * (real(dy[i, j]) - along))


def _by_rows(loop: Any, *arrays: np.ndarray) -> np.ndarray:
    shape = arrays[0].shape
    rows = [np.ascontiguousarray(a).reshape(math.prod(shape[:-1]), shape[-1]) for a in arrays]
    out = np.empty_like(rows[0])
    over(loop, (*rows, out))
    return out.reshape(shape)


def softmax(xp: Any, x: np.ndarray) -> np.ndarray:
    return _by_rows(_softmax_rows, x)


def softmax_backward(xp: Any, y: np.ndarray, dy: np.ndarray) -> np.ndarray:
    return _by_rows(_softmax_backward_rows, y, dy)
