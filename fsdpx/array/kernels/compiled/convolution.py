"""Convolution with channels last, and with 3 x 3 windows and stride 1 by Winograd's F(4 x 4, 3 x 3): a quarter of the
multiplications (Lavin, Gray 2016).

A tile of 4 x 4 results is a bilinear function of its 6 x 6 pixels and the window, A [(G w G^T) * (B d B^T)] A^T with
constant matrices; summed over channels, each of the 36 products of elements is a product of matrices for BLAS. What
goes around those products are linear maps of square patches, 16 channels at a time. Its gradients are the same formula
read backwards. Rounding grows with the numbers in A and B: see docs/speed.md."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from fsdpx.array import blas, parallel
from fsdpx.array.kernels import activation
from fsdpx.array.kernels import convolution as plain
from fsdpx.array.kernels.compiled.images import channels_first, channels_last, put_channels_first
from fsdpx.array.kernels.compiled.product import PLAIN, TURNED, cblas
from fsdpx.array.kernels.compiled.scalar import widest
from fsdpx.array.kernels.convolution import SlidingWindow
from fsdpx.array.parallel import over
from fsdpx.native.compiled import jit
from fsdpx.native.late import intrinsic, ir, register_jitable, types

__all__ = [
    "LANES", "conv2d", "conv2d_backward_input", "conv2d_backward_params", "gathering", "scattering", "suits_winograd",
    "winograd_backward_input", "winograd_backward_weight", "winograd_forward",
]  # fmt: skip

Matrix = Sequence[Sequence[float]]

LANES = 16
"""Channels at a time; the number of channels must be a multiple."""


def combination(matrix: Matrix) -> Any:
    """to[i] = the sum of matrix[i][j] source[j], each element of these LANES numbers; all are read before any is
    written. Addresses and distances are in bytes."""

    @intrinsic
    def combine(typingctx: Any, like: Any, to: Any, to_step: Any, source: Any, source_step: Any) -> Any:
        def code(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            like, to, to_step, source, source_step = arguments
            vector = ir.VectorType(like.type, LANES)
            read = [_load(builder, vector, source, source_step, j) for j in range(len(matrix[0]))]
            sums = [_sum(builder, vector, row, read) for row in matrix]
            for i, value in enumerate(sums):
                builder.store(value, _at(builder, vector, to, to_step, i), align=4)
            return context.get_dummy_value()

        return types.void(like, types.int64, types.int64, types.int64, types.int64), code

    return combine


def _at(builder: Any, vector: Any, base: Any, step: Any, n: int) -> Any:
    return builder.inttoptr(builder.add(base, builder.mul(step, step.type(n))), vector.as_pointer())


def _load(builder: Any, vector: Any, base: Any, step: Any, n: int) -> Any:
    return builder.load(_at(builder, vector, base, step, n), align=4)


def _sum(builder: Any, vector: Any, row: Sequence[float], read: list[Any]) -> Any:
    total = None
    for factor, value in zip(row, read, strict=True):
        if factor:
            size = ir.Constant(vector, [abs(factor)] * LANES)
            term = value if abs(factor) == 1 else builder.fmul(value, size, flags=["contract"])
            if total is None:
                total = term if factor > 0 else builder.fneg(term)
            else:
                total = (builder.fadd if factor > 0 else builder.fsub)(total, term, flags=["contract"])
    return total


_copy, _plus = combination([[1]]), combination([[1, 1]])


def gathering(matrix: Matrix, step: int, name: str) -> Any:
    """The loop that maps patches of (samples, height, width, channels): planes[i k + j, tile] = (matrix patch
    matrix^T)[i, j], with k rows of the matrix.

    A tile's patch begins `step` after that of the tile before it, the first one at `edge`; what lies outside of the
    image is 0. first, last: the samples that are done; down, right: tiles of a sample."""
    rows, size, combine = len(matrix), len(matrix[0]), combination(matrix)

    def loop(first, last, image, planes, edge, down, right):
        widest()
        height, width, channels = image.shape[1], image.shape[2], image.shape[3]
        like, word = image.dtype.type(0), image.itemsize
        patch, half = np.zeros((size, size, LANES), image.dtype), np.zeros((size, rows, LANES), image.dtype)
        at_patch, at_half, at_planes = patch.ctypes.data, half.ctypes.data, planes.ctypes.data
        lane, plane = LANES * word, planes.strides[0]
        for n in range(first, last):
            for tile in range(down * right):
                top, left = tile // right * step + edge, tile % right * step + edge
                inside = top >= 0 and left >= 0 and top + size <= height and left + size <= width
                base = image.ctypes.data + (((n * height + top) * width + left) * channels) * word
                out = at_planes + (n * down * right + tile) * channels * word
                for c in range(0, channels, LANES):
                    for i in range(size):
                        row, step_j = base + (i * width * channels + c) * word, channels * word
                        if not inside:
                            for j in range(size):
                                if 0 <= top + i < height and 0 <= left + j < width:
                                    _copy(like, at_patch + (i * size + j) * lane, 0, row + j * step_j, 0)
                                else:
                                    patch[i, j] = like
                            row, step_j = at_patch + i * size * lane, lane
                        combine(like, at_half + i * rows * lane, lane, row, step_j)
                    for j in range(rows):
                        combine(like, out + j * plane + c * word, rows * plane, at_half + j * lane, rows * lane)

    return jit(loop, name=name)


def scattering(matrix: Matrix, step: int, name: str) -> Any:
    """The loop that maps patches back: patch = matrix planes[., tile] matrix^T, stored in the image, or added to what
    is there; what lies outside of the image is dropped. The arguments are those of `gathering`."""
    size, rows, combine = len(matrix), len(matrix[0]), combination(matrix)

    def loop(first, last, image, planes, edge, down, right, add):
        widest()
        height, width, channels = image.shape[1], image.shape[2], image.shape[3]
        like, word = image.dtype.type(0), image.itemsize
        patch, half = np.zeros((size, size, LANES), image.dtype), np.zeros((size, rows, LANES), image.dtype)
        at_patch, at_half, at_planes = patch.ctypes.data, half.ctypes.data, planes.ctypes.data
        lane, plane = LANES * word, planes.strides[0]
        for n in range(first, last):
            for tile in range(down * right):
                top, left = tile // right * step + edge, tile % right * step + edge
                inside = top >= 0 and left >= 0 and top + size <= height and left + size <= width
                base = image.ctypes.data + (((n * height + top) * width + left) * channels) * word
                source = at_planes + (n * down * right + tile) * channels * word
                for c in range(0, channels, LANES):
                    for j in range(rows):
                        combine(like, at_half + j * lane, rows * lane, source + j * plane + c * word, rows * plane)
                    for i in range(size):
                        row, step_j = base + (i * width * channels + c) * word, channels * word
                        if inside and not add:
                            combine(like, row, step_j, at_half + i * rows * lane, lane)
                            continue
                        combine(like, at_patch, lane, at_half + i * rows * lane, lane)
                        for j in range(size):
                            if 0 <= top + i < height and 0 <= left + j < width:
                                to, part = row + j * step_j, at_patch + j * lane
                                if add:
                                    _plus(like, to, 0, to, part - to)
                                else:
                                    _copy(like, to, 0, part, 0)

    return jit(loop, name=name)


TILE, PLANES = 4, 36
A = ((1, 1, 1, 1, 1, 0), (0, 1, -1, 2, -2, 0), (0, 1, 1, 4, 4, 0), (0, 1, -1, 8, -8, 1))
B = (
    (4, 0, -5, 0, 1, 0), (0, -4, -4, 1, 1, 0), (0, 4, -4, -1, 1, 0), (0, -2, -1, 2, 1, 0), (0, 2, -1, -2, 1, 0),
    (0, 4, 0, -5, 0, 1),
)  # fmt: skip
G = (
    (1 / 4, 0, 0), (-1 / 6, -1 / 6, -1 / 6), (-1 / 6, 1 / 6, -1 / 6), (1 / 24, 1 / 12, 1 / 6), (1 / 24, -1 / 12, 1 / 6),
    (0, 0, 1),
)  # fmt: skip
TILE_BLOCK = 1 << 23
"""Bytes of a block of tiles, about: they stay in the cache between the three passes."""
LEAST = 128
"""Tiles of a block, at least: the weights are read once for each block."""
FILLED = 0.6
"""Part of the tiles' pixels that must lie inside of the result: below it, most of what is saved is lost again."""


def _transposed(matrix: Any) -> Any:
    return tuple(zip(*matrix, strict=True))


_of_input, _of_weight = gathering(B, TILE, "of_input"), gathering(G, TILE, "of_weight")
_of_gradient = gathering(_transposed(A), TILE, "of_gradient")
_to_output, _to_weight = scattering(A, TILE, "to_output"), scattering(_transposed(G), TILE, "to_weight")
_to_input = scattering(_transposed(B), TILE, "to_input")


@jit
def _multiply(first, last, at, out, a, b, turn_a, turn_b, m, n, k, accumulate):
    """out[t] (+)= a[t] b[t] for the planes from `first` to `last`."""
    one = out.dtype.type(1)
    beta = one if accumulate else out.dtype.type(0)
    ta, lda = (TURNED, m) if turn_a else (PLAIN, k)
    tb, ldb = (TURNED, k) if turn_b else (PLAIN, n)
    for t in range(first, last):
        ap, bp, cp = a[t].ctypes.data, b[t].ctypes.data, out[t].ctypes.data
        cblas(at, ta, tb, m, n, k, one, ap, lda, bp, ldb, beta, cp, n)


def suits_winograd(shape: tuple[int, ...], weight: tuple[int, ...], window: SlidingWindow) -> bool:
    """Whether images and weights of these shapes can go this way, and few pixels of its tiles lie outside."""
    top, left = window.padding
    if (window.kernel, window.stride) != ((3, 3), (1, 1)) or top != left or top > 2:
        return False
    height, width = window.out(shape)
    filled = height * width >= FILLED * _tiles(height) * _tiles(width) * TILE * TILE
    return filled and weight[0] % LANES == 0 and weight[1] % LANES == 0


def winograd_forward(at: int, x: np.ndarray, weight: np.ndarray, padding: int) -> np.ndarray:
    """y (samples, height, width, out) of x (samples, height, width, in) and weight (out, 3, 3, in)."""
    (n, height, width, inner), outer = x.shape, weight.shape[0]
    y = np.empty((n, height + 2 * padding - 2, width + 2 * padding - 2, outer), x.dtype)
    down, right = _tiles(y.shape[1]), _tiles(y.shape[2])
    u = _planes(weight, outer * inner)
    _each(_of_weight, outer, weight, u, 0, 1, 1)
    for start, stop, tiles in _tile_blocks(n, down * right, inner + outer, x.itemsize):
        v, m = _planes(x, tiles * inner), _planes(x, tiles * outer)
        _each(_of_input, stop - start, x[start:stop], v, -padding, down, right)
        _each(_multiply, PLANES, at, m, v, u, False, True, tiles, outer, inner, False)
        _each(_to_output, stop - start, y[start:stop], m, 0, down, right, False)
    return y


def winograd_backward_input(
    at: int, shape: tuple[int, ...], weight: np.ndarray, dy: np.ndarray, padding: int
) -> np.ndarray:
    """dx of this shape, (samples, height, width, in), from dy (samples, height, width, out)."""
    inner, outer = shape[3], dy.shape[3]
    down, right = _tiles(dy.shape[1]), _tiles(dy.shape[2])
    u, dx = _planes(dy, outer * inner), np.zeros(shape, dy.dtype)
    _each(_of_weight, outer, weight, u, 0, 1, 1)
    for start, stop, tiles in _tile_blocks(shape[0], down * right, inner + outer, dy.itemsize):
        dm, dv = _planes(dy, tiles * outer), _planes(dy, tiles * inner)
        _each(_of_gradient, stop - start, dy[start:stop], dm, 0, down, right)
        _each(_multiply, PLANES, at, dv, dm, u, False, False, tiles, inner, outer, False)
        _each(_to_input, stop - start, dx[start:stop], dv, -padding, down, right, True)
    return dx


def winograd_backward_weight(at: int, x: np.ndarray, dy: np.ndarray, padding: int) -> np.ndarray:
    """The gradient of the weight, (out, 3, 3, in)."""
    inner, outer = x.shape[3], dy.shape[3]
    down, right = _tiles(dy.shape[1]), _tiles(dy.shape[2])
    du, dw = _planes(x, outer * inner), np.zeros((outer, 3, 3, inner), x.dtype)
    for start, stop, tiles in _tile_blocks(x.shape[0], down * right, inner + outer, x.itemsize):
        dm, v = _planes(x, tiles * outer), _planes(x, tiles * inner)
        _each(_of_gradient, stop - start, dy[start:stop], dm, 0, down, right)
        _each(_of_input, stop - start, x[start:stop], v, -padding, down, right)
        _each(_multiply, PLANES, at, du, dm, v, True, False, outer, inner, tiles, start > 0)
    if x.shape[0]:
        _each(_to_weight, outer, dw, du, 0, 1, 1, False)
    return dw


def _each(function: Callable[..., Any], count: int, *rest: Any) -> None:
    """`function(first, last, *rest)` for all of `count`, cut among the threads."""
    threads = parallel.threads()
    edges = [count * i // threads for i in range(threads + 1)]
    parallel.run(function, [(a, b, *rest) for a, b in zip(edges, edges[1:], strict=False) if a < b])


def _tile_blocks(samples: int, tiles: int, channels: int, word: int) -> list[tuple[int, int, int]]:
    """(first sample, last, tiles) of blocks, which do not depend on the number of threads."""
    count = max(TILE_BLOCK // (PLANES * tiles * channels * word), -(-LEAST // tiles))
    cuts = range(0, samples, count)
    return [(a, min(a + count, samples), (min(a + count, samples) - a) * tiles) for a in cuts]


def _planes(like: np.ndarray, size: int) -> np.ndarray:
    """36 planes that are not a power of two apart: else their elements would share a few lines of the cache."""
    return np.empty((PLANES, size + LANES), like.dtype)


def _tiles(size: int) -> int:
    return -(-size // TILE)


BLOCK = 1 << 21
"""Bytes of the rows that are made at a time, about: they stay in the cache until they are multiplied."""


@register_jitable
def _inside(first, kernel, size):
    """The part of a window from `first` that lies on [0, size), as a range of its `kernel` places; it may be empty."""
    start = min(max(-first, 0), kernel)
    return start, max(min(kernel, size - first), start)


@jit
def _unfold(image, rows, channels, kh, kw, down, right, top, left):
    """rows[n, y, x] = the window of result (y, x): kh kw pixels with their channels, 0 outside of the image, of which
    image[n, i] is row i, one pixel after the other."""
    width = image.shape[2] // channels
    for n in range(image.shape[0]):
        for y in range(rows.shape[1]):
            above, below = _inside(y * down - top, kh, image.shape[1])
            for x in range(rows.shape[2]):
                row, first = rows[n, y, x], x * right - left
                start, stop = _inside(first, kw, width)
                if below - above < kh or stop - start < kw:
                    row[:] = 0
                for i in range(above, below):
                    size, at, source = (
                        (stop - start) * channels,
                        (i * kw + start) * channels,
                        (first + start) * channels,
                    )
                    pixels, into = image[n, y * down - top + i, source : source + size], row[at : at + size]
                    for c in range(size):
                        into[c] = pixels[c]


@jit
def _fold(image, rows, channels, kh, kw, down, right, top, left):
    """Add each window back to the pixels that it was made of."""
    width = image.shape[2] // channels
    for n in range(image.shape[0]):
        for y in range(rows.shape[1]):
            above, below = _inside(y * down - top, kh, image.shape[1])
            for x in range(rows.shape[2]):
                row, first = rows[n, y, x], x * right - left
                start, stop = _inside(first, kw, width)
                for i in range(above, below):
                    size, at, target = (
                        (stop - start) * channels,
                        (i * kw + start) * channels,
                        (first + start) * channels,
                    )
                    into, pixels = image[n, y * down - top + i, target : target + size], row[at : at + size]
                    for c in range(size):
                        into[c] += pixels[c]


def conv2d(xp: Any, x: np.ndarray, weight: np.ndarray, bias: Any, window: SlidingWindow) -> np.ndarray:
    at = blas.pointer(x.dtype)
    if not at:
        return plain.conv2d.__wrapped__(xp, x, weight, bias, window)  # type: ignore[attr-defined]
    image, kernel = channels_last(x), channels_last(weight)
    if suits_winograd(x.shape, weight.shape, window):
        y = winograd_forward(at, image, kernel, window.padding[0])
    else:
        y = np.empty((x.shape[0], *window.out(x.shape), weight.shape[0]), x.dtype)
        for part, rows in _unfolded(image, window, y.shape[1:3]):
            blas.gemm(_flat(y[part]), rows, _matrix(kernel).T)
    if bias is not None:
        activation.add_bias(xp, y, bias)
    return channels_first(y)


def conv2d_backward_input(
    xp: Any, weight: np.ndarray, dy: np.ndarray, window: SlidingWindow, shape: tuple[int, ...]
) -> np.ndarray:
    if not blas.pointer(dy.dtype):
        return plain.conv2d_backward_input.__wrapped__(xp, weight, dy, window, shape)  # type: ignore[attr-defined]
    slope, kernel = channels_last(dy), channels_last(weight)
    if suits_winograd(shape, weight.shape, window):
        image = (shape[0], *shape[2:], shape[1])
        dx = winograd_backward_input(blas.pointer(dy.dtype), image, kernel, slope, window.padding[0])
    else:
        dx = _folded(slope, kernel, window, shape)
    return channels_first(dx)


def conv2d_backward_params(xp: Any, x: Any, dy: Any, window: SlidingWindow, weight: plain.Sum, bias: plain.Sum) -> None:
    slope = channels_last(dy)
    if bias is not None:
        total = np.empty(dy.shape[1], dy.dtype)
        activation.sum_rows(xp, _flat(slope), total, False)
        plain.put(bias, total)
    if weight is None:
        return
    if not blas.pointer(x.dtype):
        plain.conv2d_backward_params.__wrapped__(xp, x, dy, window, weight, None)  # type: ignore[attr-defined]
        return
    image, shape = channels_last(x), (dy.shape[1], x.shape[1], *window.kernel)
    if suits_winograd(x.shape, shape, window):
        dw = winograd_backward_weight(blas.pointer(x.dtype), image, slope, window.padding[0])
    else:
        dw = np.zeros((shape[0], *window.kernel, shape[1]), x.dtype)
        for part, rows in _unfolded(image, window, slope.shape[1:3]):
            blas.gemm(_matrix(dw), _flat(slope[part]).T, rows, True)
    put_channels_first(weight, dw)


def _unfolded(image: np.ndarray, window: SlidingWindow, out: tuple[int, ...]) -> Iterator[tuple[slice, np.ndarray]]:
    """Blocks of samples, each with its windows as rows of a matrix; valid until the next block."""
    if window.dot:
        yield slice(None), _flat(image)
        return
    samples, channels = image.shape[0], image.shape[3]
    for part, rows in _blocks(samples, (*out, window.size * channels), image.dtype):
        over(
            _unfold,
            (_lines(image[part]), rows),
            channels,
            *window.kernel,
            *window.stride,
            *window.padding,
            work=rows.size,
        )
        yield part, _flat(rows)


def _folded(slope: np.ndarray, kernel: np.ndarray, window: SlidingWindow, shape: tuple[int, ...]) -> np.ndarray:
    """The gradient of the image: the gradients of its windows, each added where it belongs."""
    samples, channels, height, width = shape
    dx = np.zeros((samples, height, width, channels), slope.dtype)
    if window.dot:
        blas.gemm(_flat(dx), _flat(slope), _matrix(kernel))
        return dx
    for part, rows in _blocks(samples, (*slope.shape[1:3], window.size * channels), slope.dtype):
        blas.gemm(_flat(rows), _flat(slope[part]), _matrix(kernel))
        over(_fold, (_lines(dx[part]), rows), channels, *window.kernel, *window.stride, *window.padding, work=rows.size)
    return dx


def _blocks(samples: int, shape: tuple[int, ...], dtype: Any) -> Iterator[tuple[slice, np.ndarray]]:
    """Runs of samples with memory for them, which is used again; the cut does not depend on the number of threads."""
    count = max(1, min(samples, BLOCK // max(math.prod(shape) * dtype.itemsize, 1)))
    memory = np.empty((count, *shape), dtype)
    for start in range(0, samples, count):
        stop = min(start + count, samples)
        yield slice(start, stop), memory[: stop - start]


def _lines(image: np.ndarray) -> np.ndarray:
    """The pixels of each row of an image one after the other."""
    return image.reshape(*image.shape[:2], image.shape[2] * image.shape[3])


def _flat(rows: np.ndarray) -> np.ndarray:
    return rows.reshape(math.prod(rows.shape[:-1]), rows.shape[-1])


def _matrix(kernel: np.ndarray) -> np.ndarray:
    return kernel.reshape(kernel.shape[0], math.prod(kernel.shape[1:]))
