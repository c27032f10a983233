"""Products with matrices in few bits, `fsdpx.array.packed`: their values are never in memory all at once."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from fsdpx.array import parallel
from fsdpx.array.blas import halves, integers
from fsdpx.array.blas.products import gemm
from fsdpx.array.kernels.choice import installed
from fsdpx.array.kernels.half import narrowed, widened
from fsdpx.array.nf4 import BLOCK, LEVELS, NF4
from fsdpx.array.packed import Packed, PackedInt8

__all__ = ["affine", "product"]

FEW, FEWER = 8, 4
"""Rows up to which a matrix is widened in registers, once for each: a quarter of the bytes is read from memory. FEWER
where whole numbers can be multiplied as they are, or a row has several scales."""
AT_ONCE = 1 << 20
"""Elements of the matrix that are widened in memory at once."""
ROWS = 128
"""Rows of the input whose digits are multiplied at once."""
HALVES = 64
"""Rows of bfloat16 up to which digits are as fast as a matrix that is widened to bfloat16, and nearer."""
LONGEST = 1 << 17
"""Terms whose sum is less than 2^31, whatever the numbers are."""
NOTHING = np.empty(0, np.float32)


def affine(out: np.ndarray, x: np.ndarray, weight: Packed, bias: np.ndarray | None) -> None:
    """out = x @ weight.T + bias: `(m, k)` and `(n, k)` into `(m, n)` in the dtype of x, float32 or bfloat16."""
    rows, alone, whole = x.shape[0], weight.packing.block is None, isinstance(weight.packing, PackedInt8)
    digits = alone and x.shape[1] <= LONGEST and installed() and integers.library() is not None
    if whole and rows <= (FEWER if digits or not alone else FEW) and installed():
        total = np.empty((weight.shape[0], rows), np.float32)
        some = (total, weight.stored, weight.scales)
        parallel.over(_compiled("dots"), some, _plain(widened(np, x)), _block(weight), work=total.size * x.shape[1])
        _put(out, total.T, bias)
    elif digits and weight.size and (x.dtype == np.float32 or rows <= HALVES):
        total = out if out.dtype == np.float32 else np.empty(out.shape, np.float32)
        cut = [slice(start, start + ROWS) for start in range(0, rows, ROWS)]
        wide, shift = _plain(widened(np, x)), NOTHING if bias is None else _plain(widened(np, bias))
        parallel.run(_by_digits, [(total[some], wide[some], weight, shift) for some in cut])
        if total is not out:
            out[...] = narrowed(np, total, out.dtype)
    else:
        _widened(out, x, weight)
        if bias is not None:
            _put(out, widened(np, out), bias)


def _by_digits(out: np.ndarray, x: np.ndarray, weight: Packed, bias: np.ndarray) -> None:
    """x as three whole numbers of 8 bits: products of those are exact."""
    library = integers.library()
    assert library is not None
    digits, unit = np.empty((3, *x.shape), np.int8), np.empty(len(x), np.float32)
    if not _compiled("apart")(x, digits, unit):  # NaN and Inf have none
        _widened(out, x, weight)
        out += bias if bias.size else 0
        return
    products = np.empty((3, *out.shape), np.float32)
    library.product(products.reshape(-1, out.shape[1]), digits.reshape(-1, x.shape[1]), weight.numbers.T, False, None)
    _compiled("together")(out, products, unit, weight.scales[:, 0].copy(), bias)


def _widened(out: np.ndarray, x: np.ndarray, weight: Packed) -> None:
    for start, stop, values in _pieces(weight, x.dtype):
        _multiply(out[:, start:stop], x, values.T, False)


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
    buffer = np.empty((min(step, rows), columns), dtype)
    for start in range(0, rows, step):
        stop = min(start + step, rows)
        values = buffer[: stop - start]
        if installed():
            seen = values if dtype == np.float32 else values.view(np.uint16)
            part = weight.rows(start, stop)
            some = (seen, part.stored, part.scales)
            if isinstance(weight.packing, NF4):
                parallel.over(_compiled("widen_levels"), some, LEVELS, BLOCK)
            else:
                parallel.over(_compiled("widen"), some, _block(weight))
        else:
            values[...] = weight[start:stop]
        yield start, stop, values


def _plain(x: np.ndarray) -> np.ndarray:
    """x in the one layout that loops are compiled for."""
    return np.require(x, requirements=("C", "A", "W"))


def _block(weight: Packed) -> int:
    return weight.packing.block or max(weight.shape[1], 1)


@functools.cache
def _compiled(name: str) -> Callable[..., Any]:
    from fsdpx.array.kernels.compiled import packed

    found: Callable[..., Any] = getattr(packed, name)
    return found
