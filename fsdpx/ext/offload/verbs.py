"""The actions FETCH, STORE and EVICT, which move offloaded state between disk and memory, and how a rank runs them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from fsdpx.core.array.shapes.array import find_storage
from fsdpx.core.comm.calls import TimedTransfer
from fsdpx.core.engine.activations import get_arena_storage_ids
from fsdpx.core.engine.operations import OPERATIONS, TARGET_TEXTS, release_slots
from fsdpx.core.engine.run import ProgramRun, Values
from fsdpx.core.program import PASSES, SLOTS, VERBS, Action, Slot, SlotKind, Verb, VerbTransfer
from fsdpx.core.program.pipeline import INDEX_RANGES, SPECIAL_WORDS
from fsdpx.core.state.placement import Placement
from fsdpx.ext.offload.disk import DiskStorage, extract_large_arrays
from fsdpx.ext.offload.records import SPILLED, get_record_of_action, insert_disk_transfers_of_records, list_records

__all__ = ["fetch_record", "write_record_to_disk"]

# fmt: off
SLOTS["stored"] = SlotKind("stored", "control")  # a "stored" slot has a value only while its record is on disk
VERBS.update({
    "FETCH": Verb(takes=("stored:once",), reads=("stored:always",), gives=("record:here",), about="record", lane="disk",
                  moves=(VerbTransfer("disk", "read", "record", "record"),)),
    "STORE": Verb(takes=("record:here",), gives=("record:here", "stored:here"), about="record", lane="disk",
                  moves=(VerbTransfer("disk", "write", "record", "record"),)),
    "EVICT": Verb(takes=("record:here",), lane="host", about="record"),
    "UPDATE": replace(VERBS["UPDATE"], takes=(*VERBS["UPDATE"].takes, "stored:changed")),
})
# fmt: on
SPECIAL_WORDS["record"] = lambda over, action, stage: [get_record_of_action(stage, action)]
INDEX_RANGES.update(
    {
        "once": lambda a, s, n: [] if a.mb is None else [(a.unit, a.mb)],
        "always": lambda a, s, n: [(a.unit, None)] if a.mb is None else [],
        "changed": lambda a, s, n: [
            (n, None) for n, r in enumerate(list_records(s)) if r.at == a.unit and r.kind not in SPILLED
        ],
    }
)
PASSES.append(insert_disk_transfers_of_records)


def fetch_record(run: ProgramRun, action: Action, taken: Values, read: Values, added: Values) -> Values:
    slot, disk = get_record_of_action(run.stage, action), _get_disk(run)
    if slot.mb is not None:
        (spilled,) = taken
        handle, memory = disk.start_restore(slot, spilled)
        made: list[Any] = []  # holds the value after the first call, because later calls must return the same arrays

        def get_value() -> Any:
            if not made:
                made.append(spilled.rebuild_value_from_memory(memory))
            return made[0]

        run.placement.axes.counters.add_calls("disk", "read", sum(spilled.sizes))
        return (TimedTransfer(handle, get_value),)
    handle, arrays = disk.start_fetch(slot, _allocate_record_buffer(run, slot))
    run.placement.axes.counters.add_calls("disk", "read", disk.get_record_nbytes(slot))
    return (TimedTransfer(handle, lambda: arrays),)


def write_record_to_disk(run: ProgramRun, action: Action, taken: Values, read: Values, added: Values) -> Values:
    slot, disk, (value,) = get_record_of_action(run.stage, action), _get_disk(run), taken
    if slot.mb is not None:
        batch = [array for one in run.feed.batch if one is not None for array in (*one.inputs, *one.targets)]
        own = get_arena_storage_ids(run.workspace.state.arena) | {
            id(find_storage(array)) for array in batch
        }  # inputs and arena buffers stay in memory anyway, so writing them to disk would free nothing
        spilled = extract_large_arrays(value, lambda root: id(root) in own)
        run.placement.axes.counters.add_calls("disk", "write", sum(spilled.sizes))
        return TimedTransfer(disk.start_spill(slot, spilled), lambda: value), spilled
    run.placement.axes.counters.add_calls("disk", "write", disk.get_record_nbytes(slot))
    return TimedTransfer(disk.start_store(slot), lambda: value), True


def _get_disk(run: ProgramRun) -> DiskStorage:
    disk = run.workspace.state.storage
    assert isinstance(disk, DiskStorage)
    return disk


def _allocate_record_buffer(run: ProgramRun, slot: Slot) -> Any:
    """Allocate memory for reading a record (state that is stored on disk between uses). The memory is empty if this
    rank holds no part of the record."""
    assert slot.at is not None
    nbytes = _get_disk(run).get_fetch_buffer_nbytes(slot)
    if not nbytes:  # this rank holds no part of the record
        return run.placement.xp.empty((0,), dtype="uint8")
    return run.workspace.take_next_temporary_buffer(slot.kind, slot.at, nbytes, "uint8")


def _describe_offloaded_record(placement: Placement, number: int) -> str:
    record = list_records(placement.stage)[number]
    assert record.at is not None
    if record.kind in SPILLED:
        return f"activations of unit {placement.layout.units[record.at].name!r}"
    return f"{SLOTS[record.kind].memory} of page {placement.format_page_name(record.at)!r}"


TARGET_TEXTS["record"] = _describe_offloaded_record
OPERATIONS.update({"FETCH": fetch_record, "STORE": write_record_to_disk, "EVICT": release_slots})
