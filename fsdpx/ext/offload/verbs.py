"""The verbs of records, what lies on disk between uses, and their operations on one rank."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from fsdpx.core.array.shapes.array import root_of
from fsdpx.core.comm.calls import Transfer
from fsdpx.core.engine.activations import arena_roots
from fsdpx.core.engine.operations import ABOUT, OPERATIONS, release
from fsdpx.core.engine.run import ProgramRun, Values
from fsdpx.core.program import PASSES, SLOTS, VERBS, Action, Move, Slot, SlotKind, Verb
from fsdpx.core.program.pipeline import OVER, STANDING
from fsdpx.core.state.placement import Placement
from fsdpx.ext.offload.disk import Disk, spill
from fsdpx.ext.offload.records import SPILLED, place_records, record_of, records_of

__all__ = ["fetch_record", "store_record"]

# fmt: off
SLOTS["stored"] = SlotKind("stored", "control")  # of a record: its values lie in a slower level
VERBS.update({
    "FETCH": Verb(takes=("stored:once",), reads=("stored:always",), gives=("record:here",), about="record", lane="disk",
                  moves=(Move("disk", "read", "record", "record"),)),
    "STORE": Verb(takes=("record:here",), gives=("record:here", "stored:here"), about="record", lane="disk",
                  moves=(Move("disk", "write", "record", "record"),)),
    "EVICT": Verb(takes=("record:here",), lane="host", about="record"),
    "UPDATE": replace(VERBS["UPDATE"], takes=(*VERBS["UPDATE"].takes, "stored:changed")),
})
# fmt: on
STANDING["record"] = lambda over, action, stage: [record_of(stage, action)]
OVER.update({
    "once": lambda a, s, n: [] if a.mb is None else [(a.unit, a.mb)],
    "always": lambda a, s, n: [(a.unit, None)] if a.mb is None else [],
    "changed": lambda a, s, n: [
        (n, None) for n, r in enumerate(records_of(s)) if r.at == a.unit and r.kind not in SPILLED
    ],
})
PASSES.append(place_records)


def fetch_record(run: ProgramRun, action: Action, taken: Values, read: Values, added: Values) -> Values:
    slot, disk = record_of(run.stage, action), _disk_of(run)
    if slot.mb is not None:
        (spilled,) = taken
        handle, memory = disk.bring(slot, spilled)
        made: list[Any] = []  # made once: later calls get the same arrays

        def value() -> Any:
            if not made:
                made.append(spilled.value(memory))
            return made[0]

        run.place.axes.counters.add("disk", "read", sum(spilled.sizes))
        return (Transfer(handle, value),)
    handle, arrays = disk.fetch(slot, _memory_of(run, slot))
    run.place.axes.counters.add("disk", "read", disk.size(slot))
    return (Transfer(handle, lambda: arrays),)


def store_record(run: ProgramRun, action: Action, taken: Values, read: Values, added: Values) -> Values:
    slot, disk, (value,) = record_of(run.stage, action), _disk_of(run), taken
    if slot.mb is not None:
        batch = [array for one in run.feed.batch if one is not None for array in (*one.inputs, one.target)]
        own = arena_roots(run.workspace.state.arena) | {id(root_of(array)) for array in batch}  # is there anyway
        spilled = spill(value, lambda root: id(root) in own)
        run.place.axes.counters.add("disk", "write", sum(spilled.sizes))
        return Transfer(disk.spill(slot, spilled), lambda: value), spilled
    run.place.axes.counters.add("disk", "write", disk.size(slot))
    return Transfer(disk.store(slot), lambda: value), True


def _disk_of(run: ProgramRun) -> Disk:
    disk = run.workspace.state.storage
    assert isinstance(disk, Disk)
    return disk


def _memory_of(run: ProgramRun, slot: Slot) -> Any:
    """Memory for a record that is fetched."""
    assert slot.at is not None
    nbytes = _disk_of(run).buffer_nbytes(slot)
    if not nbytes:  # this rank has nothing of it
        return run.place.xp.empty((0,), dtype="uint8")
    return run.workspace.buffer(slot.kind, slot.at, nbytes, "uint8")


def _about_record(placement: Placement, number: int) -> str:
    record = records_of(placement.stage)[number]
    assert record.at is not None
    if record.kind in SPILLED:
        return f"activations of unit {placement.layout.units[record.at].name!r}"
    return f"{SLOTS[record.kind].memory} of page {placement.name(record.at)!r}"


ABOUT["record"] = _about_record
OPERATIONS.update({"FETCH": fetch_record, "STORE": store_record, "EVICT": release})
