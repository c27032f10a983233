"""Matrices that a file has the other way round: which of its elements a part of ours is."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from fsdpx.array.namespace import to_host
from fsdpx.checkpoint.pieces import BLOCK, Block, Held, Run

__all__ = ["MatrixBlock", "Turned", "boxes", "turned"]


@dataclass(frozen=True)
class MatrixBlock:
    """Elements [top, bottom) x [left, right) of a matrix."""

    top: int
    bottom: int
    left: int
    right: int

    @property
    def shape(self) -> tuple[int, int]:
        return self.bottom - self.top, self.right - self.left

    def turned(self, rows: int) -> list[Run]:
        """Where they lie, column after column, in a file of the turned matrix; rows: of the whole matrix."""
        return [(column * rows + self.top, column * rows + self.bottom) for column in range(self.left, self.right)]


def boxes(runs: Iterable[Run], columns: int) -> Iterator[MatrixBlock]:
    """Runs of flat elements of a matrix as boxes, in order: part of a row, whole rows, part of a row."""
    for start, stop in runs:
        while start < stop:
            (top, left), rest = divmod(start, columns), stop - start
            if left or rest < columns:
                right = min(left + rest, columns)
                yield MatrixBlock(top, top + 1, left, right)
                start += right - left
            else:
                yield MatrixBlock(top, top + rest // columns, 0, columns)
                start += rest // columns * columns


@dataclass(frozen=True)
class Turned:
    """A box of a matrix of `rows` rows, to be written as `Held` is, into a file that has the matrix the other way
    round."""

    name: str
    array: Any
    box: MatrixBlock
    rows: int

    def blocks(self, elements: int) -> Iterator[Block]:
        """All at once: it is a part of a block."""
        part = self.array.reshape(self.box.shape).T
        yield Block(np.ascontiguousarray(part).reshape(-1), tuple(self.box.turned(self.rows)))


def turned(name: str, held: Held) -> Iterator[Turned]:
    """A rank's part of a matrix, box by box: in each the places in the file ascend."""
    rows, columns = held.spec.shape
    for block in held.blocks(BLOCK // held.array.dtype.itemsize):
        host, at = to_host(block.array).reshape(-1), 0
        for box in boxes(block.runs, columns):
            size = box.shape[0] * box.shape[1]
            yield Turned(name, host[at : at + size], box, rows)
            at += size
