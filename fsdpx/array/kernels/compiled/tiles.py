"""Linear maps of square patches of an image, 16 channels at a time: what goes around the products of `winograd`."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from fsdpx.array.kernels.compiled.scalar import widest
from fsdpx.native.compiled import jit
from fsdpx.native.late import intrinsic, ir, types

__all__ = ["LANES", "gathering", "scattering"]

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
