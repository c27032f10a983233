"""Attention for bfloat16 arrays, computed in blocks of rows with the CPU instruction that multiplies pairs of bfloat16
numbers (VDPBF16PS from AVX512-BF16). Arrays in memory remain 16-bit.

As in `dot_product_attention`, softmax is computed on full rows, not online. Scores and sums are float32, and
probabilities are rounded to bfloat16 before they are multiplied. A word is a pair of bfloat16 numbers that are adjacent
along the summed dim. Each thread holds the keys and values of one head as words, and a few blocks of rows. A block is
passed as an address and strides in bytes. Blocks are padded with zeros, so that all loops run over full vectors.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from fsdpx.core.array.jit import REORDER, jit, specialize
from fsdpx.core.array.kernels.compiled.elements import dot_product, find_max_of_vector, round_to_dtype_of
from fsdpx.core.array.kernels.compiled.scalar import exp, use_widest_vectors
from fsdpx.core.array.lazy_numba import cgutils, intrinsic, ir, types
from fsdpx.core.base import environment
from fsdpx.core.base.processor import read_cpuinfo_field

__all__ = [
    "SIZE_MULTIPLE", "attention_backward_into", "attention_forward_into", "copy_bytes", "has_bf16_dot_instruction",
    "interleave_row_pairs", "multiply_bfloat16_into", "round_up_to_multiple", "transpose_number_pairs_into",
]  # fmt: skip

LANES = 16
SIZE_MULTIPLE = 2 * LANES
"""Tile sizes are multiples of this number."""
ROWS, VECTORS = 8, 2  # size, in rows and vectors, of a tile whose sums fit into registers
WORD, ADDRESS = ir.IntType(32), ir.IntType(64)
SUMS, WORDS, HALVES = (ir.VectorType(kind, LANES) for kind in (ir.FloatType(), WORD, ir.IntType(16)))


@functools.cache
def has_bf16_dot_instruction() -> bool:
    """Return whether the processor that Numba compiles for has the VDPBF16PS instruction."""
    return not environment.describe_compiler_target() and "avx512_bf16" in read_cpuinfo_field("flags").split()


@jit
def round_up_to_multiple(size):
    """Return `size` rounded up to a multiple of `SIZE_MULTIPLE`."""
    return (size + SIZE_MULTIPLE - 1) // SIZE_MULTIPLE * SIZE_MULTIPLE


@jit
def multiply_bfloat16_into(a, down, along, b, b_row, c, c_row, rows, columns, words, add):
    """Compute `c = a @ b`, or `c += a @ b` if `add` is true, for bfloat16 matrices a and b and a float32 matrix c. The
    matrices are passed as addresses.

    c is (rows, columns), a is (rows, words) with the strides `down` and `along`, and b is (words, columns). A word
    holds two numbers that are adjacent along the summed dim. `b_row` and `c_row` are the distances between rows of b
    and of c. All strides and distances are in bytes. `rows` is rounded up to a multiple of ROWS; `columns` must be a
    multiple of `SIZE_MULTIPLE`."""
    for j in range(0, columns, VECTORS * LANES):
        for i in range(0, rows, ROWS):
            _multiply_tile_into(a + i * down, down, along, b + 4 * j, b_row, c + i * c_row + 4 * j, c_row, words, add)


@jit
def interleave_row_pairs(x, row, rows, columns, out, out_row):
    """Interleave each pair of rows of x: each word of the result holds two numbers that are adjacent along dim 0. x and
    `out` are addresses, and `row` and `out_row` are the distances between their rows in bytes. Sizes are multiples of
    `SIZE_MULTIPLE`."""
    for i in range(0, rows, 2):
        for j in range(0, columns, LANES):
            _interleave_two_rows_into(x + i * row + 2 * j, row, out + i // 2 * out_row + 4 * j)


@jit
def transpose_number_pairs_into(x, row, rows, columns, out, out_row):
    """Transpose x, viewed as a matrix of words. Each word consists of two numbers that are adjacent along dim 1. x and
    `out` are addresses, and `row` and `out_row` are the distances between their rows in bytes. Sizes, counted in
    numbers, are multiples of `SIZE_MULTIPLE`."""
    for i in range(0, rows, LANES):
        for j in range(0, columns // 2, LANES):
            _transpose_tile_into(x + i * row + 4 * j, row, out + j * out_row + 4 * i, out_row)


@intrinsic
def copy_bytes(typingctx: Any, to: Any, source: Any, size: Any) -> Any:
    """Copy `size` bytes from the address `source` to the address `to`."""

    def emit_ir(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        to, source, size = arguments
        byte = ir.IntType(8).as_pointer()
        kind = ir.FunctionType(byte, [byte, byte, ADDRESS])
        function = builder.module.globals.get("memcpy") or ir.Function(builder.module, kind, "memcpy")
        builder.call(function, [builder.inttoptr(to, byte), builder.inttoptr(source, byte), size])
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64), emit_ir


@intrinsic
def _multiply_tile_into(typingctx: Any, a: Any, down: Any, along: Any, b: Any, b_row: Any, c: Any, c_row: Any,
          words: Any, add: Any) -> Any:  # fmt: skip
    """Compute one tile (ROWS rows by VECTORS vectors) of the result of `multiply_bfloat16_into`, with all sums in
    registers."""

    def emit_ir(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        a, down, along, b, b_row, c, c_row, words, add = arguments
        places = [_emit_vector_pointer(builder, SUMS, c, c_row, i, j) for i in range(ROWS) for j in range(VECTORS)]
        sums = [cgutils.alloca_once(builder, SUMS) for _ in places]
        for accumulator in sums:
            builder.store(ir.Constant(SUMS, [0.0] * LANES), accumulator)
        with builder.if_then(add):
            for accumulator, place in zip(sums, places, strict=True):
                builder.store(builder.load(place, align=4), accumulator)
        with cgutils.for_range(builder, words) as loop:
            first, second = (builder.add(x, builder.mul(loop.index, step)) for x, step in ((a, along), (b, b_row)))
            right = [
                builder.load(_emit_vector_pointer(builder, WORDS, second, b_row, 0, j), align=4) for j in range(VECTORS)
            ]
            for i in range(ROWS):
                word = builder.load(_emit_vector_pointer(builder, WORD, first, down, i), align=2)
                left = _emit_broadcast_word(builder, word)
                for accumulator, vector in zip(sums[i * VECTORS :], right, strict=False):
                    builder.store(_emit_dot_of_pairs(builder, builder.load(accumulator), left, vector), accumulator)
        for accumulator, place in zip(sums, places, strict=True):
            builder.store(builder.load(accumulator), place, align=4)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 8, types.boolean), emit_ir


@intrinsic
def _interleave_two_rows_into(typingctx: Any, x: Any, row: Any, out: Any) -> Any:
    """Interleave two rows of LANES numbers into one row of words. Word i holds the numbers i of both rows."""

    def emit_ir(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        x, row, out = arguments
        low, high = (
            builder.zext(builder.load(_emit_vector_pointer(builder, HALVES, x, row, i), align=2), WORDS)
            for i in range(2)
        )
        word = builder.or_(low, builder.shl(high, ir.Constant(WORDS, [16] * LANES)))
        builder.store(word, _emit_vector_pointer(builder, WORDS, out, row, 0), align=4)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 3), emit_ir


@intrinsic
def _transpose_tile_into(typingctx: Any, x: Any, row: Any, out: Any, out_row: Any) -> Any:
    """Transpose a tile of LANES x LANES words in registers, in log2(LANES) rounds. Each round exchanges parts between
    pairs of rows."""

    def emit_ir(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        x, row, out, out_row = arguments
        rows = [builder.load(_emit_vector_pointer(builder, WORDS, x, row, i), align=2) for i in range(LANES)]
        step = LANES // 2
        while step:
            for i in range(LANES):
                if not i & step:
                    row_register, other = rows[i], rows[i + step]
                    rows[i] = _emit_shuffle(
                        builder, row_register, other, [n + LANES - step if n & step else n for n in range(LANES)]
                    )
                    rows[i + step] = _emit_shuffle(
                        builder, row_register, other, [n + LANES if n & step else n + step for n in range(LANES)]
                    )
            step //= 2
        for i, value in enumerate(rows):
            builder.store(value, _emit_vector_pointer(builder, WORDS, out, out_row, i), align=4)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 4), emit_ir


def _emit_vector_pointer(builder: Any, vector_type: Any, base: Any, row: Any, i: int, vector: int = 0) -> Any:
    """Return a pointer to vector number `vector` of row i of the matrix at address `base`, whose rows are `row` bytes
    apart."""
    moved = builder.add(base, builder.mul(row, ADDRESS(i)))
    return builder.inttoptr(builder.add(moved, ADDRESS(4 * LANES * vector)), vector_type.as_pointer())


def _emit_broadcast_word(builder: Any, word: Any) -> Any:
    """Return a vector with `word` in every lane."""
    nothing = ir.Constant(WORDS, ir.Undefined)
    return _emit_shuffle(builder, builder.insert_element(nothing, word, WORD(0)), nothing, [0] * LANES)


def _emit_shuffle(builder: Any, first: Any, second: Any, lanes: list[int]) -> Any:
    return builder.shuffle_vector(first, second, ir.Constant(WORDS, lanes))


def _emit_dot_of_pairs(builder: Any, total: Any, left: Any, right: Any) -> Any:
    """In each lane, add the dot product of the number pairs in `left` and `right` to `total`."""
    name, pairs = "llvm.x86.avx512bf16.dpbf16ps.512", _make_bfloat_vector_type()
    kind = ir.FunctionType(SUMS, [SUMS, pairs, pairs])
    function = builder.module.globals.get(name) or ir.Function(builder.module, kind, name)
    return builder.call(function, [total, builder.bitcast(left, pairs), builder.bitcast(right, pairs)])


def _make_bfloat_vector_type() -> Any:
    """Return the LLVM type <32 x bfloat>, which llvmlite does not provide."""

    class Pairs(ir.Type):
        def _to_string(self) -> str:
            return f"<{2 * LANES} x bfloat>"

        def __eq__(self, other: object) -> bool:
            return str(self) == str(other)

        def __hash__(self) -> int:
            return hash(str(self))

    return Pairs()


BLOCK = 64
SINGLE = ("float32",)


@jit
def _scale_mask_and_find_row_max(x, scale, seen):
    """Multiply a row of scores x by `scale` in place, set all elements at index `seen` and above to -inf, and return
    the maximum."""
    for j in range(x.size):
        x[j] *= scale
    x[seen:] = -np.inf
    return find_max_of_vector(x)


@jit(fastmath=REORDER)
def _exponentiate_row_into_and_sum(x, top, p):
    """Write exp(x - top) to p, rounded to the dtype of p. Return the sum of the elements before rounding."""
    use_widest_vectors()
    result = np.float32(0)
    for j in range(x.size):
        e = exp(x[j] - top)
        p[j] = round_to_dtype_of(p, e)
        result += e
    return result


@jit
def _compute_row_probs_and_score_gradients(s, dp, scale, lse, along, p, ds, seen):
    """Compute a row of attention probabilities, `p = exp(s * scale - lse)`, and a row of score gradients,
    `ds = p * (dp - along) * scale`. Both are 0 at index `seen` and above. `along` is the dot product of the row's
    output and the gradient of this output."""
    use_widest_vectors()
    for j in range(p.size):
        e = exp(s[j] * scale - lse)
        p[j] = round_to_dtype_of(p, e)
        ds[j] = round_to_dtype_of(ds, e * (dp[j] - along) * scale)
    p[seen:] = 0
    ds[seen:] = 0


@jit
def _copy_head_rows_into(x, b, h, start, stop, out):
    """Copy the rows [start, stop) of sample b and head h to the first columns of `out`."""
    address = x.ctypes.data + b * x.strides[0] + h * x.strides[1]
    for t in range(start, stop):
        copy_bytes(out.ctypes.data + (t - start) * out.strides[0], address + t * x.strides[2], 2 * x.shape[3])


@jit
def _write_scaled_head_rows(out, b, h, start, stop, x, factors, block):
    """Multiply row i of x by `factors[i]`, round the products in the buffer `block`, and write them to the rows [start,
    stop) of sample b and head h in `out`."""
    for i in range(factors.size):
        for j in range(x.shape[1]):
            block[i, j] = round_to_dtype_of(block, x[i, j] * factors[i])
    address = out.ctypes.data + b * out.strides[0] + h * out.strides[1]
    for t in range(start, stop):
        copy_bytes(address + t * out.strides[2], block.ctypes.data + (t - start) * block.strides[0], 2 * out.shape[3])


@jit
def _attention_forward_into(q, k, v, o, lse, factor, causal, first, last):
    """Compute the attention outputs o and the log-sum-exps lse of the (sample, head) pairs numbered [first, last).
    Scores are multiplied by `factor`."""
    heads, time, full, scale = q.shape[1], q.shape[2], k.shape[2], factor[0]
    width, length, group = round_up_to_multiple(q.shape[3]), round_up_to_multiple(full), q.shape[1] // k.shape[1]
    plain, block = np.zeros((length, width), np.uint16), np.zeros((BLOCK, width), np.uint16)
    keys, values = np.empty((width // 2, length), np.uint32), np.empty((length // 2, width), np.uint32)
    s, p = np.empty((BLOCK, length), np.float32), np.zeros((BLOCK, length), np.uint16)
    sums, shares = np.empty((BLOCK, width), np.float32), np.empty(BLOCK, np.float32)
    for pair in range(first, last):
        b, h = pair // heads, pair % heads
        _copy_head_rows_into(k, b, h // group, 0, full, plain)
        transpose_number_pairs_into(plain.ctypes.data, 2 * width, length, width, keys.ctypes.data, 4 * length)
        _copy_head_rows_into(v, b, h // group, 0, full, plain)
        interleave_row_pairs(plain.ctypes.data, 2 * width, length, width, values.ctypes.data, 4 * width)
        for start in range(0, time, BLOCK):
            stop = min(start + BLOCK, time)
            rows, there = stop - start, round_up_to_multiple(min(stop, full)) if causal else length
            _copy_head_rows_into(q, b, h, start, stop, block)
            multiply_bfloat16_into(block.ctypes.data, 2 * width, 4, keys.ctypes.data, 4 * length,
                     s.ctypes.data, 4 * length, rows, there, width // 2, False)  # fmt: skip
            for i in range(rows):
                top = _scale_mask_and_find_row_max(s[i, :there], scale, start + i + 1 if causal else full)
                total = _exponentiate_row_into_and_sum(s[i, :there], top, p[i, :there])
                shares[i] = np.float32(1) / total
                lse[b, h, start + i] = top + np.log(total)
            multiply_bfloat16_into(p.ctypes.data, 2 * length, 4, values.ctypes.data, 4 * width,
                     sums.ctypes.data, 4 * width, rows, width, there // 2, False)  # fmt: skip
            _write_scaled_head_rows(o, b, h, start, stop, sums, shares[:rows], block)


@jit
def _attention_backward_into(q, k, v, o, lse, do, dq, dk, dv, factor, causal, first, last):
    """Compute the gradients dq, dk and dv of the (sample, key head) pairs numbered [first, last).

    The last block of rows attends to all keys, so it runs first and initializes dk and dv. The other blocks and query
    heads then add to them.
    """
    shared, time, full, scale = k.shape[1], q.shape[2], k.shape[2], factor[0]
    width, length, group = round_up_to_multiple(q.shape[3]), round_up_to_multiple(full), q.shape[1] // k.shape[1]
    plain, ones = np.zeros((length, width), np.uint16), np.ones(length, np.float32)
    keys, values = np.empty((width // 2, length), np.uint32), np.empty((width // 2, length), np.uint32)
    # `dq = ds @ k` sums over keys, and the dot instruction sums adjacent pairs of numbers, so adjacent keys are
    # interleaved
    ways = np.empty((length // 2, width), np.uint32)
    blocks, scores = np.zeros((3, BLOCK, width), np.uint16), np.empty((2, BLOCK, length), np.float32)
    factors, words = np.zeros((2, BLOCK, length), np.uint16), np.empty((2, BLOCK // 2, width), np.uint32)
    # arrays are indexed one by one, because Numba does not know that unpacked arrays are contiguous
    queries, slopes, results = blocks[0], blocks[1], blocks[2]
    s, dp, p, ds = scores[0], scores[1], factors[0], factors[1]
    seen_words, sums = np.empty((2, BLOCK // 2, length), np.uint32), np.empty((2, length, width), np.float32)
    sums_q = np.empty((BLOCK, width), np.float32)
    for pair in range(first, last):
        b, g = pair // shared, pair % shared
        _copy_head_rows_into(v, b, g, 0, full, plain)
        transpose_number_pairs_into(plain.ctypes.data, 2 * width, length, width, values.ctypes.data, 4 * length)
        _copy_head_rows_into(k, b, g, 0, full, plain)
        transpose_number_pairs_into(plain.ctypes.data, 2 * width, length, width, keys.ctypes.data, 4 * length)
        interleave_row_pairs(plain.ctypes.data, 2 * width, length, width, ways.ctypes.data, 4 * width)
        end = (time - 1) // BLOCK * BLOCK
        for h in range(g * group, (g + 1) * group):
            for start in range(end, -1, -BLOCK):
                stop = min(start + BLOCK, time)
                rows, there = stop - start, round_up_to_multiple(stop) if causal else length
                even = (rows + 1) // 2 * 2
                _copy_head_rows_into(q, b, h, start, stop, queries)
                _copy_head_rows_into(do, b, h, start, stop, slopes)
                _copy_head_rows_into(o, b, h, start, stop, results)
                for rest in (queries, slopes, p, ds):
                    rest[rows:even] = 0
                multiply_bfloat16_into(queries.ctypes.data, 2 * width, 4, keys.ctypes.data, 4 * length,
                         s.ctypes.data, 4 * length, rows, there, width // 2, False)  # fmt: skip
                multiply_bfloat16_into(slopes.ctypes.data, 2 * width, 4, values.ctypes.data, 4 * length,
                         dp.ctypes.data, 4 * length, rows, there, width // 2, False)  # fmt: skip
                for i in range(rows):
                    along, seen = dot_product(slopes[i], results[i]), start + i + 1 if causal else full
                    _compute_row_probs_and_score_gradients(
                        s[i], dp[i], scale, lse[b, h, start + i], along, p[i, :there], ds[i, :there], seen
                    )
                multiply_bfloat16_into(ds.ctypes.data, 2 * length, 4, ways.ctypes.data, 4 * width,
                         sums_q.ctypes.data, 4 * width, rows, width, there // 2, False)  # fmt: skip
                _write_scaled_head_rows(dq, b, h, start, stop, sums_q, ones[:rows], results)
                more = start < end or h > g * group
                for n, (left, right) in enumerate(((ds, queries), (p, slopes))):
                    interleave_row_pairs(
                        left.ctypes.data, 2 * length, even, there, seen_words[n].ctypes.data, 4 * length
                    )
                    interleave_row_pairs(right.ctypes.data, 2 * width, even, width, words[n].ctypes.data, 4 * width)
                    multiply_bfloat16_into(seen_words[n].ctypes.data, 4, 4 * length, words[n].ctypes.data, 4 * width,
                             sums[n].ctypes.data, 4 * width, there, width, even // 2, more)  # fmt: skip
        _write_scaled_head_rows(dk, b, g, 0, full, sums[0], ones[:full], plain)
        _write_scaled_head_rows(dv, b, g, 0, full, sums[1], ones[:full], plain)
        plain[:] = 0


FORWARD = "A4hr A4hr A4hr A4h C3 C1r b i i"
BACKWARD = "A4hr A4hr A4hr A4hr C3r A4hr A4h A4h A4h C1r b i i"


def attention_forward_into(*arguments: Any) -> None:
    """Compute attention outputs for a range of (sample, head) pairs. Arguments: q, k, v, o, lse, factor, causal,
    first, last."""
    specialize(_attention_forward_into, FORWARD, SINGLE)(*arguments)


def attention_backward_into(*arguments: Any) -> None:
    """Compute attention gradients for a range of (sample, key head) pairs. Arguments: q, k, v, o, lse, do, dq, dk, dv,
    factor, causal, first, last."""
    specialize(_attention_backward_into, BACKWARD, SINGLE)(*arguments)
