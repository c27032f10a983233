"""Sums of squares of 1-D arrays, for gradient norms. Each sum is bitwise identical on all processors."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

from fsdpx.core.array.kernels.dispatch import kernel
from fsdpx.core.array.shapes.flop_counter import iterate_first_and_count_all

__all__ = ["BLOCK", "LANES", "square_sum", "sum_each_row_in_fixed_order", "sum_squares_of_blocks"]

BLOCK = 1 << 14  # number of elements per block in `square_sum`
LANES = 64  # number of partial sums of a block; element i is added to partial sum i % LANES
PIECE_ELEMENTS = 1 << 18  # number of elements converted at a time, so that the float64 copy stays in cache


@kernel(narrow=0)
def square_sum(xp: Any, flat: Any) -> float:
    """Return the sum of squares of a 1-D array, computed in float64 in blocks of `BLOCK` elements."""
    sums = [
        sum_squares_of_blocks(xp, flat[start : start + PIECE_ELEMENTS], BLOCK)
        for start in _iterate_block_starts(xp, flat.shape[0], PIECE_ELEMENTS)
    ]
    return float(sum_each_row_in_fixed_order(xp, xp.concatenate(sums)[None])[0]) if sums else 0.0


@kernel(narrow=0)
def sum_squares_of_blocks(xp: Any, flat: Any, grain: int) -> Any:
    """Return the sums of squares of consecutive blocks of `grain` elements of a 1-D array, in float64. The last block
    may be shorter.

    The results are bitwise identical in all implementations and on all processors, because elements are added in fixed
    lanes (see `sum_each_row_in_fixed_order`), regardless of the processor's vector width.
    """
    squares = xp.square(flat.astype(np.float64))
    rows = xp.zeros((-(-squares.size // grain), grain))
    rows.reshape(-1)[: squares.size] = squares
    return sum_each_row_in_fixed_order(xp, rows)


def _iterate_block_starts(xp: Any, size: int, step: int) -> Iterable[int]:
    """Yield the start of each block of `step` elements. For shape-only arrays, yield only the first start, and multiply
    the counted work of this block by the number of blocks."""
    if getattr(xp, "holds_no_data", False):
        return iterate_first_and_count_all(0, -(-size // step))
    return range(0, size, step)


def sum_each_row_in_fixed_order(xp: Any, rows: Any) -> Any:
    """Sum each row in a fixed order that suits vector processors.

    Lane k adds the elements k, k + LANES, k + 2 * LANES, ... one after another. Then the upper half of the lanes is
    repeatedly added to the lower half, until one lane is left.
    """
    lanes = xp.zeros((rows.shape[0], LANES))
    for start in _iterate_block_starts(xp, rows.shape[1], LANES):
        some = rows[:, start : start + LANES]
        lanes[:, : some.shape[1]] += some
    while lanes.shape[1] > 1:
        half = lanes.shape[1] // 2
        lanes = lanes[:, :half] + lanes[:, half:]
    return lanes[:, 0]
