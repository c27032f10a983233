"""Compiled spectra, and fast Fourier transforms along one dim. Lines whose length has a prime factor above 7, and real
lines of odd length, are left to NumPy.

The lines of a tile are copied into an array in which they are interleaved, so that each lane of a vector register holds
one line. Each pass over a tile splits all transforms into transforms of a smaller length (Stockham's algorithm, see Van
Loan 1992). A real line is transformed as a complex line of half the length. Its real parts are the numbers at even
positions of the real line, and its imaginary parts are the numbers at odd positions. An inverse transform is computed
as a forward transform, with real and imaginary parts swapped before and after it. No line affects another."""

from __future__ import annotations

import math
from functools import lru_cache, partial, reduce
from typing import Any

import numpy as np

from fsdpx.core.array.jit import jit
from fsdpx.core.array.kernels.choice import register_compiled_kernel
from fsdpx.core.array.kernels.compiled.elements import as_contiguous, prefetch_array_at_byte_offset
from fsdpx.core.array.kernels.compiled.scalar import use_widest_vectors
from fsdpx.core.array.lazy_numba import cgutils, intrinsic, ir, register_jitable, types
from fsdpx.core.array.parallel import parallel_for_range
from fsdpx.ext.fields.kernels import fourier as plain
from fsdpx.ext.fields.kernels.compiled.direct import (
    WIDE,
    emit_as_noinline_function,
    emit_load,
    emit_pointer_cast,
    get_vector_type_and_itemsize,
)

__all__ = ["fourier_along_dim", "sum_squares_by_index"]

RADICES = (4, 2, 3, 5, 7)
"""Factors of the length of a transform. The passes of a transform use them in this order."""
PREFETCHED_ROWS = 16
"""Distance, in rows, between the row that is copied and the row that is prefetched meanwhile. The code prefetches rows
itself because they are too far apart for the hardware prefetcher."""
FLAGS = ("contract",)

Complex = tuple[Any, Any]
"""The real and imaginary parts of one complex number per lane."""


def _emit_sum(builder: Any, a: Complex, b: Complex, signs: str = "++") -> Complex:
    """Emit LLVM code for a sum of complex numbers. `signs` are those of the real and the imaginary part of b."""
    pairs = zip(signs, a, b, strict=True)
    re, im = [(builder.fadd if sign == "+" else builder.fsub)(p, q, flags=FLAGS) for sign, p, q in pairs]
    return re, im


def _emit_scaled(builder: Any, a: Complex, factor: float) -> Complex:
    row = ir.Constant(a[0].type, [factor] * a[0].type.count)
    return builder.fmul(a[0], row, flags=FLAGS), builder.fmul(a[1], row, flags=FLAGS)


def _emit_product(builder: Any, a: Complex, w: Complex) -> Complex:
    rows = [builder.fmul(p, q, flags=FLAGS) for p in a for q in w]
    return builder.fsub(rows[0], rows[3], flags=FLAGS), builder.fadd(rows[1], rows[2], flags=FLAGS)


def _emit_small_transform(builder: Any, a: list[Complex]) -> list[Complex]:
    """Emit LLVM code for the Fourier transform of two, four, or an odd number of complex numbers."""
    add, count = partial(_emit_sum, builder), len(a)
    if count == 2:
        return [add(a[0], a[1]), add(a[0], a[1], "--")]
    if count == 4:
        even, odd, first, third = add(a[0], a[2]), add(a[1], a[3]), add(a[0], a[2], "--"), add(a[1], a[3], "--")[::-1]
        return [add(even, odd), add(first, third, "+-"), add(even, odd, "--"), add(first, third, "-+")]
    half = range(1, count // 2 + 1)
    sums, differences = ([add(a[i], a[count - i], signs) for i in half] for signs in ("++", "--"))
    found = [reduce(add, sums, a[0])] * count
    for j in half:
        angles = [2.0 * math.pi * (i * j % count) / count for i in half]
        cosines = reduce(add, [_emit_scaled(builder, p, math.cos(t)) for p, t in zip(sums, angles, strict=True)], a[0])
        terms = [_emit_scaled(builder, p, math.sin(t)) for p, t in zip(differences, angles, strict=True)]
        sines = reduce(add, terms)[::-1]
        found[j], found[count - j] = add(cosines, sines, "+-"), add(cosines, sines, "-+")
    return found


def _make_butterfly_loop(radix: int) -> Any:
    """Return a compiled loop of `count` transforms of `radix` points. For j > 0, result j of each transform is
    multiplied by the complex factor with index j - 1 in the array at `factors`.

    A point is two vectors of WIDE bytes, the real and the imaginary parts of all lines of the tile. The points of a
    transform are `x_step` bytes apart in x and `y_step` bytes apart in y. Each transform begins one point after the
    previous transform. Addresses are in bytes."""

    @intrinsic
    def run_butterflies(typingctx: Any, like: Any, x: Any, x_step: Any, y: Any, y_step: Any, factors: Any,
                        count: Any) -> Any:  # fmt: skip
        def emit_ir(context: Any, builder: Any, signature: Any, arguments: Any) -> None:
            like, x, x_step, y, y_step, factors, count = arguments
            rows = [_emit_broadcast(builder, like, factors, n) for n in range(2 * (radix - 1))]
            with cgutils.for_range(builder, count) as loop:
                at, to = (builder.add(base, builder.mul(loop.index, base.type(2 * WIDE))) for base in (x, y))
                points = []
                for _ in range(radix):
                    points.append(_emit_load_point(builder, like, at, at.type(0)))
                    at = builder.add(at, x_step)
                for j, point in enumerate(_emit_small_transform(builder, points)):
                    found = _emit_product(builder, point, (rows[2 * j - 2], rows[2 * j - 1])) if j else point
                    _emit_store_point(builder, found, to, to.type(0))
                    to = builder.add(to, y_step)

        return types.void(like, *[types.int64] * 6), emit_as_noinline_function(emit_ir)

    return run_butterflies


def _emit_broadcast(builder: Any, like: Any, base: Any, n: int) -> Any:
    """Emit LLVM code that loads the element with index n of the array at `base` into all lanes of a vector."""
    vector, word = get_vector_type_and_itemsize(like, WIDE)
    none, index = ir.Constant(vector, ir.Undefined), ir.IntType(32)
    zeros = ir.Constant(ir.VectorType(index, vector.count), [0] * vector.count)
    number = emit_load(builder, like.type, base, base.type(word), n)
    return builder.shuffle_vector(builder.insert_element(none, number, index(0)), none, zeros)


def _emit_load_point(builder: Any, like: Any, at: Any, swap: Any) -> Complex:
    """Emit LLVM code that loads a point of a tile. `swap` is WIDE if the imaginary parts come first, otherwise 0."""
    vector, _ = get_vector_type_and_itemsize(like, WIDE)
    places = builder.add(at, swap), builder.add(at, builder.sub(swap.type(WIDE), swap))
    re, im = (emit_load(builder, vector, place, None, 0) for place in places)
    return re, im


def _emit_store_point(builder: Any, point: Complex, at: Any, swap: Any) -> None:
    word = 4 if point[0].type.element == ir.FloatType() else 8
    places = builder.add(at, swap), builder.add(at, builder.sub(swap.type(WIDE), swap))
    for row, place in zip(point, places, strict=True):
        builder.store(row, emit_pointer_cast(builder, row.type, place), align=word)


@intrinsic
def _untangle_halves(typingctx: Any, like: Any, tile: Any, points: Any, swap: Any, turns: Any) -> Any:
    """Convert the transforms of complex lines to modes 1 to points - 1 of real lines, in place. The complex lines were
    made from the real lines as in `_read_real_line`. `turns` holds the cosine and sine of the angle pi k / points for
    each mode k. If the cosines are negated, convert the modes of real lines back to transforms of complex lines.
    Addresses are in bytes, and `swap` is as in `_emit_load_point`."""

    def emit_ir(context: Any, builder: Any, signature: Any, arguments: Any) -> None:
        like, tile, points, swap, turns = arguments
        _, word = get_vector_type_and_itemsize(like, WIDE)
        with cgutils.for_range(builder, builder.udiv(points, points.type(2))) as loop:
            k = builder.add(loop.index, points.type(1))
            at, mirror = (builder.add(tile, builder.mul(n, n.type(2 * WIDE))) for n in (k, builder.sub(points, k)))
            (re, im), (re2, im2) = (_emit_load_point(builder, like, place, swap) for place in (at, mirror))
            base = builder.add(turns, builder.mul(k, k.type(2 * word)))
            turn = tuple(_emit_broadcast(builder, like, base, part) for part in (0, 1))
            # (b + i a) (c + i s), where a is the difference of the real parts and b the sum of the imaginary parts
            product = _emit_product(builder, (builder.fadd(im, im2), builder.fsub(re, re2)), turn)
            total = builder.fadd(re, re2), builder.fsub(im, im2)
            opposite = total[0], builder.fneg(total[1])
            for place, pair, signs in ((at, total, "+-"), (mirror, opposite, "--")):
                point = _emit_sum(builder, pair, product, signs)
                _emit_store_point(builder, _emit_scaled(builder, point, 0.5), place, swap)

    return types.void(like, *[types.int64] * 4), emit_as_noinline_function(emit_ir)


_four, _two, _three, _five, _seven = map(_make_butterfly_loop, RADICES)


@register_jitable
def _transform_tile(tiles, radices, factors):
    """Transform tiles[0], (points, real and imaginary part, lines), and return the tile that holds the result, which is
    one of `tiles`. The other tile is overwritten."""
    like, row, word = tiles.dtype.type(0), 2 * WIDE, tiles.itemsize
    x, y, at = tiles[0].ctypes.data, tiles[1].ctypes.data, factors.ctypes.data
    done, left = 1, tiles.shape[1]
    for radix in radices:
        left //= radix
        for p in range(left):
            begin, to, x_step, y_step = x + p * done * row, y + p * radix * done * row, left * done * row, done * row
            if radix == 4:
                _four(like, begin, x_step, to, y_step, at, done)
            elif radix == 2:
                _two(like, begin, x_step, to, y_step, at, done)
            elif radix == 3:
                _three(like, begin, x_step, to, y_step, at, done)
            elif radix == 5:
                _five(like, begin, x_step, to, y_step, at, done)
            else:
                _seven(like, begin, x_step, to, y_step, at, done)
            at += 2 * (radix - 1) * word
        done *= radix
        x, y = y, x
    return tiles[len(radices) % 2]


@jit
def _transform_tiles(first, last, x, y, real, inverse, radices, factors, turns):
    """Transform the tiles `first` to `last` of the lines of x into y, both (outer, elements, inner, parts). A line runs
    along dim 1. The last dim holds one part for real numbers, and two for complex numbers. `real` says whether one of x
    and y is real."""
    use_widest_vectors()
    n, inner, lanes = max(x.shape[1], y.shape[1]), x.shape[2], WIDE // x.itemsize
    points = n // 2 if real else n
    tiles, scale = np.zeros((2, points, 2, lanes), x.dtype), x.dtype.type(1.0 / points if inverse else 1.0)
    for begin in range(first * lanes, min(last * lanes, x.shape[0] * inner), lanes):
        valid = min(lanes, x.shape[0] * inner - begin)
        if real:
            for t in range(valid):
                line = x[(begin + t) // inner, :, (begin + t) % inner]
                _read_real_line(tiles[0, :, inverse, t], tiles[0, :, 1 - inverse, t], line)
            if inverse:
                _untangle_modes_of_packed_real_lines(tiles[0], inverse, turns)
        else:
            _copy_complex_lines(x, tiles[0], begin, valid, inverse, True, scale)
        found = _transform_tile(tiles, radices, factors)
        if real:
            if not inverse:
                _untangle_modes_of_packed_real_lines(found, inverse, turns)
            for t in range(valid):
                line = y[(begin + t) // inner, :, (begin + t) % inner]
                _write_real_line(found[:, inverse, t], found[:, 1 - inverse, t], line, scale)
        else:
            _copy_complex_lines(y, found, begin, valid, inverse, False, scale)


@register_jitable
def _copy_complex_lines(x, tile, begin, valid, inverse, reads, scale):
    """Copy `valid` complex lines of x, from line `begin` on, into a tile. If `reads` is False, copy the lines from the
    tile into x instead, multiplied by `scale`. For an inverse transform, real and imaginary parts are swapped."""
    line, inner = 0, x.shape[2]
    while line < valid:  # copy lines with the same index along dim 0 together: they are adjacent in memory
        outer, j = (begin + line) // inner, (begin + line) % inner
        count = min(valid - line, inner - j)
        for i in range(x.shape[1]):
            row = x[outer, i, j : j + count]
            prefetch_array_at_byte_offset(row, PREFETCHED_ROWS * inner * 2 * x.itemsize)
            re, im = tile[i, inverse, line : line + count], tile[i, 1 - inverse, line : line + count]
            if reads:
                for t in range(count):
                    re[t], im[t] = row[t, 0], row[t, 1]
            else:
                for t in range(count):
                    row[t, 0], row[t, 1] = re[t] * scale, im[t] * scale
        line += count


@register_jitable
def _untangle_modes_of_packed_real_lines(tile, inverse, turns):
    """Convert the transforms of complex lines to the modes of real lines, in place. If `inverse`, convert the modes
    back to transforms. The complex lines were made from the real lines as in `_read_real_line`. Modes 0 and n / 2 are
    real, and are stored together as the first point."""
    like, factor = tile.dtype.type(0), tile.dtype.type(0.5 if inverse else 1.0)
    for t in range(tile.shape[2]):
        first, last = tile[0, inverse, t], tile[0, 1 - inverse, t]
        tile[0, inverse, t], tile[0, 1 - inverse, t] = factor * (first + last), factor * (first - last)
    _untangle_halves(like, tile.ctypes.data, tile.shape[0], inverse * WIDE, turns[inverse].ctypes.data)


@register_jitable
def _read_real_line(re, im, line):
    """Fill the complex line re + i im from `line`, which holds the numbers or the modes of a real line. Numbers at even
    positions become real parts, and numbers at odd positions become imaginary parts. Modes are copied, except that the
    last mode, which is real like the first, becomes the imaginary part of the first."""
    if line.shape[1] == 1:
        for i in range(re.size):
            re[i], im[i] = line[2 * i, 0], line[2 * i + 1, 0]
    else:
        for k in range(re.size):
            re[k], im[k] = line[k, 0], line[k, 1]
        im[0] = line[re.size, 0]


@register_jitable
def _write_real_line(re, im, line, scale):
    """Write the numbers or modes of a real line to `line`. The complex line re + i im holds them in the same order as
    in `_read_real_line`."""
    if line.shape[1] == 1:
        for i in range(re.size):
            line[2 * i, 0], line[2 * i + 1, 0] = re[i] * scale, im[i] * scale
    else:
        for k in range(re.size):
            line[k, 0], line[k, 1] = re[k], im[k]
        line[0, 1], line[re.size, 0], line[re.size, 1] = 0, im[0], 0


@lru_cache(256)
def _plan_passes(n: int, is_real: bool, dtype: str) -> tuple[np.ndarray, ...] | None:
    """Return what transforms of length n need: the radix of each pass, the factors (real, imaginary) of all butterflies
    in order, and the cosine and sine of the angle 2 pi k / n for each k. The cosines and sines have the shape (2, n //
    2 + 1, 2); in the second half, the cosines are negated. Return None if the compiled code has no transform of this
    length."""
    points = n // 2 if is_real else n
    radices, left, angles = list[int](), points, list[Any]([np.zeros(0)])
    for radix in RADICES:
        while left and left % radix == 0:
            left //= radix
            radices.append(radix)
    if left != 1 or (is_real and n % 2):
        return None
    left = points
    for radix in radices:
        angles.append(np.outer(np.arange(left // radix), np.arange(1, radix)).reshape(-1) * (-2.0 * np.pi / left))
        left //= radix
    circles = np.concatenate(angles), np.arange(n // 2 + 1) * (2.0 * np.pi / n)
    factors, turns = (np.stack([np.cos(a), np.sin(a)], axis=-1) for a in circles)
    turns = np.stack([turns, turns * (-1.0, 1.0)])
    return np.array(radices, np.int64), factors.astype(dtype), turns.astype(dtype)


@register_compiled_kernel(lambda x, w, s: (x.reshape(1, 6, 1), 1, 6, "rfft"))
def fourier_along_dim(xp: Any, x: np.ndarray, dim: int, n: int, transform: str) -> np.ndarray:
    is_real = "r" in transform
    plan = _plan_passes(n, is_real, x.dtype.name)
    if plan is None:
        return plain.fourier_along_dim.fallback(xp, x, dim, n, transform)  # type: ignore[attr-defined]
    count, parts = (n // 2 + 1, 2) if transform == "rfft" else (n, 1 if is_real else 2)
    y = np.empty((*x.shape[:dim], count, *x.shape[dim + 1 : -1], parts), x.dtype)
    outer, inner = math.prod(x.shape[:dim]), math.prod(x.shape[dim + 1 : -1])
    flat = [a.reshape(outer, a.shape[dim], inner, a.shape[-1]) for a in (as_contiguous(x), y)]
    tiles = -(-outer * inner // (WIDE // x.itemsize))
    parallel_for_range(_transform_tiles, 0, tiles, *flat, is_real, int(transform[0] == "i"), *plan)
    return y


@jit
def _sum_rows_by_index(first, last, modes, index, weights, y):
    """Compute the rows `first` to `last` of y (rows, count). Neighboring modes may have the same index. They are added
    to two different partial sums, so that an addition need not wait until the previous addition has stored its
    result."""
    sums = np.zeros((2, y.shape[1]))
    for row in range(first, last):
        sums[:] = 0.0
        for i in range(index.size):
            re, im = np.float64(modes[row, i, 0]), np.float64(modes[row, i, 1])
            sums[i % 2, index[i]] += weights[i] * (re * re + im * im)
        for k in range(y.shape[1]):
            y[row, k] = sums[0, k] + sums[1, k]


@register_compiled_kernel(lambda x, w, s: (x.reshape(1, 3, 2), np.zeros(3, np.int64), x.reshape(-1)[:3].copy(), 1))
def sum_squares_by_index(xp: Any, modes: Any, index: np.ndarray, weights: Any, count: int) -> np.ndarray:
    rows, y = modes.shape[0], np.empty((modes.shape[0], count))
    flat = as_contiguous(modes).reshape(rows, index.size, 2), index.reshape(-1), as_contiguous(weights).reshape(-1)
    parallel_for_range(_sum_rows_by_index, 0, rows, *flat, y)
    return y
