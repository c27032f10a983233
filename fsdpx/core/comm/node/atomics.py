"""Compiled code for collectives in shared memory. It waits for flags, adds arrays and sets flags, using only memory
addresses.

The arguments of a collective are stored in an array of 64-bit words, called its row, so that compiled code needs only
the address of the row. `fsdpx.core.comm.node.persistent` fills in the row."""

from __future__ import annotations

from typing import Any

import numpy as np

from fsdpx.core.array.jit import jit
from fsdpx.core.array.kernels.compiled.half import emit_round_to_bfloat16, emit_round_to_float16_precision
from fsdpx.core.array.kernels.compiled.scalar import X86
from fsdpx.core.array.lazy_numba import cgutils, intrinsic, ir, types

__all__ = [
    "ADDRESS_WORDS", "COMPLETE", "DIVISOR", "ELEMENTS", "HEAD", "HELD", "LANE", "LATE", "MOVED", "RANKS", "STREAM",
    "WRITTEN", "add32", "add64", "add_bfloat16", "add_float16", "poll_barrier", "synchronize_and_add32",
    "synchronize_and_add64", "synchronize_and_add_bfloat16", "synchronize_and_add_float16",
]  # fmt: skip

WORD = ir.IntType(64)
LINE_BYTES = 64  # size of a cache line, and of the LLVM vectors used here
LINES_PER_STEP = 4  # number of cache lines that one loop iteration sums over the ranks

RANKS, LANE, ELEMENTS, DIVISOR, STREAM, WRITTEN, HEAD = range(7)
"""Indices of words in a row (the arguments of a collective): number of ranks on the host, this rank's index among them,
number of elements to add, divisor of the sums, whether stores bypass the caches, and number of arrays to write to.
After these HEAD words, the row contains three tables with one entry per rank: the address of the rank's board (its
shared records), the address of the rank's array, and the location of this array (ADDRESS_WORDS words). If a rank posts
a different location on its board, its array has moved. The addresses of the output arrays come last."""
ADDRESS_WORDS = 3
POSTED, FINISHED, WORDS = 0, 8, 16
"""Byte offsets of the fields of a record on the board (in shared memory)."""
LATE, MOVED, HELD, COMPLETE = range(4)
"""The states of a collective. LATE: some rank has not arrived. MOVED: the address of an array has changed. HELD: other
ranks are still reading or writing. COMPLETE: the collective is complete."""


@intrinsic
def load_acquire(typingctx: Any, address: Any) -> Any:
    """Atomically load the 64-bit word at an address with acquire ordering."""

    def emit_ir(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.load_atomic(_cast_to_pointer(builder, arguments[0], WORD), "acquire", 8)

    return types.int64(types.int64), emit_ir


@intrinsic
def store_release(typingctx: Any, address: Any, value: Any) -> Any:
    """Atomically store a 64-bit word at an address with release ordering."""

    def emit_ir(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        builder.store_atomic(arguments[1], _cast_to_pointer(builder, arguments[0], WORD), "release", 8)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), emit_ir


@intrinsic
def cpu_pause(typingctx: Any) -> Any:
    """Execute the CPU's pause instruction, as recommended for polling loops."""
    return _make_x86_instruction_or_no_op("llvm.x86.sse2.pause")


@intrinsic
def fence_stores(typingctx: Any) -> Any:
    """Make sure that streaming (non-temporal) stores become visible before all later stores. On x86, a release store
    alone does not guarantee this order."""
    return _make_x86_instruction_or_no_op("llvm.x86.sse.sfence")


@intrinsic
def get_type_size(typingctx: Any, x: Any) -> Any:
    """Return the size in bytes of the type of `x`."""

    def emit_ir(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return WORD(x.bitwidth // 8)

    return types.int64(x), emit_ir


def _make_x86_instruction_or_no_op(name: str) -> Any:
    def emit_ir(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        if X86:
            kind = ir.FunctionType(ir.VoidType(), [])
            builder.call(cgutils.get_or_insert_function(builder.module, kind, name), [])
        return context.get_dummy_value()

    return types.void(), emit_ir


def _cast_to_pointer(builder: Any, address: Any, kind: Any) -> Any:
    return builder.inttoptr(address, kind.as_pointer())


def return_unconverted(builder: Any, value: Any) -> Any:
    return value


def make_rank_sum_intrinsic(lines: int, streaming: bool = False, through: Any = return_unconverted) -> Any:
    """Return a Numba intrinsic that adds the arrays of all ranks in rank order. One call adds `lines` cache lines at a
    given byte offset, or a single element if `lines` is 0.

    If `streaming` is true, stores bypass the caches. `through` is a conversion, such as rounding, that is applied to
    each value before it is added. If the sum is written to several arrays, the sum is converted too."""

    @intrinsic
    def add_vectors(
        typingctx: Any, sources: Any, ranks: Any, outs: Any, written: Any, at: Any, divisor: Any, zero: Any
    ) -> Any:
        """Add the arrays at byte offset `at`, and write the sum divided by `divisor`.

        `sources` is the address of a table with the addresses of the `ranks` arrays to add. `outs` is the address of a
        table with the addresses of the `written` output arrays. `zero` is 0 in the dtype of the arrays."""
        itemsize = zero.bitwidth // 8

        def emit_ir(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            sources, ranks, outs, written, address, divisor, zero = arguments
            vector = ir.VectorType(zero.type, LINE_BYTES // itemsize if lines else 1)
            every = range(lines or 1)

            def load_vector(table: Any, index: Any, line: int) -> Any:
                start = builder.load(builder.gep(_cast_to_pointer(builder, table, WORD), [index]))
                return _cast_to_pointer(
                    builder, builder.add(builder.add(start, address), WORD(line * LINE_BYTES)), vector
                )

            def load_summand(rank: Any, line: int) -> Any:
                return through(builder, builder.load(load_vector(sources, rank, line), align=itemsize))

            totals = [cgutils.alloca_once_value(builder, load_summand(WORD(0), i)) for i in every]
            with cgutils.for_range_slice(builder, WORD(1), ranks, WORD(1)) as (rank, _):
                for i in every:
                    builder.store(builder.fadd(builder.load(totals[i]), load_summand(rank, i)), totals[i])
            if through is not return_unconverted:
                with builder.if_then(builder.icmp_signed("!=", written, WORD(1))):
                    for i in every:
                        builder.store(through(builder, builder.load(totals[i])), totals[i])
            with builder.if_then(builder.icmp_signed("!=", divisor, WORD(1)), likely=False):
                same = _splat_vector(builder, builder.sitofp(divisor, zero.type), vector)
                for i in every:
                    builder.store(builder.fdiv(builder.load(totals[i]), same), totals[i])
            with cgutils.for_range(builder, written) as out:
                for i in every:
                    place, align = load_vector(outs, out.index, i), LINE_BYTES if streaming else itemsize
                    line = builder.store(builder.load(totals[i]), place, align=align)
                    if streaming:
                        line.set_metadata("nontemporal", builder.module.add_metadata([ir.IntType(32)(1)]))
            return context.get_dummy_value()

        return types.void(*[types.int64] * 6, zero), emit_ir

    return add_vectors


def _splat_vector(builder: Any, value: Any, vector: Any) -> Any:
    same = ir.Constant(vector, ir.Undefined)
    for lane in range(vector.count):
        same = builder.insert_element(same, value, ir.IntType(32)(lane))
    return same


@jit
def poll_barrier(row, number, at, max_polls):
    """Poll a barrier at most `max_polls` times. Return COMPLETE if all ranks have arrived, and LATE otherwise. `row` is
    the address of the barrier's arguments, and `number` is its sequence number. `at` is the byte offset of the records
    (in shared memory) in which ranks announce this number."""
    return COMPLETE if _have_all_posted(row, number, at + POSTED, max_polls) else LATE


@jit
def _have_all_posted(row, number, at, max_polls):
    """Poll shared memory at most `max_polls` times, and return whether all ranks of the host have announced collective
    number `number` or a later one. `row` is the address of the collective's arguments, and `at` is the byte offset of
    the words in which ranks announce numbers."""
    for rank in range(load_acquire(row + 8 * RANKS)):
        flag = load_acquire(row + 8 * (HEAD + rank)) + at
        while rank != load_acquire(row + 8 * LANE) and load_acquire(flag) < number:
            if max_polls <= 0:
                return False
            max_polls -= 1
            cpu_pause()
    return True


@jit
def _are_arrays_unmoved(row, at):
    ranks = load_acquire(row + 8 * RANKS)
    for rank in range(ranks):
        record = load_acquire(row + 8 * (HEAD + rank)) + at + WORDS
        place = row + 8 * (HEAD + 2 * ranks + ADDRESS_WORDS * rank)
        for word in range(ADDRESS_WORDS):
            if load_acquire(record + 8 * word) != load_acquire(place + 8 * word):
                return False
    return True


def _compile_rank_sum_functions(name, through, kind):
    """Return two compiled functions: one that adds the arrays of all ranks in rank order, and one that also
    synchronizes the ranks before and after the addition.

    `name` is used in the names of these functions, `kind` is the dtype of the sum, and `through` is applied to each
    value before it is added."""
    element, lines, streamed = (
        make_rank_sum_intrinsic(0, through=through),
        make_rank_sum_intrinsic(LINES_PER_STEP, through=through),
        make_rank_sum_intrinsic(LINES_PER_STEP, True, through),
    )
    zero = kind(0)

    def add_arrays(row):
        ranks, written, divisor = (
            load_acquire(row + 8 * RANKS),
            load_acquire(row + 8 * WRITTEN),
            load_acquire(row + 8 * DIVISOR),
        )
        itemsize = get_type_size(zero)
        end, index, stride = load_acquire(row + 8 * ELEMENTS) * itemsize, 0, LINES_PER_STEP * LINE_BYTES
        sources, outs = row + 8 * (HEAD + ranks), row + 8 * (HEAD + (2 + ADDRESS_WORDS) * ranks)
        while (
            index < end and (load_acquire(outs) + index) % LINE_BYTES
        # add single elements up to the first cache line boundary, because streaming stores must be aligned and other
        # stores are faster if aligned
        ):
            element(sources, ranks, outs, written, index, divisor, zero)
            index += itemsize
        if load_acquire(row + 8 * STREAM):
            while index + stride <= end:
                streamed(sources, ranks, outs, written, index, divisor, zero)
                index += stride
            fence_stores()
        while index + stride <= end:
            lines(sources, ranks, outs, written, index, divisor, zero)
            index += stride
        while index < end:
            element(sources, ranks, outs, written, index, divisor, zero)
            index += itemsize

    added = jit(add_arrays, name=f"add{name}")

    def synchronize_and_add(row, number, at, max_polls):
        """Advance a collective sum as far as possible, polling at most `max_polls` times per wait, and return the state
        of the sum. `at` is the byte offset of this collective's records on the ranks' boards."""
        finished = load_acquire(row + 8 * (HEAD + load_acquire(row + 8 * LANE))) + at + FINISHED
        if load_acquire(finished) < number:
            if not _have_all_posted(row, number, at + POSTED, max_polls):
                return LATE
            if not _are_arrays_unmoved(row, at):
                return MOVED
            added(row)
            store_release(finished, number)
        return COMPLETE if _have_all_posted(row, number, at + FINISHED, max_polls) else HELD

    return added, jit(synchronize_and_add, name=f"meet{name}")


add32, synchronize_and_add32 = _compile_rank_sum_functions("32", return_unconverted, np.float32)
add64, synchronize_and_add64 = _compile_rank_sum_functions("64", return_unconverted, np.float64)
add_bfloat16, synchronize_and_add_bfloat16 = _compile_rank_sum_functions(
    "_bfloat16", emit_round_to_bfloat16, np.float32
)
add_float16, synchronize_and_add_float16 = _compile_rank_sum_functions(
    "_float16", emit_round_to_float16_precision, np.float32
)
"""The 16-bit variants add float32 arrays. Values are rounded to the 16-bit dtype before they are added."""
