"""FETCH, STORE and EVICT: records between memory and disk."""

from __future__ import annotations

from typing import Any

from fsdpx.engine.run import ProgramRun, Values
from fsdpx.engine.workspace import planned
from fsdpx.program import Action
from fsdpx.state.disk import root_of, spill
from fsdpx.state.transfer import Transfer

__all__ = ["evict", "fetch", "store"]


def fetch(run: ProgramRun, action: Action, taken: Values, read: Values, added: Values) -> Values:
    slot, disk = run.stage.record(action), run.disk
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
    handle, arrays = disk.fetch(slot, run.workspace.record(slot))
    run.place.axes.counters.add("disk", "read", disk.size(slot))
    return (Transfer(handle, lambda: arrays),)


def store(run: ProgramRun, action: Action, taken: Values, read: Values, added: Values) -> Values:
    slot, disk, (value,) = run.stage.record(action), run.disk, taken
    if slot.mb is not None:
        own = _roots(run)
        spilled = spill(value, lambda root: id(root) in own)
        run.place.axes.counters.add("disk", "write", sum(spilled.sizes))
        return Transfer(disk.spill(slot, spilled), lambda: value), spilled
    run.place.axes.counters.add("disk", "write", disk.size(slot))
    return Transfer(disk.store(slot), lambda: value), True


def evict(run: ProgramRun, action: Action, taken: Values, read: Values, added: Values) -> Values:
    return ()


def _roots(run: ProgramRun) -> set[int]:
    """Memory that is there anyway: the arena's, and that of the batch."""
    batch = [array for one in run.feed.batch if one is not None for array in (*one.inputs, one.target)]
    return planned(run.workspace.state.arena) | {id(root_of(array)) for array in batch}
