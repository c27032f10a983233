"""Attention of bfloat16 in blocks of rows, its products by the instruction for pairs: what is in memory stays 16-bit.

As in `attention` full rows instead of an online softmax; scores and sums are float32, probabilities are rounded where
they are multiplied. A thread holds the words of one head's keys and values, and some blocks."""

from typing import Any

import numpy as np

from fsdpx.array.kernels.compiled.bits import put
from fsdpx.array.kernels.compiled.rows import dot
from fsdpx.array.kernels.compiled.scalar import exp, order, unorder, widest
from fsdpx.array.kernels.compiled.words import copy, multiply, padded, turned, woven
from fsdpx.native.compiled import REORDER, fixed, jit

__all__ = ["backward", "forward"]

BLOCK = 64
SINGLE = ("float32",)


@jit
def _scaled(x, scale, seen):
    """x *= scale, and -inf from `seen` on; its largest element."""
    for j in range(x.size):
        x[j] *= scale
    x[seen:] = -np.inf
    best = order(np.float32(-np.inf))
    for j in range(x.size):
        n = order(x[j])
        best = n if n > best else best
    return unorder(best)


@jit(fastmath=REORDER)
def _exponentials(x, top, p):
    """p = exp(x - top); their sum, before they are rounded."""
    widest()
    result = np.float32(0)
    for j in range(x.size):
        e = exp(x[j] - top)
        p[j] = put(p, e)
        result += e
    return result


@jit
def _slopes(s, dp, scale, lse, along, p, ds, seen):
    """p = exp(s scale - lse) and ds = p (dp - along) scale of a row; 0 for what is not seen."""
    widest()
    for j in range(p.size):
        e = exp(s[j] * scale - lse)
        p[j] = put(p, e)
        ds[j] = put(ds, e * (dp[j] - along) * scale)
    p[seen:] = 0
    ds[seen:] = 0


@jit
def _load(x, b, h, start, stop, out):
    """Rows of a head, to the first columns of `out`."""
    at = x.ctypes.data + b * x.strides[0] + h * x.strides[1]
    for t in range(start, stop):
        copy(out.ctypes.data + (t - start) * out.strides[0], at + t * x.strides[2], 2 * x.shape[3])


@jit
def _store(out, b, h, start, stop, x, factors, block):
    """Rows of a head from sums: row i of x times factors[i], rounded in `block`."""
    for i in range(factors.size):
        for j in range(x.shape[1]):
            block[i, j] = put(block, x[i, j] * factors[i])
    at = out.ctypes.data + b * out.strides[0] + h * out.strides[1]
    for t in range(start, stop):
        copy(at + t * out.strides[2], block.ctypes.data + (t - start) * block.strides[0], 2 * out.shape[3])


@jit
def _forward(q, k, v, o, lse, factor, causal, first, last):
    """o and lse of the pairs (sample, head) from `first` to `last`."""
    heads, time, full, scale = q.shape[1], q.shape[2], k.shape[2], factor[0]
    width, length, group = padded(q.shape[3]), padded(full), q.shape[1] // k.shape[1]
    plain, block = np.zeros((length, width), np.uint16), np.zeros((BLOCK, width), np.uint16)
    keys, values = np.empty((width // 2, length), np.uint32), np.empty((length // 2, width), np.uint32)
    s, p = np.empty((BLOCK, length), np.float32), np.zeros((BLOCK, length), np.uint16)
    sums, shares = np.empty((BLOCK, width), np.float32), np.empty(BLOCK, np.float32)
    for pair in range(first, last):
        b, h = pair // heads, pair % heads
        _load(k, b, h // group, 0, full, plain)
        turned(plain.ctypes.data, 2 * width, length, width, keys.ctypes.data, 4 * length)
        _load(v, b, h // group, 0, full, plain)
        woven(plain.ctypes.data, 2 * width, length, width, values.ctypes.data, 4 * width)
        for start in range(0, time, BLOCK):
            stop = min(start + BLOCK, time)
            rows, there = stop - start, padded(min(stop, full)) if causal else length
            _load(q, b, h, start, stop, block)
            multiply(block.ctypes.data, 2 * width, 4, keys.ctypes.data, 4 * length,
                     s.ctypes.data, 4 * length, rows, there, width // 2, False)  # fmt: skip
            for i in range(rows):
                top = _scaled(s[i, :there], scale, start + i + 1 if causal else full)
                total = _exponentials(s[i, :there], top, p[i, :there])
                shares[i] = np.float32(1) / total
                lse[b, h, start + i] = top + np.log(total)
            multiply(p.ctypes.data, 2 * length, 4, values.ctypes.data, 4 * width,
                     sums.ctypes.data, 4 * width, rows, width, there // 2, False)  # fmt: skip
            _store(o, b, h, start, stop, sums, shares[:rows], block)


@jit
def _backward(q, k, v, o, lse, do, dq, dk, dv, factor, causal, first, last):
    """dq, dk and dv of the pairs (sample, head of keys) from `first` to `last`: the last block of rows sees all keys,
    so it goes first and writes the sums of dk and dv, to which the others add, and other heads of queries."""
    shared, time, full, scale = k.shape[1], q.shape[2], k.shape[2], factor[0]
    width, length, group = padded(q.shape[3]), padded(full), q.shape[1] // k.shape[1]
    plain, ones = np.zeros((length, width), np.uint16), np.ones(length, np.float32)
    keys, values = np.empty((width // 2, length), np.uint32), np.empty((width // 2, length), np.uint32)
    ways = np.empty((length // 2, width), np.uint32)  # from slopes of scores to those of queries: the keys, woven
    blocks, scores = np.zeros((3, BLOCK, width), np.uint16), np.empty((2, BLOCK, length), np.float32)
    factors, words = np.zeros((2, BLOCK, length), np.uint16), np.empty((2, BLOCK // 2, width), np.uint32)
    queries, slopes, results = blocks[0], blocks[1], blocks[2]  # to Numba these are contiguous, `= blocks` is not
    s, dp, p, ds = scores[0], scores[1], factors[0], factors[1]
    seen_words, sums = np.empty((2, BLOCK // 2, length), np.uint32), np.empty((2, length, width), np.float32)
    sums_q = np.empty((BLOCK, width), np.float32)
    for pair in range(first, last):
        b, g = pair // shared, pair % shared
        _load(v, b, g, 0, full, plain)
        turned(plain.ctypes.data, 2 * width, length, width, values.ctypes.data, 4 * length)
        _load(k, b, g, 0, full, plain)
        turned(plain.ctypes.data, 2 * width, length, width, keys.ctypes.data, 4 * length)
        woven(plain.ctypes.data, 2 * width, length, width, ways.ctypes.data, 4 * width)
        end = (time - 1) // BLOCK * BLOCK
        for h in range(g * group, (g + 1) * group):
            for start in range(end, -1, -BLOCK):
                stop = min(start + BLOCK, time)
                rows, there = stop - start, padded(stop) if causal else length
                even = (rows + 1) // 2 * 2
                _load(q, b, h, start, stop, queries)
                _load(do, b, h, start, stop, slopes)
                _load(o, b, h, start, stop, results)
                for rest in (queries, slopes, p, ds):
                    rest[rows:even] = 0
                multiply(queries.ctypes.data, 2 * width, 4, keys.ctypes.data, 4 * length,
                         s.ctypes.data, 4 * length, rows, there, width // 2, False)  # fmt: skip
                multiply(slopes.ctypes.data, 2 * width, 4, values.ctypes.data, 4 * length,
                         dp.ctypes.data, 4 * length, rows, there, width // 2, False)  # fmt: skip
                for i in range(rows):
                    along, seen = dot(slopes[i], results[i]), start + i + 1 if causal else full
                    _slopes(s[i], dp[i], scale, lse[b, h, start + i], along, p[i, :there], ds[i, :there], seen)
                multiply(ds.ctypes.data, 2 * length, 4, ways.ctypes.data, 4 * width,
                         sums_q.ctypes.data, 4 * width, rows, width, there // 2, False)  # fmt: skip
                _store(dq, b, h, start, stop, sums_q, ones[:rows], results)
                more = start < end or h > g * group
                for n, (left, right) in enumerate(((ds, queries), (p, slopes))):
                    woven(left.ctypes.data, 2 * length, even, there, seen_words[n].ctypes.data, 4 * length)
                    woven(right.ctypes.data, 2 * width, even, width, words[n].ctypes.data, 4 * width)
                    multiply(seen_words[n].ctypes.data, 4, 4 * length, words[n].ctypes.data, 4 * width,
                             sums[n].ctypes.data, 4 * width, there, width, even // 2, more)  # fmt: skip
        _store(dk, b, g, 0, full, sums[0], ones[:full], plain)
        _store(dv, b, g, 0, full, sums[1], ones[:full], plain)
        plain[:] = 0


FORWARD = "A4hr A4hr A4hr A4h C3 C1r b i i"
BACKWARD = "A4hr A4hr A4hr A4hr C3r A4hr A4h A4h A4h C1r b i i"


def forward(*arguments: Any) -> None:
    """q, k, v, o, lse, factor, causal, first, last: see `_forward`."""
    fixed(_forward, FORWARD, SINGLE)(*arguments)


def backward(*arguments: Any) -> None:
    """q, k, v, o, lse, do, dq, dk, dv, factor, causal, first, last: see `_backward`."""
    fixed(_backward, BACKWARD, SINGLE)(*arguments)
