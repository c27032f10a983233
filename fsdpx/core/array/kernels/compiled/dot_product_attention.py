"""Numba implementations of attention in blocks of rows, softmax, and rotary position embedding. One compiled function
computes the attention of all heads, and calls BLAS for the matrix products of blocks.

A thread holds at most one block of scores, BLOCK_ROWS x time (Dao et al. 2022, but with full rows instead of an online
softmax). A row stays in cache during all passes of softmax over it.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from fsdpx.core.array import blas, parallel
from fsdpx.core.array.jit import REORDER, jit, specialize
from fsdpx.core.array.kernels.choice import register_compiled_kernel
from fsdpx.core.array.kernels.compiled import attention16
from fsdpx.core.array.kernels.compiled.attention16 import has_bf16_dot_instruction
from fsdpx.core.array.kernels.compiled.elements import (
    accumulation_dtype,
    accumulation_zero,
    as_contiguous,
    assume_unit_stride,
    call_plain_kernel,
    dot_product,
    exponentiate_in_place,
    find_max_of_vector,
    round_to_dtype_of,
    sum_row,
    to_float,
    widen_into,
)
from fsdpx.core.array.kernels.compiled.product import PLAIN, TURNED, call_cblas
from fsdpx.core.array.kernels.compiled.scalar import exp, use_widest_vectors
from fsdpx.core.array.kernels.dot_product_attention import attention as plain_attention
from fsdpx.core.array.kernels.dot_product_attention import attention_backward as plain_backward
from fsdpx.core.array.kernels.dot_product_attention import rotate as plain_rotate
from fsdpx.core.array.kernels.head_layout import empty_attention_gradients, empty_time_first
from fsdpx.core.array.parallel import parallel_for_rows


@jit
def _softmax_loop(x, y):
    use_widest_vectors()
    row = np.full(x.shape[1], accumulation_zero(x))
    for i in range(x.shape[0]):
        widen_into(x[i], row)
        exponentiate_in_place(row, find_max_of_vector(row))
        share = row.dtype.type(1) / sum_row(row)
        for j in range(x.shape[1]):
            y[i, j] = round_to_dtype_of(y, row[j] * share)


@jit
def _softmax_backward_loop(y, dy, dx):
    use_widest_vectors()
    for i in range(y.shape[0]):
        along = dot_product(y[i], dy[i])
        for j in range(y.shape[1]):
            dx[i, j] = round_to_dtype_of(dx, to_float(y[i, j]) * (to_float(dy[i, j]) - along))


def _run_loop_in_parallel_over_rows(loop: Any, *arrays: np.ndarray) -> np.ndarray:
    shape = arrays[0].shape
    rows = [np.ascontiguousarray(a).reshape(math.prod(shape[:-1]), shape[-1]) for a in arrays]
    out = np.empty_like(rows[0])
    parallel_for_rows(loop, (*rows, out))
    return out.reshape(shape)


@register_compiled_kernel(lambda x, w, s: (x,))
def softmax(xp: Any, x: np.ndarray) -> np.ndarray:
    return _run_loop_in_parallel_over_rows(_softmax_loop, x)


@register_compiled_kernel(lambda x, w, s: (x, x))
def softmax_backward(xp: Any, y: np.ndarray, dy: np.ndarray) -> np.ndarray:
    return _run_loop_in_parallel_over_rows(_softmax_backward_loop, y, dy)


@jit
def _rotary_embedding_loop(x, y, cos, sin):
    use_widest_vectors()
    half = cos.shape[1]
    for b in range(x.shape[0]):
        for t in range(x.shape[1]):
            c, s = cos[t], sin[t]
            for h in range(x.shape[2]):
                row, out = x[b, t, h], y[b, t, h]
                for i in range(half):
                    p, q = to_float(row[i]), to_float(row[half + i])
                    out[i] = round_to_dtype_of(out, p * c[i] - q * s[i])
                    out[half + i] = round_to_dtype_of(out, q * c[i] + p * s[i])


@register_compiled_kernel(lambda x, w, s: (x[:, :2].reshape(1, 2, 1, 2), s[:2, None], s[:2, None]))
def rotate(xp: Any, x: np.ndarray, cos: np.ndarray, sin: np.ndarray) -> np.ndarray:
    dtype = accumulation_dtype(x.dtype)
    if not cos.dtype == sin.dtype == dtype:
        return call_plain_kernel(plain_rotate, xp, x, cos, sin)
    x, y = as_contiguous(x), np.empty(x.shape, x.dtype)
    parallel_for_rows(_rotary_embedding_loop, (x, y), as_contiguous(cos), as_contiguous(sin))
    return y


# number of rows of scores held in memory at a time; with a causal mask, keys after the last of these rows are skipped
BLOCK_ROWS = 64
HIDDEN = 60.0
"""Before exp, a masked score is set to the maximum of its row minus this number; after exp, it is set to 0. Masked
scores are not skipped, so that every loop over a row has the full length of the block. A shorter loop would often end
with elements that do not fill a vector. Processing them one by one would take as long as all full vectors of the
row."""


@jit(fastmath=REORDER)
def _exponentiate_and_sum_row(x, top):
    """Overwrite x with exp(x - top), and return the sum of the results."""
    use_widest_vectors()
    result = x.dtype.type(0)
    for j in range(x.size):
        e = exp(x[j] - top)
        x[j] = e
        result += e
    return result


@jit
def _softmax_backward_row_in_place(s, dp, scale, lse, along):
    """Replace a row of scores s with its probabilities p, and the probability gradients dp with the score gradients,
    `p * (dp - along) * scale`. `along` is the dot product of the row's output and the gradient of this output."""
    use_widest_vectors()
    for j in range(s.size):
        p = exp(s[j] - lse)
        s[j] = p
        dp[j] = p * (dp[j] - along) * scale


@jit
def _find_keys_of_row_block(start, stop, full, causal, window):
    """Return the range of keys that the queries [start, stop) attend to. `full` is the number of keys; `window` is 0 if
    there is no window."""
    return max(start - window + 1, 0) if window else 0, stop if causal else full


@jit
def _find_keys_of_row(i, start, low, keys, causal, window):
    """Return the range of keys that query `start + i` attends to, as indices relative to key `low`. `keys` is the
    number of keys from `low` on; `window` is 0 if there is no window."""
    row = start + i - low
    return max(row - window + 1, 0) if window else 0, row + 1 if causal else keys


@jit
def _mask_other_segments(x, names, name, value):
    """Set x[i] to `value` wherever the segment number names[i] differs from `name`."""
    for j in range(x.size):
        if names[j] != name:
            x[j] = value


@jit
def _attention_forward_into(gemm_address, q, k, v, o, lse, scratch, factor, names, causal, window, first, last):
    """Compute the attention outputs o, stored with time before heads, and the log-sum-exps lse, for the (sample, head)
    pairs with numbers in [first, last). Scores are multiplied by `factor`, `scratch` holds a block of scores, and
    `names` are segment numbers."""
    use_widest_vectors()
    heads, time, width, size = q.shape[1], q.shape[2], q.shape[3], q.itemsize
    full, group, apart = k.shape[2], q.shape[1] // k.shape[1], names.size > 0
    one, zero, scale = lse.dtype.type(1), lse.dtype.type(0), lse.dtype.type(factor[0])
    ldq, ldk, ldv, ldo = q.strides[2] // size, k.strides[2] // size, v.strides[2] // size, o.strides[1] // size
    hidden, totals = lse.dtype.type(HIDDEN), np.empty(BLOCK_ROWS, lse.dtype)
    for pair in range(first, last):
        b, h = pair // heads, pair % heads
        g = h // group
        for start in range(0, time, BLOCK_ROWS):
            stop = min(start + BLOCK_ROWS, time)
            low, high = _find_keys_of_row_block(start, stop, full, causal, window)
            rows, keys = stop - start, high - low
            s = scratch[: rows * keys].reshape(rows, keys)
            sp, qp, op = s.ctypes.data, q[b, h, start:].ctypes.data, o[b, start, h:].ctypes.data
            kp, vp = k[b, g, low:].ctypes.data, v[b, g, low:].ctypes.data
            call_cblas(gemm_address, PLAIN, TURNED, rows, keys, width, scale, qp, ldq, kp, ldk, zero, sp, keys)
            for i in range(rows):
                since, seen = _find_keys_of_row(i, start, low, keys, causal, window)
                if apart:
                    _mask_other_segments(s[i], names[b, low:high], names[b, start + i], -lse.dtype.type(np.inf))
                top = find_max_of_vector(s[i, since:seen])
                s[i, :since] = top - hidden
                s[i, seen:] = top - hidden
                totals[i] = _exponentiate_and_sum_row(s[i], top)
                s[i, :since] = 0
                s[i, seen:] = 0
                if apart:
                    _mask_other_segments(s[i], names[b, low:high], names[b, start + i], zero)
                lse[b, h, start + i] = top + np.log(totals[i])
            call_cblas(gemm_address, PLAIN, PLAIN, rows, width, keys, one, sp, keys, vp, ldv, zero, op, ldo)
            for i in range(rows):
                out, part = o[b, start + i, h], one / totals[i]
                for j in range(width):
                    out[j] *= part


@jit
def _attention_forward_of_single_queries(q, k, v, o, lse, scratch, factor, first, last):
    """Do the same as `_attention_forward_into`, but for a single query per head, which attends to all keys. BLAS is not
    used, because calling it would take longer than the product itself."""
    use_widest_vectors()
    heads, width, keys = q.shape[1], q.shape[3], k.shape[2]
    group, one = heads // k.shape[1], lse.dtype.type(1)
    for pair in range(first, last):
        b, h = pair // heads, pair % heads
        row, out, s = assume_unit_stride(q[b, h, 0]), assume_unit_stride(o[b, 0, h]), scratch[:keys]
        of_keys, values = k[b, h // group], v[b, h // group]
        for t in range(keys):
            s[t] = dot_product(row, assume_unit_stride(of_keys[t])) * factor[0]
        top = find_max_of_vector(s)
        total = _exponentiate_and_sum_row(s, top)
        lse[b, h, 0] = top + np.log(total)
        out[:] = 0
        for t in range(keys):
            value, part = assume_unit_stride(values[t]), s[t] * (one / total)
            for j in range(width):
                out[j] += value[j] * part


@jit
def _attention_backward_into(
    gemm_address, q, k, v, o, lse, do, dq, dk, dv, scratch, factor, names, causal, window, first, last
):
    """Compute the gradients dq, dk and dv of the (sample, key head) pairs numbered [first, last). o and do are stored
    with time before heads.

    The last block of rows attends to all keys, so it runs first and initializes dk and dv. The other blocks and query
    heads then add to them. With a window, dk and dv are initialized with zeros instead.
    """
    use_widest_vectors()
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
            for start in range((time - 1) // BLOCK_ROWS * BLOCK_ROWS, -1, -BLOCK_ROWS):
                stop = min(start + BLOCK_ROWS, time)
                low, high = _find_keys_of_row_block(start, stop, full, causal, window)
                rows, keys = stop - start, high - low
                s = scratch[0, : rows * keys].reshape(rows, keys)
                dp = scratch[1, : rows * keys].reshape(rows, keys)
                sp, dpp = s.ctypes.data, dp.ctypes.data
                qp, dop, dqp = q[b, h, start:].ctypes.data, do[b, start, h:].ctypes.data, dq[b, h, start:].ctypes.data
                kp, vp = k[b, g, low:].ctypes.data, v[b, g, low:].ctypes.data
                dkp, dvp = dk[b, g, low:].ctypes.data, dv[b, g, low:].ctypes.data
                call_cblas(gemm_address, PLAIN, TURNED, rows, keys, width, scale, qp, ldq, kp, ldk, zero, sp, keys)
                call_cblas(gemm_address, PLAIN, TURNED, rows, keys, width, one, dop, ldd, vp, ldv, zero, dpp, keys)
                for i in range(rows):
                    row = start + i
                    since, seen = _find_keys_of_row(i, start, low, keys, causal, window)
                    s[i, :since] = lse[b, h, row] - hidden
                    s[i, seen:] = lse[b, h, row] - hidden
                    if apart:
                        _mask_other_segments(s[i], names[b, low:high], names[b, row], lse[b, h, row] - hidden)
                    _softmax_backward_row_in_place(
                        s[i], dp[i], scale, lse[b, h, row], dot_product(do[b, row, h], o[b, row, h])
                    )
                    for some in (s[i], dp[i]):
                        some[:since] = 0
                        some[seen:] = 0
                        if apart:
                            _mask_other_segments(some, names[b, low:high], names[b, row], zero)
                call_cblas(gemm_address, TURNED, PLAIN, keys, width, rows, one, dpp, keys, qp, ldq, beta, dkp, lde)
                call_cblas(gemm_address, TURNED, PLAIN, keys, width, rows, one, sp, keys, dop, ldd, beta, dvp, lde)
                call_cblas(gemm_address, PLAIN, PLAIN, rows, width, keys, one, dpp, keys, kp, ldk, zero, dqp, ldg)
                beta = one


SINGLE = "A4r A4r A4r C4 C3 C1 C1r i i"
FORWARD = "i A4r A4r A4r C4 C3 C1 C1r C2r b i i i"
BACKWARD = "i A4r A4r A4r C4r C3r C4r A4 A4 A4 C2 C1r C2r b i i i"


def _make_sample_attention_arrays(x: Any) -> tuple[Any, ...]:
    """Return example arrays q, k, v, o, lse and do, in the memory layout that attention layers use."""
    q, k, v = np.zeros((1, 2, 3, 1, 4), x.dtype).transpose(2, 0, 3, 1, 4)
    o, lse = plain_attention(np, q, k, v, True, 1.0)
    return q, k, v, o, lse, o.copy()


def _make_sample_calls(x: Any, w: Any, s: Any) -> list[Any]:
    """Return the arguments of two example calls: attention over a full sequence, and attention of one token to earlier
    tokens."""
    q, k, v, *_ = _make_sample_attention_arrays(x)
    return [(q, k, v, True, 1.0), (q[:, :, :1], k, v, False, 1.0)]


@register_compiled_kernel(_make_sample_calls)
def attention(
    xp: Any, q: Any, k: Any, v: Any, causal: bool, scale: float, window: int = 0, segments: Any = None
) -> tuple[np.ndarray, np.ndarray]:
    gemm_address = blas.get_gemm_address(accumulation_dtype(q.dtype))
    bits = q.dtype == np.uint16
    single = q.shape[2] == 1 and not (bits or causal) and segments is None
    if not (has_bf16_dot_instruction() and not window and segments is None if bits else gemm_address or single):
        return call_plain_kernel(plain_attention, xp, q, k, v, causal, scale, window, segments)
    samples, heads, _, _ = q.shape
    o, lse = empty_time_first(np, q), np.empty(q.shape[:3], accumulation_dtype(q.dtype))
    q, k, v = _copy_unless_blas_readable(q), _copy_unless_blas_readable(k), _copy_unless_blas_readable(v)
    factor, names = np.array([scale], lse.dtype), _renumber_segments(segments, lse.dtype)

    def run_pairs(first: int, last: int) -> None:
        if bits:
            attention16.attention_forward_into(q, k, v, o, lse, factor, causal, first, last)
            return
        if single:
            scratch = np.empty(k.shape[2], q.dtype)
            specialize(_attention_forward_of_single_queries, SINGLE)(
                q, k, v, o.swapaxes(1, 2), lse, scratch, factor, first, last
            )
            return
        scratch = np.empty(BLOCK_ROWS * k.shape[2], q.dtype)
        run = specialize(_attention_forward_into, FORWARD)
        run(gemm_address, q, k, v, o.swapaxes(1, 2), lse, scratch, factor, names, causal, window, first, last)

    parallel.run_tasks(run_pairs, _split_heads_over_threads(samples * heads))
    return o, lse


@register_compiled_kernel(lambda x, w, s: (*_make_sample_attention_arrays(x), True, 1.0))
def attention_backward(
    xp: Any, q: Any, k: Any, v: Any, o: Any, lse: Any, do: Any, causal: bool, scale: float, window: int = 0,
    segments: Any = None,
) -> np.ndarray | tuple[np.ndarray, ...]:  # fmt: skip
    gemm_address = blas.get_gemm_address(accumulation_dtype(q.dtype))
    bits = q.dtype == np.uint16
    if not (has_bf16_dot_instruction() and not window and segments is None if bits else gemm_address):
        return call_plain_kernel(plain_backward, xp, q, k, v, o, lse, do, causal, scale, window, segments)
    d, pairs = empty_attention_gradients(np, q, k), k.shape[0] * k.shape[1]
    q, k, v, lse = (
        _copy_unless_blas_readable(q),
        _copy_unless_blas_readable(k),
        _copy_unless_blas_readable(v),
        np.ascontiguousarray(lse),
    )
    factor, names = np.array([scale], lse.dtype), _renumber_segments(segments, lse.dtype)
    if bits:
        o, do = _copy_unless_blas_readable(o), _copy_unless_blas_readable(do)
    else:
        o, do = np.ascontiguousarray(o.swapaxes(1, 2)), np.ascontiguousarray(do.swapaxes(1, 2))

    def run_pairs(first: int, last: int) -> None:
        if bits:
            attention16.attention_backward_into(q, k, v, o, lse, do, d[0], d[1], d[2], factor, causal, first, last)
            return
        scratch = np.empty((2, BLOCK_ROWS * k.shape[2]), q.dtype)
        run, grads = specialize(_attention_backward_into, BACKWARD), (d[0], d[1], d[2])
        run(gemm_address, q, k, v, o, lse, do, *grads, scratch, factor, names, causal, window, first, last)

    parallel.run_tasks(run_pairs, _split_heads_over_threads(pairs))
    return d


def _renumber_segments(segments: Any, dtype: Any) -> np.ndarray:
    """Return the segment numbers in the compute dtype, renumbered from 0. Return an empty array if `segments` is
    None."""
    if segments is None:
        return np.empty((0, 0), dtype)
    return np.unique(segments, return_inverse=True)[1].reshape(segments.shape).astype(dtype)


def _copy_unless_blas_readable(x: np.ndarray) -> np.ndarray:
    """Return x if each of its rows is contiguous, as BLAS requires, else a copy. The distance between rows does not
    matter."""
    step, width, size = x.strides[2], x.shape[3], x.itemsize
    fits = x.strides[3] == size and step % size == 0 and step >= width * size
    return x if fits else np.ascontiguousarray(x)


def _split_heads_over_threads(pairs: int) -> list[tuple[int, int]]:
    """Split range(pairs), the indices of (sample, head) pairs, into ranges that are each processed by one thread. The
    split does not affect results."""
    count = max(1, min(pairs, 4 * parallel.get_threads())) if parallel.get_threads() > 1 else 1
    return [(pairs * n // count, pairs * (n + 1) // count) for n in range(count)]
