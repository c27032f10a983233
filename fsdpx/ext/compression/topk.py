"""Top-k compression, which sends only those elements of a gradient that have the largest absolute values."""

from __future__ import annotations

import math
from math import ceil
from typing import Any

import numpy as np

from fsdpx.core.array.random import NumberRange
from fsdpx.core.base.name_hints import wrap_with_option_check
from fsdpx.core.comm.calls import Array
from fsdpx.errors import ConfigError
from fsdpx.ext.compression.compressed import MAX_REDUCES, SIZE_MULTIPLE_BYTES, CompressedCodec
from fsdpx.ext.compression.implementations import can_run_compiled_kernels

__all__ = [
    "TopK",
    "count_chosen_elements",
    "scatter_largest_into",
    "select_largest_magnitudes_of_blocks",
    "to_global_positions",
]

MAGNITUDE_MASK = np.uint32(0x7FFFFFFF)
"""Mask of all bits of a float32 except the sign. Masked floats, compared as integers, are ordered by absolute value,
with NaN above all others."""


def count_chosen_elements(size: int, block: int, share: float) -> tuple[int, int]:
    """Return how many of `size` elements are sent, as (total for all full blocks, number for the last, shorter block).
    From each full block, ceil(share * block) elements are sent."""
    each, rest = _count_chosen_per_block(size, block, share)
    return size // block * each, rest


def _count_chosen_per_block(size: int, block: int, share: float) -> tuple[int, int]:
    """Return how many elements are sent from each full block, and how many from the last, shorter block."""
    return ceil(share * block), ceil(share * (size % block))


def select_largest_magnitudes_of_blocks(
    xp: Any, x: Any, block: int, share: float, values: Any, positions: Any, residual: Any | None
) -> None:
    """From each block of `x`, take the elements with the largest absolute values, and store them in the order in which
    they appear in `x`.

    `x` is a flat float32 or float64 array. The values of the elements taken are written to `values` (float32), and
    their indices within the block to `positions`. Among equal elements, the first are taken. `residual` receives x
    minus the values taken, or 0 where x is not finite; `residual` may be x itself."""
    if can_run_compiled_kernels(xp):
        from fsdpx.ext.compression.compiled import select_largest_magnitudes_of_blocks as body

        body(x, block, *_count_chosen_per_block(x.size, block, share), values, positions, residual)
        return
    if residual is not None and residual is not x:
        residual[...] = x
    for rows, at in _split_into_blocks(x, block, share):
        k = (at.stop - at.start) // max(len(rows), 1)
        if not k:
            continue
        with np.errstate(over="ignore", under="ignore"):
            small = rows.astype(np.float32)
        sizes = small.view(np.uint32) & MAGNITUDE_MASK
        least = xp.partition(sizes, rows.shape[1] - k, axis=1)[:, rows.shape[1] - k, None]
        above, equal = sizes > least, sizes == least
        taken = above | (equal & (xp.cumsum(equal, axis=1) <= k - above.sum(axis=1, keepdims=True)))
        row, column = xp.nonzero(taken)
        positions[at], values[at] = column, small[row, column]
    if residual is not None:
        where = to_global_positions(xp, x.size, block, share, positions)
        with np.errstate(invalid="ignore"):
            residual[where] -= values
        residual[~xp.isfinite(residual)] = 0


def scatter_largest_into(xp: Any, values: Any, positions: Any, block: int, share: float, out: Any, add: bool) -> None:
    """Write the elements taken by `select_largest_magnitudes_of_blocks` to their positions in `out`, and zeros to all
    other positions. If `add` is true, add the elements to `out` instead."""
    if not add:
        out[...] = 0
    if can_run_compiled_kernels(xp):
        from fsdpx.ext.compression.compiled import scatter_largest_into as body

        body(values, positions, block, *_count_chosen_per_block(out.size, block, share), out)
        return
    out[to_global_positions(xp, out.size, block, share, positions)] += values


def _split_into_blocks(x: Any, block: int, share: float) -> list[tuple[Any, slice]]:
    """Return two pairs (matrix, slice), one for all full blocks and one for the last, shorter block. The matrix has one
    block per row. The slice selects the elements of `values` that were taken from the matrix."""
    whole, rest = count_chosen_elements(x.size, block, share)
    edge = x.size // block * block
    return [(x[:edge].reshape(-1, block), slice(0, whole)), (x[None, edge:], slice(whole, whole + rest))]


def to_global_positions(xp: Any, size: int, block: int, share: float, positions: Any) -> Any:
    """Convert positions within blocks to positions in the array of `size` elements."""
    each, rest = _count_chosen_per_block(size, block, share)
    whole = size // block
    return positions + xp.concatenate([xp.repeat(xp.arange(whole) * block, each), xp.full(rest, whole * block)])


MAX_BLOCK_ELEMENTS = 1 << 16
"""Maximum number of elements in a block, so that an index into a block fits in 2 bytes."""
INITIAL_SHARE = 0.25
"""The share of elements that is sent when a warm-up begins."""


class TopK(CompressedCodec):
    """Codec that sends, from each part of n elements, only the ceil(fraction * n) elements with the largest absolute
    values.

    Each element sent takes 4 bytes for its index and 4 for its value. The elements not sent are added to the next
    gradient (Deep Gradient Compression, Lin et al. 2018). Among elements with equal absolute values, the first ones are
    sent.

    Parameters
    ----------
    fraction : share of the elements to send, in (0, 1]; 1 sends all
    warmup : number of initial reductions during which the share falls geometrically from 1/4 to `fraction`
    block : choose ceil(fraction * block) elements from each block of `block` elements, using all threads. With blocks,
        slightly more elements are sent, but the indices take only 2 bytes. If None (default), choose from the entire
        part
    """

    @wrap_with_option_check
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

    def packed_bytes(self, size: int, step: int = MAX_REDUCES) -> int:
        share = self.get_sent_element_share(step)
        if self.block is None:
            return 8 * math.ceil(share * size)
        return -(-6 * sum(count_chosen_elements(size, self.block, share)) // SIZE_MULTIPLE_BYTES) * SIZE_MULTIPLE_BYTES

    def pack_part(
        self, xp: Any, x: Array, wire: Array, residual: Array | None, step: int, numbers: NumberRange
    ) -> None:
        if x.size:
            share = self.get_sent_element_share(step)
            select_largest_magnitudes_of_blocks(
                xp, x, self.block or x.size, share, *self._split_packed_part(wire, x.size, share), residual
            )

    def unpack_part(self, xp: Any, wire: Array, out: Array, add: bool, step: int) -> None:
        if out.size:
            share = self.get_sent_element_share(step)
            scatter_largest_into(
                xp, *self._split_packed_part(wire, out.size, share), self.block or out.size, share, out, add
            )

    def _split_packed_part(self, wire: Array, size: int, share: float) -> tuple[Array, Array]:
        """Return two views of a packed part: the values and their positions. Positions count from the start of the
        block or, without blocks, from the start of the part."""
        if self.block is None:
            return wire[wire.size // 2 :].view(np.float32), wire[: wire.size // 2].view(np.int32)
        k = sum(count_chosen_elements(size, self.block, share))
        wire[6 * k :] = 0
        return wire[: 4 * k].view(np.float32), wire[4 * k : 6 * k].view(np.uint16)

    def get_sent_element_share(self, step: int) -> float:
        """Return the share of elements that is sent in the reduction with index `step`. After the warm-up, the share is
        `fraction`.

        Parameters
        ----------
        step : index of the reduction, from 0

        Returns
        -------
        float : share in (0, 1]
        """
        if step >= self.warmup:
            return self.fraction
        return max(self.fraction, INITIAL_SHARE * (self.fraction / INITIAL_SHARE) ** (step / self.warmup))
