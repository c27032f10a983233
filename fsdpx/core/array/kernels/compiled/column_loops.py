"""Loops over the rows of matrices. A loop either sums each column over a range of rows, or computes a matrix element by
element. Per-column values stay in vector registers during the loop."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fsdpx.core.array.lazy_numba import cgutils, intrinsic, ir, register_jitable, types

__all__ = ["make_column_loop", "sum_block", "sum_block_gradients", "sum_block_squares"]

WIDE, NARROW, UNROLLED = 64, 32, 4
"""WIDE, NARROW: sizes of vectors in bytes. UNROLLED: number of WIDE vectors that are processed together."""

Formula = Callable[[Any, list[Any], list[Any]], list[Any]]
"""Function (builder, matrix elements, per-column values) that emits code for one position (row, column) of the
matrices. It returns the LLVM values of the results of this code."""


def make_column_loop(formula: Formula, writes: bool) -> Any:
    """Return a compiled function `loop(matrices, first, last, start, stop, values, sums)` for the rows from `first` to
    `last` and the columns from `start` to `stop` of matrices.

    If `writes` is true, the formula computes each element of the last matrix from the elements of the other matrices at
    the same position. If `writes` is false, the formula computes one or more terms for each position. The loop sums
    term k over the rows of column j, and writes the sum to `sums[k][j - start]`. The formula may use per-column values:
    value k of column j is `values[k][j - start]`. Results are bitwise equal for any `start` and `stop`."""
    unrolled, wide, narrow, single = (
        _make_loop_over_simd_columns(formula, writes, *size)
        for size in ((WIDE, UNROLLED), (WIDE, 1), (NARROW, 1), (0, 1))
    )

    @register_jitable
    def loop(matrices, first, last, start, stop, values, sums):
        lanes, j = WIDE // _get_itemsize(values, sums), start
        while j + UNROLLED * lanes <= stop:
            unrolled(matrices, first, last, j, start, values, sums)
            j += UNROLLED * lanes
        while j + lanes <= stop:
            wide(matrices, first, last, j, start, values, sums)
            j += lanes
        while j + lanes // 2 <= stop:
            narrow(matrices, first, last, j, start, values, sums)
            j += lanes // 2
        while j < stop:
            single(matrices, first, last, j, start, values, sums)
            j += 1

    return loop


@intrinsic
def _get_itemsize(typingctx: Any, values: Any, sums: Any) -> Any:
    """Return the number of bytes of one element of `values` or, if there are no values, of `sums`."""
    size = (values.types or sums.types)[0].dtype.bitwidth // 8

    def emit_ir(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return ir.IntType(64)(size)

    return types.int64(values, sums), emit_ir


def _make_loop_over_simd_columns(formula: Formula, writes: bool, nbytes: int, vectors: int) -> Any:
    """Return a loop like the one that `make_column_loop` returns. The loop processes as many columns as fit into
    `vectors` vectors of `nbytes` bytes, beginning at a given column. If `nbytes` is 0, a vector is a single number."""

    @intrinsic
    def run_column_loop(typingctx: Any, matrices: Any, first: Any, last: Any, column: Any, start: Any, values: Any,
                        sums: Any) -> Any:  # fmt: skip
        def emit_ir(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            first, last, column, start = arguments[1:5]
            real = context.get_data_type((values.types or sums.types)[0].dtype)
            lanes = max(nbytes // (4 if isinstance(real, ir.FloatType) else 8), 1)
            vector, inside = ir.VectorType(real, lanes), builder.sub(column, start)
            rows = _list_column_addresses_and_strides(context, builder, matrices, arguments[0], column, first)
            of_values, of_sums = (
                [at for at, *_ in _list_column_addresses_and_strides(context, builder, kind, packed, inside)]
                for kind, packed in ((values, arguments[5]), (sums, arguments[6]))
            )
            known = [[_emit_vector_load(builder, real, lanes, at, v) for at in of_values] for v in range(vectors)]
            totals = [[cgutils.alloca_once(builder, vector) for _ in of_sums] for _ in range(vectors)]
            for total in (total for row in totals for total in row):
                builder.store(ir.Constant(vector, None), total)
            with cgutils.for_range(builder, builder.sub(last, first)) as each:
                places = [(builder.add(at, builder.mul(each.index, step)), kind) for at, step, kind in rows]
                for v in range(vectors):
                    cells = [_emit_vector_load(builder, kind, lanes, at, v) for at, kind in places[: -writes or None]]
                    terms = formula(builder, cells, known[v])
                    if writes:
                        _emit_vector_store(builder, *places[-1], terms[0], v)
                    for total, term in zip(totals[v], terms, strict=False):
                        builder.store(builder.fadd(builder.load(total), term, flags=["contract"]), total)
            for v in range(vectors):
                for total, at in zip(totals[v], of_sums, strict=True):
                    _emit_vector_store(builder, at, real, builder.load(total), v)
            return context.get_dummy_value()

        return types.void(matrices, first, last, column, start, values, sums), emit_ir

    return run_column_loop


def _list_column_addresses_and_strides(
    context: Any, builder: Any, kind: Any, packed: Any, column: Any, row: Any = None
) -> list[tuple[Any, Any, Any]]:
    """Return one tuple for each array: the address of the element at `column` (in `row`, if given), the distance
    between rows in bytes, and the LLVM type of an element."""
    found = []
    for n, one in enumerate(kind.types):
        array = context.make_array(one)(context, builder, builder.extract_value(packed, n))
        step, element = builder.extract_value(array.strides, 0), context.get_data_type(one.dtype)
        at = builder.ptrtoint(array.data, column.type)
        at = at if row is None else builder.add(at, builder.mul(row, step))
        size = column.type(context.get_abi_sizeof(element))
        found.append((builder.add(at, builder.mul(column, size)), step, element))
    return found


def _get_vector_pointer(builder: Any, at: Any, kind: Any, lanes: int, n: int) -> tuple[Any, int]:
    """Return a pointer to vector number n, counted from the address `at`, and the size of an element in bytes."""
    word = kind.width // 8 if isinstance(kind, ir.IntType) else 4 if isinstance(kind, ir.FloatType) else 8
    at = builder.add(at, at.type(n * lanes * word)) if n else at
    return builder.inttoptr(at, ir.VectorType(kind, lanes).as_pointer()), word


def _emit_vector_load(builder: Any, kind: Any, lanes: int, at: Any, n: int) -> Any:
    """Load vector number n, counted from the address `at`. bfloat16 bits are converted to float32."""
    pointer, word = _get_vector_pointer(builder, at, kind, lanes, n)
    loaded = builder.load(pointer, align=word)
    if word != 2:
        return loaded
    wide = ir.VectorType(ir.IntType(32), lanes)
    bits = builder.shl(builder.zext(loaded, wide), ir.Constant(wide, [16] * lanes))
    return builder.bitcast(bits, ir.VectorType(ir.FloatType(), lanes))


def _emit_vector_store(builder: Any, at: Any, kind: Any, row: Any, n: int) -> None:
    """Store the vector `row` as vector number n, counted from the address `at`. If the array contains bfloat16 bits,
    the values are rounded as in `to_bfloat16_bits`."""
    lanes = row.type.count
    pointer, word = _get_vector_pointer(builder, at, kind, lanes, n)
    if word == 2:
        wide = ir.VectorType(ir.IntType(32), lanes)
        half, one, most, rest, infinity, quiet = (
            ir.Constant(wide, [number] * lanes) for number in (16, 1, 0x7FFF, 0x7FFFFFFF, 0x7F800000, 0x40)
        )
        bits = builder.bitcast(row, wide)
        upper = builder.lshr(bits, half)
        rounded = builder.lshr(builder.add(bits, builder.add(builder.and_(upper, one), most)), half)
        nan = builder.icmp_unsigned(">", builder.and_(bits, rest), infinity)
        row = builder.trunc(builder.select(nan, builder.or_(upper, quiet), rounded), ir.VectorType(kind, lanes))
    builder.store(row, pointer, align=word)


def _emit_square(builder: Any, cells: list[Any], values: list[Any]) -> list[Any]:
    apart = builder.fsub(cells[0], values[0])
    return [builder.fmul(apart, apart, flags=["contract"])]


def _emit_gradient(builder: Any, cells: list[Any], values: list[Any]) -> list[Any]:
    normal = builder.fmul(builder.fsub(cells[0], values[0]), values[1])
    return [cells[1], builder.fmul(cells[1], normal, flags=["contract"])]


sum_block = make_column_loop(lambda builder, cells, values: cells, False)
"""Column loop that sets sums[0] to the sum of x."""
sum_block_squares = make_column_loop(_emit_square, False)
"""Column loop that sets `sums[0]` to the sum of `(x - values[0])^2`."""
sum_block_gradients = make_column_loop(_emit_gradient, False)
"""Column loop over the matrices x and dy. It sets `sums[0]` to the sum of dy, and `sums[1]` to the sum of
`dy * (x - values[0]) * values[1]`."""
