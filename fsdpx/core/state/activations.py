"""What counts as memory of activations.

Between actions it is the arrays in their slots, which `Activations` follows. At any time, in a run on shapes, it is all
that is alive beside the arena (`count_heap`); rows of the ledger that have memory for a pass alone lie there as well
(`count_pass_rows`)."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from fsdpx.core.array.arena import Arena
from fsdpx.core.array.shapes.array import Meter, root_of
from fsdpx.core.program import SLOTS, Slot
from fsdpx.core.state.ledger import Ledger
from fsdpx.core.state.train_state import TrainState

__all__ = ["Activations", "arena_roots", "count_heap", "count_pass_rows", "is_activation", "roots"]


def is_activation(slot: Slot) -> bool:
    """Whether what lies in a slot is counted here."""
    return SLOTS[slot.kind].memory == "activations"


def arena_roots(arena: Arena) -> set[int]:
    """Identities of the memory that the arena holds: what lies there is counted by the ledger."""
    return {id(root_of(array)) for array in (*arena.kept.values(), *arena.blocks, arena.slab)}


class Activations:
    """Bytes of arrays in activation slots, followed from action to action by what each of them takes and gives. Views
    count once, with the array that they are views of; parameters that a layer keeps for backward do not: the ledger
    counts them. alive: bytes now; most: at any time."""

    def __init__(self) -> None:
        self.alive = self.most = 0
        self._held: dict[Slot, dict[int, int]] = {}
        self._users: dict[int, int] = {}
        self._planned: tuple[tuple[int, int], set[int]] = ((-1, -1), set())

    def held(self) -> dict[Slot, dict[int, int]]:
        """Slot -> (identity -> bytes) of the memory behind what lies there now."""
        return dict(self._held)

    def within(self, arena: Arena) -> None:
        """A program begins whose buffers lie there."""
        state = (arena.generation, len(arena.kept))
        if self._planned[0] != state:
            self._planned = state, arena_roots(arena)

    def take(self, slot: Slot) -> None:
        """A slot is emptied."""
        for root, nbytes in self._held.pop(slot, {}).items():
            self._users[root] -= 1
            if not self._users[root]:
                del self._users[root]
                self.alive -= nbytes

    def give(self, slot: Slot, value: Any) -> None:
        """A slot is filled, or refilled."""
        self.take(slot)
        there = self._planned[1]
        self._held[slot] = held = {root: nbytes for root, nbytes in roots(value) if root not in there}
        for root, nbytes in held.items():
            users = self._users.get(root, 0)
            self._users[root] = users + 1
            self.alive += 0 if users else nbytes
        self.most = max(self.most, self.alive)


def roots(value: Any) -> Iterable[tuple[int, int]]:
    """(identity, bytes) of the memory behind every array in tuples, lists and dicts."""
    if isinstance(value, dict):
        value = tuple(value.values())
    if isinstance(value, tuple | list):
        for one in value:
            yield from roots(one)
    elif (root := root_of(value)) is not None:
        yield id(root), root.nbytes


def count_heap(state: TrainState, meter: Meter) -> int:
    """Return the most bytes of arrays without data that were alive beside those of the arena, which stay."""
    slab = [] if state.arena.slab is None else [state.arena.slab]
    buffers = (*state.arena.kept.values(), *state.ledger.arrays.values(), *slab)
    return meter.peak - sum({id(buffer.root): buffer.root.nbytes for buffer in buffers}.values())


def count_pass_rows(ledger: Ledger, now: bool = False) -> int:
    """Return the bytes of rows that have no memory after an update, which is never the arena's. now: of those that have
    some at this moment."""
    return sum(row.nbytes for row in ledger if row.passing and (not now or row.key in ledger.arrays))
