"""Floats as 8-bit numbers with a scale per block, see `comm.codecs.quantise`: the same bits."""

from collections.abc import Callable
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np

from fsdpx.array.kernels.compiled.half import WORD, intrinsic, mixed
from fsdpx.array.kernels.compiled.scalar import order, unorder, widest
from fsdpx.array.parallel import GRAIN, cuts, run
from fsdpx.array.random import Stretch
from fsdpx.codecs.levels import BLOCK, LARGEST, LEVELS, TINY
from fsdpx.native.tools import ir, jit, types

__all__ = ["add_quantised", "quantise"]

SOURCE = blake2b(Path(__file__).read_bytes(), digest_size=8).hexdigest()
SIXTEENTH = ir.Constant(ir.FloatType(), 2.0**-16)


def kernel(body: Callable[..., Any]) -> Any:
    """Compiled under a name by which the cache never takes code of another version."""
    return jit(body, name=f"{body.__name__}.{SOURCE}")


@intrinsic
def fraction(typingctx: Any, place: Any, key0: Any, key1: Any) -> Any:
    """The chance of a place as a float32 in [0, 1)."""

    def code(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        place, key0, key1 = (builder.trunc(a, WORD) for a in arguments)
        number = mixed(builder, builder.xor(mixed(builder, builder.xor(place, key0)), key1))
        return builder.fmul(builder.uitofp(builder.lshr(number, WORD(16)), ir.FloatType()), SIXTEENTH)

    return types.float32(types.int64, types.int64, types.int64), code


@kernel
def _scale(x):
    most = order(abs(x[0]))
    for i in range(x.size):
        most = max(most, order(abs(x[i])))
    largest = unorder(most)
    scale = np.float32(largest / x.dtype.type(LEVELS)) if largest <= LARGEST else np.float32(np.nan)
    return np.float32(0) if scale < TINY else scale


@kernel
def _quantise(first, last, all_x, all_q, scales, keep, by_chance, at, key0, key1):
    widest()
    half, low, high = all_x.dtype.type(0.5), all_x.dtype.type(-LEVELS), all_x.dtype.type(LEVELS)
    for b in range(first, last):
        start = b * BLOCK
        x, q = all_x[start : start + BLOCK], all_q[start : start + BLOCK]  # places from 0 on: LLVM sees them in a row
        scales[b] = scale = _scale(x)
        if not scale > 0:
            q[:] = 0
            if keep and scale != 0:
                x[:] = 0
        elif by_chance:
            for i in range(x.size):
                up = x.dtype.type(fraction(at + start + i, key0, key1))
                level = min(max(np.floor(x[i] / scale + up), low), high)
                q[i] = np.int8(np.int32(level))
                if keep:
                    x[i] -= level * scale
        elif keep:
            for i in range(x.size):
                level = min(max(np.floor(x[i] / scale + half), low), high)
                q[i] = np.int8(np.int32(level))
                x[i] -= level * scale
        else:
            for i in range(x.size):
                q[i] = np.int8(np.int32(min(max(np.floor(x[i] / scale + half), low), high)))


@kernel
def _add(first, last, all_q, scales, all_out, add):
    widest()
    for b in range(first, last):
        start = b * BLOCK
        q, out, scale = all_q[start : start + BLOCK], all_out[start : start + BLOCK], scales[b]
        if add:
            for i in range(q.size):
                out[i] += out.dtype.type(q[i]) * scale
        else:
            for i in range(q.size):
                out[i] = out.dtype.type(q[i]) * scale


def quantise(
    x: np.ndarray, q: np.ndarray, scales: np.ndarray, lost: np.ndarray | None, numbers: Stretch | None
) -> None:
    if not x.size:
        return
    _, at, key0, key1 = (slice(0), 0, 0, 0) if numbers is None else next(numbers.words())
    if lost is not None and lost is not x:
        lost[...] = x
    keep, by_chance = lost is not None, numbers is not None
    _in_blocks(_quantise, scales.size, x if lost is None else lost, q, scales, keep, by_chance, at, key0, key1)


def add_quantised(q: np.ndarray, scales: np.ndarray, out: np.ndarray, add: bool) -> None:
    _in_blocks(_add, scales.size, q, scales, out, add)


def _in_blocks(body: Any, blocks: int, *arguments: Any) -> None:
    """`body(first, last, *arguments)` for all blocks, cut among threads."""
    run(body, [(first, last, *arguments) for first, last in cuts(blocks, GRAIN // BLOCK, 1)])
