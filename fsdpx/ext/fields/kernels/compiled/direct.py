"""Direct convolutions over one to three dims with channels last. They read windows in place, without an im2col copy.

A strip is a run of neighboring outputs whose sums stay in registers while the loop multiplies the cells under their
windows by rows of weights; each lane of a vector register is one output channel. If a window reaches beyond the field,
only the window offsets inside the field are computed. With few output channels, the lanes are input channels instead,
and the lanes are summed at the end. The gradient of the weights is computed in groups of a few rows, which stay in
registers while the loop runs over outputs."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import lru_cache
from itertools import product
from typing import Any, NamedTuple

import numpy as np

from fsdpx.core.array.arena import get_data_pointer
from fsdpx.core.array.jit import jit
from fsdpx.core.array.kernels.compiled.elements import as_contiguous
from fsdpx.core.array.kernels.compiled.scalar import use_widest_vectors
from fsdpx.core.array.lazy_numba import cgutils, intrinsic, ir, register_jitable, types
from fsdpx.core.array.parallel import parallel_for_range
from fsdpx.core.base.processor import read_cpuinfo_field
from fsdpx.ext.fields.kernels.convolution import WindowStrides

__all__ = [
    "NARROW",
    "NARROW_ROWS",
    "NEAR_BYTES",
    "WIDE",
    "WIDE_ROWS",
    "choose_strip_output_count",
    "compute_line_by_strips",
    "convolve_direct",
    "direct_add_weight_gradient",
    "direct_backward_input",
    "emit_load",
    "emit_offset",
    "emit_pointer_cast",
    "find_sample_and_run_of_output_line",
    "make_direct_convolution_arguments",
    "make_strip_convolution_loop",
    "make_weight_gradient_loop",
    "reshape_to_three_dims",
    "round_up_to_lanes",
]  # fmt: skip

WIDE, NARROW = 64, 32
"""WIDE: size, in bytes, of a block of channels that are computed together. NARROW: size of the last block if few
channels are left."""
WIDE_ROWS = 8 if "avx512f" in read_cpuinfo_field("flags").split() else 6
NARROW_ROWS = 8
"""WIDE_ROWS, NARROW_ROWS: maximum number of outputs in a strip if each output is a row of channels of WIDE or of NARROW
bytes. The sums of strips of these sizes fit into registers. With AVX-512, a WIDE row fills one of the 32 registers, and
a strip needs at least 8 rows to keep both multiply units busy."""
FEW_OUTPUTS = (8, 6, 4, 3)
"""Maximum number of cells in a strip for one, two, three and four output channels."""
WINDOW_ROWS = (3, 5, 7)
"""Window sizes, along a strip, for which depthwise convolution has special code. This code loads each cell only once,
and keeps the weights of the window in registers."""
NEAR_BYTES = 3 << 13
"""Size, in bytes, of a block of cells and output gradients. The computation of the weight gradient reads each block
repeatedly, so the size is chosen such that a block stays in the cache."""


def make_strip_convolution_loop(nbytes: int, max_rows: int, depthwise: bool = False, group: int = 1) -> Any:
    """Return a compiled loop that computes a strip of outputs: y[b] = start[b] + the sum over window offsets and
    channels r of x[b + offset, r] w[offset, r].

    Each y[b], start[b] and w[offset, r] is a vector of `nbytes` bytes. With `depthwise`, each x is also such a vector,
    and is multiplied by w elementwise. If `nbytes` is WIDE and `group` is 1, a depthwise strip loads each cell only
    once, provided that the window has one of the sizes WINDOW_ROWS and moves from one output to the next by the
    distance between its own neighboring cells. Loading each cell only once does not change the order of summation. If
    `group` is above 1, lanes form groups of this size. In x[b + offset, r], all lanes of a group hold channel r of the
    group, for r below `group`. Addresses and steps are in bytes."""

    @intrinsic
    def run_strip(typingctx: Any, like: Any, rows: Any, y: Any, y_step: Any, start: Any, start_step: Any, x: Any,
              x_step: Any, w: Any, counts: Any, x_steps: Any, w_steps: Any, run: Any) -> Any:  # fmt: skip
        def emit_ir(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            like, rows, y, y_step, start, start_step, x, x_step, w, counts, x_steps, w_steps, run = arguments
            vector, word = get_vector_type_and_itemsize(like, nbytes)
            sums = [cgutils.alloca_once(builder, vector) for _ in range(max_rows)]
            counts, x_steps, w_steps = (cgutils.unpack_tuple(builder, one, 3) for one in (counts, x_steps, w_steps))

            def emit_strip(case: int) -> None:
                row_count, width = (case - 1) % max_rows + 1, (0, *WINDOW_ROWS)[(case - 1) // max_rows]
                dims = 2 if width else 3
                for total in sums[:row_count]:
                    builder.store(ir.Constant(vector, None), total)
                with ExitStack() as stack:
                    indices = [stack.enter_context(cgutils.for_range(builder, count)).index for count in counts[:dims]]
                    cells = emit_address(builder, x, indices, x_steps[:dims])
                    row = emit_address(builder, w, indices, w_steps[:dims])
                    kept = [emit_load(builder, vector, row, w_steps[2], k) for k in range(width)]
                    for c in range(row_count + width - 1 if width else 0):
                        cell = emit_load(builder, vector, cells, x_step, c)
                        for b in range(max(c - width + 1, 0), min(c + 1, row_count)):
                            emit_fma(builder, sums[b], cell, kept[c - b])
                    if group > 1:
                        weights = [emit_load(builder, vector, row, row.type(nbytes), r) for r in range(group)]
                        for b in range(row_count):
                            cell = emit_load(builder, vector, cells, x_step, b)
                            for r in range(group):
                                emit_fma(builder, sums[b], emit_group_broadcast(builder, cell, group, r), weights[r])
                    elif not width:
                        with cgutils.for_range(builder, run) as r:
                            weights = emit_load(
                                builder, vector, builder.add(row, emit_offset(builder, r.index, nbytes)), None, 0
                            )
                            cell = builder.add(cells, emit_offset(builder, r.index, word))
                            number = vector if depthwise else like.type
                            for b in range(row_count):
                                emit_fma(builder, sums[b], emit_load(builder, number, cell, x_step, b), weights)
                for b in range(row_count):
                    to = emit_pointer_cast(builder, vector, builder.add(y, emit_offset(builder, y_step, b)))
                    begin = emit_load(builder, vector, start, start_step, b)
                    builder.store(builder.fadd(begin, builder.load(sums[b])), to, align=word)

            # compile special code for each window size only for WIDE depthwise strips, because other strips are rare
            case, widths = rows, WINDOW_ROWS if depthwise and nbytes == WIDE and group == 1 else ()
            for n, width in enumerate(widths, 1):
                fits = builder.icmp_signed("==", counts[2], counts[2].type(width))
                fits = builder.and_(fits, builder.icmp_signed("==", x_step, x_steps[2]))
                case = builder.select(fits, builder.add(rows, rows.type(n * max_rows)), case)
            emit_switch_on_row_count(builder, case, max_rows * (1 + len(widths)), emit_strip)
            return context.get_dummy_value()

        three = types.UniTuple(types.int64, 3)
        return types.void(like, *[types.int64] * 8, *[three] * 3, types.int64), emit_as_noinline_function(emit_ir)

    return run_strip


def make_few_outputs_convolution_loop(outputs: int, max_rows: int) -> Any:
    """Return a compiled loop that computes a strip with few output channels: y[b, o] = start[b, o] + the sum over
    window offsets and channels r of x[b + offset, r] w[o, offset, r].

    The channels fill `run` vectors of NARROW bytes. Addresses and steps are in bytes."""

    @intrinsic
    def run_dots(typingctx: Any, like: Any, rows: Any, y: Any, y_step: Any, start: Any, start_step: Any, x: Any,
             x_step: Any, w: Any, w_step: Any, counts: Any, x_steps: Any, w_steps: Any, run: Any) -> Any:  # fmt: skip
        def emit_ir(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            like, rows, y, y_step, start, start_step, x, x_step, w, w_step, counts, x_steps, w_steps, run = arguments
            vector, word = get_vector_type_and_itemsize(like, NARROW)
            sums = [[cgutils.alloca_once(builder, vector) for _ in range(outputs)] for _ in range(max_rows)]
            counts, x_steps, w_steps = (cgutils.unpack_tuple(builder, one, 3) for one in (counts, x_steps, w_steps))

            def emit_dots(row_count: int) -> None:
                for total in (total for row in sums[:row_count] for total in row):
                    builder.store(ir.Constant(vector, None), total)
                with ExitStack() as stack:
                    indices = [stack.enter_context(cgutils.for_range(builder, count)).index for count in (*counts, run)]
                    cells, row = (emit_address(builder, base, indices, (*steps, w.type(NARROW)))
                                  for base, steps in ((x, x_steps), (w, w_steps)))  # fmt: skip
                    weights = [emit_load(builder, vector, row, w_step, o) for o in range(outputs)]
                    for b in range(row_count):
                        cell = emit_load(builder, vector, cells, x_step, b)
                        for total, weight in zip(sums[b], weights, strict=True):
                            emit_fma(builder, total, cell, weight)
                for b, o in product(range(row_count), range(outputs)):
                    begin, to = (builder.add(base, base.type(o * word)) for base in (start, y))
                    number = emit_load(builder, like.type, begin, start_step, b)
                    to = emit_pointer_cast(builder, like.type, builder.add(to, emit_offset(builder, y_step, b)))
                    builder.store(builder.fadd(number, emit_lane_sum(builder, builder.load(sums[b][o]))), to)

            emit_switch_on_row_count(builder, rows, max_rows, emit_dots)
            return context.get_dummy_value()

        three = types.UniTuple(types.int64, 3)
        return types.void(like, *[types.int64] * 9, *[three] * 3, types.int64), emit_as_noinline_function(emit_ir)

    return run_dots


def emit_group_broadcast(builder: Any, row: Any, group: int, r: int) -> Any:
    """Emit LLVM code that copies lane `r` of each group of `group` lanes of the vector `row` to all lanes of the
    group."""
    order = [lane // group * group + r for lane in range(row.type.count)]
    mask = ir.Constant(ir.VectorType(ir.IntType(32), len(order)), order)
    return builder.shuffle_vector(row, ir.Constant(row.type, ir.Undefined), mask)


def emit_lane_sum(builder: Any, row: Any) -> Any:
    """Emit LLVM code that sums the lanes of the vector `row` by repeatedly adding one half of the vector to the
    other."""
    index = ir.IntType(32)
    while (half := row.type.count // 2) > 0:
        none, kind = ir.Constant(row.type, ir.Undefined), ir.VectorType(index, half)
        low = builder.shuffle_vector(row, none, ir.Constant(kind, [*range(half)]))
        high = builder.shuffle_vector(row, none, ir.Constant(kind, [*range(half, 2 * half)]))
        row = builder.fadd(low, high)
    return builder.extract_element(row, index(0))


def make_weight_gradient_loop(nbytes: int, max_rows: int, depthwise: bool = False) -> Any:
    """Return a compiled loop that computes the gradient of some rows of weights: w[b] += the sum over outputs (i, j) of
    x[i, j, b] dy[i, j].

    Each w[b] and dy[i, j] is a vector of `nbytes` bytes. With `depthwise`, each x is also such a vector, and is
    multiplied by dy elementwise. `x_step` is the number of bytes from x[i, j, b] to x[i, j, b + 1]."""

    @intrinsic
    def run_outer_product(typingctx: Any, like: Any, rows: Any, w: Any, x: Any, x_step: Any, dy: Any, counts: Any,
              x_steps: Any, dy_steps: Any) -> Any:  # fmt: skip
        def emit_ir(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            like, rows, w, x, x_step, dy, counts, x_steps, dy_steps = arguments
            vector, word = get_vector_type_and_itemsize(like, nbytes)
            kind = vector if depthwise else like.type
            sums = [cgutils.alloca_once(builder, vector) for _ in range(max_rows)]
            counts, x_steps, dy_steps = (cgutils.unpack_tuple(builder, one, 2) for one in (counts, x_steps, dy_steps))

            def emit_outer(row_count: int) -> None:
                rows_at = [builder.add(w, w.type(b * nbytes)) for b in range(row_count)]
                for b in range(row_count):
                    builder.store(emit_load(builder, vector, rows_at[b], None, 0), sums[b])
                with ExitStack() as stack:
                    indices = [stack.enter_context(cgutils.for_range(builder, count)).index for count in counts]
                    cell = emit_address(builder, x, indices, x_steps)
                    slope = emit_load(builder, vector, emit_address(builder, dy, indices, dy_steps), None, 0)
                    for b in range(row_count):
                        emit_fma(builder, sums[b], emit_load(builder, kind, cell, x_step, b), slope)
                for b in range(row_count):
                    builder.store(builder.load(sums[b]), emit_pointer_cast(builder, vector, rows_at[b]), align=word)

            emit_switch_on_row_count(builder, rows, max_rows, emit_outer)

        two = types.UniTuple(types.int64, 2)
        return types.void(like, *[types.int64] * 5, two, two, two), emit_as_noinline_function(emit_ir)

    return run_outer_product


def emit_as_noinline_function(emit_body: Callable[..., Any]) -> Callable[..., Any]:
    """Let an intrinsic emit its code as a function that LLVM does not inline. Such a function compiles in half the time
    of inlined code, and runs just as fast."""

    def emit_ir(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        kind = ir.FunctionType(ir.VoidType(), [value.type for value in arguments])
        function = ir.Function(builder.module, kind, builder.module.get_unique_name("loop"))
        function.linkage = "internal"
        set.update(function.attributes, {"noinline", '"prefer-vector-width"="512"'})  # see `use_widest_vectors`
        emit_body(context, body := ir.IRBuilder(function.append_basic_block()), signature, function.args)
        body.ret_void()
        builder.call(function, arguments)
        return context.get_dummy_value()

    return emit_ir


def get_vector_type_and_itemsize(like: Any, nbytes: int) -> tuple[Any, int]:
    """Return the LLVM type of a vector of `nbytes` bytes, and the size in bytes of each of its numbers."""
    word = 4 if like.type == ir.FloatType() else 8
    return ir.VectorType(like.type, nbytes // word), word


def emit_offset(builder: Any, step: Any, n: Any) -> Any:
    return builder.mul(step, step.type(n))


def emit_pointer_cast(builder: Any, element_type: Any, address: Any) -> Any:
    return builder.inttoptr(address, element_type.as_pointer())


def emit_load(builder: Any, element_type: Any, base: Any, step: Any, n: int) -> Any:
    address = builder.add(base, emit_offset(builder, step, n)) if n else base
    return builder.load(emit_pointer_cast(builder, element_type, address), align=4)


def emit_fma(builder: Any, into: Any, number: Any, row: Any) -> None:
    """Emit LLVM code for into += number * row. `number` is a vector, or a scalar that multiplies all lanes."""
    if number.type != row.type:
        none, index = ir.Constant(row.type, ir.Undefined), ir.IntType(32)
        zeros = ir.Constant(ir.VectorType(index, row.type.count), [0] * row.type.count)
        number = builder.shuffle_vector(builder.insert_element(none, number, index(0)), none, zeros)
    term = builder.fmul(number, row, flags=["contract"])
    builder.store(builder.fadd(builder.load(into), term, flags=["contract"]), into)


def emit_address(builder: Any, base: Any, indices: Sequence[Any], steps: Sequence[Any]) -> Any:
    for index, step in zip(indices, steps, strict=True):
        base = builder.add(base, builder.mul(index, step))
    return base


def emit_switch_on_row_count(builder: Any, rows: Any, max_size: int, body: Any) -> None:
    """Emit an LLVM switch on the value `rows`. `body(n)` emits the code of the case n, for each n from 1 to `max_size`,
    so that each case can unroll its loops over rows."""
    end = builder.append_basic_block("sized")
    switch = builder.switch(rows, end)
    for n in range(1, max_size + 1):
        block = builder.append_basic_block(f"size{n}")
        switch.add_case(rows.type(n), block)
        builder.position_at_end(block)
        body(n)
        builder.branch(end)
    builder.position_at_end(end)


_wide_strip, _narrow_strip = (
    make_strip_convolution_loop(WIDE, WIDE_ROWS),
    make_strip_convolution_loop(NARROW, NARROW_ROWS),
)
_one, _two, _three, _four = (make_few_outputs_convolution_loop(n + 1, most) for n, most in enumerate(FEW_OUTPUTS))
_wide_outer, _narrow_outer = make_weight_gradient_loop(WIDE, 6), make_weight_gradient_loop(NARROW, 12)


@register_jitable
def _can_use_dot_loop(outputs, nbytes):
    """Return whether dot products, with one input channel per vector lane, can be used. There must be few outputs, and
    the channels of a cell (`nbytes` bytes) must fill whole vectors."""
    return outputs <= len(FEW_OUTPUTS) and nbytes % NARROW == 0


@jit
def _pack_weights(weight, packed, places, swapped, unpack):
    """Copy weights into blocks of lanes: packed[block, offset, c, lane] = weight[o, c, offset]. For few outputs, the
    order is packed[block, lane, offset, c].

    `places`, (3 dims, 3), has one row per dim: the number of window offsets to copy, the first offset, and the step
    from one offset to the next. If `swapped`, the dims of `weight` for channels and outputs are swapped. If `unpack`,
    add `packed` to `weight` instead."""
    outer, inner = (weight.shape[1], weight.shape[0]) if swapped else (weight.shape[0], weight.shape[1])
    word, first, base = weight.itemsize, 0, 0
    while first < outer:
        lanes = (WIDE if outer - first > NARROW // word else NARROW) // word
        few = not unpack and _can_use_dot_loop(outer - first, inner * word)
        near, far = (1, places[0, 0] * places[1, 0] * places[2, 0] * inner) if few else (lanes, 1)
        for c in range(inner):
            at = base + c * near
            for i in range(places[0, 0]):
                for j in range(places[1, 0]):
                    for k in range(places[2, 0]):
                        p, q = places[0, 1] + i * places[0, 2], places[1, 1] + j * places[1, 2]
                        r = places[2, 1] + k * places[2, 2]
                        for lane in range(min(lanes, outer - first)):
                            o, n = (c, first + lane) if swapped else (first + lane, c)
                            if unpack:
                                weight[o, n, p, q, r] += packed[at + lane]
                            else:
                                packed[at + lane * far] = weight[o, n, p, q, r]
                        at += inner * near
        base += places[0, 0] * places[1, 0] * places[2, 0] * inner * lanes
        first += lanes


@register_jitable
def choose_strip_output_count(rows, limit):
    """Return the number of outputs in the next strip, at most `limit`, when `rows` outputs are left in the line. The
    number is chosen so that the last two strips of a line are similar in size."""
    return limit if rows >= 2 * limit or rows == limit else min(rows, limit) if rows <= limit else (rows + 1) // 2


@register_jitable
def _copy_lanes_to_scratch(scratch, rows, valid, address, step):
    """Copy the first `valid` lanes of each of the `rows` rows at `address` to `scratch`, which has room for full
    vectors."""
    for r in range(rows):
        for v in range(valid):
            scratch[r, v] = _load_scalar(scratch.dtype.type(0), address + r * step + v * scratch.itemsize)


@intrinsic
def _load_scalar(typingctx: Any, like: Any, address: Any) -> Any:
    def emit_ir(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.load(emit_pointer_cast(builder, arguments[0].type, arguments[1]))

    return like(like, types.int64), emit_ir


@intrinsic
def _store_scalar_at_address(typingctx: Any, value: Any, address: Any) -> Any:
    def emit_ir(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        builder.store(arguments[0], emit_pointer_cast(builder, arguments[0].type, arguments[1]))
        return context.get_dummy_value()

    return types.void(value, types.int64), emit_ir


@register_jitable
def compute_line_by_strips(
    like, wide, length, x, x_step, y, y_step, start, add, valid, scratch, w, counts, x_steps, w_steps, run
):
    """Compute a line of outputs strip by strip. If only the first `valid` lanes of each vector are in use, the strips
    are computed in `scratch`, and these lanes are then copied to y."""
    at, most, word = 0, WIDE_ROWS if wide else NARROW_ROWS, scratch.itemsize
    partial = valid * word < (WIDE if wide else NARROW)
    while at < length:
        rows = choose_strip_output_count(length - at, most)
        xs, ys = x + at * x_step, y + at * y_step
        begin, step = (ys, y_step) if add else (start, 0)
        to, to_step = ys, y_step
        if partial:
            _copy_lanes_to_scratch(scratch, rows, valid, begin, step)
            begin = to = scratch.ctypes.data
            step = to_step = WIDE
        if wide:
            _wide_strip(like, rows, to, to_step, begin, step, xs, x_step, w, counts, x_steps, w_steps, run)
        else:
            _narrow_strip(like, rows, to, to_step, begin, step, xs, x_step, w, counts, x_steps, w_steps, run)
        if partial:
            for r in range(rows):
                for v in range(valid):
                    _store_scalar_at_address(scratch[r, v], ys + r * y_step + v * word)
        at += rows


@register_jitable
def _compute_line_by_dot_products(
    like, outputs, length, x, x_step, y, y_step, start, add, w, w_step, counts, x_steps, w_steps, run
):
    """Compute a line of outputs with few channels strip by strip, using dot products. `run` is the number of contiguous
    input bytes that are multiplied by weights at each window offset."""
    at, most, run = 0, FEW_OUTPUTS[outputs - 1], run // NARROW
    while at < length:
        rows = choose_strip_output_count(length - at, most)
        xs, ys = x + at * x_step, y + at * y_step
        begin, step = (ys, y_step) if add else (start, 0)
        if outputs == 1:
            _one(like, rows, ys, y_step, begin, step, xs, x_step, w, w_step, counts, x_steps, w_steps, run)
        elif outputs == 2:
            _two(like, rows, ys, y_step, begin, step, xs, x_step, w, w_step, counts, x_steps, w_steps, run)
        elif outputs == 3:
            _three(like, rows, ys, y_step, begin, step, xs, x_step, w, w_step, counts, x_steps, w_steps, run)
        else:
            _four(like, rows, ys, y_step, begin, step, xs, x_step, w, w_step, counts, x_steps, w_steps, run)
        at += rows


@register_jitable
def find_sample_and_run_of_output_line(line, runs):
    """Return three integers for a line of outputs: its sample, the index of its run, and its output index along the
    first dim. A run is a range of outputs that have the same window offsets inside the field."""
    lines, a = 0, 0
    for run in range(runs.shape[0]):
        lines += runs[run, 1] - runs[run, 0]
    n, left = line // lines, line % lines
    while left >= runs[a, 1] - runs[a, 0]:
        left -= runs[a, 1] - runs[a, 0]
        a += 1
    return n, a, runs[a, 0] + left


@jit
def _convolve_lines(
    from_line, to_line, x, y, x_steps, y_steps, moves, runs, bounds, channels, sizes, packed, start, add
):
    """Compute the lines of outputs `from_line` to `to_line`, strip by strip. A line consists of all outputs of a sample
    with the same index along the first dim. Lines are counted over all samples.

    `x` and `y` are the addresses of the first cell and the first output. `x_steps` and `y_steps` are the numbers of
    bytes from sample to sample, and from cell to cell along each dim. `moves`, (3 dims, 3), contains three distances in
    x, in bytes, for each dim. The first is from the cell that an output reads to the cell that the next output reads at
    the same window offset. The second is from one window offset to the next. The third is from the first cell of x to
    the first cell that output 0 reads. `runs` contains, for each dim d, bounds[d] runs (start, stop, first offset, end
    of offsets) of outputs with the same window offsets. `sizes` is the number of window offsets along each dim. Sums
    start from `start` or, if `add`, from the previous values of the outputs."""
    use_widest_vectors()
    like, word = packed.dtype.type(0), packed.itemsize
    places = sizes[0] * sizes[1] * sizes[2]
    merged = moves[2, 1] == channels * word
    scratch = np.zeros((NARROW_ROWS, WIDE // word), packed.dtype)
    for line in range(from_line, to_line):
        n, a, i = find_sample_and_run_of_output_line(line, runs[0, : bounds[0]])
        lo0, n0 = runs[0, a, 2], runs[0, a, 3] - runs[0, a, 2]
        x_line = x + n * x_steps[0] + i * moves[0, 0] + moves[0, 2] + lo0 * moves[0, 1]
        y_line = y + n * y_steps[0] + i * y_steps[1]
        first, block = 0, packed.ctypes.data
        while first < start.size:
            wide = start.size - first > NARROW // word
            nbytes = WIDE if wide else NARROW
            valid = min(nbytes // word, start.size - first)
            few = _can_use_dot_loop(valid, channels * word)
            cell = channels * (word if few else nbytes)
            steps = (sizes[1] * sizes[2] * cell, sizes[2] * cell, cell)
            for b in range(bounds[1]):
                for c in range(bounds[2]):
                    lo1, n1, lo2, n2 = runs[1, b, 2], runs[1, b, 3], runs[2, c, 2], runs[2, c, 3]
                    n1, n2 = n1 - lo1, n2 - lo2
                    down, right = runs[1, b, 0], runs[2, c, 0]
                    high, long = runs[1, b, 1] - down, runs[2, c, 1] - right
                    x_at = x_line + down * moves[1, 0] + moves[1, 2] + lo1 * moves[1, 1]
                    x_at += right * moves[2, 0] + moves[2, 2] + lo2 * moves[2, 1]
                    y_at = y_line + down * y_steps[2] + right * y_steps[3] + first * word
                    w_at = block + lo0 * steps[0] + lo1 * steps[1] + lo2 * steps[2]
                    counts = (n0, n1, 1 if merged else n2)
                    run = n2 * channels if merged else channels
                    x_out, x_in, y_out, y_in = moves[1, 0], moves[2, 0], y_steps[2], y_steps[3]
                    if high > long:
                        high, long, x_out, x_in, y_out, y_in = long, high, x_in, x_out, y_in, y_out
                    start_at, x_moves = start.ctypes.data + first * word, (moves[0, 1], moves[1, 1], moves[2, 1])
                    for h in range(high):
                        xs, ys = x_at + h * x_out, y_at + h * y_out
                        if few:
                            _compute_line_by_dot_products(like, valid, long, xs, x_in, ys, y_in, start_at, add, w_at,
                                                          places * cell, counts, x_moves, steps,
                                                          run * word)  # fmt: skip
                        else:
                            compute_line_by_strips(like, wide, long, xs, x_in, ys, y_in, start_at, add, valid, scratch,
                                                   w_at, counts, x_moves, steps, run)  # fmt: skip
            first += nbytes // word
            block += places * channels * nbytes


@jit
def _add_weight_gradient(
    from_plane, to_plane, x, dy, x_steps, y_steps, moves, runs, bounds, channels, sizes, packed, outputs, samples
):
    """Add the gradients of some of the weights to `packed`. The weights are those of the planes [`from_plane`,
    `to_plane`). A plane contains all weights with the same window offsets along the first two dims. Planes are numbered
    in C order. The other arguments are as in `_convolve_lines`."""
    use_widest_vectors()
    like, word = packed.dtype.type(0), packed.itemsize
    merged = moves[2, 1] == channels * word
    for n in range(samples):
        for a in range(bounds[0]):
            for i in range(runs[0, a, 0], runs[0, a, 1]):
                for b in range(bounds[1]):
                    down, below = runs[1, b, 0], runs[1, b, 1]
                    for c in range(bounds[2]):
                        right, long = runs[2, c, 0], runs[2, c, 1] - runs[2, c, 0]
                        tall = max(NEAR_BYTES // (long * (moves[2, 0] + outputs * word)), 1)
                        for j in range(down, below, tall):
                            high = min(tall, below - j)
                            x_at = x + n * x_steps[0] + i * moves[0, 0] + j * moves[1, 0] + right * moves[2, 0]
                            x_at += moves[0, 2] + moves[1, 2] + moves[2, 2]
                            y_at = dy + n * y_steps[0] + i * y_steps[1] + j * y_steps[2] + right * y_steps[3]
                            for plane in range(from_plane, to_plane):
                                p, q = plane // sizes[1], plane % sizes[1]
                                if not (runs[0, a, 2] <= p < runs[0, a, 3] and runs[1, b, 2] <= q < runs[1, b, 3]):
                                    continue
                                for place in range(runs[2, c, 2], runs[2, c, 2] + 1 if merged else runs[2, c, 3]):
                                    run = (runs[2, c, 3] - place) * channels if merged else channels
                                    cell = x_at + p * moves[0, 1] + q * moves[1, 1] + place * moves[2, 1]
                                    row = ((p * sizes[1] + q) * sizes[2] + place) * channels
                                    first, block = 0, packed.ctypes.data
                                    while first < outputs:
                                        wide = outputs - first > NARROW // word
                                        nbytes, most = (WIDE, 6) if wide else (NARROW, 12)
                                        at = 0
                                        while at < run:
                                            rows = choose_strip_output_count(run - at, most)
                                            to, source = block + (row + at) * nbytes, cell + at * word
                                            slope, steps = y_at + first * word, (y_steps[2], y_steps[3])
                                            if wide:
                                                _wide_outer(like, rows, to, source, word, slope, (high, long),
                                                            (moves[1, 0], moves[2, 0]), steps)  # fmt: skip
                                            else:
                                                _narrow_outer(like, rows, to, source, word, slope, (high, long),
                                                              (moves[1, 0], moves[2, 0]), steps)  # fmt: skip
                                            at += rows
                                        first += nbytes // word
                                        block += sizes[0] * sizes[1] * sizes[2] * channels * nbytes


def convolve_direct(
    x: np.ndarray, weight: np.ndarray, bias: Any, strides: WindowStrides, y: np.ndarray, add: bool, places: Any = None
) -> None:
    """Convolve x with `weight`. Write the result plus `bias`, (outputs,), to y. If `add`, add the result without a bias
    to y instead.

    x and y have channels last. If `places` is given, it selects the window offsets to use, as (number of offsets, first
    offset, step) for each dim. In this case, the dims of the weight for input and output channels are swapped."""
    if not y.size:
        return
    plan = make_direct_convolution_arguments(strides, places, x.shape, x.strides, y.shape, y.strides, add)
    if plan is None:
        return
    found, sizes, lines, *rest = plan
    lanes = round_up_to_lanes(y.shape[-1], x.dtype)
    make = np.empty if lanes == y.shape[-1] else np.zeros
    packed = make(lanes * x.shape[-1] * math.prod(sizes.tolist()), x.dtype)
    _pack_weights(reshape_to_three_dims(weight), packed, found, places is not None, False)
    begin = np.zeros(y.shape[-1], x.dtype) if bias is None else as_contiguous(bias, x.dtype)
    addresses = get_data_pointer(x), get_data_pointer(y)
    parallel_for_range(_convolve_lines, 0, lines, *addresses, *rest, x.shape[-1], sizes, packed, begin, add)


@lru_cache(1 << 10)
def make_direct_convolution_arguments(
    strides: WindowStrides, places: Any, x: tuple[int, ...], x_strides: tuple[int, ...], y: tuple[int, ...],
    y_strides: tuple[int, ...], add: bool,
) -> tuple[Any, ...] | None:  # fmt: skip
    """Return the arguments that are the same in all calls of `convolve_direct` for arrays of these shapes and strides:
    the window offsets for `_pack_weights`, their number along each dim, the number of lines, and the arguments of
    `_convolve_lines` from `x_steps` to `bounds`. Return None if there is nothing to compute.

    Steps are distances in bytes. Each array of steps holds the step from sample to sample, followed by the steps from
    cell to cell along the three dims."""
    if places is None:
        places = (*((1, 0, 1),) * (3 - len(strides.kernel)), *((k, 0, 1) for k in strides.kernel))
    strides = strides._replace(kernel=tuple(many for many, *_ in places[3 - len(strides.kernel) :]))
    runs = _find_output_runs_with_same_window_offsets(strides, y[1:-1], x[1:-1], add)
    if runs is None:
        return None
    met = zip(runs.met, places, strict=True)
    found = np.array([(b - a, first + a * step, step) for (a, b), (_, first, step) in met])
    x_steps, y_steps = (np.array([s[0], *(0,) * (5 - len(s)), *s[1:-1]]) for s in (x_strides, y_strides))
    moves = runs.moves * x_steps[1:, None]
    return found, found[:, 0].copy(), x[0] * runs.lines, x_steps, y_steps, moves, runs.table, runs.bounds


def direct_backward_input(
    weight: np.ndarray, dy: np.ndarray, strides: WindowStrides, dx: np.ndarray, bias: Any,
    convolve: Callable[..., None] = convolve_direct,
) -> None:  # fmt: skip
    """Write the gradient with respect to the input, plus `bias` of shape (channels,), to `dx`.

    The gradient at a cell is a sum over the outputs whose windows cover the cell. Two cells that are one stride apart
    use the same weights, but their outputs are shifted by one. Therefore, dx is computed one phase at a time. A phase
    is a set of cells spaced one stride apart, and its gradient is a convolution of dy with stride 1, which `convolve`
    computes."""
    for into, places, reverse in _plan_stride_phases(strides):
        part = dx[into]
        if all(many for many, *_ in places):
            convolve(dy, weight, bias, reverse, part, False, places)
        else:
            part[...] = 0 if bias is None else bias


@lru_cache(1 << 10)
def _plan_stride_phases(
    strides: WindowStrides,
) -> list[tuple[tuple[slice, ...], tuple[tuple[int, ...], ...], WindowStrides]]:
    """Return (cells, places, strides) for each phase. A phase is a set of cells spaced one stride apart. `cells` is the
    index of the cells. `places` and `strides` are the arguments for `convolve_direct` to compute the gradient at these
    cells."""
    plans: list[tuple[Any, Any, WindowStrides]] = []
    for phase in product(*map(range, strides.stride)):
        firsts, places, into = [], [(1, 0, 1)] * (3 - len(phase)), [slice(None)]
        for r, k, s, d, first in zip(phase, *strides[:4], strict=True):
            begin, step = (0, 1) if s == 1 else ((r - first) % s, s)
            many = len(range(begin, k, step))
            last = begin + step * (many - 1)
            places.append((many, last, -step))
            firsts.append((r - first - last * d) // s)
            into.append(slice(r, None, s))
        ones = (1,) * len(phase)
        reverse = WindowStrides(ones, ones, strides.dilation, tuple(firsts), 1)
        plans.append((tuple(into), tuple(places), reverse))
    return plans


def direct_add_weight_gradient(x: np.ndarray, dy: np.ndarray, strides: WindowStrides, dw: np.ndarray) -> None:
    """Add the gradient of the weights to `dw`, (outputs, channels, *kernel)."""
    if not dy.size:
        return
    outputs, channels, lanes = dy.shape[-1], x.shape[-1], round_up_to_lanes(dy.shape[-1], x.dtype)
    if outputs < lanes:
        dy, narrow = np.zeros((*dy.shape[:-1], lanes), dy.dtype), dy
        dy[..., :outputs] = narrow
    plan = make_direct_convolution_arguments(strides, None, x.shape, x.strides, dy.shape, dy.strides, True)
    if plan is None:
        return
    places, sizes, _, *rest = plan
    packed = np.zeros(lanes * channels * math.prod(sizes.tolist()), x.dtype)
    rest = [get_data_pointer(x), get_data_pointer(dy), *rest, channels, sizes, packed, lanes, x.shape[0]]
    parallel_for_range(_add_weight_gradient, 0, int(sizes[0] * sizes[1]), *rest)
    kernel = reshape_to_three_dims(dw)
    _pack_weights(kernel, packed, places, False, True)
    if not np.may_share_memory(kernel, dw):
        dw[...] = kernel.reshape(dw.shape)


def round_up_to_lanes(outputs: int, dtype: Any) -> int:
    """Return `outputs`, rounded up to a multiple of the number of lanes in a narrow vector."""
    narrow = NARROW // dtype.itemsize
    return -(-outputs // narrow) * narrow


def reshape_to_three_dims(weight: np.ndarray) -> np.ndarray:
    return as_contiguous(weight).reshape(weight.shape[:2] + (1,) * (5 - weight.ndim) + weight.shape[2:])


class _OutputRuns(NamedTuple):
    """Runs of consecutive outputs. For all outputs of a run, the same offsets of the window lie inside the field. The
    runs are stored in the form that `_convolve_lines` takes.

    Attributes
    ----------
    table : (start, stop, first offset, end of offsets) of each run, for each dim
    bounds : number of runs along each dim
    moves : distances as in `_convolve_lines`, but in cells instead of bytes
    met : for each dim, the range of window offsets that any output uses; offsets in `table` and `moves` are counted
        from the start of this range
    lines : number of outputs along the first dim
    """

    table: np.ndarray
    bounds: np.ndarray
    moves: np.ndarray
    met: tuple[tuple[int, int], ...]
    lines: int


def _find_output_runs_with_same_window_offsets(
    strides: WindowStrides, sizes: tuple[int, ...], cells: tuple[int, ...], add: bool
) -> _OutputRuns | None:
    """Find the runs of consecutive outputs whose windows have the same offsets inside the field. Return None if there
    are no outputs.

    If `add`, outputs whose windows are completely outside the field are left out."""
    rows = [*zip(strides.kernel, strides.stride, strides.dilation, strides.first, sizes, cells, strict=True)]
    rows = [(1, 1, 1, 0, 1, 1)] * (3 - len(rows)) + rows
    found, met, moves = [], [], []
    for k, s, d, first, size, n in rows:
        begin = first + s * np.arange(size)
        low = np.clip(-(begin // d), 0, k)
        high = np.maximum(np.clip(-((begin - n) // d), 0, k), low)
        edges = [0, *(np.flatnonzero((np.diff(low) != 0) | (np.diff(high) != 0)) + 1).tolist(), size]
        runs = [(a, b, int(low[a]), int(high[a])) for a, b in zip(edges, edges[1:], strict=False) if b > a]
        runs = [run for run in runs if run[3] > run[2] or not add]
        some = [run for run in runs if run[3] > run[2]]
        least = min((run[2] for run in some), default=0)
        most = max((run[3] for run in some), default=least)
        met.append((least, most))
        found.append([(a, b, low - least, high - least) if high > low else (a, b, 0, 0) for a, b, low, high in runs])
        moves.append((s, d, first + least * d))
    if not all(found):
        return None
    table = np.zeros((3, max(map(len, found)), 4), np.int64)
    for dim, runs in enumerate(found):
        table[dim, : len(runs)] = runs
    lines = sum(b - a for a, b, *_ in found[0])
    return _OutputRuns(table, np.array([len(runs) for runs in found]), np.array(moves), tuple(met), lines)
