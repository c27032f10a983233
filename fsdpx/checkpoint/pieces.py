"""Which elements of which tensors this rank has, block by block: what a checkpoint is written from and read into."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol

from fsdpx.nn.cut import share
from fsdpx.nn.layer import Spec
from fsdpx.optim.kept import Kept
from fsdpx.state.ledger import LedgerRow
from fsdpx.state.placement import Placement
from fsdpx.state.rows import saved_name, tensor_name
from fsdpx.state.state import TrainState

__all__ = ["BLOCK", "Block", "Held", "Run", "TensorPiece", "held", "owned"]

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
        """In order, this many elements at a time."""
        for at in range(0, int(self.array.size), elements):
            array = self.array[at : at + elements]
            first, last = self.start + at, self.start + at + int(array.size)
            yield Block(array, tuple(self._runs(first, last)))

    def _runs(self, first: int, last: int) -> Iterator[Run]:
        if self.spec.cut is None or self.width == 1:
            return iter([(first, last)])
        return self.spec.cut.runs(self.spec.shape, self.rank, self.width, first, last)


class TensorPiece(Protocol):
    """A part of tensor `name` that can be written: what `Held` is, too."""

    @property
    def name(self) -> str: ...
    @property
    def array(self) -> Any: ...
    def blocks(self, elements: int) -> Iterator[Block]: ...


def held(state: TrainState, replicas: int | None = None) -> Iterator[Held]:
    """All that this rank has of the train state, row by row of the ledger, but for what codecs keep: that is each
    rank's own, see `checkpoint.kept`. replicas: how many states there are, where each replica has one of its own: this
    one takes that of its number, counted from 0 again where there are fewer."""
    for row, array in state.ledger.saved():
        if row.key.kind != "memory":
            yield from _of_row(state.placement, row, array, replicas=replicas)


def owned(state: TrainState) -> Iterator[Held]:
    """The part of it that this rank writes: every element of every tensor is written by exactly one rank.

    Replicas hold the same and write an even part of it each; what each has of its own it writes alone. Parameters
    that the tensor axis does not cut are written by the first rank there: the others' shards of a page with cut
    parameters begin elsewhere. Copies of a tied parameter are written by the ranks that have the first one, running
    statistics by one rank of those that move them."""
    placement = state.placement
    place, axes = placement.axes.coordinates, placement.axes
    for row, array in state.ledger.saved():
        if row.key.kind == "memory" or row.key.page in placement.layout.copies:
            continue
        for one in _of_row(placement, row, array, first=True):
            if row.key.page is None:
                yield from [one] if (placement.statistics_home[one.name], 0, 0, 0) == place else []
            elif one.spec.cut is not None or place.tensor == 0:
                yield one.part(place.replica, axes.replica.size) if row.owner == "shard" else one


def _of_row(
    placement: Placement, row: LedgerRow, array: Any, first: bool = False, replicas: int | None = None
) -> Iterator[Held]:
    """The parts of tensors that lie in a row: of a page, pieces of its parameters; else a tensor by itself. first: of
    tensors that each rank with a part of a parameter keeps, only those of parameters that begin here."""
    layout, (_, p, name) = placement.layout, row.key
    if p is None:
        yield Held(name, array.reshape(-1), 0, layout.specs[name], 0, 1)
        return
    slot = name if row.key.kind in ("slot", "average") else ""
    spread, form, mine = layout.spread, placement.kept.get(slot, Kept()), placement.pages[p].mine
    begins = {f.name for f in layout.pages[p].fields if mine.start <= f.offset < mine.stop}
    replica = placement.axes.coordinates.replica
    before = saved_name(row, replica if replicas is None else replica % replicas)
    for field, start, part in placement.slot_page(slot, p).held(array, row.span):
        spec = layout.specs[field.source]
        if not form.plain:
            spec = Spec(form.of(field.source, spec.shape))
        if first and form.shape is not None and field.name not in begins:
            continue
        yield Held(tensor_name(before, field.source), part, start, spec, spread.rank, spread.width)
