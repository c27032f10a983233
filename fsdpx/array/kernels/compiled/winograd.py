"""Convolution with 3 x 3 windows and stride 1 by F(4 x 4, 3 x 3): a quarter of the multiplications (Lavin, Gray 2016).

A tile of 4 x 4 results is a bilinear function of its 6 x 6 pixels and the window, A [(G w G^T) * (B d B^T)] A^T with
constant matrices; summed over channels, each of the 36 products of elements is a product of matrices for BLAS. Its
gradients are the same formula read backwards. Rounding grows with the numbers in A and B: see docs/speed.md."""

from collections.abc import Callable
from typing import Any

import numpy as np

from fsdpx.array import parallel
from fsdpx.array.kernels.compiled.product import PLAIN, TURNED, cblas
from fsdpx.array.kernels.compiled.tiles import LANES, gathering, scattering
from fsdpx.array.kernels.convolution import SlidingWindow
from fsdpx.native.compiled import jit

__all__ = ["backward_input", "backward_weight", "forward", "suits"]

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
BLOCK = 1 << 23
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


def suits(shape: tuple[int, ...], weight: tuple[int, ...], window: SlidingWindow) -> bool:
    """Whether images and weights of these shapes can go this way, and few pixels of its tiles lie outside."""
    top, left = window.padding
    if (window.kernel, window.stride) != ((3, 3), (1, 1)) or top != left or top > 2:
        return False
    height, width = window.out(shape)
    filled = height * width >= FILLED * _tiles(height) * _tiles(width) * TILE * TILE
    return filled and weight[0] % LANES == 0 and weight[1] % LANES == 0


def forward(at: int, x: np.ndarray, weight: np.ndarray, padding: int) -> np.ndarray:
    """y (samples, height, width, out) of x (samples, height, width, in) and weight (out, 3, 3, in)."""
    (n, height, width, inner), outer = x.shape, weight.shape[0]
    y = np.empty((n, height + 2 * padding - 2, width + 2 * padding - 2, outer), x.dtype)
    down, right = _tiles(y.shape[1]), _tiles(y.shape[2])
    u = _planes(weight, outer * inner)
    _each(_of_weight, outer, weight, u, 0, 1, 1)
    for start, stop, tiles in _blocks(n, down * right, inner + outer, x.itemsize):
        v, m = _planes(x, tiles * inner), _planes(x, tiles * outer)
        _each(_of_input, stop - start, x[start:stop], v, -padding, down, right)
        _each(_multiply, PLANES, at, m, v, u, False, True, tiles, outer, inner, False)
        _each(_to_output, stop - start, y[start:stop], m, 0, down, right, False)
    return y


def backward_input(at: int, shape: tuple[int, ...], weight: np.ndarray, dy: np.ndarray, padding: int) -> np.ndarray:
    """dx of this shape, (samples, height, width, in), from dy (samples, height, width, out)."""
    inner, outer = shape[3], dy.shape[3]
    down, right = _tiles(dy.shape[1]), _tiles(dy.shape[2])
    u, dx = _planes(dy, outer * inner), np.zeros(shape, dy.dtype)
    _each(_of_weight, outer, weight, u, 0, 1, 1)
    for start, stop, tiles in _blocks(shape[0], down * right, inner + outer, dy.itemsize):
        dm, dv = _planes(dy, tiles * outer), _planes(dy, tiles * inner)
        _each(_of_gradient, stop - start, dy[start:stop], dm, 0, down, right)
        _each(_multiply, PLANES, at, dv, dm, u, False, False, tiles, inner, outer, False)
        _each(_to_input, stop - start, dx[start:stop], dv, -padding, down, right, True)
    return dx


def backward_weight(at: int, x: np.ndarray, dy: np.ndarray, padding: int) -> np.ndarray:
    """The gradient of the weight, (out, 3, 3, in)."""
    inner, outer = x.shape[3], dy.shape[3]
    down, right = _tiles(dy.shape[1]), _tiles(dy.shape[2])
    du, dw = _planes(x, outer * inner), np.zeros((outer, 3, 3, inner), x.dtype)
    for start, stop, tiles in _blocks(x.shape[0], down * right, inner + outer, x.itemsize):
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


def _blocks(samples: int, tiles: int, channels: int, word: int) -> list[tuple[int, int, int]]:
    """(first sample, last, tiles) of blocks, which do not depend on the number of threads."""
    count = max(BLOCK // (PLANES * tiles * channels * word), -(-LEAST // tiles))
    cuts = range(0, samples, count)
    return [(a, min(a + count, samples), (min(a + count, samples) - a) * tiles) for a in cuts]


def _planes(like: np.ndarray, size: int) -> np.ndarray:
    """36 planes that are not a power of two apart: else their elements would share a few lines of the cache."""
    return np.empty((PLANES, size + LANES), like.dtype)


def _tiles(size: int) -> int:
    return -(-size // TILE)
