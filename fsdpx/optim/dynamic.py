"""Dynamic numbers of 8 bits (Dettmers 2016): between 0 and 1, with more digits the larger they are."""

from functools import lru_cache
from typing import Any

import numpy as np

__all__ = ["START", "buckets", "table"]

DECADES = 7
START = 16
"""The first bits of a float32 that say where the search for its code begins."""


@lru_cache
def table(signed: bool) -> tuple[Any, Any]:
    """The 256 numbers by code, ascending, and the 255 edges between them: x has as many below it as its code says, so a
    tie belongs to the lower code. float32.

    From 10^-(i+1) to 10^-i, i = 0 to 6, there are 2^(7-i) numbers, in the middle of as many equal parts, or 2^(6-i) of
    either sign; beside these 0 and 1."""
    found = [0.0, 1.0]
    for i in range(DECADES):
        parts = 2 ** (DECADES - 1 - i if signed else DECADES - i)
        middles = (0.1 + 0.9 * (np.arange(parts) + 0.5) / parts) * 10.0**-i
        found += [*middles, *(-middles if signed else [])]
    numbers = np.sort(np.array(found)).astype(np.float32)
    edges = ((numbers[:-1].astype(np.float64) + numbers[1:]) / 2).astype(np.float32)
    return _fixed(numbers), _fixed(edges)


@lru_cache
def buckets(signed: bool) -> tuple[Any, Any, int]:
    """For a quick search: edges, with an infinite last one; how many lie below all float32 with the same first bits;
    how many more there can be below one of these."""
    edges = table(signed)[1]
    low = (np.arange(1 << START, dtype=np.uint32) << (32 - START)).view(np.float32)
    high = (low.view(np.uint32) | ((1 << (32 - START)) - 1)).view(np.float32)
    first, last = (np.searchsorted(edges, np.fmin(low, high) if down else np.fmax(low, high)) for down in (1, 0))
    return _fixed(np.append(edges, np.float32(np.inf))), _fixed(first.astype(np.uint8)), int((last - first).max())


def _fixed(array: Any) -> Any:
    array.flags.writeable = False
    return array
