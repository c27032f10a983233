"""The largest elements of each block of an array, and back."""

from math import ceil
from typing import Any

import numpy as np

from fsdpx.codecs.forms import compiles

__all__ = ["add_largest", "chosen", "in_whole", "take_largest"]

SIZE = np.uint32(0x7FFFFFFF)
"""The bits of a float32 but for its sign: as whole numbers they order as sizes do, with NaN above all."""


def chosen(size: int, block: int, share: float) -> tuple[int, int]:
    """How many of `size` elements are chosen, in whole blocks and in what is left: ceil(share block) of each block."""
    each, rest = _each(size, block, share)
    return size // block * each, rest


def _each(size: int, block: int, share: float) -> tuple[int, int]:
    """Of one whole block, and of what is left."""
    return ceil(share * block), ceil(share * (size % block))


def take_largest(xp: Any, x: Any, block: int, share: float, values: Any, places: Any, lost: Any | None) -> None:
    """values (float32), places (integers, in its block): of each block of `x`, flat float32 or float64, the `chosen`
    ones that are largest in size in the order in which they lie, of equals the first. lost: becomes what of x does not
    arrive, 0 where that is no number; it may be x."""
    if compiles(xp):
        from fsdpx.codecs.compiled_blocks import take_largest as body

        body(x, block, *_each(x.size, block, share), values, places, lost)
        return
    if lost is not None and lost is not x:
        lost[...] = x
    for rows, at in _cut(x, block, share):
        k = (at.stop - at.start) // max(len(rows), 1)
        if not k:
            continue
        with np.errstate(over="ignore", under="ignore"):
            small = rows.astype(np.float32)
        sizes = small.view(np.uint32) & SIZE
        least = xp.partition(sizes, rows.shape[1] - k, axis=1)[:, rows.shape[1] - k, None]
        above, equal = sizes > least, sizes == least
        taken = above | (equal & (xp.cumsum(equal, axis=1) <= k - above.sum(axis=1, keepdims=True)))
        row, column = xp.nonzero(taken)
        places[at], values[at] = column, small[row, column]
    if lost is not None:
        where = in_whole(xp, x.size, block, share, places)
        with np.errstate(invalid="ignore"):
            lost[where] -= values
        lost[~xp.isfinite(lost)] = 0


def add_largest(xp: Any, values: Any, places: Any, block: int, share: float, out: Any, add: bool) -> None:
    """out = what `take_largest` took and zeros elsewhere, or out += it."""
    if not add:
        out[...] = 0
    if compiles(xp):
        from fsdpx.codecs.compiled_blocks import add_largest as body

        body(values, places, block, *_each(out.size, block, share), out)
        return
    out[in_whole(xp, out.size, block, share, places)] += values


def _cut(x: Any, block: int, share: float) -> list[tuple[Any, slice]]:
    """Whole blocks and what is left, as rows of a matrix each, and where lies what is chosen of them."""
    whole, rest = chosen(x.size, block, share)
    edge = x.size // block * block
    return [(x[:edge].reshape(-1, block), slice(0, whole)), (x[None, edge:], slice(whole, whole + rest))]


def in_whole(xp: Any, size: int, block: int, share: float, places: Any) -> Any:
    """Places in their blocks as places in an array of `size` elements."""
    each, rest = _each(size, block, share)
    whole = size // block
    return places + xp.concatenate([xp.repeat(xp.arange(whole) * block, each), xp.full(rest, whole * block)])
