"""Sums that are bitwise identical no matter how the terms are distributed over ranks, because the sums of fixed blocks
are added exactly. The module also merges means and variances without cancellation."""

import math
from collections.abc import Sequence
from typing import Any

from fsdpx.core.array.kernels.squares import sum_squares_of_blocks
from fsdpx.core.array.namespace import to_host

__all__ = [
    "CHUNK_ELEMENTS", "EXPANSION_PARTS", "combine_moments", "compute_padded_sum_expansion", "compute_sum_expansion",
    "sum_block_squares", "sum_exactly",
]  # fmt: skip

CHUNK_ELEMENTS = 1024
"""Number of elements per block. Shards whose boundaries are multiples of this number contain only complete blocks."""
EXPANSION_PARTS = 40
"""Maximum length of an expansion (numbers that represent a sum exactly). This length suffices, because each number has
53 of the 2,098 bits that a sum of float64 numbers can have."""


def sum_block_squares(xp: Any, x: Any) -> list[float]:
    """Return the sums of squares of consecutive blocks of `CHUNK_ELEMENTS` elements, in float64. The last block may be
    shorter."""
    sums: list[float] = to_host(sum_squares_of_blocks(xp, x, CHUNK_ELEMENTS)).tolist()
    return sums


def sum_exactly(values: Sequence[float]) -> float:
    """Return the correctly rounded sum of `values`, which does not depend on their order (Shewchuk 1997)."""
    try:
        return math.fsum(values)
    except OverflowError:
        return math.inf


def compute_sum_expansion(values: Sequence[float]) -> list[float]:
    """Return a few numbers whose exact sum equals the exact sum of `values`. They can be sent to other ranks in place
    of the sum, which would have to be rounded."""
    parts: list[float] = []
    rest = sum_exactly(values)
    while rest != 0.0:
        parts.append(rest)
        if not math.isfinite(rest):
            break
        rest = math.fsum([*values, *(-part for part in parts)])
    return parts


def compute_padded_sum_expansion(values: Sequence[float]) -> list[float]:
    """Return the expansion of `values` (see `compute_sum_expansion`), padded with zeros to `EXPANSION_PARTS` numbers,
    so that it has the same length on all ranks."""
    parts = compute_sum_expansion(values)
    return [*parts, *[0.0] * (EXPANSION_PARTS - len(parts))]


def combine_moments(xp: Any, first: Any, second: Any) -> Any:
    """Merge the moments (count, mean, sum of squared deviations) of two sets of numbers: return the moments of the
    union of both sets (Chan et al. 1979)."""
    total = first[0] + second[0]
    share = second[0] / xp.where(total > 0, total, 1.0)
    apart = second[1] - first[1]
    return xp.stack([total, first[1] + apart * share, first[2] + second[2] + apart * apart * (first[0] * share)])
