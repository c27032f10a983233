"""Products with matrices in 8 bits, `fsdpx.array.packed`: their values are never in memory all at once."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from fsdpx.array import parallel
from fsdpx.array.blas import halves
from fsdpx.array.blas.products import gemm
from fsdpx.array.kernels.choice import installed
from fsdpx.array.kernels.half import narrowed, widened
from fsdpx.array.packed import Packed

__all__ = ["affine", "product"]

FEW = 8
"""Rows up to which a matrix is widened in registers, once for each: a quarter of the bytes is read from memory."""
AT_ONCE = 1 << 19
"""Elements of the matrix that are widened in memory at once: they stay in the second cache."""


def affine(out: np.ndarray, x: np.ndarray, weight: Packed, bias: np.ndarray | None) -> None:
    """out = x @ weight.T + bias: `(m, k)` and `(n, k)` into `(m, n)` in the dtype of x, float32 or bfloat16."""
    if x.shape[0] <= FEW and installed():
        total = np.empty((weight.shape[0], x.shape[0]), np.float32)
        few = np.require(widened(np, x), requirements=("C", "A", "W"))
        work = total.size * x.shape[1]
        parallel.over(_compiled("dots"), (total, weight.stored, weight.scales), few, _block(weight), work=work)
        _put(out, total.T, bias)
        return
    for start, stop, values in _pieces(weight, x.dtype):
        _multiply(out[:, start:stop], x, values.T, False)
    if bias is not None:
        _put(out, widened(np, out), bias)


def product(out: np.ndarray, x: np.ndarray, weight: Packed) -> None:
    """out = x @ weight: `(m, n)` and `(n, k)` into `(m, k)` in the dtype of x."""
    total = out if out.dtype == np.float32 else np.empty(out.shape, np.float32)
    total[...] = 0
    for start, stop, values in _pieces(weight, x.dtype):
        _multiply(total, x[:, start:stop], values, True)
    if total is not out:
        out[...] = narrowed(np, total, out.dtype)


def _put(out: np.ndarray, total: np.ndarray, bias: np.ndarray | None) -> None:
    if bias is not None:
        total = total + widened(np, bias)
    out[...] = total if out.dtype == np.float32 else narrowed(np, np.ascontiguousarray(total), out.dtype)


def _multiply(out: np.ndarray, a: np.ndarray, b: np.ndarray, accumulate: bool) -> None:
    (gemm if a.dtype == np.float32 else halves.product)(out, a, b, accumulate)


def _pieces(weight: Packed, dtype: np.dtype) -> Iterator[tuple[int, int, np.ndarray]]:
    """Some rows at a time, as an array that the next ones overwrite."""
    rows, columns = weight.shape
    step = max(AT_ONCE // max(columns, 1), 1)
    room = np.empty((min(step, rows), columns), dtype)
    for start in range(0, rows, step):
        stop = min(start + step, rows)
        values = room[: stop - start]
        if installed():
            seen = values if dtype == np.float32 else values.view(np.uint16)
            some = (seen, weight.stored[start:stop], weight.scales[start:stop])
            parallel.over(_compiled("widen"), some, _block(weight))
        else:
            values[...] = weight[start:stop]
        yield start, stop, values


def _block(weight: Packed) -> int:
    return weight.packing.block or max(weight.shape[1], 1)


@functools.cache
def _compiled(name: str) -> Callable[..., Any]:
    from fsdpx.array.kernels.compiled import packed

    found: Callable[..., Any] = getattr(packed, name)
    return found
