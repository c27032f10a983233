"""Products of bfloat16 tiles that stay in cache, by the instruction that multiplies pairs (VDPBF16PS, AVX512-BF16).

A word is two numbers that follow each other along the dim that is summed. Tiles are addresses and distances in bytes;
their sizes are padded with zeros, so that nothing has a tail."""

import functools
from typing import Any

from fsdpx import environment
from fsdpx.native.compiled import jit
from fsdpx.native.late import cgutils, intrinsic, ir, types
from fsdpx.native.processor import cpuinfo

__all__ = ["GRAIN", "available", "copy", "multiply", "padded", "turned", "woven"]

LANES = 16
GRAIN = 2 * LANES
"""What all sizes are multiples of."""
ROWS, VECTORS = 8, 2  # of the tile whose sums are kept in registers
WORD, ADDRESS = ir.IntType(32), ir.IntType(64)
SUMS, WORDS, HALVES = (ir.VectorType(kind, LANES) for kind in (ir.FloatType(), WORD, ir.IntType(16)))


@functools.cache
def available() -> bool:
    """Whether Numba compiles for a processor that has the instruction."""
    return not environment.compiler() and "avx512_bf16" in cpuinfo("flags").split()


@jit
def padded(size):
    """The next multiple of GRAIN."""
    return (size + GRAIN - 1) // GRAIN * GRAIN


@jit
def multiply(a, down, along, b, b_row, c, c_row, rows, columns, words, add):
    """c (+)= a b: float32 c (rows, columns) and b (words, columns of words) by rows, a in steps of `down` and `along`.

    rows: rounded up to ROWS; columns: a multiple of GRAIN."""
    for j in range(0, columns, VECTORS * LANES):
        for i in range(0, rows, ROWS):
            _tile(a + i * down, down, along, b + 4 * j, b_row, c + i * c_row + 4 * j, c_row, words, add)


@jit
def woven(x, row, rows, columns, out, out_row):
    """Rows of numbers as half as many rows of words: pairs along dim 0. Sizes are multiples of GRAIN."""
    for i in range(0, rows, 2):
        for j in range(0, columns, LANES):
            _weave(x + i * row + 2 * j, row, out + i // 2 * out_row + 4 * j)


@jit
def turned(x, row, rows, columns, out, out_row):
    """Rows of words, pairs along dim 1, as columns of words. Sizes, in numbers, are multiples of GRAIN."""
    for i in range(0, rows, LANES):
        for j in range(0, columns // 2, LANES):
            _turn(x + i * row + 4 * j, row, out + j * out_row + 4 * i, out_row)


@intrinsic
def copy(typingctx: Any, to: Any, source: Any, size: Any) -> Any:
    """Bytes from one address to another."""

    def code(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        to, source, size = arguments
        byte = ir.IntType(8).as_pointer()
        kind = ir.FunctionType(byte, [byte, byte, ADDRESS])
        function = builder.module.globals.get("memcpy") or ir.Function(builder.module, kind, "memcpy")
        builder.call(function, [builder.inttoptr(to, byte), builder.inttoptr(source, byte), size])
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64), code


@intrinsic
def _tile(typingctx: Any, a: Any, down: Any, along: Any, b: Any, b_row: Any, c: Any, c_row: Any, words: Any,
          add: Any) -> Any:  # fmt: skip
    """`multiply` of ROWS rows and VECTORS vectors, with all sums in registers."""

    def code(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        a, down, along, b, b_row, c, c_row, words, add = arguments
        places = [_at(builder, SUMS, c, c_row, i, j) for i in range(ROWS) for j in range(VECTORS)]
        sums = [cgutils.alloca_once(builder, SUMS) for _ in places]
        for at in sums:
            builder.store(ir.Constant(SUMS, [0.0] * LANES), at)
        with builder.if_then(add):
            for at, place in zip(sums, places, strict=True):
                builder.store(builder.load(place, align=4), at)
        with cgutils.for_range(builder, words) as loop:
            first, second = (builder.add(x, builder.mul(loop.index, step)) for x, step in ((a, along), (b, b_row)))
            right = [builder.load(_at(builder, WORDS, second, b_row, 0, j), align=4) for j in range(VECTORS)]
            for i in range(ROWS):
                left = _spread(builder, builder.load(_at(builder, WORD, first, down, i), align=2))
                for at, vector in zip(sums[i * VECTORS :], right, strict=False):
                    builder.store(_dot(builder, builder.load(at), left, vector), at)
        for at, place in zip(sums, places, strict=True):
            builder.store(builder.load(at), place, align=4)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 8, types.boolean), code


@intrinsic
def _weave(typingctx: Any, x: Any, row: Any, out: Any) -> Any:
    """Two rows of LANES numbers as one of words."""

    def code(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        x, row, out = arguments
        low, high = (builder.zext(builder.load(_at(builder, HALVES, x, row, i), align=2), WORDS) for i in range(2))
        word = builder.or_(low, builder.shl(high, ir.Constant(WORDS, [16] * LANES)))
        builder.store(word, _at(builder, WORDS, out, row, 0), align=4)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 3), code


@intrinsic
def _turn(typingctx: Any, x: Any, row: Any, out: Any, out_row: Any) -> Any:
    """LANES x LANES words, rows to columns: log2(LANES) times, pairs of rows exchange every second part of theirs."""

    def code(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        x, row, out, out_row = arguments
        rows = [builder.load(_at(builder, WORDS, x, row, i), align=2) for i in range(LANES)]
        step = LANES // 2
        while step:
            for i in range(LANES):
                if not i & step:
                    one, other = rows[i], rows[i + step]
                    rows[i] = _mixed(builder, one, other, [n + LANES - step if n & step else n for n in range(LANES)])
                    rows[i + step] = _mixed(
                        builder, one, other, [n + LANES if n & step else n + step for n in range(LANES)]
                    )
            step //= 2
        for i, value in enumerate(rows):
            builder.store(value, _at(builder, WORDS, out, out_row, i), align=4)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 4), code


def _at(builder: Any, kind: Any, base: Any, row: Any, i: int, vector: int = 0) -> Any:
    """A pointer to a vector of row i."""
    moved = builder.add(base, builder.mul(row, ADDRESS(i)))
    return builder.inttoptr(builder.add(moved, ADDRESS(4 * LANES * vector)), kind.as_pointer())


def _spread(builder: Any, word: Any) -> Any:
    """A word in every lane."""
    nothing = ir.Constant(WORDS, ir.Undefined)
    return _mixed(builder, builder.insert_element(nothing, word, WORD(0)), nothing, [0] * LANES)


def _mixed(builder: Any, one: Any, other: Any, lanes: list[int]) -> Any:
    return builder.shuffle_vector(one, other, ir.Constant(WORDS, lanes))


def _dot(builder: Any, total: Any, left: Any, right: Any) -> Any:
    """total + the products of both numbers of each word."""
    name, pairs = "llvm.x86.avx512bf16.dpbf16ps.512", _pairs()
    kind = ir.FunctionType(SUMS, [SUMS, pairs, pairs])
    function = builder.module.globals.get(name) or ir.Function(builder.module, kind, name)
    return builder.call(function, [total, builder.bitcast(left, pairs), builder.bitcast(right, pairs)])


def _pairs() -> Any:
    """LLVM's <32 x bfloat>, which llvmlite has no name for."""

    class Pairs(ir.Type):
        def _to_string(self) -> str:
            return f"<{2 * LANES} x bfloat>"

        def __eq__(self, other: object) -> bool:
            return str(self) == str(other)

        def __hash__(self) -> int:
            return hash(str(self))

    return Pairs()
