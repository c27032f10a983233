"""Meetings of processes in memory they share, as compiled code on addresses: wait for flags, add, say that it is done.

What is to be done is a row of 64-bit words, so that a call passes one address; `fsdpx.comm.planned` writes the row.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import extending, types
from numba.core import cgutils

from fsdpx.array.kernels.compiled.control import X86
from fsdpx.array.kernels.compiled.jit import jit

__all__ = [
    "COMPLETE", "DIVISOR", "ELEMENTS", "HEAD", "HELD", "LANE", "LATE", "MOVED", "PLACE", "RANKS", "STREAM", "WRITTEN",
    "add32", "add64", "come", "meet32", "meet64",
]  # fmt: skip

intrinsic: Any = extending.intrinsic
WORD, BYTE, BITS = ir.IntType(64), ir.IntType(8), 512
LINE = BITS // 8  # bytes of a cache line, which is a vector to LLVM
STEP = 4  # lines added at a time

RANKS, LANE, ELEMENTS, DIVISOR, STREAM, WRITTEN, HEAD = range(7)
"""Words of a row: ranks of the machine, this one's place among them, elements to add, what sums are divided by, whether
they go past the caches, to how many arrays. After these HEAD words come for each rank the address of its board, that of
its array, and the place it must have posted (PLACE words); then the addresses of what is written."""
PLACE = 3
POSTED, FINISHED, WORDS = 0, 8, 16
"""Bytes from the start of a record on a board."""
LATE, MOVED, HELD, COMPLETE = range(4)
"""How a meeting stands: not all have come; some array lies elsewhere; others still read or write; complete."""


@intrinsic
def load(typingctx: Any, address: Any) -> Any:
    """The word at an address; nothing that follows is read before it."""

    def code(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.load_atomic(_pointer(builder, arguments[0], WORD), "acquire", 8)

    return types.int64(types.int64), code


@intrinsic
def store(typingctx: Any, address: Any, value: Any) -> Any:
    """Write a word when all that was written before can be seen."""

    def code(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        builder.store_atomic(arguments[1], _pointer(builder, arguments[0], WORD), "release", 8)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), code


@intrinsic
def rest(typingctx: Any) -> Any:
    """Let a loop that only looks go easy on the core."""
    return _processor("llvm.x86.sse2.pause")


@intrinsic
def drain(typingctx: Any) -> Any:
    """Streamed lines can be seen before what is written from now on: on x86 a release store does not say so."""
    return _processor("llvm.x86.sse.sfence")


def _processor(name: str) -> Any:
    def code(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        if X86:
            kind = ir.FunctionType(ir.VoidType(), [])
            builder.call(cgutils.get_or_insert_function(builder.module, kind, name), [])
        return context.get_dummy_value()

    return types.void(), code


def _pointer(builder: Any, address: Any, kind: Any) -> Any:
    return builder.inttoptr(address, kind.as_pointer())


def adding(real: Any, lanes: int, lines: int, streaming: bool = False) -> Any:
    """Code that adds `lines` vectors of `lanes` elements, `at` bytes from the start of every array, in rank order."""
    vector, width = ir.VectorType(real, lanes), lanes * (4 if isinstance(real, ir.FloatType) else 8)
    align = width if streaming else width // lanes

    @intrinsic
    def add(typingctx: Any, sources: Any, ranks: Any, outs: Any, written: Any, at: Any, divisor: Any) -> Any:
        """sources, outs: where the addresses of `ranks` and `written` arrays lie."""

        def code(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            sources, ranks, outs, written, at, divisor = arguments

            def part(table: Any, index: Any, line: int) -> Any:
                entry = builder.load(builder.gep(_pointer(builder, table, WORD), [index]))
                return _pointer(builder, builder.add(builder.add(entry, at), WORD(line * width)), vector)

            every = range(lines)
            first = [builder.load(part(sources, WORD(0), i), align=width // lanes) for i in every]
            totals = [cgutils.alloca_once_value(builder, value) for value in first]
            with cgutils.for_range_slice(builder, WORD(1), ranks, WORD(1)) as (rank, _):
                for i in every:
                    value = builder.load(part(sources, rank, i), align=width // lanes)
                    builder.store(builder.fadd(builder.load(totals[i]), value), totals[i])
            with builder.if_then(builder.icmp_signed("!=", divisor, WORD(1)), likely=False):
                same = _splat(builder, builder.sitofp(divisor, real), vector)
                for i in every:
                    builder.store(builder.fdiv(builder.load(totals[i]), same), totals[i])
            with cgutils.for_range(builder, written) as out:
                for i in every:
                    line = builder.store(builder.load(totals[i]), part(outs, out.index, i), align=align)
                    if streaming:
                        line.set_metadata("nontemporal", builder.module.add_metadata([ir.IntType(32)(1)]))
            return context.get_dummy_value()

        return types.void(*[types.int64] * 6), code

    return add


def _splat(builder: Any, value: Any, vector: Any) -> Any:
    same = ir.Constant(vector, ir.Undefined)
    for lane in range(vector.count):
        same = builder.insert_element(same, value, ir.IntType(32)(lane))
    return same


def kernels(real: Any, itemsize: int) -> tuple[Any, Any]:
    """`add` and `meet` for one type of float."""
    lanes = LINE // itemsize
    one, several = adding(real, 1, 1), adding(real, lanes, STEP)
    streamed = adding(real, lanes, STEP, streaming=True)
    stride = STEP * LINE

    @jit
    def add(row):
        """Every array that is written = the sum of all arrays, in rank order."""
        ranks, written = load(row + 8 * RANKS), load(row + 8 * WRITTEN)
        divisor, end = load(row + 8 * DIVISOR), load(row + 8 * ELEMENTS) * itemsize
        sources = row + 8 * (HEAD + ranks)
        outs = row + 8 * (HEAD + (2 + PLACE) * ranks)
        at = 0
        if load(row + 8 * STREAM):
            while at < end and (load(outs) + at) % LINE:
                one(sources, ranks, outs, written, at, divisor)
                at += itemsize
            while at + stride <= end:
                streamed(sources, ranks, outs, written, at, divisor)
                at += stride
            drain()
        while at + stride <= end:
            several(sources, ranks, outs, written, at, divisor)
            at += stride
        while at < end:
            one(sources, ranks, outs, written, at, divisor)
            at += itemsize

    @jit
    def meet(row, number, at, looks):
        """A meeting whose work is `add`, moved on as far as it goes; `at` is where its records are on the boards."""
        finished = load(row + 8 * (HEAD + load(row + 8 * LANE))) + at + FINISHED
        if load(finished) < number:
            if not _there(row, number, at + POSTED, looks):
                return LATE
            if not _in_place(row, at):
                return MOVED
            add(row)
            store(finished, number)
        return COMPLETE if _there(row, number, at + FINISHED, looks) else HELD

    return add, meet


@jit
def come(row, number, at, looks):
    """A meeting without work."""
    return COMPLETE if _there(row, number, at + POSTED, looks) else LATE


@jit
def _there(row, number, at, looks):
    """Whether all have written the number, or a later one, within so many looks."""
    for rank in range(load(row + 8 * RANKS)):
        flag = load(row + 8 * (HEAD + rank)) + at
        while rank != load(row + 8 * LANE) and load(flag) < number:
            if looks <= 0:
                return False
            looks -= 1
            rest()
    return True


@jit
def _in_place(row, at):
    ranks = load(row + 8 * RANKS)
    for rank in range(ranks):
        record = load(row + 8 * (HEAD + rank)) + at + WORDS
        place = row + 8 * (HEAD + 2 * ranks + PLACE * rank)
        for word in range(PLACE):
            if load(record + 8 * word) != load(place + 8 * word):
                return False
    return True


add32, meet32 = kernels(ir.FloatType(), 4)
add64, meet64 = kernels(ir.DoubleType(), 8)
