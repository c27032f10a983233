"""What counts as memory of activations: arrays that have no place in the arena and belong to no row of the ledger.

Between actions these lie in slots, which `Activations` follows, of arrays with data, too. In an action there are more:
a run on shapes counts all that is alive, action by action (`HeapWatch`). Recordings, peaks, dry runs, plans and errors
about too little memory ask these two."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from fsdpx.core.array.arena import Arena
from fsdpx.core.array.shapes.array import Meter, root_of
from fsdpx.core.comm.calls import Transfer
from fsdpx.core.engine.observer import Observer
from fsdpx.core.program import SLOTS, Action, Program, Slot
from fsdpx.core.state.train_state import TrainState

if TYPE_CHECKING:
    from fsdpx.core.engine.engine import Engine

__all__ = ["Activations", "HeapWatch", "arena_roots", "is_activation", "roots"]


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


class HeapWatch(Observer):
    """Follows the memory of a run on shapes from action to action, from its making on. Beside the arena lie activations
    and rows of the ledger that have memory for a pass alone: the *heap*.

    between: activations in slots. program, at: what ran when the heap was largest, and which action of it, from 0;
    then: what lay in slots before that action. batch: identity and bytes of the arrays of the first batch."""

    def __init__(self, engine: Engine, meter: Meter) -> None:
        self.between, self.program, self.at = Activations(), engine.ran, 0
        self.then: dict[Slot, dict[int, int]] = {}
        self.batch: dict[int, int] = {}
        self._engine, self._meter = engine, meter
        self._most = self._rows = self._next = 0
        self._each: list[tuple[int, int]] = []
        self._began = False
        engine.observe(self)

    def begin_program(self, program: Program, state: TrainState) -> None:
        """What was alive at most before the first program was of no step: checking a batch makes shapes, too."""
        if not self._began:
            self.batch = dict(roots([(one.inputs, one.target) for one in self._engine.batch if one is not None]))
        self._meter.peak, self._began, self._next = self._meter.live, True, 0
        self._each.clear()

    def look(self, action: Action) -> None:
        """After an action."""
        program, state, meter, rows = self._engine.ran, self._engine.state, self._meter, self._engine.state.ledger
        assert program is not None
        passing = rows.pass_nbytes(now=True)
        self._each.append((meter.peak - passing, meter.live - passing))
        if meter.peak > self._most:
            self._most, self._rows, self.program, self.at = meter.peak, passing, program, self._next
            self.then = self.between.held()
        slots, meter.peak = program.slots[self._next], meter.live
        self._next += 1
        self.between.within(state.arena)
        for slot in slots.takes:
            self.between.take(slot)
        for slot in filter(is_activation, (*slots.gives, *slots.adds)):
            value = state.store[slot]
            self.between.give(slot, value.finish() if isinstance(value, Transfer) else value)  # on its way, or there

    @property
    def _arena(self) -> int:
        """Bytes that stay."""
        state = self._engine.state
        slab = [] if state.arena.slab is None else [state.arena.slab]
        kept = [array for key, array in state.ledger.arrays.items() if not state.ledger.rows[key].passing]
        buffers = (*state.arena.kept.values(), *kept, *slab)
        return sum({id(buffer.root): buffer.root.nbytes for buffer in buffers}.values())

    @property
    def heap(self) -> int:
        """The most bytes of the heap at any time."""
        return self._most - self._arena

    @property
    def activations(self) -> int:
        """Bytes of activations at that time."""
        return self.heap - self._rows

    @property
    def each(self) -> list[tuple[int, int]]:
        """Bytes of activations, at most in each action of the last program, and after it."""
        arena = self._arena
        return [(most - arena, after - arena) for most, after in self._each]

    def memory(self) -> dict[str, int]:
        """Bytes by kind of memory, when the heap was largest."""
        state = self._engine.state
        found = {"gradients": 0, **state.nbytes(), "activations": self.activations}
        found["gradients"] += self._rows - state.ledger.pass_nbytes()
        return {kind: nbytes for kind, nbytes in found.items() if nbytes or kind == "activations"}
