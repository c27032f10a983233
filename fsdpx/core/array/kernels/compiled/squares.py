"""Sums of squares, computed in fixed blocks and in a fixed order, so that results are bitwise identical for any number
of threads and any vector width."""

from __future__ import annotations

from typing import Any

import numpy as np

from fsdpx.core.array.jit import jit
from fsdpx.core.array.kernels.choice import register_compiled_kernel
from fsdpx.core.array.kernels.compiled.elements import to_float
from fsdpx.core.array.kernels.squares import BLOCK, LANES, sum_each_row_in_fixed_order
from fsdpx.core.array.parallel import MIN_PIECE_ELEMENTS, run_tasks, split_range


@jit
def _sum_block_squares_into(x, sums, grain):
    """Write the sum of squares of each block of `grain` elements of x to `sums`. Elements are added in the order that
    `sum_each_row_in_fixed_order` describes, regardless of the processor's vector width."""
    lanes = np.empty(LANES)
    for n in range(sums.size):
        block = x[n * grain : min((n + 1) * grain, x.size)]
        whole = block.size // LANES
        lanes[:] = 0
        for row in range(whole):
            start = row * LANES
            for k in range(LANES):
                v = np.float64(to_float(block[start + k]))
                lanes[k] += v * v
        rest = block[whole * LANES :]
        for k in range(rest.size):
            v = np.float64(to_float(rest[k]))
            lanes[k] += v * v
        half = LANES
        while half > 1:
            half //= 2
            for k in range(half):
                lanes[k] += lanes[half + k]
        sums[n] = lanes[0]


@register_compiled_kernel(lambda x, w, s: (w,))
def square_sum(xp: Any, flat: np.ndarray) -> float:
    sums = sum_squares_of_blocks(xp, flat, BLOCK)
    return float(sum_each_row_in_fixed_order(np, sums[None])[0]) if sums.size else 0.0


@register_compiled_kernel(lambda x, w, s: (w, 2))
def sum_squares_of_blocks(xp: Any, flat: np.ndarray, grain: int) -> np.ndarray:
    flat = np.ascontiguousarray(flat)
    sums = np.empty(-(-flat.size // grain))
    blocks = split_range(sums.size, max(MIN_PIECE_ELEMENTS // grain, 1), line=8)
    run_tasks(_sum_block_squares_into, [(flat[a * grain : b * grain], sums[a:b], grain) for a, b in blocks])
    return sums
