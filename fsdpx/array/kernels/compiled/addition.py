"""Sums of arrays in one pass; columns are added in fixed blocks of rows and cut among threads."""

import math
from typing import Any

import numpy as np

from fsdpx.array.kernels import activation as plain
from fsdpx.array.kernels.activation import exact
from fsdpx.array.kernels.compiled.activation import gelu_of, gelu_tanh_of
from fsdpx.array.kernels.compiled.half import fallback, number, put, real, wide
from fsdpx.array.kernels.compiled.rows import alike, owned
from fsdpx.array.kernels.compiled.scalar import widest
from fsdpx.array.parallel import over, over_columns
from fsdpx.native.compiled import jit

__all__ = ["add", "add_bias", "bias_gelu", "column_sums", "sum_rows"]

BLOCK = 32  # rows added up before they are added to the total: rounding grows with rows / BLOCK + BLOCK


@jit
def _add(a, b, out):
    for i in range(a.size):
        out[i] = put(out, real(a[i]) + real(b[i]))


@jit
def _add_bias(y, bias):
    for i in range(y.shape[0]):
        for j in range(y.shape[1]):
            y[i, j] = put(y, real(y[i, j]) + real(bias[j]))


def _biased(of: Any) -> Any:
    """The loop h += bias, y = of(h)."""

    def loop(h, y, bias):
        widest()
        for i in range(h.shape[0]):
            for j in range(h.shape[1]):
                h[i, j] = put(h, real(h[i, j]) + real(bias[j]))
                y[i, j] = put(y, of(real(h[i, j])))

    return jit(loop, name=f"biased_{of.__name__}")


_bias_gelu, _bias_gelu_tanh = _biased(gelu_of), _biased(gelu_tanh_of)


@jit
def column_sums(start, stop, rows, out, accumulate):
    into, block = out[start:stop], np.empty(stop - start, out.dtype)
    if not accumulate:
        into[:] = 0
    for first in range(0, rows.shape[0], BLOCK):
        block[:] = 0
        last = min(first + BLOCK, rows.shape[0])
        whole = first + (last - first) // 4 * 4
        for i in range(first, whole, 4):
            a, b, c, d = rows[i, start:stop], rows[i + 1, start:stop], rows[i + 2, start:stop], rows[i + 3, start:stop]
            for j in range(block.size):
                block[j] += (real(a[j]) + real(b[j])) + (real(c[j]) + real(d[j]))
        for i in range(whole, last):
            row = rows[i, start:stop]
            for j in range(block.size):
                block[j] += real(row[j])
        for j in range(block.size):
            into[j] += block[j]


def _rows(x: np.ndarray) -> np.ndarray:
    return x.reshape(math.prod(x.shape[:-1]), x.shape[-1])


def add(xp: Any, a: np.ndarray, b: np.ndarray) -> np.ndarray:
    if a.shape != b.shape:
        return fallback(plain.add, xp, a, b)
    flat, out = alike(a, b)
    over(_add, flat)
    return out


def add_bias(xp: Any, y: np.ndarray, bias: np.ndarray) -> None:
    lead, fits = y.shape[: y.ndim - bias.ndim], bias.shape == y.shape[y.ndim - bias.ndim :] and bias.dtype == y.dtype
    if y.flags.c_contiguous and fits:
        over(_add_bias, (y.reshape(math.prod(lead), bias.size),), owned(bias).reshape(-1))
    else:
        fallback(plain.add_bias, xp, y, bias)


def bias_gelu(xp: Any, h: np.ndarray, bias: np.ndarray | None, approximate: str = "none") -> np.ndarray:
    if bias is None or bias.shape != h.shape[-1:] or bias.dtype != h.dtype or not h.flags.c_contiguous:
        return fallback(plain.bias_gelu, xp, h, bias, approximate)
    y = np.empty(h.shape, h.dtype)
    loop = _bias_gelu if exact(approximate) else _bias_gelu_tanh
    over(loop, (_rows(h), _rows(y)), owned(bias))
    return y


def sum_rows(xp: Any, rows: np.ndarray, out: np.ndarray, accumulate: bool = True) -> None:
    rows = np.ascontiguousarray(rows).reshape(rows.shape[0], math.prod(rows.shape[1:]))
    if out.flags.c_contiguous and out.dtype == wide(rows.dtype):
        over_columns(column_sums, rows, out.reshape(-1), accumulate)
        return
    total = np.empty(rows.shape[1], wide(rows.dtype))
    over_columns(column_sums, rows, total, False)
    numbers = number(out)
    total = total.reshape(out.shape)
    numbers[...] = total + numbers if accumulate else total
