"""Compiled code for spectra, and for fast Fourier transforms along one dim. Lines whose length has a prime factor above
7, and real lines of odd length, are left to NumPy.

The lines of a tile are copied into an array in which they are interleaved, so that each lane of a vector register holds
one line. Each pass over a tile splits all transforms into transforms of a smaller length (Stockham's algorithm, see Van
Loan 1992). A real line is transformed as a complex line of half the length. Its real parts are the numbers at even
positions of the real line, and its imaginary parts are the numbers at odd positions. An inverse transform is computed
as a forward transform, with real and imaginary parts swapped before and after it. No line affects another."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache, partial, reduce
from typing import Any

import numpy as np

from fsdpx.core.array.jit import jit
from fsdpx.core.array.kernels.choice import register_compiled_kernel
from fsdpx.core.array.kernels.compiled.elements import as_contiguous, prefetch_array_at_byte_offset, prefetch_line
from fsdpx.core.array.kernels.compiled.scalar import use_widest_vectors
from fsdpx.core.array.lazy_numba import cgutils, intrinsic, ir, register_jitable, types
from fsdpx.core.array.parallel import parallel_for_range
from fsdpx.ext.fields.kernels import fourier as plain
from fsdpx.ext.fields.kernels.compiled.direct import (
    NARROW,
    WIDE,
    emit_as_noinline_function,
    emit_load,
    emit_pointer_cast,
    get_vector_type_and_itemsize,
)

__all__ = ["fourier_along_dim", "sum_squares_by_index"]

RADICES = (4, 2, 3, 5, 7)
"""Factors of the length of a transform. The passes of a transform use them in this order."""
FLAGS = ("contract",)

Complex = tuple[Any, Any]
"""The real and imaginary parts of one complex number per lane."""


def _emit_sum(builder: Any, a: Complex, b: Complex, signs: str = "++") -> Complex:
    """Emit LLVM code that adds two complex numbers. `signs` are the signs with which the real and the imaginary part of
    b are added."""
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


@intrinsic
def _run_pass(typingctx: Any, like: Any, radix: Any, x: Any, y: Any, factors: Any, left: Any, done: Any) -> Any:
    """Run `left` x `done` transforms, each of `radix` points. Transform (p, q), with p < left and q < done, reads
    points (j left + p) done + q of the tile x, for j < radix, and writes points (p radix + j) done + q of the tile y.
    For j > 0, result j is multiplied by the complex factor with index (p, j - 1).

    A point is two vectors of WIDE bytes, the real and the imaginary parts of all lines. x, y and `factors` are
    addresses."""

    def emit_ir(context: Any, builder: Any, signature: Any, arguments: Any) -> None:
        like, chosen, x, y, factors, left, done = arguments
        vector, word = get_vector_type_and_itemsize(like, WIDE)
        number, y_step = done.type, builder.mul(done, done.type(2 * WIDE))
        x_step = builder.mul(left, y_step)
        for radix in RADICES:
            with (
                builder.if_then(builder.icmp_signed("==", chosen, number(radix))),
                cgutils.for_range(builder, left) as outer,
            ):
                base = builder.add(factors, builder.mul(outer.index, number(2 * (radix - 1) * word)))
                rows = [emit_load(builder, like.type, base, number(word), n) for n in range(2 * (radix - 1))]
                rows = [_emit_splat(builder, row, vector) for row in rows]
                begin = builder.mul(outer.index, y_step)
                with cgutils.for_range(builder, done) as loop:
                    offset = builder.mul(loop.index, number(2 * WIDE))
                    at = builder.add(builder.add(x, begin), offset)
                    to = builder.add(builder.add(y, builder.mul(begin, number(radix))), offset)
                    places = [builder.add(at, builder.mul(x_step, number(j))) for j in range(radix)]
                    points = [_emit_load_point(builder, like, place, number(0)) for place in places]
                    for j, point in enumerate(_emit_small_transform(builder, points)):
                        found = _emit_product(builder, point, (rows[2 * j - 2], rows[2 * j - 1])) if j else point
                        _emit_store_point(builder, found, builder.add(to, builder.mul(y_step, number(j))), number(0))

    return types.void(like, *[types.int64] * 6), emit_as_noinline_function(emit_ir)


def _emit_splat(builder: Any, number: Any, vector: Any) -> Any:
    """Emit LLVM code that copies a number into all lanes of a vector."""
    none, index = ir.Constant(vector, ir.Undefined), ir.IntType(32)
    zeros = ir.Constant(ir.VectorType(index, vector.count), [0] * vector.count)
    return builder.shuffle_vector(builder.insert_element(none, number, index(0)), none, zeros)


def _emit_load_point(builder: Any, like: Any, at: Any, swap: Any) -> Complex:
    """Emit LLVM code that loads a point of a tile. `swap` is WIDE if the imaginary parts are stored before the real
    parts, otherwise 0."""
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
    """Convert the transforms of complex lines to modes 1 to points - 1 of the real lines that are packed in them, in
    place. `_copy_lines` describes the packing. `turns` holds the cosine and sine of the angle pi k / points for each
    mode k. If the cosines are negated, convert the modes of real lines back to transforms of complex lines. Addresses
    are in bytes, and `swap` is as in `_emit_load_point`."""

    def emit_ir(context: Any, builder: Any, signature: Any, arguments: Any) -> None:
        like, tile, points, swap, turns = arguments
        _, word = get_vector_type_and_itemsize(like, WIDE)
        with cgutils.for_range(builder, builder.udiv(points, points.type(2))) as loop:
            k = builder.add(loop.index, points.type(1))
            at, mirror = (builder.add(tile, builder.mul(n, n.type(2 * WIDE))) for n in (k, builder.sub(points, k)))
            (re, im), (re2, im2) = (_emit_load_point(builder, like, place, swap) for place in (at, mirror))
            base = builder.add(turns, builder.mul(k, k.type(2 * word)))
            turn = [emit_load(builder, like.type, base, base.type(word), part) for part in (0, 1)]
            cosine, sine = (_emit_splat(builder, part, re.type) for part in turn)
            # (b + i a) (c + i s), where a is the difference of the real parts and b the sum of the imaginary parts
            product = _emit_product(builder, (builder.fadd(im, im2), builder.fsub(re, re2)), (cosine, sine))
            total = builder.fadd(re, re2), builder.fsub(im, im2)
            opposite = total[0], builder.fneg(total[1])
            for place, pair, signs in ((at, total, "+-"), (mirror, opposite, "--")):
                point = _emit_sum(builder, pair, product, signs)
                _emit_store_point(builder, _emit_scaled(builder, point, 0.5), place, swap)

    return types.void(like, *[types.int64] * 4), emit_as_noinline_function(emit_ir)


@register_jitable
def _transform_tile(tiles, points, radices, factors):
    """Transform tiles[0], (points, real and imaginary part, lines), and return the tile that holds the result, which is
    one of `tiles`. The other tile is overwritten."""
    like, x, y, at = tiles.dtype.type(0), tiles[0].ctypes.data, tiles[1].ctypes.data, factors.ctypes.data
    done, left = 1, points
    for radix in radices:
        left //= radix
        _run_pass(like, radix, x, y, at, left, done)
        at += left * 2 * (radix - 1) * tiles.itemsize
        done *= radix
        x, y = y, x
    return tiles[len(radices) % 2]


def _emit_mask(builder: Any, bits: int, numbers: Sequence[int], first: Any, count: Any) -> Any:
    """Emit LLVM code for a vector of booleans that tells which of `numbers` lie in the range [first, first + count).
    The mask is for lanes of `bits` bits."""
    vector, wide = ir.VectorType(ir.IntType(bits), len(numbers)), bits == first.type.width
    bounds = [bound if wide else builder.trunc(bound, vector.element) for bound in (first, builder.add(first, count))]
    low, high = (_emit_splat(builder, bound, vector) for bound in bounds)
    lanes = ir.Constant(vector, list(numbers))
    return builder.and_(builder.icmp_signed(">=", lanes, low), builder.icmp_signed("<", lanes, high))


def _emit_masked(builder: Any, operation: str, row: Any, at: Any, mask: Any) -> Any:
    """Emit LLVM code that stores the lanes of `row` whose mask is true at an address. If `operation` is "load" instead
    of "store", load these lanes from the address, and the others from `row`."""
    place, align, loads = emit_pointer_cast(builder, row.type, at), ir.IntType(32)(4), operation == "load"
    arguments = [place, align, mask, row] if loads else [row, place, align, mask]
    kind = ir.FunctionType(row.type if loads else ir.VoidType(), [a.type for a in arguments])
    name = f"llvm.masked.{operation}.v{row.type.count}{row.type.element.intrinsic_name}.p0"
    return builder.call(cgutils.get_or_insert_function(builder.module, kind, name), arguments)


def _emit_shuffled(builder: Any, a: Any, b: Any, interleaves: bool) -> list[Any]:
    """Emit LLVM code for two vectors that together hold a[0], b[0], a[1], b[1] and so on. If `interleaves` is False,
    undo this."""
    count = a.type.count
    order = [n for lane in range(count) for n in (lane, lane + count)]
    order = order if interleaves else [*range(0, 2 * count, 2), *range(1, 2 * count, 2)]
    kind = ir.VectorType(ir.IntType(32), count)
    return [builder.shuffle_vector(a, b, ir.Constant(kind, half)) for half in (order[:count], order[count:])]


@intrinsic
def _copy_contiguous_lines(typingctx: Any, line: Any, step: Any, valid: Any, numbers: Any, tile: Any, swap: Any,
                           reads: Any, scale: Any) -> Any:  # fmt: skip
    """Copy `valid` lines into a tile. Each line consists of `numbers` contiguous numbers, and lines are `step` bytes
    apart. If `reads` is False, copy the tile into the lines instead, multiplied by `scale`. Square blocks are
    transposed in registers, as in `transpose_pixels_into`. Lanes without a line contain copies of the last line. `swap`
    is as in `_emit_load_point`."""

    def emit_ir(context: Any, builder: Any, signature: Any, arguments: Any) -> None:
        line, step, valid, numbers, tile, swap, reads, scale = arguments
        vector, word = get_vector_type_and_itemsize(scale, NARROW)
        size, number, last = vector.count, step.type, builder.sub(valid, step.type(1))
        zeros, many = ir.Constant(vector, None), _emit_splat(builder, scale, vector)

        def emit_transpose(rows: list[Any]) -> list[Any]:
            for _ in range(size.bit_length() - 1):
                pairs = zip(rows[: size // 2], rows[size // 2 :], strict=True)
                rows = [row for a, b in pairs for row in _emit_shuffled(builder, a, b, True)]
            return rows

        blocks = cgutils.for_range_slice(builder, number(0), numbers, number(size))
        with blocks as (first, _), cgutils.for_range(builder, number(WIDE // NARROW)) as group:
            mask = _emit_mask(builder, 8 * word, range(size), number(0), builder.sub(numbers, first))
            begin, lane = builder.mul(first, number(word)), builder.mul(group.index, number(size))
            lanes = [builder.add(lane, number(n)) for n in range(size)]
            lanes = [builder.select(builder.icmp_signed("<", last, n), last, n) for n in lanes]
            places = [builder.add(builder.add(line, begin), builder.mul(n, step)) for n in lanes]
            to = builder.add(builder.add(tile, builder.mul(first, number(WIDE))), builder.mul(lane, number(word)))
            bases = builder.add(to, swap), builder.sub(to, swap)
            parts = [builder.add(bases[n % 2], number(n * WIDE)) for n in range(size)]
            with builder.if_else(reads) as (then, otherwise):
                with then:
                    rows = emit_transpose([_emit_masked(builder, "load", zeros, at, mask) for at in places])
                    for row, at in zip(rows, parts, strict=True):
                        builder.store(row, emit_pointer_cast(builder, vector, at), align=word)
                with otherwise:
                    rows = [emit_load(builder, vector, at, None, 0) for at in parts]
                    rows = emit_transpose([builder.fmul(row, many) for row in rows])
                    for row, at in zip(rows, places, strict=True):
                        _emit_masked(builder, "store", row, at, mask)

    return types.void(*[types.int64] * 6, types.boolean, scale), emit_as_noinline_function(emit_ir)


@intrinsic
def _copy_adjacent_lines(typingctx: Any, row: Any, step: Any, lane: Any, count: Any, points: Any, tile: Any, swap: Any,
                         reads: Any, scale: Any) -> Any:  # fmt: skip
    """Copy `count` complex lines of `points` points into a tile, starting at lane `lane`. If `reads` is False, copy
    these lanes of the tile into the lines instead, multiplied by `scale`. `swap` is as in `_copy_contiguous_lines`. Row
    i in memory holds point i of all lines contiguously, and rows are `step` bytes apart."""

    def emit_ir(context: Any, builder: Any, signature: Any, arguments: Any) -> None:
        row, step, lane, count, points, tile, swap, reads, scale = arguments
        vector, word = get_vector_type_and_itemsize(scale, WIDE)
        lanes, number, many = vector.count, step.type, _emit_splat(builder, scale, vector)
        zeros = ir.Constant(vector, None)
        numbers = range(lanes), [n // 2 for n in range(lanes)], [n // 2 for n in range(lanes, 2 * lanes)]
        mask, *halves = (_emit_mask(builder, 8 * word, n, lane, count) for n in numbers)
        row = builder.sub(row, builder.mul(lane, number(2 * word)))
        with cgutils.for_range(builder, points) as loop:
            at = builder.add(tile, builder.mul(loop.index, number(2 * WIDE)))
            place = builder.add(row, builder.mul(loop.index, step))
            places, point = (place, builder.add(place, number(WIDE))), _emit_load_point(builder, scale, at, swap)
            with builder.if_else(reads) as (then, otherwise):
                with then:
                    low, high = [_emit_masked(builder, "load", zeros, *p) for p in zip(places, halves, strict=True)]
                    found = _emit_shuffled(builder, low, high, False)
                    re, im = (builder.select(mask, *both) for both in zip(found, point, strict=True))
                    _emit_store_point(builder, (re, im), at, swap)
                with otherwise:
                    rows = _emit_shuffled(builder, builder.fmul(point[0], many), builder.fmul(point[1], many), True)
                    for p in zip(rows, places, halves, strict=True):
                        _emit_masked(builder, "store", *p)

    return types.void(*[types.int64] * 7, types.boolean, scale), emit_as_noinline_function(emit_ir)


@jit
def _transform_tiles(first, last, x, y, real, inverse, radices, factors, turns):
    """Transform the lines of x in the tiles `first` to `last`, and write the results to y. Both x and y are (outer,
    elements, inner, parts), and a line runs along dim 1. The last dim holds one part for real numbers, and two for
    complex numbers. `real` says whether one of x and y is real; inner is then 1."""
    use_widest_vectors()
    n, inner, lanes = max(x.shape[1], y.shape[1]), x.shape[2], WIDE // x.itemsize
    points = n // 2 if real else n
    # padded, because contiguous lines are copied in whole blocks
    tiles = np.zeros((2, points + lanes // 2, 2, lanes), x.dtype)
    scale = x.dtype.type(1.0 / points if inverse else 1.0)
    for begin in range(first * lanes, min(last * lanes, x.shape[0] * inner), lanes):
        valid = min(lanes, x.shape[0] * inner - begin)
        _copy_lines(x, tiles[0], points, begin, valid, inverse, True, scale)
        if real and inverse:
            _untangle_modes_of_packed_real_lines(tiles[0], points, inverse, turns)
        found = _transform_tile(tiles, points, radices, factors)
        if real and not inverse:
            _untangle_modes_of_packed_real_lines(found, points, inverse, turns)
        _copy_lines(y, found, points, begin, valid, inverse, False, scale)


@register_jitable
def _copy_lines(x, tile, points, begin, valid, inverse, reads, scale):
    """Copy `valid` lines of x, starting at line `begin`, into a tile. If `reads` is False, copy the tile into these
    lines instead, multiplied by `scale`. For an inverse transform, real and imaginary parts are swapped.

    In a real line, the numbers at even positions become real parts, and those at odd positions become imaginary parts.
    The last mode is real, like the first mode, and is stored as the imaginary part of the first mode."""
    elements, inner, parts, word = x.shape[1], x.shape[2], x.shape[3], x.itemsize
    row, to, swap, lane = inner * parts * word, tile.ctypes.data, inverse * WIDE, 0
    if inner == 1:
        line, step = x.ctypes.data + begin * elements * row, elements * row
        prefetch_array_at_byte_offset(x[begin : begin + valid], tile.shape[2] * step)
        _copy_contiguous_lines(line, step, valid, min(elements * parts, 2 * points), to, swap, reads, scale)
        for t in range(tile.shape[2] if elements * parts > 2 * points else 0):
            modes = x[begin + min(t, valid - 1), :, 0]
            if reads:
                tile[0, 1 - inverse, t] = modes[points, 0]
            else:
                modes[0, 1], modes[points, 0], modes[points, 1] = 0, tile[0, 1 - inverse, t], 0
    while inner > 1 and lane < valid:  # lines with the same index along dim 0 are adjacent in memory
        outer, j = (begin + lane) // inner, (begin + lane) % inner
        count, place = min(valid - lane, inner - j), x.ctypes.data + outer * elements * row + j * parts * word
        for ahead in range(place + 2 * WIDE, place + 2 * WIDE + points * row, row):  # the next tile
            prefetch_line(ahead)
            prefetch_line(ahead + WIDE)
        _copy_adjacent_lines(place, row, lane, count, points, to, swap, reads, scale)
        lane += count


@register_jitable
def _untangle_modes_of_packed_real_lines(tile, points, inverse, turns):
    """Convert the transforms of complex lines to the modes of real lines, in place. If `inverse`, convert the modes
    back to transforms. The complex lines were made from the real lines as in `_copy_lines`. Modes 0 and n / 2 are
    real, and are stored together as the first point."""
    like, factor = tile.dtype.type(0), tile.dtype.type(0.5 if inverse else 1.0)
    for t in range(tile.shape[2]):
        first, last = tile[0, inverse, t], tile[0, 1 - inverse, t]
        tile[0, inverse, t], tile[0, 1 - inverse, t] = factor * (first + last), factor * (first - last)
    _untangle_halves(like, tile.ctypes.data, points, inverse * WIDE, turns[inverse].ctypes.data)


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
    if is_real and math.prod(x.shape[dim + 1 : -1]) != 1:
        y = fourier_along_dim(xp, np.moveaxis(x, dim, -2), x.ndim - 2, n, transform)
        return np.ascontiguousarray(np.moveaxis(y, -2, dim))
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
    to two different partial sums, so that no addition has to wait until the previous one has stored its result."""
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
