"""Sums that do not depend on how their terms are distributed over ranks, fixed blocks, added exactly; counts, means and
sums of squares about them, merged so that nothing cancels."""

import math
from collections.abc import Sequence
from typing import Any

from fsdpx.core.array.kernels.squares import square_sums
from fsdpx.core.array.namespace import to_host

__all__ = [
    "CHUNK_SIZE",
    "EXPANSION_PARTS",
    "block_squares",
    "combine_moments",
    "exact_sum",
    "expand_sum",
    "pad_expansion",
]

CHUNK_SIZE = 1024
"""Elements of a block. Cuts of parameters at multiples of it leave the blocks whole."""
EXPANSION_PARTS = 40
"""The most numbers of an expansion: each has 53 of the 2,098 bits that sums of float64 can have."""


def block_squares(xp: Any, x: Any) -> list[float]:
    """Sums of squares in float64 over blocks of `GRAIN` elements, the last one perhaps shorter."""
    sums: list[float] = to_host(square_sums(xp, x, CHUNK_SIZE)).tolist()
    return sums


def exact_sum(values: Sequence[float]) -> float:
    """The correctly rounded sum, whatever the order of the terms (Shewchuk 1997)."""
    try:
        return math.fsum(values)
    except OverflowError:
        return math.inf


def expand_sum(values: Sequence[float]) -> list[float]:
    """A few numbers with the same exact sum as `values`: what is sent instead of them, without rounding."""
    parts: list[float] = []
    rest = exact_sum(values)
    while rest != 0.0:
        parts.append(rest)
        if not math.isfinite(rest):
            break
        rest = math.fsum([*values, *(-part for part in parts)])
    return parts


def pad_expansion(values: Sequence[float]) -> list[float]:
    """The expansion of `values` as `PARTS` numbers, with zeros at the end: equally long on every rank."""
    parts = expand_sum(values)
    return [*parts, *[0.0] * (EXPANSION_PARTS - len(parts))]


def combine_moments(xp: Any, one: Any, other: Any) -> Any:
    """(count, mean, sum of squares about it) of two sets together, by the rule of Chan et al. (1979)."""
    total = one[0] + other[0]
    share = other[0] / xp.where(total > 0, total, 1.0)
    apart = other[1] - one[1]
    return xp.stack([total, one[1] + apart * share, one[2] + other[2] + apart * apart * (one[0] * share)])
