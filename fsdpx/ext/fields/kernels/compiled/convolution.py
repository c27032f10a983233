"""Compiled convolutions. The algorithm depends on the window.

One-cell windows with many weights use BLAS. 3 x 3 windows with stride 1 and many channels use Winograd's F(4 x 4, 3 x
3), which needs a quarter of the multiplications (Lavin and Gray 2016). Windows of three dims that are 3 x 3 along the
last two use the same algorithm on slices of two dims, and also sum the products along the first dim. All other windows
use direct convolution.

In Winograd's algorithm, a tile of 4 x 4 results is a bilinear function of the 6 x 6 pixels d under it and the window w:
A [(G w G^T) * (B d B^T)] A^T with constant matrices A, B and G. The sum over channels turns each of the 36 elementwise
products into a matmul over all tiles. The operands of these matmuls, called planes, are linear maps of square patches,
and are computed for 16 channels at a time. The gradients use the transposed formula. Rounding errors grow with the
magnitude of the numbers in A and B."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Any

import numpy as np

from fsdpx.core.array import blas
from fsdpx.core.array.jit import jit
from fsdpx.core.array.kernels import activation
from fsdpx.core.array.kernels.choice import register_compiled_kernel
from fsdpx.core.array.kernels.compiled.elements import as_contiguous, keep_alive
from fsdpx.core.array.kernels.compiled.memory_order import (
    to_channels_last,
    transpose_channels_into,
    view_channels_first,
    view_channels_last,
)
from fsdpx.core.array.kernels.compiled.product import PLAIN, TURNED, call_cblas
from fsdpx.core.array.kernels.compiled.scalar import use_widest_vectors
from fsdpx.core.array.lazy_numba import intrinsic, ir, types
from fsdpx.core.array.parallel import parallel_for_range, parallel_for_rows
from fsdpx.ext.fields.kernels import convolution as places
from fsdpx.ext.fields.kernels.compiled import depthwise, direct
from fsdpx.ext.fields.kernels.compiled.direct import (
    WIDE,
    compute_line_by_strips,
    emit_load,
    emit_offset,
    emit_pointer_cast,
    reshape_to_three_dims,
)  # fmt: skip
from fsdpx.ext.fields.kernels.convolution import (
    GROUP_OUTPUTS,
    LANES,
    MIN_TILES,
    TILE,
    GradientTarget,
    WindowStrides,
    count_winograd_tiles,
    is_depthwise,
    is_matmul,
    suits_winograd,
    write_or_add_gradient,
)  # fmt: skip

__all__ = [
    "LANES",
    "convolve_winograd",
    "make_winograd_input_loop",
    "make_winograd_output_loop",
    "suits_winograd",
    "winograd_backward_weight",
]

Matrix = Sequence[Sequence[float]]


def make_linear_combination_function(matrix: Matrix) -> Any:
    """Return a compiled function that computes to[i] = sum over j of matrix[i][j] * source[j] for vectors of LANES
    numbers.

    The compiled function reads all vectors before it writes any. Its arguments are addresses and strides in bytes."""

    @intrinsic
    def combine_lanes(typingctx: Any, like: Any, to: Any, to_step: Any, source: Any, source_step: Any) -> Any:
        def emit_ir(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            like, to, to_step, source, source_step = arguments
            vector = ir.VectorType(like.type, LANES)
            found = [emit_load(builder, vector, source, source_step, j) for j in range(len(matrix[0]))]
            sums = [_emit_weighted_sum(builder, vector, row, found) for row in matrix]
            for i, value in enumerate(sums):
                at = builder.add(to, emit_offset(builder, to_step, i))
                builder.store(value, emit_pointer_cast(builder, vector, at), align=4)
            return context.get_dummy_value()

        return types.void(like, types.int64, types.int64, types.int64, types.int64), emit_ir

    return combine_lanes


def _emit_weighted_sum(builder: Any, vector: Any, row: Sequence[float], found: list[Any]) -> Any:
    total = None
    for factor, value in zip(row, found, strict=True):
        if factor:
            size = ir.Constant(vector, [abs(factor)] * LANES)
            term = value if abs(factor) == 1 else builder.fmul(value, size, flags=["contract"])
            if total is None:
                total = term if factor > 0 else builder.fneg(term)
            else:
                total = (builder.fadd if factor > 0 else builder.fsub)(total, term, flags=["contract"])
    return total


_copy = make_linear_combination_function([[1]])


def make_winograd_input_loop(matrix: Matrix, step: int, name: str) -> Any:
    """Return a compiled loop that transforms image patches to planes, the operands of Winograd's matmuls.

    For an image (samples, height, width, channels) and a matrix with k rows, the loop computes
    `planes[i * k + j, tile] = (matrix @ patch @ matrix.T)[i, j]`. The patch of the first tile begins at pixel `edge`,
    and each further patch begins `step` pixels after the previous one. Pixels outside the image are 0. The loop handles
    the tiles from `first` to `last`, numbered over all samples. `base` is the index of the tile that is stored first in
    the planes, and each sample has `down` x `right` tiles."""
    rows, size, combine = len(matrix), len(matrix[0]), make_linear_combination_function(matrix)

    def input_loop(first, last, image, planes, base, edge, down, right):
        use_widest_vectors()
        height, width, channels = image.shape[1], image.shape[2], image.shape[3]
        like, word = image.dtype.type(0), image.itemsize
        patch, half = np.zeros((size, size, LANES), image.dtype), np.zeros((size, rows, LANES), image.dtype)
        at_patch, at_half, at_planes = patch.ctypes.data, half.ctypes.data, planes.ctypes.data
        lane, plane = LANES * word, planes.strides[0]
        for number in range(first, last):
            n, tile = number // (down * right), number % (down * right)
            top, left = tile // right * step + edge, tile % right * step + edge
            inside = top >= 0 and left >= 0 and top + size <= height and left + size <= width
            corner = image.ctypes.data + (((n * height + top) * width + left) * channels) * word
            out = at_planes + (number - base) * channels * word
            for c in range(0, channels, LANES):
                for i in range(size):
                    row, step_j = corner + (i * width * channels + c) * word, channels * word
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
        keep_alive(patch, half)

    return jit(input_loop, name=name)


def make_winograd_output_loop(matrix: Matrix, step: int, name: str) -> Any:
    """Return a compiled loop that transforms planes, the results of Winograd's matmuls, to image patches.

    The loop computes `patch = matrix @ planes[:, tile] @ matrix.T`, where the planes of a tile form a square matrix,
    and drops pixels outside the image. It takes the same arguments as the loop from `make_winograd_input_loop`."""
    size, rows, combine = len(matrix), len(matrix[0]), make_linear_combination_function(matrix)

    def output_loop(first, last, image, planes, base, edge, down, right):
        use_widest_vectors()
        height, width, channels = image.shape[1], image.shape[2], image.shape[3]
        like, word = image.dtype.type(0), image.itemsize
        patch, half = np.zeros((size, size, LANES), image.dtype), np.zeros((size, rows, LANES), image.dtype)
        at_patch, at_half, at_planes = patch.ctypes.data, half.ctypes.data, planes.ctypes.data
        lane, plane = LANES * word, planes.strides[0]
        for number in range(first, last):
            n, tile = number // (down * right), number % (down * right)
            top, left = tile // right * step + edge, tile % right * step + edge
            inside = top >= 0 and left >= 0 and top + size <= height and left + size <= width
            corner = image.ctypes.data + (((n * height + top) * width + left) * channels) * word
            source = at_planes + (number - base) * channels * word
            for c in range(0, channels, LANES):
                for j in range(rows):
                    combine(like, at_half + j * lane, rows * lane, source + j * plane + c * word, rows * plane)
                for i in range(size):
                    row, step_j = corner + (i * width * channels + c) * word, channels * word
                    if inside:
                        combine(like, row, step_j, at_half + i * rows * lane, lane)
                        continue
                    combine(like, at_patch, lane, at_half + i * rows * lane, lane)
                    for j in range(size):
                        if 0 <= top + i < height and 0 <= left + j < width:
                            _copy(like, row + j * step_j, 0, at_patch + j * lane, 0)
        keep_alive(patch, half)

    return jit(output_loop, name=name)


PLANES, ONES = 36, 7
"""PLANES: number of planes, one for each elementwise product of a tile. ONES: index of a plane that enters every result
with factor 1, so a bias added to this plane is added to every result."""
A = ((1, 1, 1, 1, 1, 0), (0, 1, -1, 2, -2, 0), (0, 1, 1, 4, 4, 0), (0, 1, -1, 8, -8, 1))
B = (
    (4, 0, -5, 0, 1, 0), (0, -4, -4, 1, 1, 0), (0, 4, -4, -1, 1, 0), (0, -2, -1, 2, 1, 0), (0, 2, -1, -2, 1, 0),
    (0, 4, 0, -5, 0, 1),
)  # fmt: skip
G = (
    (1 / 4, 0, 0), (-1 / 6, -1 / 6, -1 / 6), (-1 / 6, 1 / 6, -1 / 6), (1 / 24, 1 / 12, 1 / 6), (1 / 24, -1 / 12, 1 / 6),
    (0, 0, 1),
)  # fmt: skip
TILE_BLOCK = 1 << 21
"""Approximate size, in bytes, of a block of tiles, chosen so that the block stays in the cache for all three passes
over it: transform, multiply, transform back."""
TILES_PER_STEP = 64
"""Minimum number of tiles in a block. Weights are read once per block, so large blocks reduce the number of reads."""
TILES_OF_SLICE = 8
"""Maximum number of tiles that a block takes from each slice of a field with several slices. A block is a set of tiles
that are processed together."""
LONG = 256
"""Maximum number of products that are summed at once. The limit exists because rounding errors grow with the length of
a sum."""


def _transpose_matrix(matrix: Any) -> Any:
    return tuple(zip(*matrix, strict=True))


_of_input, _of_weight = make_winograd_input_loop(B, TILE, "of_input"), make_winograd_input_loop(G, TILE, "of_weight")
_of_reversed = make_winograd_input_loop([row[::-1] for row in G], TILE, "of_reversed")
_of_gradient = make_winograd_input_loop(_transpose_matrix(A), TILE, "of_gradient")
_to_output = make_winograd_output_loop(A, TILE, "to_output")
_to_weight = make_winograd_output_loop(_transpose_matrix(G), TILE, "to_weight")


@jit
def _multiply_transposed_planes_into(first, last, gemm_address, out, a, b, skip, m, n, k, accumulate):
    """Compute `a[t].T @ b[t]` with BLAS for each plane t from `first` to `last`, without the first `skip` elements of
    b[t]. Write the result to out[t], or add it to out[t] if `accumulate`."""
    one = out.dtype.type(1)
    beta = one if accumulate else out.dtype.type(0)
    for t in range(first, last):
        ap, bp, cp = a[t].ctypes.data, b[t].ctypes.data + skip * b.itemsize, out[t].ctypes.data
        call_cblas(gemm_address, TURNED, PLAIN, m, n, k, one, ap, m, bp, n, beta, cp, n)


@lru_cache(1 << 10)
def _plan_slices(
    window: int, samples: int, cells: tuple[int, ...], sizes: tuple[int, ...], first: tuple[int, ...]
) -> tuple[np.ndarray, int]:
    """Return how the tiles of a field are arranged. A field of three dims is processed as slices of two dims. The
    result is an array of integers: the number of tiles of a slice, the numbers of input and of output slices of a
    sample, the first input slice under the window of output slice 0, the number of tiles along the height and the width
    of a slice, and the first pixel of the first patch. Also return the total number of tiles over one slice of each
    sample.

    Fields of two dims, and slices that are convolved independently of each other, are treated as one slice that
    contains the tiles of all samples and slices. `window` is the number of slices of the window."""
    down, right = count_winograd_tiles(sizes[-2]), count_winograd_tiles(sizes[-1])
    inputs, outputs, near = (cells[0], sizes[0], first[0]) if len(sizes) > 2 else (1, 1, 0)
    tiles = down * right
    if window == 1 and near == 0 and inputs == outputs:
        samples, tiles, inputs, outputs = 1, samples * outputs * tiles, 1, 1
    return np.array([tiles, inputs, outputs, near, down, right, first[-1]]), samples * tiles


def _make_loop_over_slices(loop: Any, of_inputs: bool, name: str) -> Any:
    """Return a compiled function that calls `loop` for the rows `first` to `last` of planes, which are operands or
    results of Winograd's matrix products. Row k * many + i holds tile `column` + i of the slice with index `start` + k.
    Tile indices count the tiles of one slice per sample, one sample after the other. Rows of slices that do not exist
    are set to 0."""

    def run_over_slices(first, last, image, planes, column, many, start, slices):
        use_widest_vectors()
        tiles, count, channels = slices[0], slices[1 if of_inputs else 2], image.shape[3]
        edge = slices[6] if of_inputs else 0
        while first < last:
            k = first // many
            stop = min((k + 1) * many, last)
            if 0 <= start + k < count:
                base = (column // tiles * count + start + k) * tiles + column % tiles - k * many
                loop(base + first, base + stop, image, planes, base, edge, slices[4], slices[5])
            else:
                planes[:, first * channels : stop * channels] = 0
            first = stop

    return jit(run_over_slices, name=name)


_inputs_to_planes = _make_loop_over_slices(_of_input, True, "inputs_to_planes")
_gradients_to_planes = _make_loop_over_slices(_of_gradient, False, "gradients_to_planes")
_planes_to_outputs = _make_loop_over_slices(_to_output, False, "planes_to_outputs")


def _make_winograd_loop(flat: bool, name: str) -> Any:
    """Return a compiled function that computes the outputs of the tiles `first` to `last` in all slices with Winograd's
    algorithm. Tile indices count the tiles of one slice per sample, one sample after the other. At most `most` tiles of
    a slice are processed together.

    `u` holds the transformed weights of each slice of the window, in rows of LANES outputs each. `block` is the
    distance, in elements, from one of these rows to the row of the next LANES outputs, and `row` is the distance to the
    row of the next channel. `begin`, (outputs,), is the bias. If `flat`, the window has one slice, and this number is a
    compile-time constant."""

    def convolve_tiles(first, last, x, y, u, block, row, begin, slices, most):
        use_widest_vectors()
        like, word, inner, outer = y.dtype.type(0), y.itemsize, x.shape[3], y.shape[3]
        window, tiles, outputs, near = 1 if flat else u.shape[0], slices[0], slices[2], slices[3]
        deep = min(max(TILES_PER_STEP // most, 1), outputs)
        v = np.empty((PLANES, (deep + window - 1) * most * inner + LANES), y.dtype)
        m = np.empty((PLANES, deep * most * outer + LANES), y.dtype)
        scratch, lanes, long = np.zeros((1, LANES), y.dtype), WIDE // word, max(LONG // window, 1)
        while first < last:
            many = min(most, last - first, tiles - first % tiles)
            for z in range(0, outputs, deep):
                depth = min(deep, outputs - z)
                _inputs_to_planes(0, (depth + window - 1) * many, x, v, first, many, z + near, slices)
                for t in range(PLANES):
                    cells, rows, weights = v[t].ctypes.data, m[t].ctypes.data, u[0, t].ctypes.data
                    for o in range(0, outer, lanes):
                        start = begin.ctypes.data + o * word if t == ONES else scratch.ctypes.data
                        w = weights + (o // LANES * block + o % LANES) * word
                        for c in range(0, inner, long):
                            places, steps = (1, window, min(long, inner - c)), (0, u.strides[0], row * word)
                            compute_line_by_strips(like, True, depth * many, cells + c * word, inner * word,
                                                   rows + o * word, outer * word, start, c > 0, lanes, scratch,
                                                   w + c * row * word, places, (0, many * inner * word, word), steps,
                                                   1)  # fmt: skip
                _planes_to_outputs(0, depth * many, y, m, first, many, z, slices)
            first += many

    return jit(convolve_tiles, name=name)


_convolve_tiles, _convolve_tiles_of_slices = (
    _make_winograd_loop(True, "convolve_tiles"),
    _make_winograd_loop(False, "convolve_tiles_of_slices"),
)


def convolve_winograd(
    x: np.ndarray, weight: np.ndarray, bias: Any, first: Sequence[int], sizes: Sequence[int], backward: bool = False
) -> np.ndarray:
    """Return the convolution of x (samples, *cells, in) with weight (out, in, *kernel), computed with Winograd's
    algorithm. `first` is the first cell under the window of output 0 along each dim, and `sizes` is the number of
    outputs along each dim.

    If `backward`, compute the gradient of the input instead: x is the gradient of the output, `sizes` is the number of
    cells of the input, and `first` is for the window of the transposed convolution, which moves over x."""
    kernel, inner, outer = reshape_to_three_dims(weight), x.shape[-1], weight.shape[1 if backward else 0]
    window, y = kernel.shape[2], np.empty((x.shape[0], *sizes, outer), x.dtype)
    u = np.empty((window, PLANES, outer * inner + LANES), x.dtype)
    for k in range(window):
        part = as_contiguous(kernel[:, :, window - 1 - k if backward else k])
        blocks = part.reshape(-1, LANES, *((3, 3) if backward else (inner, 9)))
        rows = to_channels_last(blocks).reshape(-1, 3, 3, LANES)
        parallel_for_range(_of_reversed if backward else _of_weight, 0, rows.shape[0], rows, u[k], 0, 0, 1, 1)
    block, row = (LANES, outer) if backward else (LANES * inner, LANES)
    begin = np.zeros(outer, x.dtype) if bias is None else as_contiguous(bias, x.dtype)
    slices, columns = _plan_slices(window, x.shape[0], x.shape[1:-1], tuple(sizes), tuple(first))
    images, results = (a.reshape(-1, *a.shape[-3:]) for a in (x, y))
    most = _count_tiles_per_step(slices, TILES_PER_STEP)
    loop = _convolve_tiles if window == 1 else _convolve_tiles_of_slices
    parallel_for_range(loop, 0, columns, images, results, u, block, row, begin, slices, most)
    return y


def winograd_backward_weight(
    gemm_address: int, x: np.ndarray, dy: np.ndarray, first: Sequence[int], window: int
) -> np.ndarray:
    """Return the gradient of the weight, computed with Winograd's algorithm, as (out, window, 3, 3, in). `window` is
    the number of slices of the window, 1 for fields of two dims, and `first` is as in `convolve_winograd`."""
    inner, outer = x.shape[-1], dy.shape[-1]
    slices, columns = _plan_slices(window, x.shape[0], x.shape[1:-1], dy.shape[1:-1], tuple(first))
    images, slopes = (a.reshape(-1, *a.shape[-3:]) for a in (x, dy))
    du = [_allocate_planes(x, outer * inner) for _ in range(window)]
    dw = np.zeros((window, outer, 3, 3, inner), x.dtype)
    rows = max(TILE_BLOCK // (PLANES * (inner + outer) * x.itemsize), TILES_PER_STEP)
    most, add = _count_tiles_per_step(slices, rows), False
    deep = max(rows // most, 1)
    for column, many, z, depth in _iterate_blocks(slices, columns, most, deep):
        tall = depth + window - 1
        dm, v = _allocate_planes(x, depth * many * outer), _allocate_planes(x, tall * many * inner)
        parallel_for_range(_gradients_to_planes, 0, depth * many, slopes, dm, column, many, z, slices)
        parallel_for_range(_inputs_to_planes, 0, tall * many, images, v, column, many, z + int(slices[3]), slices)
        for k in range(window):
            sizes = k * many * inner, outer, inner, depth * many
            parallel_for_range(_multiply_transposed_planes_into, 0, PLANES, gemm_address, du[k], dm, v, *sizes, add)
        add = True
    for k in range(window if add else 0):
        parallel_for_range(_to_weight, 0, outer, dw[k], du[k], 0, 0, 1, 1)
    return np.moveaxis(dw, 0, 1)


def _count_tiles_per_step(slices: np.ndarray, rows: int) -> int:
    """Return how many tiles of a slice are processed together if planes have about `rows` rows. If a field has several
    slices, only a few tiles of each slice are processed together, so that a block can span many slices. Every block
    reads some input slices in addition to those at its output slices. The more slices a block spans, the smaller the
    share of these additional slices is."""
    return min(rows if slices[2] == 1 else TILES_OF_SLICE, int(slices[0]))


def _iterate_blocks(slices: np.ndarray, columns: int, most: int, deep: int) -> Iterator[tuple[int, int, int, int]]:
    """Divide the output into blocks whose planes fit into the cache: at most `most` tiles and `deep` slices. Yield
    (first tile, number of tiles, first output slice, number of output slices) for each block. The blocks do not depend
    on the number of threads."""
    tiles, outputs = int(slices[0]), int(slices[2])
    for sample in range(0, columns, max(tiles, 1)):
        for column in range(sample, sample + tiles, most):
            for z in range(0, outputs, deep):
                yield column, min(most, sample + tiles - column), z, min(deep, outputs - z)


def _allocate_planes(like: np.ndarray, size: int) -> np.ndarray:
    """Return uninitialized planes of `size` elements. The planes are padded because planes spaced by a power of two
    would compete for cache lines."""
    return np.empty((PLANES, size + LANES), like.dtype)


MAX_DIRECT_WEIGHTS = 1 << 12
"""Maximum number of weights for which direct convolution with a one-cell window is faster than BLAS. Direct convolution
adds the bias without another pass over memory, and this many weights stay in the cache."""


@lru_cache(1 << 10)
def _choose_algorithm(
    strides: WindowStrides, weight: tuple[int, ...], shape: tuple[int, ...], sizes: tuple[int, ...], has_gemm: bool
) -> str:
    """Return the name of the algorithm to use for an input of `shape` and outputs of `sizes`: "winograd", "gemm",
    "depthwise" or "direct". The first two require a gemm function (`has_gemm`)."""
    if has_gemm and suits_winograd(shape, weight, strides, sizes):
        return "winograd"
    if has_gemm and math.prod(weight) > MAX_DIRECT_WEIGHTS and is_matmul(strides, shape[2:], sizes):
        return "gemm"
    return "depthwise" if is_depthwise(strides, weight) else "direct"


TWO_CELL_WINDOW, ONE_CELL_WINDOW = (WindowStrides((cells,), (1,), (1,), (0,), 1) for cells in (2, 1))
DEPTHWISE_WINDOW = TWO_CELL_WINDOW._replace(groups=3)


def _make_example_field(x: Any) -> tuple[Any, Any]:
    """Return a one-dimensional field with channels last in memory, and matching weights, as example arguments for
    compiling a kernel."""
    return np.zeros((2, 2, 3), x.dtype).transpose(0, 2, 1), np.zeros((3, 3, 2), x.dtype)


IMAGE = WindowStrides((3, 3), (1, 1), (1, 1), (-1, -1), 1)


def _make_example_images(x: Any, cells: int = TILE) -> Any:
    """Return example arguments for compiling a kernel: images to which Winograd's algorithm applies or, if `cells` is
    3, weights that match these images."""
    return np.zeros((MIN_TILES, LANES, cells, cells), x.dtype)


def _make_example_gradient(x: Any) -> Any:
    return np.zeros((MIN_TILES, MIN_TILES, TILE, TILE), x.dtype)


@register_compiled_kernel(
    lambda x, w, s: [
        (*_make_example_field(x), None, TWO_CELL_WINDOW, (2,), _make_example_field(x)[0]),
        (np.zeros((1, 64, 1), x.dtype), np.zeros((65, 64, 1), x.dtype), np.zeros(65, x.dtype), ONE_CELL_WINDOW, (1,)),
        (_make_example_field(x)[0], np.zeros((3, 1, 2), x.dtype), w, DEPTHWISE_WINDOW, (2,)),
        (_make_example_images(x), _make_example_images(x, 3), np.zeros(MIN_TILES, x.dtype), IMAGE, (TILE, TILE)),
    ]
)  # fmt: skip
def correlate(
    xp: Any, x: np.ndarray, weight: np.ndarray, bias: Any, strides: WindowStrides, sizes: Sequence[int], out: Any = None
) -> np.ndarray:
    apart = out is not None and not (out.dtype == x.dtype and _has_channels_last(out) and out.flags.writeable)
    if apart:
        return places.correlate.__wrapped__(xp, x, weight, bias, strides, sizes, out)  # type: ignore[attr-defined]
    has_gemm = out is None and bool(blas.get_gemm_address(x.dtype))
    algorithm = _choose_algorithm(strides, weight.shape, x.shape, tuple(sizes), has_gemm)
    if algorithm == "winograd":
        return view_channels_first(convolve_winograd(to_channels_last(x), weight, bias, strides.first, sizes))
    image = _as_channels_last(x)
    y = np.empty((x.shape[0], *sizes, weight.shape[0]), x.dtype) if out is None else view_channels_last(out)
    if algorithm == "gemm":
        blas.gemm(_flatten_rows(y), _flatten_rows(as_contiguous(image)), _as_matrix(weight).T)
        if bias is not None:
            activation.add_bias(xp, y, bias)
    elif algorithm == "depthwise":
        depthwise.convolve_depthwise(image, weight, bias, strides, y, out is not None)
    elif _has_small_groups(strides, weight):
        depthwise.convolve_small_groups(image, weight, bias, strides, y, out is not None)
    elif strides.groups == 1:
        direct.convolve_direct(image, weight, bias, strides, y, out is not None)
    else:
        for count, a, b in _iterate_slices_of_group_batches(strides, image, y):
            begin, dense = None if bias is None else bias[b], _as_block_diagonal(weight[b], count)
            direct.convolve_direct(image[..., a], dense, begin, strides, y[..., b], out is not None)
    return view_channels_first(y) if out is None else out


@register_compiled_kernel(
    lambda x, w, s: [
        (*_make_example_field(x)[::-1], TWO_CELL_WINDOW, (2, 3, 3)),
        (np.zeros((3, 1, 2), x.dtype), _make_example_field(x)[0], DEPTHWISE_WINDOW, (2, 3, 3)),
        (_make_example_images(x, 3), _make_example_gradient(x), IMAGE, _make_example_images(x).shape),
    ]
)
def correlate_backward_input(
    xp: Any, weight: np.ndarray, dy: np.ndarray, strides: WindowStrides, shape: Sequence[int], bias: Any = None
) -> np.ndarray:
    apart = any(s > 1 and d > 1 for s, d in zip(strides.stride, strides.dilation, strict=True))
    if apart:
        plain = places.correlate_backward_input.__wrapped__  # type: ignore[attr-defined]
        return plain(xp, weight, dy, strides, shape, bias)
    has_gemm = bias is None and bool(blas.get_gemm_address(dy.dtype))
    algorithm = _choose_algorithm(strides, weight.shape, tuple(shape), dy.shape[2:], has_gemm)
    if algorithm == "winograd":
        first = [1 - k - at for k, at in zip(strides.kernel, strides.first, strict=True)]
        return view_channels_first(convolve_winograd(to_channels_last(dy), weight, None, first, shape[2:], True))
    slope, dx = _as_channels_last(dy), np.empty((shape[0], *shape[2:], shape[1]), dy.dtype)
    if algorithm == "gemm":
        blas.gemm(_flatten_rows(dx), _flatten_rows(as_contiguous(slope)), _as_matrix(weight))
    elif algorithm == "depthwise":
        depthwise.depthwise_backward_input(weight, slope, strides, dx, bias)
    elif _has_small_groups(strides, weight):
        depthwise.small_groups_backward_input(weight, slope, strides, dx, bias)
    elif strides.groups == 1:
        direct.direct_backward_input(weight, slope, strides, dx, bias)
    else:
        for count, a, b in _iterate_slices_of_group_batches(strides, dx, slope):
            begin, dense = None if bias is None else bias[a], _as_block_diagonal(weight[b], count)
            direct.direct_backward_input(dense, slope[..., b], strides, dx[..., a], begin)
    return view_channels_first(dx)


@register_compiled_kernel(
    lambda x, w, s: [
        (
            _make_example_field(x)[0], _make_example_field(x)[0], TWO_CELL_WINDOW,
            (_make_example_field(x)[1].astype(s.dtype), True), (s, True),
        ),
        (
            _make_example_field(x)[0], _make_example_field(x)[0], DEPTHWISE_WINDOW,
            (np.zeros((3, 1, 2), s.dtype), True), None,
        ),
        (_make_example_images(x), _make_example_gradient(x), IMAGE, (_make_example_images(s, 3), True), None),
    ]
)  # fmt: skip
def correlate_backward_params(
    xp: Any, x: Any, dy: Any, strides: WindowStrides, weight: GradientTarget, bias: GradientTarget
) -> None:
    slope = _as_channels_last(dy)
    if bias is not None:
        total = np.empty(dy.shape[1], dy.dtype)
        activation.sum_rows(xp, _flatten_rows(as_contiguous(slope)), total, False)
        write_or_add_gradient(bias, total)
    if weight is None:
        return
    gemm_address, shape = blas.get_gemm_address(x.dtype), weight[0].shape
    algorithm = _choose_algorithm(strides, shape, x.shape, dy.shape[2:], bool(gemm_address))
    if algorithm == "winograd":
        field, window = to_channels_last(x), shape[2] if len(shape) > 4 else 1
        dw = winograd_backward_weight(gemm_address, field, as_contiguous(slope), strides.first, window)
        write_or_add_as_channels_first(weight, np.ascontiguousarray(dw.reshape(shape[0], *shape[2:], shape[1])))
        return
    image, (out, add) = _as_channels_last(x), weight
    here = out.dtype == x.dtype and out.flags.c_contiguous and out.flags.aligned
    dw = out if here else np.zeros(shape, x.dtype)
    if here and not add:
        out[...] = 0
    if algorithm == "gemm":
        blas.gemm(_as_matrix(dw), _flatten_rows(as_contiguous(slope)).T, _flatten_rows(as_contiguous(image)), True)
    elif algorithm == "depthwise":
        depthwise.add_depthwise_weight_gradient(image, slope, strides, dw)
    else:
        for count, a, b in _iterate_slices_of_group_batches(strides, image, slope):
            dense = dw[b] if count == 1 else np.zeros((b.stop - b.start, a.stop - a.start, *shape[2:]), dw.dtype)
            direct.direct_add_weight_gradient(image[..., a], slope[..., b], strides, dense)
            if count > 1:
                dw[b] += _view_diagonal_blocks(dense, count).reshape(dw[b].shape)
    if not here:
        write_or_add_gradient(weight, dw)


def _iterate_slices_of_group_batches(
    strides: WindowStrides, x: np.ndarray, y: np.ndarray
) -> Iterator[tuple[int, slice, slice]]:
    """For each set of groups that are computed together, yield (number of groups, slice of their input channels, slice
    of their output channels)."""
    inner, outer = x.shape[-1] // strides.groups, y.shape[-1] // strides.groups
    together = 1 if strides.groups == 1 else -(-GROUP_OUTPUTS // outer)
    for g in range(0, strides.groups, together):
        end = min(g + together, strides.groups)
        yield end - g, slice(g * inner, end * inner), slice(g * outer, end * outer)


def _has_small_groups(strides: WindowStrides, weight: np.ndarray) -> bool:
    """Return whether the groups of channels have the same small size in the input and the output, and together fill
    whole vectors."""
    outputs, size = weight.shape[:2]
    fills = size in depthwise.GROUP_SIZES and outputs % (WIDE // weight.itemsize) == 0
    return fills and outputs == strides.groups * size


def _as_block_diagonal(weight: np.ndarray, groups: int) -> np.ndarray:
    """Return a block-diagonal weight. A convolution with this weight and no groups gives the same result as `weight`
    with `groups` groups."""
    if groups == 1:
        return weight
    dense = np.zeros((weight.shape[0], groups * weight.shape[1], *weight.shape[2:]), weight.dtype)
    _view_diagonal_blocks(dense, groups)[...] = weight.reshape(groups, -1, *weight.shape[1:])
    return dense


def _view_diagonal_blocks(dense: np.ndarray, groups: int) -> np.ndarray:
    """Return a view (groups, outputs, channels, *kernel) of the diagonal blocks of a contiguous weight (groups x
    outputs, groups x channels, *kernel)."""
    outputs, channels = dense.shape[0] // groups, dense.shape[1] // groups
    step = outputs * dense.strides[0] + channels * dense.strides[1]
    shape = (groups, outputs, channels, *dense.shape[2:])
    return np.lib.stride_tricks.as_strided(dense, shape, (step, *dense.strides))


def _has_channels_last(x: np.ndarray) -> bool:
    """Return whether the channels of a cell are contiguous in memory."""
    return x.flags.aligned and (x.shape[1] == 1 or x.strides[1] == x.itemsize)


def _as_channels_last(x: np.ndarray) -> np.ndarray:
    """Return x (samples, channels, *cells) as (samples, *cells, channels). x is copied only if the channels of a cell
    are not contiguous."""
    return view_channels_last(x) if _has_channels_last(x) else to_channels_last(x)


def _flatten_rows(rows: np.ndarray) -> np.ndarray:
    return rows.reshape(math.prod(rows.shape[:-1]), rows.shape[-1])


def _as_matrix(kernel: np.ndarray) -> np.ndarray:
    return kernel.reshape(kernel.shape[0], math.prod(kernel.shape[1:]))


def write_or_add_as_channels_first(target: Any, cells: np.ndarray) -> None:
    """Write the gradient `cells`, which has channels last, to an array with channels first, or add it to this array.
    `target` is (array, whether to add)."""
    out, add = target
    n, channels, size = cells.shape[0], cells.shape[-1], math.prod(cells.shape[1:-1])
    if out.dtype == cells.dtype and out.flags.c_contiguous and out.flags.aligned:
        parallel_for_rows(
            transpose_channels_into, (cells.reshape(n, size, channels), out.reshape(n, channels, size)), add
        )
    else:
        write_or_add_gradient(target, view_channels_first(cells))
