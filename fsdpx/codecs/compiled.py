"""Floats as 8-bit numbers with a scale per block, see `comm.codecs.quantise`: the same bits."""

from collections.abc import Callable
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np

from fsdpx.array.kernels.compiled.half import WORD, intrinsic, mixed
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
def _scale(x, start, stop):
    largest = abs(x[start])
    odd = False
    for i in range(start, stop):
        size = abs(x[i])
        odd |= not size <= LARGEST
        largest = size if size > largest else largest
    scale = np.float32(np.nan) if odd else np.float32(largest / x.dtype.type(LEVELS))
    return np.float32(0) if scale < TINY else scale


@kernel
def _quantise(first, last, x, q, scales, lost, keep, by_chance, at, key0, key1):
    for b in range(first, last):
        start, stop = b * BLOCK, min((b + 1) * BLOCK, x.size)
        scales[b] = scale = _scale(x, start, stop)
        if not scale > 0:
            odd = scale != 0
            for i in range(start, stop):
                q[i] = 0
                if keep:
                    lost[i] = x.dtype.type(0) if odd else x[i]
            continue
        half, low, high = x.dtype.type(0.5), x.dtype.type(-LEVELS), x.dtype.type(LEVELS)
        for i in range(start, stop):
            up = x.dtype.type(fraction(at + i, key0, key1)) if by_chance else half
            level = min(max(np.floor(x[i] / scale + up), low), high)
            if keep:
                lost[i] = x[i] - level * scale
            q[i] = np.int8(level)


@kernel
def _add(first, last, q, scales, out, add):
    for b in range(first, last):
        scale = scales[b]
        for i in range(b * BLOCK, min((b + 1) * BLOCK, q.size)):
            found = out.dtype.type(q[i]) * scale
            out[i] = out[i] + found if add else found


def quantise(
    x: np.ndarray, q: np.ndarray, scales: np.ndarray, lost: np.ndarray | None, numbers: Stretch | None
) -> None:
    if not x.size:
        return
    _, at, key0, key1 = (slice(0), 0, 0, 0) if numbers is None else next(numbers.words())
    keep, by_chance = lost is not None, numbers is not None
    _in_blocks(_quantise, scales.size, x, q, scales, lost if keep else x, keep, by_chance, at, key0, key1)


def add_quantised(q: np.ndarray, scales: np.ndarray, out: np.ndarray, add: bool) -> None:
    _in_blocks(_add, scales.size, q, scales, out, add)


def _in_blocks(body: Any, blocks: int, *arguments: Any) -> None:
    """`body(first, last, *arguments)` for all blocks, cut among threads."""
    run(body, [(first, last, *arguments) for first, last in cuts(blocks, GRAIN // BLOCK, 1)])
