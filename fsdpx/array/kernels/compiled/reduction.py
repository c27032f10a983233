"""Sums of squares of flat arrays in one pass, by fixed blocks, so that they do not depend on threads."""

from typing import Any

import numpy as np

from fsdpx.array.kernels.compiled.bits import real
from fsdpx.array.kernels.norm import BLOCK
from fsdpx.array.parallel import GRAIN, cuts, run
from fsdpx.native.compiled import REORDER, jit

__all__ = ["square_sum", "square_sums"]


@jit(fastmath=REORDER)
def _square_sum(x):
    result = 0.0
    for i in range(x.size):
        v = np.float64(real(x[i]))
        result += v * v
    return result


@jit
def _square_sums(x, sums, grain):
    for n in range(sums.size):
        sums[n] = _square_sum(x[n * grain : min((n + 1) * grain, x.size)])


def square_sum(xp: Any, flat: np.ndarray) -> float:
    if flat.size <= BLOCK:
        return float(_square_sum(np.ascontiguousarray(flat)))
    return float(np.sum(square_sums(xp, flat, BLOCK)))


def square_sums(xp: Any, flat: np.ndarray, grain: int) -> np.ndarray:
    flat = np.ascontiguousarray(flat)
    sums = np.empty(-(-flat.size // grain))
    blocks = cuts(sums.size, max(GRAIN // grain, 1), line=8)
    run(_square_sums, [(flat[a * grain : b * grain], sums[a:b], grain) for a, b in blocks])
    return sums
