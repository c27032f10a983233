"""How a parameter is cut over the tensor axis: blocks of one dim, each split among the ranks in whole grains."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from fsdpx.array.namespace import namespace_of
from fsdpx.errors import ConfigError

__all__ = ["Cut", "share"]


def share(count: int, rank: int, width: int) -> tuple[int, int]:
    """The part of `count` things that falls to `rank` of `width`: [floor(count r/n), floor(count (r+1)/n))."""
    return count * rank // width, count * (rank + 1) // width


@dataclass(frozen=True)
class Cut:
    """How a dim is cut over n ranks: of k grains in each block, rank r holds [floor(k r/n), floor(k (r+1)/n)).

    Parameters
    ----------
    dim : of the full array
    blocks : equal blocks one after the other, each cut by itself; queries, keys and values are 3
    grain : elements that must stay on one rank, such as those of one head
    """

    dim: int
    blocks: int = 1
    grain: int = 1

    def ranges(self, shape: tuple[int, ...], rank: int, width: int) -> list[tuple[int, int]]:
        """Where in dim `dim` of a full array of `shape` the pieces of `rank` lie: (start, stop) per block."""
        size = shape[self.dim] // self.blocks
        start, stop = share(self.grains(shape), rank, width)
        return [(b * size + self.grain * start, b * size + self.grain * stop) for b in range(self.blocks)]

    def grains(self, shape: tuple[int, ...]) -> int:
        """How many grains a block of dim `dim` has; ConfigError if dim is not a multiple of blocks and grain."""
        count, rest = divmod(shape[self.dim], self.blocks * self.grain)
        if rest:
            raise ConfigError(f"{self}: {shape[self.dim]} is not {self.blocks} blocks of multiples of {self.grain}")
        return count

    def local(self, shape: tuple[int, ...], rank: int, width: int) -> tuple[int, ...]:
        """The shape of what `rank` holds of a full array of `shape`."""
        dims = list(shape)
        dims[self.dim] = sum(stop - start for start, stop in self.ranges(shape, rank, width))
        return tuple(dims)

    def take(self, array: Any, rank: int, width: int) -> Any:
        """What `rank` holds of a full `array`: a view where that is one piece, else a copy."""
        parts = [array[self._at(start, stop)] for start, stop in self.ranges(array.shape, rank, width)]
        return parts[0] if len(parts) == 1 else namespace_of(array).concatenate(parts, axis=self.dim)

    def put(self, full: Any, local: Any, rank: int, width: int) -> None:
        """Write what `rank` holds into its places of `full`."""
        at = 0
        for start, stop in self.ranges(full.shape, rank, width):
            full[self._at(start, stop)] = local[self._at(at, at + stop - start)]
            at += stop - start

    def runs(self, shape: tuple[int, ...], rank: int, width: int, start: int, stop: int) -> Iterator[tuple[int, int]]:
        """The runs (start, stop) of flat elements of the full array that are local flat elements [start, stop), in
        order. One run per row for a cut of dim 1."""
        inner = math.prod(shape[self.dim + 1 :])
        pieces = [(a * inner, b * inner) for a, b in self.ranges(shape, rank, width)]
        row, whole = sum(b - a for a, b in pieces), shape[self.dim] * inner
        if row == 0:
            return
        last: tuple[int, int] | None = None
        for outer in range(start // row, -(-stop // row)):
            for first, end in self._clipped(pieces, start - outer * row, stop - outer * row):
                run = (outer * whole + first, outer * whole + end)
                if last is not None and last[1] == run[0]:
                    last = (last[0], run[1])
                    continue
                if last is not None:
                    yield last
                last = run
        if last is not None:
            yield last

    def _clipped(self, pieces: list[tuple[int, int]], start: int, stop: int) -> Iterator[tuple[int, int]]:
        """The parts of `pieces`, laid end to end, that lie in [start, stop)."""
        at = 0
        for first, end in pieces:
            a, b = max(start - at, 0), min(stop - at, end - first)
            if a < b:
                yield first + a, first + b
            at += end - first

    def _at(self, start: int, stop: int) -> tuple[slice, ...]:
        return (*(slice(None),) * self.dim, slice(start, stop))
