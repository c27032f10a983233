"""Attention in blocks of rows: one compiled function for all heads that calls BLAS for products of tiles; softmax row
by row, and rotary positions.

A thread holds a block of rows x time at most (Dao et al. 2022, with full rows instead of an online softmax). A row of
softmax stays in the cache between its passes."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from fsdpx.core.array import blas, parallel
from fsdpx.core.array.jit import REORDER, fixed, jit
from fsdpx.core.array.kernels.choice import form
from fsdpx.core.array.kernels.compiled import attention16
from fsdpx.core.array.kernels.compiled.attention16 import available
from fsdpx.core.array.kernels.compiled.elements import (
    dot,
    exponentials,
    fallback,
    in_line,
    largest,
    numbers,
    owned,
    put,
    real,
    total,
    wide,
    zero,
)
from fsdpx.core.array.kernels.compiled.product import PLAIN, TURNED, cblas
from fsdpx.core.array.kernels.compiled.scalar import exp, widest
from fsdpx.core.array.kernels.dot_product_attention import attention as plain_attention
from fsdpx.core.array.kernels.dot_product_attention import attention_backward as plain_backward
from fsdpx.core.array.kernels.dot_product_attention import rotate as plain_rotate
from fsdpx.core.array.kernels.head_layout import merged, time_first
from fsdpx.core.array.parallel import over


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


@form(lambda x, w, s: (x,))
def softmax(xp: Any, x: np.ndarray) -> np.ndarray:
    return _by_rows(_softmax_rows, x)


@form(lambda x, w, s: (x, x))
def softmax_backward(xp: Any, y: np.ndarray, dy: np.ndarray) -> np.ndarray:
    return _by_rows(_softmax_backward_rows, y, dy)


@jit
def _rotate(x, y, cos, sin):
    widest()
    half = cos.shape[1]
    for b in range(x.shape[0]):
        for t in range(x.shape[1]):
            c, s = cos[t], sin[t]
            for h in range(x.shape[2]):
                row, out = x[b, t, h], y[b, t, h]
                for i in range(half):
                    p, q = real(row[i]), real(row[half + i])
                    out[i] = put(out, p * c[i] - q * s[i])
                    out[half + i] = put(out, q * c[i] + p * s[i])


@form(lambda x, w, s: (x[:, :2].reshape(1, 2, 1, 2), s[:2, None], s[:2, None]))
def rotate(xp: Any, x: np.ndarray, cos: np.ndarray, sin: np.ndarray) -> np.ndarray:
    dtype = wide(x.dtype)
    if not cos.dtype == sin.dtype == dtype:
        return fallback(plain_rotate, xp, x, cos, sin)
    x, y = owned(x), np.empty(x.shape, x.dtype)
    over(_rotate, (x, y), owned(cos), owned(sin))
    return y


BLOCK = 64  # rows of scores alive at a time; with `causal` the keys behind a block are never computed
HIDDEN = 60.0
"""How far below the maximum of its row a masked score is set before exp, so that all loops over rows have the length of
the block: the tail of a loop of another length costs as much as all before. After exp the element is set to 0."""


@jit(fastmath=REORDER)
def _exponentials(x, top):
    """x to exp(x - top) in place; their sum."""
    widest()
    result = x.dtype.type(0)
    for j in range(x.size):
        e = exp(x[j] - top)
        x[j] = e
        result += e
    return result


@jit
def _slopes(s, dp, scale, lse, along):
    """A row of scores to probabilities p, and of dp to p (dp - along) scale, both in place."""
    widest()
    for j in range(s.size):
        p = exp(s[j] - lse)
        s[j] = p
        dp[j] = p * (dp[j] - along) * scale


@jit
def _bounds(start, stop, full, causal, window):
    """The keys that the rows from `start` to `stop` see."""
    return max(start - window + 1, 0) if window else 0, stop if causal else full


@jit
def _seen(i, start, low, keys, causal, window):
    """The first key that row i of a block sees, and the one after the last, both counted from key `low`."""
    row = start + i - low
    return max(row - window + 1, 0) if window else 0, row + 1 if causal else keys


@jit
def _split(x, names, name, value):
    """x = value where names differ from `name`."""
    for j in range(x.size):
        if names[j] != name:
            x[j] = value


@jit
def _forward(at, q, k, v, o, lse, scratch, factor, names, causal, window, first, last):
    """o and lse of the pairs (sample, head) from `first` to `last`; o has time before heads."""
    widest()
    heads, time, width, size = q.shape[1], q.shape[2], q.shape[3], q.itemsize
    full, group, apart = k.shape[2], q.shape[1] // k.shape[1], names.size > 0
    one, zero, scale = lse.dtype.type(1), lse.dtype.type(0), lse.dtype.type(factor[0])
    ldq, ldk, ldv, ldo = q.strides[2] // size, k.strides[2] // size, v.strides[2] // size, o.strides[1] // size
    hidden, totals = lse.dtype.type(HIDDEN), np.empty(BLOCK, lse.dtype)
    for pair in range(first, last):
        b, h = pair // heads, pair % heads
        g = h // group
        for start in range(0, time, BLOCK):
            stop = min(start + BLOCK, time)
            low, high = _bounds(start, stop, full, causal, window)
            rows, keys = stop - start, high - low
            s = scratch[: rows * keys].reshape(rows, keys)
            sp, qp, op = s.ctypes.data, q[b, h, start:].ctypes.data, o[b, start, h:].ctypes.data
            kp, vp = k[b, g, low:].ctypes.data, v[b, g, low:].ctypes.data
            cblas(at, PLAIN, TURNED, rows, keys, width, scale, qp, ldq, kp, ldk, zero, sp, keys)
            for i in range(rows):
                since, seen = _seen(i, start, low, keys, causal, window)
                if apart:
                    _split(s[i], names[b, low:high], names[b, start + i], -lse.dtype.type(np.inf))
                top = largest(s[i, since:seen])
                s[i, :since] = top - hidden
                s[i, seen:] = top - hidden
                totals[i] = _exponentials(s[i], top)
                s[i, :since] = 0
                s[i, seen:] = 0
                if apart:
                    _split(s[i], names[b, low:high], names[b, start + i], zero)
                lse[b, h, start + i] = top + np.log(totals[i])
            cblas(at, PLAIN, PLAIN, rows, width, keys, one, sp, keys, vp, ldv, zero, op, ldo)
            for i in range(rows):
                out, part = o[b, start + i, h], one / totals[i]
                for j in range(width):
                    out[j] *= part


@jit
def _single(q, k, v, o, lse, scratch, factor, first, last):
    """`_forward` of one row that sees all keys: its products are shorter than a call of BLAS."""
    widest()
    heads, width, keys = q.shape[1], q.shape[3], k.shape[2]
    group, one = heads // k.shape[1], lse.dtype.type(1)
    for pair in range(first, last):
        b, h = pair // heads, pair % heads
        row, out, s = in_line(q[b, h, 0]), in_line(o[b, 0, h]), scratch[:keys]
        of_keys, values = k[b, h // group], v[b, h // group]
        for t in range(keys):
            s[t] = dot(row, in_line(of_keys[t])) * factor[0]
        top = largest(s)
        total = _exponentials(s, top)
        lse[b, h, 0] = top + np.log(total)
        out[:] = 0
        for t in range(keys):
            value, part = in_line(values[t]), s[t] * (one / total)
            for j in range(width):
                out[j] += value[j] * part


@jit
def _backward(at, q, k, v, o, lse, do, dq, dk, dv, scratch, factor, names, causal, window, first, last):
    """dq, dk and dv of the pairs (sample, head of keys) from `first` to `last`: the last block of rows sees all
    keys, so it goes first and writes dk and dv, to which the others add, and other heads of queries; within a window
    they begin as zeros. o and do have time before heads."""
    widest()
    shared, time, width, size = k.shape[1], q.shape[2], q.shape[3], q.itemsize
    full, group, apart = k.shape[2], q.shape[1] // k.shape[1], names.size > 0
    one, zero, scale = lse.dtype.type(1), lse.dtype.type(0), lse.dtype.type(factor[0])
    ldq, ldk, ldv, ldd = q.strides[2] // size, k.strides[2] // size, v.strides[2] // size, do.strides[1] // size
    ldg, lde, hidden = dq.strides[2] // size, dk.strides[2] // size, lse.dtype.type(HIDDEN)
    for pair in range(first, last):
        b, g = pair // shared, pair % shared
        beta = zero
        if window:
            dk[b, g], dv[b, g] = 0, 0
            beta = one
        for h in range(g * group, (g + 1) * group):
            for start in range((time - 1) // BLOCK * BLOCK, -1, -BLOCK):
                stop = min(start + BLOCK, time)
                low, high = _bounds(start, stop, full, causal, window)
                rows, keys = stop - start, high - low
                s = scratch[0, : rows * keys].reshape(rows, keys)
                dp = scratch[1, : rows * keys].reshape(rows, keys)
                sp, dpp = s.ctypes.data, dp.ctypes.data
                qp, dop, dqp = q[b, h, start:].ctypes.data, do[b, start, h:].ctypes.data, dq[b, h, start:].ctypes.data
                kp, vp = k[b, g, low:].ctypes.data, v[b, g, low:].ctypes.data
                dkp, dvp = dk[b, g, low:].ctypes.data, dv[b, g, low:].ctypes.data
                cblas(at, PLAIN, TURNED, rows, keys, width, scale, qp, ldq, kp, ldk, zero, sp, keys)
                cblas(at, PLAIN, TURNED, rows, keys, width, one, dop, ldd, vp, ldv, zero, dpp, keys)
                for i in range(rows):
                    row = start + i
                    since, seen = _seen(i, start, low, keys, causal, window)
                    s[i, :since] = lse[b, h, row] - hidden
                    s[i, seen:] = lse[b, h, row] - hidden
                    if apart:
                        _split(s[i], names[b, low:high], names[b, row], lse[b, h, row] - hidden)
                    _slopes(s[i], dp[i], scale, lse[b, h, row], dot(do[b, row, h], o[b, row, h]))
                    for some in (s[i], dp[i]):
                        some[:since] = 0
                        some[seen:] = 0
                        if apart:
                            _split(some, names[b, low:high], names[b, row], zero)
                cblas(at, TURNED, PLAIN, keys, width, rows, one, dpp, keys, qp, ldq, beta, dkp, lde)
                cblas(at, TURNED, PLAIN, keys, width, rows, one, sp, keys, dop, ldd, beta, dvp, lde)
                cblas(at, PLAIN, PLAIN, rows, width, keys, one, dpp, keys, kp, ldk, zero, dqp, ldg)
                beta = one


SINGLE = "A4r A4r A4r C4 C3 C1 C1r i i"
FORWARD = "i A4r A4r A4r C4 C3 C1 C1r C2r b i i i"
BACKWARD = "i A4r A4r A4r C4r C3r C4r A4 A4 A4 C2 C1r C2r b i i i"


def _heads(x: Any) -> tuple[Any, ...]:
    """Queries, keys, values, results, lse and the gradient of results of a sample, as views like those of the layer."""
    q, k, v = np.zeros((1, 2, 3, 1, 4), x.dtype).transpose(2, 0, 3, 1, 4)
    o, lse = plain_attention(np, q, k, v, True, 1.0)
    return q, k, v, o, lse, o.copy()


def _texts(x: Any, w: Any, s: Any) -> list[Any]:
    """Whole texts, and a token behind others."""
    q, k, v, *_ = _heads(x)
    return [(q, k, v, True, 1.0), (q[:, :, :1], k, v, False, 1.0)]


@form(_texts)
def attention(
    xp: Any, q: Any, k: Any, v: Any, causal: bool, scale: float, window: int = 0, segments: Any = None
) -> tuple[np.ndarray, np.ndarray]:
    at = blas.pointer(wide(q.dtype))
    bits = q.dtype == np.uint16
    single = q.shape[2] == 1 and not (bits or causal) and segments is None
    if not (available() and not window and segments is None if bits else at or single):
        return fallback(plain_attention, xp, q, k, v, causal, scale, window, segments)
    samples, heads, _, _ = q.shape
    o, lse = time_first(np, q), np.empty(q.shape[:3], wide(q.dtype))
    q, k, v = _rows(q), _rows(k), _rows(v)
    factor, names = np.array([scale], lse.dtype), _names(segments, lse.dtype)

    def some(first: int, last: int) -> None:
        if bits:
            attention16.forward(q, k, v, o, lse, factor, causal, first, last)
            return
        if single:
            scratch = np.empty(k.shape[2], q.dtype)
            fixed(_single, SINGLE)(q, k, v, o.swapaxes(1, 2), lse, scratch, factor, first, last)
            return
        scratch = np.empty(BLOCK * k.shape[2], q.dtype)
        run = fixed(_forward, FORWARD)
        run(at, q, k, v, o.swapaxes(1, 2), lse, scratch, factor, names, causal, window, first, last)

    parallel.run(some, _pieces(samples * heads))
    return o, lse


@form(lambda x, w, s: (*_heads(x), True, 1.0))
def attention_backward(
    xp: Any, q: Any, k: Any, v: Any, o: Any, lse: Any, do: Any, causal: bool, scale: float, window: int = 0,
    segments: Any = None,
) -> np.ndarray | tuple[np.ndarray, ...]:  # fmt: skip
    at = blas.pointer(wide(q.dtype))
    bits = q.dtype == np.uint16
    if not (available() and not window and segments is None if bits else at):
        return fallback(plain_backward, xp, q, k, v, o, lse, do, causal, scale, window, segments)
    d, pairs = merged(np, q, k), k.shape[0] * k.shape[1]
    q, k, v, lse = _rows(q), _rows(k), _rows(v), np.ascontiguousarray(lse)
    factor, names = np.array([scale], lse.dtype), _names(segments, lse.dtype)
    if bits:
        o, do = _rows(o), _rows(do)
    else:
        o, do = np.ascontiguousarray(o.swapaxes(1, 2)), np.ascontiguousarray(do.swapaxes(1, 2))

    def some(first: int, last: int) -> None:
        if bits:
            attention16.backward(q, k, v, o, lse, do, d[0], d[1], d[2], factor, causal, first, last)
            return
        scratch = np.empty((2, BLOCK * k.shape[2]), q.dtype)
        run, grads = fixed(_backward, BACKWARD), (d[0], d[1], d[2])
        run(at, q, k, v, o, lse, do, *grads, scratch, factor, names, causal, window, first, last)

    parallel.run(some, _pieces(pairs))
    return d


def _names(segments: Any, dtype: Any) -> np.ndarray:
    """Segments numbered from 0 on, in the format that is computed in; none for None."""
    if segments is None:
        return np.empty((0, 0), dtype)
    return np.unique(segments, return_inverse=True)[1].reshape(segments.shape).astype(dtype)


def _rows(x: np.ndarray) -> np.ndarray:
    """x, or a copy if BLAS cannot read it: rows must be contiguous, at any distance."""
    step, width, size = x.strides[2], x.shape[3], x.itemsize
    fits = x.strides[3] == size and step % size == 0 and step >= width * size
    return x if fits else np.ascontiguousarray(x)


def _pieces(pairs: int) -> list[tuple[int, int]]:
    """Runs of (sample, head) pairs for the threads; the result of a pair does not depend on its run."""
    count = max(1, min(pairs, 4 * parallel.threads())) if parallel.threads() > 1 else 1
    return [(pairs * n // count, pairs * (n + 1) // count) for n in range(count)]
