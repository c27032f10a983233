"""What a slot of an optimiser holds where that is not one element for each element of the shard."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np

from fsdpx.optim.segments import Segment, Segments

__all__ = ["Kept", "kept_of", "needs_whole", "places", "zeros"]

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Kept:
    """The format of a slot, and how many elements it has. As it is: those of the shard, in the shard's format.

    dtype: its format; None: that of the shard, but with `shape` at least float32. block: one element per `block` of a
    parameter, counted from its first one; shards are cut at multiples of 1,024 then. shape: from name and
    shape of a parameter to the shape of what each rank with a part of it keeps whole."""

    dtype: str | None = None
    block: int = 1
    shape: Callable[[str, Shape], Shape] | None = None

    @property
    def plain(self) -> bool:
        """Whether it has the elements of the shard, whatever their format."""
        return self.block == 1 and self.shape is None

    def format(self, shard: Any) -> Any:
        """Its format beside a shard of format `shard`."""
        short = self.shape is not None and np.dtype(shard).itemsize < 4
        return np.dtype(self.dtype or ("float32" if short else shard))

    def of(self, name: str, shape: Shape) -> Shape:
        """The shape kept for a whole parameter."""
        if self.shape is not None:
            return self.shape(name, shape)
        return shape if self.block == 1 else (-(-prod(shape) // self.block),)

    def first(self, offset: int) -> int:
        """Where what is kept begins for a part of a parameter from element `offset` on."""
        return 0 if self.shape is not None else offset // self.block

    def count(self, s: Segment) -> int:
        """Elements that are kept of a segment."""
        if self.shape is not None:
            return prod(self.shape(s.name, s.shape or (s.size,)))
        return -(-(s.stop - s.start) // self.block)


def kept_of(optimizer: Any) -> dict[str, Kept]:
    """By slot. An optimiser names those that differ in `kept`."""
    named: Mapping[str, Kept] = getattr(optimizer, "kept", {})
    return {name: named.get(name, Kept()) for name in optimizer.slots}


def needs_whole(optimizer: Any) -> bool:
    """Whether it must see whole parameters, so that no tensor axis may cut them."""
    return bool(getattr(optimizer, "whole", False))


def places(kept: Kept, segments: Segments) -> Iterator[slice]:
    """Where a slot's array has what is kept of each segment."""
    at = 0
    for s in segments.items:
        yield slice(at, at := at + kept.count(s))


def zeros(xp: Any, optimizer: Any, segments: Segments, dtype: Any) -> dict[str, Any]:
    """The slots of a shard of format `dtype` before step 1."""
    return {
        name: xp.zeros(sum(kept.count(s) for s in segments.items), kept.format(dtype))
        for name, kept in kept_of(optimizer).items()
    }
