"""Floats as one bit with a scale per block, and back."""

from typing import Any

import numpy as np

from fsdpx.codecs.forms import compiles
from fsdpx.codecs.levels import LANES, LARGEST, SIGNS, TINY

__all__ = ["add_signs", "signs"]


def signs(xp: Any, x: Any, bits: Any, scales: Any, lost: Any | None) -> None:
    """Bit i of `bits` (lowest first) is whether x[i] >= 0; flat arrays of float32 or float64.

    scales: one float32 per block of 1,024, the mean |x|; NaN where a block has Inf or NaN. lost: becomes x minus what
    arrives, 0 where that is no number; it may be x."""
    if compiles(xp):
        from fsdpx.codecs.compiled_signs import signs as body

        body(x, bits, scales, lost)
        return
    blocks = _blocks(xp, x)
    sizes = xp.minimum(x.size - SIGNS * xp.arange(len(blocks)), SIGNS)
    with np.errstate(over="ignore", invalid="ignore"):
        mean = _sums(xp, xp.abs(blocks).astype(np.float64)) / sizes
    fits = mean <= LARGEST
    scale = xp.where(fits, xp.where(fits, mean, 0), xp.nan).astype(np.float32)
    scale = xp.where(scale < TINY, np.float32(0), scale)
    up = x >= 0
    if lost is not None:
        sent = xp.repeat(scale, SIGNS)[: x.size]
        with np.errstate(invalid="ignore"):
            rest = x - xp.where(up, sent, -sent)
        lost[...] = xp.where(xp.repeat(fits, SIGNS)[: x.size], rest, x.dtype.type(0))
    bits[...] = xp.packbits(up, bitorder="little")
    scales[...] = scale


def add_signs(xp: Any, bits: Any, scales: Any, out: Any, add: bool) -> None:
    """out = the numbers, or out += the numbers, that `signs` made."""
    if compiles(xp):
        from fsdpx.codecs.compiled_signs import add_signs as body

        body(bits, scales, out, add)
        return
    up = xp.unpackbits(bits, bitorder="little")[: out.size].astype(bool)
    sent = xp.repeat(scales, SIGNS)[: out.size]
    found = xp.where(up, sent, -sent)
    out[...] = out + found if add else found


def _sums(xp: Any, blocks: Any) -> Any:
    """Of each block, in the order of the Numba code: lanes side by side, then halves."""
    lanes = xp.zeros((len(blocks), LANES))
    for row in range(SIGNS // LANES):
        lanes += blocks[:, row * LANES : (row + 1) * LANES]
    width = LANES
    while width > 1:
        width //= 2
        lanes = lanes[:, :width] + lanes[:, width:]
    return lanes[:, 0]


def _blocks(xp: Any, x: Any) -> Any:
    """(blocks, 1024), made up with zeros."""
    full = xp.zeros((-(-x.size // SIGNS), SIGNS), dtype=x.dtype)
    full.reshape(-1)[: x.size] = x
    return full
