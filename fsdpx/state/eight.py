"""Parameters on their way in 8 bits: blocks of each shard with a scale (qwZ of ZeRO++, Wang et al. 2023)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from fsdpx.array.random import Stretch
from fsdpx.codecs import Int8
from fsdpx.codecs.compressed import pieces_of

__all__ = ["EIGHT", "pack", "parcels", "unpack", "warm"]

EIGHT = np.dtype(np.uint8)
"""Of what travels: scales and numbers as bytes."""
CODEC, NOTHING = Int8(), Stretch(0, "", 0, 0)


def parcels(counts: Sequence[int]) -> list[int]:
    """Bytes of shards of `counts` elements."""
    return [CODEC.nbytes(n) for n in counts]


def pack(xp: Any, shard: Any, wire: Any) -> None:
    if not _imaginary(xp):
        CODEC.pack(xp, shard, wire, None, NOTHING)


def unpack(xp: Any, wire: Any, full: Any, counts: Sequence[int]) -> None:
    """All shards, this rank's own as well: all ranks compute with the same numbers."""
    if _imaginary(xp):
        return
    for piece, part in zip(pieces_of(wire, parcels(counts)), pieces_of(full, counts), strict=True):
        CODEC.unpack(xp, piece, part, False, NOTHING)


def _imaginary(xp: Any) -> bool:
    """Whether arrays have no elements: a dry run."""
    return bool(getattr(xp, "holds_no_data", False))


def warm(dtype: Any) -> None:
    CODEC.warm(dtype)
