"""What counts as memory of activations: arrays that have no place in the arena and belong to no row of the ledger.

Between actions these lie in slots, which `ActivationMeter` follows, of arrays with data, too. In an action there are
more: a run on shapes counts all that is alive, action by action (`HeapRecorder`). Recordings, peaks, dry runs, plans
and errors about too little memory ask these two."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from fsdpx.core.array.arena import Arena
from fsdpx.core.array.shapes.array import MemoryMeter, find_storage
from fsdpx.core.comm.calls import TimedTransfer
from fsdpx.core.engine.observer import Observer
from fsdpx.core.program import SLOTS, Action, Program, Slot
from fsdpx.core.state.train_state import TrainState

if TYPE_CHECKING:
    from fsdpx.core.engine.engine import Engine

__all__ = ["ActivationMeter", "HeapRecorder", "find_arena_storage", "is_activation", "storage_sizes"]


def is_activation(slot: Slot) -> bool:
    """Whether what lies in a slot is counted here."""
    return SLOTS[slot.kind].memory == "activations"


def find_arena_storage(arena: Arena) -> set[int]:
    """Identities of the memory that the arena holds: what lies there is counted by the ledger."""
    return {id(find_storage(array)) for array in (*arena.kept.values(), *arena.blocks, arena.slab)}


class ActivationMeter:
    """Bytes of arrays in activation slots, followed from action to action by what each of them takes and gives. Views
    count once, with the array that they are views of; parameters that a layer keeps for backward do not: the ledger
    counts them. alive: bytes now; most: at any time."""

    def __init__(self) -> None:
        self.alive = self.most = 0
        self._held: dict[Slot, dict[int, int]] = {}
        self._users: dict[int, int] = {}
        self._planned: tuple[tuple[int, int], set[int]] = ((-1, -1), set())

    def get_memory_by_slot(self) -> dict[Slot, dict[int, int]]:
        """Slot -> (identity -> bytes) of the memory behind what lies there now."""
        return dict(self._held)

    def use_arena(self, arena: Arena) -> None:
        """A program begins whose buffers lie there."""
        state = (arena.generation, len(arena.kept))
        if self._planned[0] != state:
            self._planned = state, find_arena_storage(arena)

    def empty_slot(self, slot: Slot) -> None:
        """A slot is emptied."""
        for root, nbytes in self._held.pop(slot, {}).items():
            self._users[root] -= 1
            if not self._users[root]:
                del self._users[root]
                self.alive -= nbytes

    def fill_slot(self, slot: Slot, value: Any) -> None:
        """A slot is filled, or refilled."""
        self.empty_slot(slot)
        there = self._planned[1]
        self._held[slot] = held = {root: nbytes for root, nbytes in storage_sizes(value) if root not in there}
        for root, nbytes in held.items():
            users = self._users.get(root, 0)
            self._users[root] = users + 1
            self.alive += 0 if users else nbytes
        self.most = max(self.most, self.alive)


def storage_sizes(value: Any) -> Iterable[tuple[int, int]]:
    """(identity, bytes) of the memory behind every array in tuples, lists and dicts."""
    if isinstance(value, dict):
        value = tuple(value.values())
    if isinstance(value, tuple | list):
        for item in value:
            yield from storage_sizes(item)
    elif (root := find_storage(value)) is not None:
        yield id(root), root.nbytes


class HeapRecorder(Observer):
    """Follows the memory of a run on shapes from action to action, from its making on. Beside the arena lie activations
    and rows of the ledger that have memory for a pass alone: the *heap*.

    between: activations in slots. program, at: what ran when the heap was largest, and which action of it, from 0;
    then: what lay in slots before that action. batch: identity and bytes of the arrays of the first batch."""

    def __init__(self, engine: Engine, meter: MemoryMeter) -> None:
        self.between, self.program, self.at = ActivationMeter(), engine.last_program, 0
        self.then: dict[Slot, dict[int, int]] = {}
        self.batch: dict[int, int] = {}
        self._engine, self._meter = engine, meter
        self._most = self._rows = self._next = 0
        self._each: list[tuple[int, int]] = []
        self._began = False
        engine.add_observer(self)

    def on_program_begin(self, program: Program, state: TrainState) -> None:
        """What was alive at most before the first program was of no step: checking a batch makes shapes, too."""
        if not self._began:
            self.batch = dict(
                storage_sizes([(one.inputs, one.target) for one in self._engine.batch if one is not None])
            )
        self._meter.peak, self._began, self._next = self._meter.live, True, 0
        self._each.clear()

    def on_action_done(self, action: Action) -> None:
        """After an action."""
        program, state, meter, rows = (
            self._engine.last_program,
            self._engine.state,
            self._meter,
            self._engine.state.ledger,
        )
        assert program is not None
        passing = rows.pass_nbytes(now=True)
        self._each.append((meter.peak - passing, meter.live - passing))
        if meter.peak > self._most:
            self._most, self._rows, self.program, self.at = meter.peak, passing, program, self._next
            self.then = self.between.get_memory_by_slot()
        slots, meter.peak = program.slots[self._next], meter.live
        self._next += 1
        self.between.use_arena(state.arena)
        for slot in slots.takes:
            self.between.empty_slot(slot)
        for slot in filter(is_activation, (*slots.gives, *slots.adds)):
            value = state.store[slot]
            self.between.fill_slot(
                slot, value.finish() if isinstance(value, TimedTransfer) else value
            )  # on its way, or there

    @property
    def _arena_bytes(self) -> int:
        """Bytes that stay."""
        state = self._engine.state
        slab = [] if state.arena.slab is None else [state.arena.slab]
        kept = [array for key, array in state.ledger.arrays.items() if not state.ledger.rows[key].is_pass_only]
        buffers = (*state.arena.kept.values(), *kept, *slab)
        return sum({id(buffer.root): buffer.root.nbytes for buffer in buffers}.values())

    @property
    def peak_heap_bytes(self) -> int:
        """The most bytes of the heap at any time."""
        return self._most - self._arena_bytes

    @property
    def peak_activation_bytes(self) -> int:
        """Bytes of activations at that time."""
        return self.peak_heap_bytes - self._rows

    @property
    def activation_bytes_by_action(self) -> list[tuple[int, int]]:
        """Bytes of activations, at most in each action of the last program, and after it."""
        arena = self._arena_bytes
        return [(most - arena, after - arena) for most, after in self._each]

    def get_peak_memory(self) -> dict[str, int]:
        """Bytes by kind of memory, when the heap was largest."""
        state = self._engine.state
        bytes_by_kind = {"gradients": 0, **state.count_bytes(), "activations": self.peak_activation_bytes}
        bytes_by_kind["gradients"] += self._rows - state.ledger.pass_nbytes()
        return {kind: nbytes for kind, nbytes in bytes_by_kind.items() if nbytes or kind == "activations"}
