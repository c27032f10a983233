"""Measure activation memory, which is the memory of all arrays that are neither in the arena (the large buffers) nor in
the ledger (the table of parameters, gradients and optimizer state).

`ActivationMeter` tracks the activations that are kept between actions, both in real runs and in dry runs.
`HeapRecorder` works only in dry runs, and counts everything that is alive during each action. Recordings, peak memory
reports, dry runs, plans and out-of-memory errors use these two classes."""

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

__all__ = [
    "ActivationMeter",
    "HeapRecorder",
    "get_arena_storage_ids",
    "is_activation_slot",
    "iterate_storage_ids_and_sizes",
]


def is_activation_slot(slot: Slot) -> bool:
    """Return whether the value in a program slot (named value) counts as activation memory."""
    return SLOTS[slot.kind].memory == "activations"


def get_arena_storage_ids(arena: Arena) -> set[int]:
    """Return the ids of the arrays that own the memory of the arena (allocator of large buffers). The ledger (table of
    a rank's arrays) already counts this memory."""
    return {id(find_storage(array)) for array in (*arena.kept.values(), *arena.blocks, arena.slab)}


class ActivationMeter:
    """Counts the bytes of activations that a program keeps between actions. The count is updated after each action. An
    input of the batch counts as long as a slot (named value of the program) holds it. Targets and temporary arrays of
    layers do not count.

    A view counts as its base array, and each base array counts once. Parameters that a layer saves for backward are not
    counted, because the ledger (table of a rank's arrays) counts them.

    Attributes
    ----------
    live_bytes : current number of bytes
    peak_bytes : maximum number of bytes so far
    """

    def __init__(self) -> None:
        self.live_bytes = self.peak_bytes = 0
        self._held: dict[Slot, dict[int, int]] = {}
        self._users: dict[int, int] = {}
        self._planned: tuple[tuple[int, int], set[int]] = ((-1, -1), set())

    def get_storage_bytes_by_slot(self) -> dict[Slot, dict[int, int]]:
        """Return the memory that each slot (named value) currently uses. The result contains one dict per slot, which
        maps the `id` of each base array to its size in bytes."""
        return dict(self._held)

    def exclude_arena(self, arena: Arena) -> None:
        """Exclude the memory of this arena (allocator of large buffers) from the count. Call this before running a
        program that uses the arena."""
        state = (arena.generation, len(arena.kept))
        if self._planned[0] != state:
            self._planned = state, get_arena_storage_ids(arena)

    def forget_slot(self, slot: Slot) -> None:
        """Stop counting the memory of the value in a slot (named value of a program)."""
        for root, nbytes in self._held.pop(slot, {}).items():
            self._users[root] -= 1
            if not self._users[root]:
                del self._users[root]
                self.live_bytes -= nbytes

    def on_action(self, takes: Iterable[Slot], gives: Iterable[Slot], values: Iterable[Any]) -> None:
        """Update the count after an action that emptied the slots `takes` and stored `values` in the slots `gives`.
        Slots that hold no activations are ignored."""
        for slot in takes:
            self.forget_slot(slot)
        for slot, value in zip(gives, values, strict=True):
            if is_activation_slot(slot):  # for a pending transfer, count the array that it will return
                self.start_counting_slot_bytes(slot, value.finish() if isinstance(value, TimedTransfer) else value)

    def start_counting_slot_bytes(self, slot: Slot, value: Any) -> None:
        """Start counting the memory of the new value in a slot (a named value of a program), and stop counting the
        memory of the slot's old value."""
        self.forget_slot(slot)
        there = self._planned[1]
        self._held[slot] = held = {
            root: nbytes for root, nbytes in iterate_storage_ids_and_sizes(value) if root not in there
        }
        for root, nbytes in held.items():
            users = self._users.get(root, 0)
            self._users[root] = users + 1
            self.live_bytes += 0 if users else nbytes
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)


def iterate_storage_ids_and_sizes(value: Any) -> Iterable[tuple[int, int]]:
    """Yield (id, size in bytes) of the base array of each array in nested tuples, lists and dicts."""
    if isinstance(value, dict):
        value = tuple(value.values())
    if isinstance(value, tuple | list):
        for item in value:
            yield from iterate_storage_ids_and_sizes(item)
    elif (root := find_storage(value)) is not None:
        yield id(root), root.nbytes


class HeapRecorder(Observer):
    """Observer that records the memory of a dry run, action by action. The *heap* is all memory outside the arena
    (allocator of large buffers): activations, and gradient shards that each update frees.

    Attributes
    ----------
    activations : meter of the activations kept between actions
    program : the program during which the heap is largest
    action_at_peak : index in `program` of the action during which the heap is largest
    slots_at_peak : for each slot (named value), the memory that its value used before that action, as a dict that maps
        array ids to sizes in bytes
    batch : size in bytes of each array in the first batch, by the array's id
    """

    def __init__(self, engine: Engine, meter: MemoryMeter) -> None:
        self.activations, self.program, self.action_at_peak = ActivationMeter(), engine.last_program, 0
        self.slots_at_peak: dict[Slot, dict[int, int]] = {}
        self.batch: dict[int, int] = {}
        self._engine, self._meter = engine, meter
        self._most = self._rows = self._next = 0
        self._each: list[tuple[int, int]] = []
        self._began = False
        engine.add_observer(self)

    def on_program_begin(self, program: Program, state: TrainState) -> None:
        """Reset the peak. Arrays that are created before the first program, for example while a batch is checked, do
        not count as part of a step."""
        if not self._began:
            self.batch = dict(
                iterate_storage_ids_and_sizes(
                    [(one.inputs, one.target) for one in self._engine.batch if one is not None]
                )
            )
        self._meter.peak, self._began, self._next = self._meter.live, True, 0
        self._each.clear()

    def on_action_done(self, action: Action) -> None:
        """Record the peak memory during an action, and the activation memory after it."""
        program, state, meter, rows = (
            self._engine.last_program,
            self._engine.state,
            self._meter,
            self._engine.state.ledger,
        )
        assert program is not None
        passing = rows.count_bytes_freed_by_update(now=True)
        self._each.append((meter.peak - passing, meter.live - passing))
        if meter.peak > self._most:
            self._most, self._rows, self.program, self.action_at_peak = meter.peak, passing, program, self._next
            self.slots_at_peak = self.activations.get_storage_bytes_by_slot()
        slots, meter.peak = program.slots[self._next], meter.live
        self._next += 1
        self.activations.exclude_arena(state.arena)
        gives = (*slots.gives, *slots.adds)
        self.activations.on_action(slots.takes, gives, [state.store.get(slot) for slot in gives])

    @property
    def _bytes_kept_between_programs(self) -> int:
        """Size in bytes of the memory that stays allocated between programs."""
        state = self._engine.state
        slab = [] if state.arena.slab is None else [state.arena.slab]
        kept = [array for key, array in state.ledger.arrays.items() if not state.ledger.rows[key].is_freed_by_update]
        buffers = (*state.arena.kept.values(), *kept, *slab)
        return sum({id(buffer.root): buffer.root.nbytes for buffer in buffers}.values())

    @property
    def peak_heap_bytes(self) -> int:
        """Maximum size in bytes of the heap (all memory outside the arena)."""
        return self._most - self._bytes_kept_between_programs

    @property
    def peak_activation_bytes(self) -> int:
        """Size in bytes of the activations when the heap was largest."""
        return self.peak_heap_bytes - self._rows

    @property
    def activation_bytes_by_action(self) -> list[tuple[int, int]]:
        """For each action of the last program, the total size of the activations in bytes, as (maximum during the
        action, size after the action)."""
        arena = self._bytes_kept_between_programs
        return [(most - arena, after - arena) for most, after in self._each]

    def get_bytes_by_kind_at_heap_peak(self) -> dict[str, int]:
        """Return a dict that maps each kind of memory, such as "gradients", to its size in bytes when the heap was
        largest."""
        state = self._engine.state
        bytes_by_kind = {"gradients": 0, **state.count_bytes_by_kind(), "activations": self.peak_activation_bytes}
        bytes_by_kind["gradients"] += self._rows - state.ledger.count_bytes_freed_by_update()
        return {kind: nbytes for kind, nbytes in bytes_by_kind.items() if nbytes or kind == "activations"}
