"""Floats as one bit with a scale per block, see `comm.codecs.signs`: the same bits."""

from typing import Any

import numpy as np

from fsdpx.array.kernels.compiled.scalar import widest
from fsdpx.array.parallel import GRAIN, cuts, run
from fsdpx.codecs.levels import LANES, LARGEST, SIGNS, TINY
from fsdpx.native.tools import extending, ir, jit, types

__all__ = ["add_signs", "signs"]

intrinsic: Any = extending.intrinsic
BYTE = ir.IntType(8)


@intrinsic
def _above(typingctx: Any, x: Any, i: Any) -> Any:
    """Which of x[i : i + 8] are 0 or more, as bits: LLVM makes no single comparison of eight that are written out."""

    def code(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        eight = builder.load(_eight(context, builder, signature, arguments), align=x.dtype.bitwidth // 8)
        return builder.bitcast(builder.fcmp_ordered(">=", eight, ir.Constant(eight.type, [0.0] * 8)), BYTE)

    return types.uint8(x, types.int64), code


@intrinsic
def _add_sizes(typingctx: Any, lanes: Any, j: Any, x: Any, i: Any) -> Any:
    """lanes[j : j + 8] += |x[i : i + 8]| in float64."""

    def code(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        sums = _eight(context, builder, signature, arguments)
        eight = builder.load(_eight(context, builder, signature, arguments, 2), align=x.dtype.bitwidth // 8)
        below = builder.fcmp_ordered("<", eight, ir.Constant(eight.type, [0.0] * 8))
        size = builder.select(below, builder.fneg(eight), eight)
        wide = size if x.dtype == types.float64 else builder.fpext(size, sums.type.pointee)
        builder.store(builder.fadd(builder.load(sums, align=8), wide), sums, align=8)
        return context.get_dummy_value()

    return types.void(lanes, types.int64, x, types.int64), code


@intrinsic
def _spread(typingctx: Any, out: Any, i: Any, byte: Any, scale: Any, add: Any) -> Any:
    """out[i : i + 8] = scale where the byte has a bit and -scale elsewhere, or += that."""

    def code(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        _, _, byte, scale, add = arguments
        place, align = _eight(context, builder, signature, arguments), out.dtype.bitwidth // 8
        up = builder.bitcast(byte, ir.VectorType(ir.IntType(1), 8))
        found = builder.select(up, _same(builder, scale), _same(builder, builder.fneg(scale)))
        nothing = ir.Constant(found.type, [-0.0] * 8)
        before = builder.select(add, builder.load(place, align=align), nothing)
        builder.store(builder.fadd(before, found), place, align=align)
        return context.get_dummy_value()

    return types.void(out, types.int64, types.uint8, out.dtype, types.boolean), code


def _eight(context: Any, builder: Any, signature: Any, arguments: Any, first: int = 0) -> Any:
    """A pointer to eight elements of an array, the `first` argument, from where the next one says."""
    data = context.make_array(signature.args[first])(context, builder, arguments[first]).data
    kind = ir.VectorType(data.type.pointee, 8)
    return builder.bitcast(builder.gep(data, [arguments[first + 1]]), kind.as_pointer())


def _same(builder: Any, value: Any) -> Any:
    """Eight times a value."""
    eight = ir.VectorType(value.type, 8)
    one = builder.insert_element(ir.Constant(eight, ir.Undefined), value, ir.IntType(32)(0))
    return builder.shuffle_vector(one, one, ir.Constant(ir.VectorType(ir.IntType(32), 8), [0] * 8))


@jit
def _mean(x, lanes):
    whole = x.size // LANES * LANES
    lanes[:] = 0.0
    for i in range(0, whole, LANES):
        for j in range(0, LANES, 8):
            _add_sizes(lanes, j, x, i + j)
    for j in range(x.size - whole):
        lanes[j] += np.float64(abs(x[whole + j]))
    width = LANES
    while width > 1:
        width //= 2
        for j in range(width):
            lanes[j] += lanes[width + j]
    mean = lanes[0] / x.size
    scale = np.float32(mean) if mean <= LARGEST else np.float32(np.nan)
    return np.float32(0) if scale < TINY else scale


@jit
def _signs(first, last, all_x, all_bits, scales, keep):
    widest()
    lanes = np.empty(LANES)
    zero = all_x.dtype.type(0)
    for b in range(first, last):
        x = all_x[b * SIGNS : (b + 1) * SIGNS]  # places from 0 on: LLVM sees that they follow each other
        bits = all_bits[b * SIGNS // 8 : (b + 1) * SIGNS // 8]
        scales[b] = scale = _mean(x, lanes)
        whole = x.size // 8
        for i in range(whole):
            bits[i] = _above(x, 8 * i)
        if 8 * whole < x.size:
            byte = np.uint8(0)
            for j in range(x.size - 8 * whole):
                byte |= np.uint8(x[8 * whole + j] >= zero) << np.uint8(j)
            bits[whole] = byte
        if not keep:
            continue
        if not scale >= 0:
            x[:] = zero
            continue
        for i in range(x.size):
            x[i] -= scale if x[i] >= zero else -scale


@jit
def _add(first, last, all_bits, scales, all_out, add):
    for b in range(first, last):
        out = all_out[b * SIGNS : (b + 1) * SIGNS]
        bits = all_bits[b * SIGNS // 8 : (b + 1) * SIGNS // 8]
        scale, whole = out.dtype.type(scales[b]), out.size // 8
        for i in range(whole):
            _spread(out, 8 * i, bits[i], scale, add)
        for i in range(8 * whole, out.size):
            found = scale if (bits[whole] >> (i & 7)) & 1 else -scale
            out[i] = out[i] + found if add else found


def signs(x: np.ndarray, bits: np.ndarray, scales: np.ndarray, lost: np.ndarray | None) -> None:
    if lost is not None and lost is not x:
        lost[...] = x
    _in_blocks(_signs, scales.size, x if lost is None else lost, bits, scales, lost is not None)


def add_signs(bits: np.ndarray, scales: np.ndarray, out: np.ndarray, add: bool) -> None:
    _in_blocks(_add, scales.size, bits, scales, out, add)


def _in_blocks(body: Any, blocks: int, *arguments: Any) -> None:
    """`body(first, last, *arguments)` for all blocks, cut among threads."""
    run(body, [(first, last, *arguments) for first, last in cuts(blocks, GRAIN // SIGNS, 1)])
