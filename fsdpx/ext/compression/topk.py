"""Gradients of which the largest elements alone travel: the codec, and how they are found in blocks."""

from __future__ import annotations

import math
from math import ceil
from typing import Any

import numpy as np

from fsdpx.core.array.random import NumberRange
from fsdpx.core.base.name_hints import suggest_arguments
from fsdpx.core.comm.calls import Array
from fsdpx.errors import ConfigError
from fsdpx.ext.compression.compressed import MAX_TURNS, SIZE_MULTIPLE_BYTES, CompressedCodec
from fsdpx.ext.compression.implementations import can_compile

__all__ = ["TopK", "add_largest", "count_chosen", "take_largest", "to_global_positions"]

SIZE = np.uint32(0x7FFFFFFF)
"""The bits of a float32 but for its sign: as whole numbers they order as sizes do, with NaN above all."""


def count_chosen(size: int, block: int, share: float) -> tuple[int, int]:
    """How many of `size` elements are chosen, in whole blocks and in what is left: ceil(share block) of each block."""
    each, rest = _count_per_block(size, block, share)
    return size // block * each, rest


def _count_per_block(size: int, block: int, share: float) -> tuple[int, int]:
    """How many are chosen of one whole block, and of what is left after the whole ones."""
    return ceil(share * block), ceil(share * (size % block))


def take_largest(xp: Any, x: Any, block: int, share: float, values: Any, places: Any, lost: Any | None) -> None:
    """values (float32), places (integers, in its block): of each block of `x`, flat float32 or float64, the `chosen`
    ones that are largest in size in the order in which they lie, of equals the first. lost: becomes what of x does not
    arrive, 0 where that is no number; it may be x."""
    if can_compile(xp):
        from fsdpx.ext.compression.compiled import take_largest as body

        body(x, block, *_count_per_block(x.size, block, share), values, places, lost)
        return
    if lost is not None and lost is not x:
        lost[...] = x
    for rows, at in _split_into_blocks(x, block, share):
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
        where = to_global_positions(xp, x.size, block, share, places)
        with np.errstate(invalid="ignore"):
            lost[where] -= values
        lost[~xp.isfinite(lost)] = 0


def add_largest(xp: Any, values: Any, places: Any, block: int, share: float, out: Any, add: bool) -> None:
    """out = what `take_largest` took and zeros elsewhere, or out += it."""
    if not add:
        out[...] = 0
    if can_compile(xp):
        from fsdpx.ext.compression.compiled import add_largest as body

        body(values, places, block, *_count_per_block(out.size, block, share), out)
        return
    out[to_global_positions(xp, out.size, block, share, places)] += values


def _split_into_blocks(x: Any, block: int, share: float) -> list[tuple[Any, slice]]:
    """Whole blocks and what is left, as rows of a matrix each, and where lies what is chosen of them."""
    whole, rest = count_chosen(x.size, block, share)
    edge = x.size // block * block
    return [(x[:edge].reshape(-1, block), slice(0, whole)), (x[None, edge:], slice(whole, whole + rest))]


def to_global_positions(xp: Any, size: int, block: int, share: float, places: Any) -> Any:
    """Places in their blocks as places in an array of `size` elements."""
    each, rest = _count_per_block(size, block, share)
    whole = size // block
    return places + xp.concatenate([xp.repeat(xp.arange(whole) * block, each), xp.full(rest, whole * block)])


MAX_BLOCK_ELEMENTS = 1 << 16
"""Elements of a block: places in it are 2 bytes."""
FIRST = 0.25
"""The share that travels when a warm-up begins."""


class TopK(CompressedCodec):
    """The ceil(fraction n) elements of each part that are largest in size travel, 4 bytes of place and 4 of value each;
    the others are added to the next gradient (Deep Gradient Compression, Lin et al. 2018). Where elements are equal,
    the first ones travel.

    Parameters
    ----------
    fraction : of the elements, in (0, 1]; 1 is exact
    warmup : reduces in which the share falls from 1/4 to `fraction`, by the same factor in each
    block : take ceil(fraction block) of each `block` elements, not of the whole part: a few more, with places of 2
        bytes, and found on all threads
    """

    @suggest_arguments
    def __init__(self, fraction: float = 0.01, warmup: int = 0, block: int | None = None) -> None:
        if not isinstance(fraction, int | float) or isinstance(fraction, bool) or not 0 < fraction <= 1:
            raise ConfigError(f"TopK(fraction={fraction!r}): the share of elements that travel, in (0, 1]")
        if block is not None and not (
            isinstance(block, int) and not isinstance(block, bool) and 1 <= block <= MAX_BLOCK_ELEMENTS
        ):
            raise ConfigError(
                f"TopK(block={block!r}): a number of elements from 1 to {MAX_BLOCK_ELEMENTS}, such as 1024, or None"
            )
        if not isinstance(warmup, int) or isinstance(warmup, bool) or warmup < 0:
            raise ConfigError(f"TopK(warmup={warmup!r}): a number of reduces, 0 or more")
        self.fraction, self.warmup, self.block = float(fraction), warmup, block

    def packed_bytes(self, size: int, turn: int = MAX_TURNS) -> int:
        share = self.share_at(turn)
        if self.block is None:
            return 8 * math.ceil(share * size)
        return -(-6 * sum(count_chosen(size, self.block, share)) // SIZE_MULTIPLE_BYTES) * SIZE_MULTIPLE_BYTES

    def pack_part(self, xp: Any, x: Array, wire: Array, lost: Array | None, turn: int, numbers: NumberRange) -> None:
        if x.size:
            share = self.share_at(turn)
            take_largest(xp, x, self.block or x.size, share, *self._split_wire(wire, x.size, share), lost)

    def unpack_part(self, xp: Any, wire: Array, out: Array, add: bool, turn: int) -> None:
        if out.size:
            share = self.share_at(turn)
            add_largest(xp, *self._split_wire(wire, out.size, share), self.block or out.size, share, out, add)

    def _split_wire(self, wire: Array, size: int, share: float) -> tuple[Array, Array]:
        """Values, and places: in the part, or in their blocks."""
        if self.block is None:
            return wire[wire.size // 2 :].view(np.float32), wire[: wire.size // 2].view(np.int32)
        k = sum(count_chosen(size, self.block, share))
        wire[6 * k :] = 0
        return wire[: 4 * k].view(np.float32), wire[4 * k : 6 * k].view(np.uint16)

    def share_at(self, turn: int) -> float:
        """The share of the elements that travels in reduce number `turn`."""
        if turn >= self.warmup:
            return self.fraction
        return max(self.fraction, FIRST * (self.fraction / FIRST) ** (turn / self.warmup))
