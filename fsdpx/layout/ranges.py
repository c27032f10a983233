"""Half-open ranges of a logical array, and the overlaps of two ways to cut it."""

from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["Piece", "Range", "overlap"]


@dataclass(frozen=True)
class Range:
    """Elements [start, stop) of a logical array."""

    start: int
    stop: int

    @property
    def size(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True)
class Piece:
    """Elements [start, stop) that lie both in have[`have`] and in want[`want`]."""

    have: int
    want: int
    start: int
    stop: int


def overlap(have: Sequence[Range], want: Sequence[Range]) -> list[Piece]:
    """Every non-empty overlap of two lists of ranges, each sorted and without overlaps in itself. O(n + m).

    Answers how to reload, resize, find optimiser segments and slice checkpoints."""
    pieces = []
    h = w = 0
    while h < len(have) and w < len(want):
        start, stop = max(have[h].start, want[w].start), min(have[h].stop, want[w].stop)
        if start < stop:
            pieces.append(Piece(h, w, start, stop))
        if have[h].stop <= want[w].stop:
            h += 1
        else:
            w += 1
    return pieces
