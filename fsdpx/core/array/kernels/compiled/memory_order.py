"""Convert fields to channels last, (samples, *cells, channels), and create 1-D views of arrays in memory order."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from fsdpx.core.array.jit import jit
from fsdpx.core.array.kernels.choice import register_compiled_kernel
from fsdpx.core.array.kernels.compiled.elements import CACHE_LINE, as_contiguous, keep_alive, prefetch_line
from fsdpx.core.array.lazy_numba import intrinsic, ir, types
from fsdpx.core.array.parallel import parallel_for_rows
from fsdpx.errors import ShapeError

__all__ = [
    "channels_last", "make_flat_views", "make_flat_views_and_output", "to_channel_rows", "to_channels_first",
    "to_channels_last", "transpose_channels_into", "transpose_pixels_into", "view_channels_first", "view_channels_last",
    "view_rows_channels_first",
]  # fmt: skip

LINE, SQUARE = 64, 8
"""LINE: number of pixels to transpose at a time; it is small enough that they stay in cache. SQUARE: number of rows and
columns of the matrices that are transposed in registers."""
CHANNELS_LAST = [(0, *range(2, ndim), 1)[:ndim] for ndim in range(65)]
"""For each number of dims, the order of dims in which channels (dim 1) are last. The tuples are made in advance,
because making one takes longer than transposing an array."""
CHANNELS_FIRST = [(0, ndim - 1, *range(1, ndim - 1)) for ndim in range(65)]
"""For each number of dims, the permutation of the dims that undoes `CHANNELS_LAST`."""


@intrinsic
def _transpose_square_block_into(
    typingctx: Any, like: Any, source: Any, source_step: Any, to: Any, to_step: Any, add: Any
) -> Any:
    """Transpose a matrix of SQUARE rows and columns from the address `source` to the address `to`. If `add` is true,
    add the transpose to the matrix at `to`, instead of overwriting that matrix. Addresses and the steps between rows
    are in bytes.

    Each pass interleaves row i with row i + SQUARE / 2, which rotates the six bits of an element's index (row, column)
    by one. After three passes, row and column are exchanged."""

    def emit_ir(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        like, source, source_step, to, to_step, add = arguments
        vector, index = ir.VectorType(like.type, SQUARE), ir.IntType(32)

        def emit_row_pointer(base: Any, step: Any, n: int) -> Any:
            return builder.inttoptr(builder.add(base, builder.mul(step, step.type(n))), vector.as_pointer())

        rows = [builder.load(emit_row_pointer(source, source_step, n), align=1) for n in range(SQUARE)]
        half = SQUARE // 2
        for _ in range(SQUARE.bit_length() - 1):
            pairs = []
            for first, second in zip(rows[:half], rows[half:], strict=True):
                for begin in (0, half):
                    order = [lane + n * SQUARE for lane in range(begin, begin + half) for n in (0, 1)]
                    mask = ir.Constant(ir.VectorType(index, SQUARE), order)
                    pairs.append(builder.shuffle_vector(first, second, mask))
            rows = pairs
        plus = builder.fadd if isinstance(like.type, (ir.FloatType, ir.DoubleType)) else builder.add
        with builder.if_else(add) as (then, otherwise):
            with then:
                for n, row in enumerate(rows):
                    place = emit_row_pointer(to, to_step, n)
                    builder.store(plus(builder.load(place, align=1), row), place, align=1)
            with otherwise:
                for n, row in enumerate(rows):
                    builder.store(row, emit_row_pointer(to, to_step, n), align=1)
        return context.get_dummy_value()

    return types.void(like, *[types.int64] * 4, types.boolean), emit_ir


@jit
def transpose_channels_into(x, out, add):
    """Move channels to the last dim: compute out[n, p, c] = x[n, c, p], or out[n, p, c] += x[n, c, p] if `add` is
    true."""
    for n in range(x.shape[0]):
        transpose_pixels_into(x[n], 0, out[n], add)


@jit
def transpose_pixels_into(x, first, out, add):
    """Compute out[p, c] = x[c, first + p] for all rows p of out, or add to out if `add` is true."""
    like, word, channels, pixels = x.dtype.type(0), x.itemsize, x.shape[0], x.shape[1]
    whole, end = channels // SQUARE * SQUARE, first + out.shape[0]
    source, to = x.ctypes.data, out.ctypes.data
    for start in range(first, end, LINE):
        stop = min(start + LINE, end)
        square_end = start + (stop - start) // SQUARE * SQUARE
        for c in range(channels if stop < pixels else 0):
            ahead = source + (c * pixels + stop) * word
            for line in range(ahead, ahead + LINE * word, CACHE_LINE):
                prefetch_line(line)
        # of the longer dim of x, as many numbers as possible are written one after another
        is_long = channels > pixels
        outer, inner = (square_end - start, whole) if is_long else (whole, square_end - start)
        for i in range(0, outer, SQUARE):
            for j in range(0, inner, SQUARE):
                c, p = (j, start + i) if is_long else (i, start + j)
                _transpose_square_block_into(like, source + (c * pixels + p) * word, pixels * word,
                                  to + ((p - first) * channels + c) * word, channels * word, add)  # fmt: skip
        for c in range(0 if square_end < stop else whole, channels):
            begin = square_end if c < whole else start
            row, column = x[c, begin:stop], out[begin - first : stop - first, c]
            if add:
                for i in range(row.size):
                    column[i] += row[i]
            else:
                for i in range(row.size):
                    column[i] = row[i]
    keep_alive(x, out)


def view_channels_last(x: np.ndarray) -> np.ndarray:
    """Return a view (samples, *cells, channels) of x (samples, channels, *cells). This is faster than
    `numpy.moveaxis`."""
    return x.transpose(CHANNELS_LAST[x.ndim])


def view_channels_first(cells: np.ndarray) -> np.ndarray:
    """Return a view (samples, channels, *cells) of `cells` (samples, *cells, channels)."""
    return cells.transpose(CHANNELS_FIRST[cells.ndim])


def to_channels_last(x: np.ndarray) -> np.ndarray:
    """Return x (samples, channels, *cells) as a contiguous array (samples, *cells, channels), copied if necessary."""
    turned = view_channels_last(x)
    if turned.strides[-1] == x.itemsize:  # channels are already last in memory
        return as_contiguous(turned)
    x, out = as_contiguous(x), np.empty(turned.shape, x.dtype)
    n, channels, cells = *x.shape[:2], math.prod(x.shape[2:])
    parallel_for_rows(transpose_channels_into, (x.reshape(n, channels, cells), out.reshape(n, cells, channels)), False)
    return out


def to_channels_first(x: np.ndarray) -> np.ndarray:
    """Return x (samples, channels, *cells) as a contiguous array with channels first, copied if necessary."""
    if x.flags.c_contiguous or x.shape[1] < SQUARE:  # NumPy is faster for few channels
        return as_contiguous(x)
    rows, out = as_contiguous(view_channels_last(x)), np.empty(x.shape, x.dtype)
    n, channels, cells = *x.shape[:2], math.prod(x.shape[2:])
    arrays = rows.reshape(n, cells, channels), out.reshape(n, channels, cells)
    parallel_for_rows(transpose_channels_into, arrays, False)
    return out


@register_compiled_kernel(lambda x, w, s: (x.reshape(2, 3, 1),))
def channels_last(xp: Any, x: np.ndarray) -> np.ndarray:
    return view_channels_first(to_channels_last(x))


def to_channel_rows(x: np.ndarray) -> np.ndarray:
    """Return x (samples, channels, ...) as a contiguous matrix with one column per channel and one row per sample and
    position."""
    return to_channels_last(x).reshape(x.shape[0] * math.prod(x.shape[2:]), x.shape[1])


def view_rows_channels_first(rows: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """View a matrix with one column per channel, such as a result of `to_channel_rows`, as an array (samples, channels,
    ...) of `shape`."""
    return view_channels_first(rows.reshape(shape[0], *shape[2:], shape[1]))


def _flatten_in_memory_order(*arrays: np.ndarray) -> list[np.ndarray] | None:
    """Return 1-D views of arrays of the same shape, in memory order. If the arrays have gaps, return copies. If their
    memory orders differ, return None. Raise ShapeError if their shapes differ, because loops would read past the end of
    an array."""
    first, alike, contiguous = arrays[0], True, True
    # use a loop instead of a generator, because it is faster and every elementwise kernel calls this function
    for a in arrays:
        if a.shape != first.shape:
            raise ShapeError(f"arrays of one shape are needed, got {' and '.join(str(a.shape) for a in arrays)}")
        alike = alike and a.strides == first.strides
        contiguous = contiguous and a.flags.c_contiguous
    if contiguous:
        return [a.reshape(-1) for a in arrays]
    return [a.ravel(order="K") for a in arrays] if alike else None


def make_flat_views(*arrays: np.ndarray) -> list[np.ndarray]:
    """Return 1-D views of arrays of the same shape, all in the same memory order. If the arrays have different memory
    orders, they are converted first: fields to channels last, and other arrays to C order."""
    flat = _flatten_in_memory_order(*arrays)
    if flat is None:
        convert = to_channels_last if arrays[0].ndim > 2 else np.ascontiguousarray
        flat = [convert(a).reshape(-1) for a in arrays]
    return [as_contiguous(a) for a in flat]  # `as_contiguous` copies arrays that are read-only or not aligned


def make_flat_views_and_output(*arrays: np.ndarray) -> tuple[tuple[np.ndarray, ...], np.ndarray]:
    """Create an output array. Return 1-D views of the given arrays and of the output, all in the same memory order,
    followed by the output itself.

    The given arrays have the same shape. If their memory orders differ, they are first converted to channels last.
    """
    # `out` has no gaps in memory; if `arrays[0]` has gaps, the strides of the two arrays differ
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
