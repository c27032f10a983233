"""How much memory activations take: the distinct arrays that are alive in slots between actions."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from fsdpx.array.arena import Arena
from fsdpx.program import SLOTS, Slot
from fsdpx.state.spill import root_of

__all__ = ["Activations", "is_activation", "planned", "roots"]


def is_activation(slot: Slot) -> bool:
    return SLOTS[slot.kind].memory == "activations"


def planned(arena: Arena) -> set[int]:
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

    def within(self, arena: Arena) -> None:
        """A program begins whose buffers lie there."""
        state = (arena.generation, len(arena.kept))
        if self._planned[0] != state:
            self._planned = state, planned(arena)

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
