"""Floats as one bit with a scale per block, see `comm.codecs.signs`: the same bits."""

from typing import Any

import numpy as np

from fsdpx.array.parallel import GRAIN, cuts, run
from fsdpx.codecs.levels import LANES, LARGEST, SIGNS, TINY
from fsdpx.native.tools import jit

__all__ = ["add_signs", "signs"]


@jit
def _mean(x, start, stop, lanes):
    whole = start + (stop - start) // LANES * LANES
    lanes[:] = 0.0
    for i in range(start, whole, LANES):
        for j in range(LANES):
            lanes[j] += np.float64(abs(x[i + j]))
    for j in range(stop - whole):
        lanes[j] += np.float64(abs(x[whole + j]))
    width = LANES
    while width > 1:
        width //= 2
        for j in range(width):
            lanes[j] += lanes[width + j]
    mean = lanes[0] / (stop - start)
    scale = np.float32(mean) if mean <= LARGEST else np.float32(np.nan)
    return np.float32(0) if scale < TINY else scale


@jit
def _signs(first, last, x, bits, scales, lost, keep):
    lanes = np.empty(LANES)
    zero = x.dtype.type(0)
    for b in range(first, last):
        start, stop = b * SIGNS, min((b + 1) * SIGNS, x.size)
        scales[b] = scale = _mean(x, start, stop, lanes)
        whole = start + (stop - start) // 8 * 8
        for at in range(start, whole, 8):
            byte = np.uint8(0)
            for j in range(8):
                byte |= np.uint8(x[at + j] >= zero) << np.uint8(j)
            bits[at >> 3] = byte
        if whole < stop:
            byte = np.uint8(0)
            for j in range(stop - whole):
                byte |= np.uint8(x[whole + j] >= zero) << np.uint8(j)
            bits[whole >> 3] = byte
        if not keep:
            continue
        if not scale >= 0:
            lost[start:stop] = zero
            continue
        for i in range(start, stop):
            lost[i] = x[i] - (scale if x[i] >= zero else -scale)


@jit
def _add(first, last, bits, scales, out, add):
    for b in range(first, last):
        scale = out.dtype.type(scales[b])
        for i in range(b * SIGNS, min((b + 1) * SIGNS, out.size)):
            found = scale if (bits[i >> 3] >> (i & 7)) & 1 else -scale
            out[i] = out[i] + found if add else found


def signs(x: np.ndarray, bits: np.ndarray, scales: np.ndarray, lost: np.ndarray | None) -> None:
    keep = lost is not None
    _in_blocks(_signs, scales.size, x, bits, scales, lost if keep else x, keep)


def add_signs(bits: np.ndarray, scales: np.ndarray, out: np.ndarray, add: bool) -> None:
    _in_blocks(_add, scales.size, bits, scales, out, add)


def _in_blocks(body: Any, blocks: int, *arguments: Any) -> None:
    """`body(first, last, *arguments)` for all blocks, cut among threads."""
    run(body, [(first, last, *arguments) for first, last in cuts(blocks, GRAIN // SIGNS, 1)])
