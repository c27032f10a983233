"""The compiler pass that inserts reads and writes of offloaded state into the program of a step.

A record is a slot (a named value of a program) that is stored on disk between uses."""

from __future__ import annotations

from collections.abc import Sequence

from fsdpx.core.program import VERBS, Action, ActionSlots, ProgramRequest, Slot, Stage, get_buffer_slots_of_action
from fsdpx.core.program.passes import append_entries_to_prefetch
from fsdpx.core.state.storage import StoredSlots

__all__ = [
    "SPILLED",
    "get_record_of_action",
    "insert_disk_transfers_of_records",
    "list_records",
    "pair_with_stored_slots",
]

Actions = list[Action]
SPILLED = ("saved", "held")
"""Kinds of records (slots that are stored on disk) that hold activations. Records of all other kinds belong to pages
(flat parameter buffers), and are changed by optimizer updates."""


def pair_with_stored_slots(records: Sequence[Slot]) -> StoredSlots:
    """Return a pair (record, slot) for each record. The slot (a named value of a program) is set only while the record
    is stored on disk."""
    return tuple((record, Slot("stored", number)) for number, record in enumerate(records))


def list_records(stage: Stage) -> list[Slot]:
    """Return the records (state that is stored on disk between uses) of a pipeline stage, ordered by number."""
    return [record for record, _ in stage.stored_slots]


def get_record_of_action(stage: Stage, action: Action) -> Slot:
    """Return the record (state that is stored on disk between uses) that an action fetches, stores or evicts."""
    assert action.unit is not None
    return stage.stored_slots[action.unit][0]._replace(mb=action.mb)


def insert_disk_transfers_of_records(actions: Actions, request: ProgramRequest) -> Actions:
    """Insert the actions that read records from disk (FETCH), write them (STORE) and free their memory (EVICT).

    Records of each kind (such as activations) are handled separately. When an action runs, the records that it needs
    are in memory. At that time, the `ahead` records that will be needed next are being fetched or have already been
    fetched, and at most `ahead` records are being written. Activations that no later action of the program needs are
    not transferred."""
    stage = request.stage
    records = list_records(stage)
    for kind in dict.fromkeys(record.kind for record in records):
        numbers = {record.at: n for n, record in enumerate(records) if record.kind == kind}
        slots = [get_buffer_slots_of_action(action, stage, request.microbatches) for action in actions]
        actions = _RecordCache(kind, numbers, request.ahead).insert_transfer_actions(actions, slots)
    return actions


class _RecordCache:
    """Simulates which records of one kind are in memory at each action, to decide where to insert fetches, stores and
    evictions.

    Attributes
    ----------
    numbers : dict from the page, unit or value of a record (`Slot.at`) to the index of the record
    there : the slots (named values of a program) that are in memory. A slot maps to True if its value has changed since
        it was written to disk
    leaving : slots whose values are being written to disk
    stored : activations that are stored on disk
    last : for each slot, the index of the last action that needs it
    """

    def __init__(self, kind: str, numbers: dict[int | None, int], ahead: int) -> None:
        self.kind, self.numbers, self.ahead = kind, numbers, ahead
        self.there: dict[Slot, bool] = {}
        self.leaving: list[Slot] = []
        self.stored: set[Slot] = set()
        self.last: dict[Slot, int] = {}
        self.result: Actions = []

    def insert_transfer_actions(self, actions: Actions, slots: Sequence[ActionSlots]) -> Actions:
        """Return the actions with transfers inserted, so that the records that each action needs are in memory when it
        runs."""
        wanted = [self._select_record_slots((*s.takes, *s.reads, *s.adds)) for s in slots]
        needs = _list_slots_needed_in_memory_per_action(
            actions, slots, [[*w, *self._select_record_slots(s.gives)] for w, s in zip(wanted, slots, strict=True)]
        )
        first, self.last = (
            _find_fetch_start_index(actions, needs),
            {slot: i for i, some in enumerate(wanted) for slot in some},
        )
        for i, action in enumerate(actions):
            if needs[i] or i == first:
                self._insert_evicts_and_fetches_for_window(
                    i, append_entries_to_prefetch(needs[i], wanted[i + 1 :], self.ahead)
                )
            self.result.append(action)
            self.there |= dict.fromkeys(self._select_record_slots((*slots[i].adds, *slots[i].gives)), True)
            for slot in self._select_record_slots(slots[i].takes):
                self.there.pop(slot, None)
        self._add_store_or_evict_actions([slot for slot in self.there if slot.mb is None])
        self._add_waits_for_writes(0)
        return self.result

    def _select_record_slots(self, slots: Sequence[Slot]) -> list[Slot]:
        return [slot for slot in slots if slot.kind == self.kind and slot.at in self.numbers]

    def _insert_evicts_and_fetches_for_window(self, action_index: int, window: dict[Slot, None]) -> None:
        """Evict the records that are not in `window`, and fetch the records in `window` that are not in memory.
        `window` contains the records that this action and the next actions need.
        """
        gone = [slot for slot in self.there if slot not in window]
        self._add_store_or_evict_actions(
            [slot for slot in gone if slot.mb is None or self.last.get(slot, -1) >= action_index]
        )
        self._add_waits_for_writes(self.ahead)
        for slot in window:
            if slot in self.there or not (slot.mb is None or slot in self.stored):
                continue
            if slot in self.leaving:  # writes complete in order, so this also waits for all earlier writes
                self._add_waits_for_writes(len(self.leaving) - 1 - self.leaving.index(slot))
            self._add_action("FETCH", slot)
            self.stored.discard(slot)
            self.there[slot] = False

    def _add_store_or_evict_actions(self, slots: Sequence[Slot]) -> None:
        for slot in slots:
            changed = self.there.pop(slot)
            self._add_action("STORE" if changed else "EVICT", slot)
            if changed:
                self.leaving.append(slot)
                self.stored.add(slot)

    def _add_waits_for_writes(self, max_pending: int) -> None:
        """Insert waits for the oldest writes until at most `max_pending` are in progress."""
        while len(self.leaving) > max_pending:
            self._add_action("EVICT", self.leaving.pop(0))

    def _add_action(self, op: str, slot: Slot) -> None:
        self.result.append(Action(op, self.numbers[slot.at], slot.mb))


def _list_slots_needed_in_memory_per_action(
    actions: Actions, slots: Sequence[ActionSlots], needs: Sequence[Sequence[Slot]]
) -> list[list[Slot]]:
    """For each action, return the records that must be in memory while it runs: the records that the action needs, and
    the records that pending transfers are still reading."""
    reading: dict[Slot, list[Slot]] = {}  # result of each pending transfer -> slots that the transfer reads
    found = []
    for action, some, own in zip(actions, slots, needs, strict=True):
        found.append(list(dict.fromkeys([*own, *(slot for held in reading.values() for slot in held)])))
        for slot in (*some.takes, *some.reads):
            reading.pop(slot, None)
        if VERBS[action.op].moves and own:
            reading |= {slot: list(own) for slot in some.gives}
    return found


def _find_fetch_start_index(actions: Actions, needs: Sequence[Sequence[Slot]]) -> int:
    """Return the index of the last compute action before the first action that needs a record.

    Fetching begins there, so that it overlaps with computation."""
    first = next((i for i, slots in enumerate(needs) if slots), 0)
    return max((i for i, action in enumerate(actions[:first]) if VERBS[action.op].lane == "compute"), default=0)
