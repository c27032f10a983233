"""Which elements of which tensors this rank has, block by block: what a checkpoint is written from and read into."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

from fsdpx.engine.engine import Engine
from fsdpx.layout.pages import Page
from fsdpx.layout.ranges import Range, overlap
from fsdpx.nn.cut import share
from fsdpx.nn.layer import Spec

__all__ = ["BLOCK", "Block", "Held", "Run", "held", "owned", "slot_name"]

BLOCK = 4 << 20
"""Bytes that are moved at a time: what saving and loading need beside the shard is a few of these."""

Run = tuple[int, int]
"""Elements [start, stop) of a whole tensor, in C order."""


@dataclass(frozen=True)
class Block:
    """Consecutive elements of an array of this rank, and where they lie in the whole tensor."""

    array: Any
    runs: tuple[Run, ...]


@dataclass(frozen=True)
class Held:
    """A part of tensor `name` that this rank holds: the flat `array` is elements [start, start + n) of what the rank's
    line of the tensor axis has of a tensor described by `spec`."""

    name: str
    array: Any
    start: int
    spec: Spec
    rank: int
    width: int

    def part(self, index: int, count: int) -> Held:
        """The part of number `index`, of `count` even ones."""
        first, last = share(int(self.array.size), index, count)
        return Held(self.name, self.array[first:last], self.start + first, self.spec, self.rank, self.width)

    def blocks(self, elements: int) -> Iterator[Block]:
        """In order, so many elements at a time."""
        for at in range(0, int(self.array.size), elements):
            array = self.array[at : at + elements]
            first, last = self.start + at, self.start + at + int(array.size)
            yield Block(array, tuple(self._runs(first, last)))

    def _runs(self, first: int, last: int) -> Iterator[Run]:
        if self.spec.cut is None or self.width == 1:
            return iter([(first, last)])
        return self.spec.cut.runs(self.spec.shape, self.rank, self.width, first, last)


def slot_name(slot: str, name: str) -> str:
    """The name of an optimiser's slot of a parameter, in the file."""
    return f"{slot}/{name}"


def held(engine: Engine) -> Iterator[Held]:
    """All that this rank has: parameters, slots of the optimiser, running statistics."""
    for p in sorted(engine.pages):
        yield from _of_page(engine, p)
    for name, array in engine.state.items():
        yield Held(name, array.reshape(-1), 0, engine.layout.specs[name], 0, 1)


def owned(engine: Engine) -> Iterator[Held]:
    """What of it this rank writes: every element of every tensor is written by exactly one rank.

    Replicas hold the same and write an even part of it each. What the tensor axis does not cut is written by the first
    rank there: the others' shards of a page with cut parameters begin elsewhere. Copies of a tied parameter are written
    by the ranks that have the first one, running statistics by one rank of those that move them.
    """
    place, axes = engine.axes.coordinates, engine.axes
    for p in sorted(engine.pages.keys() - engine.layout.copies):
        for one in _of_page(engine, p):
            if one.spec.cut is not None or place.tensor == 0:
                yield one.part(place.replica, axes.replica.size)
    for name, array in engine.state.items():
        if (engine.state_home[name], 0, 0, 0) == place:
            yield Held(name, array.reshape(-1), 0, engine.layout.specs[name], 0, 1)


def _of_page(engine: Engine, p: int) -> Iterator[Held]:
    """The shard's pieces of the parameters of a page, in its master and in every slot."""
    state, spread = engine.pages[p], engine.layout.spread
    arrays = {"": state.master, **state.slots}
    for field, where in _fields(state.page, state.mine):
        at = slice(where.start - state.mine.start, where.stop - state.mine.start)
        make = partial(Held, start=where.start - field.offset, spec=engine.layout.specs[field.source])
        for slot, array in arrays.items():
            name = slot_name(slot, field.source) if slot else field.source
            yield make(name, array[at], rank=spread.rank, width=spread.width)


def _fields(page: Page, mine: Range) -> Iterator[tuple[Any, Range]]:
    fields = [Range(f.offset, f.offset + f.size) for f in page.fields]
    for piece in overlap(fields, [mine]):
        yield page.fields[piece.have], Range(piece.start, piece.stop)
