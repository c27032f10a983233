"""Gradient codecs compiled with Numba, bitwise equal to the NumPy versions."""

from __future__ import annotations

from typing import Any

import numpy as np

from fsdpx.core.array.jit import jit
from fsdpx.core.array.kernels.compiled.elements import WORD
from fsdpx.core.array.kernels.compiled.half import emit_bit_mixing
from fsdpx.core.array.kernels.compiled.scalar import from_ordered_integer, to_ordered_integer, use_widest_vectors
from fsdpx.core.array.lazy_numba import intrinsic, ir, types
from fsdpx.core.array.parallel import MIN_PIECE_ELEMENTS, run_tasks, split_range
from fsdpx.core.array.random import NumberRange
from fsdpx.ext.compression.implementations import BLOCK_ELEMENTS, LARGEST, LEVELS, TINY

__all__ = [
    "dequantize_into",
    "quantize",
    "scatter_largest_into",
    "select_largest_magnitudes_of_blocks",
    "write_outer_product_into",
]

TWO_TO_MINUS_16 = ir.Constant(ir.FloatType(), 2.0**-16)


@intrinsic
def draw_random_fraction(typingctx: Any, place: Any, key0: Any, key1: Any) -> Any:
    """Numba intrinsic that returns the random number at index `place` of the counter-based stream (key0, key1), as a
    float32 in [0, 1)."""

    def emit_ir(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        place, key0, key1 = (builder.trunc(a, WORD) for a in arguments)
        number = emit_bit_mixing(builder, builder.xor(emit_bit_mixing(builder, builder.xor(place, key0)), key1))
        return builder.fmul(builder.uitofp(builder.lshr(number, WORD(16)), ir.FloatType()), TWO_TO_MINUS_16)

    return types.float32(types.int64, types.int64, types.int64), emit_ir


@jit
def _compute_scale(x):
    most = to_ordered_integer(abs(x[0]))
    for i in range(x.size):
        most = max(most, to_ordered_integer(abs(x[i])))
    largest = from_ordered_integer(most)
    scale = np.float32(largest / x.dtype.type(LEVELS)) if largest <= LARGEST else np.float32(np.nan)
    return np.float32(0) if scale < TINY else scale


@jit
def _quantize_blocks(first, last, all_x, all_q, scales, keep, by_chance, at, key0, key1):
    use_widest_vectors()
    half, low, high = all_x.dtype.type(0.5), all_x.dtype.type(-LEVELS), all_x.dtype.type(LEVELS)
    for b in range(first, last):
        start = b * BLOCK_ELEMENTS
        x, q = (
            all_x[start : start + BLOCK_ELEMENTS],
            all_q[start : start + BLOCK_ELEMENTS],
        )  # take slices and index them from 0, so that LLVM recognizes contiguous access
        scales[b] = scale = _compute_scale(x)
        if not scale > 0:
            q[:] = 0
            if keep and scale != 0:
                x[:] = 0
        elif by_chance:
            for i in range(x.size):
                up = x.dtype.type(draw_random_fraction(at + start + i, key0, key1))
                level = min(max(np.floor(x[i] / scale + up), low), high)
                q[i] = np.int8(np.int32(level))
                if keep:
                    x[i] -= level * scale
        elif keep:
            for i in range(x.size):
                level = min(max(np.floor(x[i] / scale + half), low), high)
                q[i] = np.int8(np.int32(level))
                x[i] -= level * scale
        else:
            for i in range(x.size):
                q[i] = np.int8(np.int32(min(max(np.floor(x[i] / scale + half), low), high)))


@jit
def _dequantize_blocks_into(first, last, all_q, scales, all_out, add):
    use_widest_vectors()
    for b in range(first, last):
        start = b * BLOCK_ELEMENTS
        q, out, scale = all_q[start : start + BLOCK_ELEMENTS], all_out[start : start + BLOCK_ELEMENTS], scales[b]
        if add:
            for i in range(q.size):
                out[i] += out.dtype.type(q[i]) * scale
        else:
            for i in range(q.size):
                out[i] = out.dtype.type(q[i]) * scale


def quantize(
    x: np.ndarray, q: np.ndarray, scales: np.ndarray, residual: np.ndarray | None, numbers: NumberRange | None
) -> None:
    if not x.size:
        return
    _, at, key0, key1 = (slice(0), 0, 0, 0) if numbers is None else next(numbers.iterate_runs_of_equal_upper_word())
    if residual is not None and residual is not x:
        residual[...] = x
    keep, by_chance = residual is not None, numbers is not None
    _run_blocks_in_threads(
        _quantize_blocks, scales.size, x if residual is None else residual, q, scales, keep, by_chance, at, key0, key1
    )


def dequantize_into(q: np.ndarray, scales: np.ndarray, out: np.ndarray, add: bool) -> None:
    _run_blocks_in_threads(_dequantize_blocks_into, scales.size, q, scales, out, add)


def _run_blocks_in_threads(body: Any, blocks: int, *arguments: Any) -> None:
    """Split `blocks` blocks among threads, and call `body(first, last, *arguments)` in each thread."""
    run_tasks(
        body,
        [(first, last, *arguments) for first, last in split_range(blocks, MIN_PIECE_ELEMENTS // BLOCK_ELEMENTS, 1)],
    )


SKIP_ELEMENTS = 32
"""Number of elements that are skipped at a time if none of them is large enough to be sent."""
HIGHEST_BIT = 30
"""Index of the highest bit of a float32 without its sign."""
MIN_PARTITION_ELEMENTS = 1 << 12
"""In blocks with more elements than this, NumPy's partition finds the k-th largest element faster than the bitwise
search."""


@jit
def _find_kth_largest_bitwise(sizes, count, k):
    """Return the largest t for which at least `k` of the first `count` elements of `sizes` are >= t. The bits of t are
    found one by one.

    The search stops as soon as exactly `k` elements are >= t."""
    least = np.int32(0)
    for step in range(HIGHEST_BIT + 1):
        trial = least | np.int32(1 << (HIGHEST_BIT - step))
        reach = np.int32(0)
        for i in range(count):
            reach += np.int32(sizes[i] >= trial)
        if reach >= k:
            least = trial
            if reach == k:
                break
    return least


@jit
def _take_largest_blocks(first, last, all_x, block, per_block, rest, known, values, positions, keep):
    use_widest_vectors()
    sizes = np.empty(block, np.int32)
    small = np.empty(block, np.float32)
    mask = np.int32(0x7FFFFFFF)
    for b in range(first, last):
        # take slices and index them from 0, so that LLVM recognizes contiguous access
        x = all_x[b * block : (b + 1) * block]
        count = x.size
        k = per_block if count == block else rest
        if k == 0:
            continue
        for i in range(count):
            small[i] = np.float32(x[i])
        bits = small.view(np.int32)
        for i in range(count):
            sizes[i] = bits[i] & mask
        least = known if known >= 0 else _find_kth_largest_bitwise(sizes, count, k)
        equals = k
        for i in range(count):
            equals -= sizes[i] > least
        at = b * per_block
        odd = False
        for begin in range(0, count, SKIP_ELEMENTS):
            end = min(begin + SKIP_ELEMENTS, count)
            some = np.int32(0)
            for i in range(begin, end):
                some += np.int32(sizes[i] >= least)
            if some == 0:
                continue
            for i in range(begin, end):
                if sizes[i] < least:
                    continue
                if sizes[i] == least:
                    if equals == 0:
                        continue
                    equals -= 1
                value = small[i]
                values[at] = value
                positions[at] = i
                at += 1
                odd |= not np.isfinite(value)
                if keep:
                    x[i] -= value
        if keep and odd:
            for i in range(count):
                if not np.isfinite(x[i]):
                    x[i] = 0


@jit
def _add_largest_elements_of_blocks(first, last, values, positions, block, per_block, rest, out):
    for b in range(first, last):
        start = b * block
        k = per_block if start + block <= out.size else rest
        for j in range(b * per_block, b * per_block + k):
            out[start + positions[j]] += values[j]


def select_largest_magnitudes_of_blocks(
    x: np.ndarray, block: int, per_block: int, rest: int, values: np.ndarray, positions: np.ndarray,
    residual: np.ndarray | None,
) -> None:  # fmt: skip
    """Compiled version of `topk.select_largest_magnitudes_of_blocks`: in each block, find the elements with the largest
    absolute values. Write these elements to `values`, and their indices within the block to `positions`.

    `per_block` is the number of elements to take from each full block, and `rest` is the number to take from the last,
    shorter block."""
    if residual is not None and residual is not x:
        residual[...] = x
    left = x if residual is None else residual
    known = (
        _find_kth_largest_magnitude_bits(left, per_block) if x.size == block > MIN_PARTITION_ELEMENTS else np.int32(-1)
    )
    _split_into_blocks_and_run_in_threads(
        _take_largest_blocks,
        x.size,
        block,
        left,
        block,
        per_block,
        rest,
        known,
        values,
        positions,
        residual is not None,
    )


def _find_kth_largest_magnitude_bits(x: np.ndarray, k: int) -> np.int32:
    """Return the k-th largest absolute value in `x`, as an integer with the bits of that float32.

    If most elements are zero, as in sums of sparse gradients, zeros are dropped first, because partitioning many equal
    elements is slow."""
    with np.errstate(over="ignore", under="ignore"):
        sizes = x.astype(np.float32, copy=False).view(np.int32) & np.int32(0x7FFFFFFF)
    if np.count_nonzero(sizes) < x.size // 2:
        sizes = sizes[sizes > 0]
    return np.partition(sizes, sizes.size - k)[sizes.size - k] if k <= sizes.size else np.int32(0)


def scatter_largest_into(
    values: np.ndarray, positions: np.ndarray, block: int, per_block: int, rest: int, out: np.ndarray
) -> None:
    _split_into_blocks_and_run_in_threads(
        _add_largest_elements_of_blocks, out.size, block, values, positions, block, per_block, rest, out
    )


def _split_into_blocks_and_run_in_threads(body: Any, size: int, block: int, *arguments: Any) -> None:
    """Divide `size` elements into blocks of `block` elements, and split the blocks among threads. Each thread calls
    `body(first, last, *arguments)`."""
    run_tasks(
        body,
        [
            (first, last, *arguments)
            for first, last in split_range(-(-size // block), max(MIN_PIECE_ELEMENTS // block, 1), 1)
        ],
    )


@jit
def _low_rank_product_loop(p, q, start, out, subtract):
    use_widest_vectors()
    ranks, columns = q.shape
    first, offset = start // columns, start % columns
    row = np.empty(columns, out.dtype)
    done = 0
    while done < out.size:
        count = min(columns - offset, out.size - done)
        here, right = row[:count], q[0, offset : offset + count]
        left = p[first, 0]
        for i in range(count):
            here[i] = left * right[i]
        for k in range(1, ranks):
            left, right = p[first, k], q[k, offset : offset + count]
            for i in range(count):
                here[i] += left * right[i]
        part = out[done : done + count]
        if subtract:
            for i in range(count):
                part[i] -= here[i]
        else:
            for i in range(count):
                part[i] = here[i]
        done, first, offset = done + count, first + 1, 0


def write_outer_product_into(p: np.ndarray, q: np.ndarray, start: int, out: np.ndarray, subtract: bool) -> None:
    _low_rank_product_loop(p, np.ascontiguousarray(q.T), start, out, subtract)
