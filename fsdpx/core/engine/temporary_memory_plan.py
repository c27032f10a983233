"""Plan the slab of a rank. The slab is one block of memory for all short-lived buffers of a program. Buffers that are
used at different times may overlap."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable
from dataclasses import replace

from fsdpx.core.array.arena import BufferLifetime, SlabPlan, assign_offsets
from fsdpx.core.program import Program, Slot, find_lifetimes
from fsdpx.core.state.ledger import LedgerKey
from fsdpx.core.state.train_state import TrainState

__all__ = [
    "agree_on_temporary_memory_plan",
    "count_action_scratch_bytes",
    "find_buffer_lifetimes",
    "plan_temporary_buffer_offsets",
]


def plan_temporary_buffer_offsets(state: TrainState, program: Program) -> SlabPlan:
    """Return the size of the slab (memory for short-lived buffers), and the offset of each use of each buffer. The uses
    of a buffer are numbered in the order of their start."""
    births: Counter[Hashable] = Counter()
    named = []
    for life in find_buffer_lifetimes(state, program):
        named.append(replace(life, name=(life.name, births[life.name])))
        births[life.name] += 1
    return assign_offsets(named)


def agree_on_temporary_memory_plan(state: TrainState, own: SlabPlan) -> SlabPlan:
    """Return the plan of the slab (memory for short-lived buffers) that this rank must use, given its own plan `own`.
    If slabs are in shared memory, all ranks must allocate the same size. The call is then collective, and the returned
    plan has the largest slab size of all ranks. Otherwise, return `own`."""
    if state.arena.memory is None:
        return own
    return replace(own, nbytes=max(state.placement.axes.world.all_gather_value(own.nbytes)))


def find_buffer_lifetimes(state: TrainState, program: Program) -> list[BufferLifetime]:
    """Return the lifetime and the size on this rank of each short-lived buffer of a program, in the order of first
    use."""
    sized = ((life, _count_slot_bytes(state, life.slot)) for life in find_lifetimes(program))
    return [BufferLifetime(life.slot, life.start, life.stop, nbytes) for life, nbytes in sized if nbytes]


def _count_slot_bytes(state: TrainState, slot: Slot) -> int:
    if (nbytes := state.storage.get_fetch_buffer_nbytes(slot)) is not None:
        return nbytes
    row = state.ledger.rows.get(LedgerKey(slot.kind, slot.at))
    if row is not None:
        return 0 if row.is_kept else row.nbytes
    return count_action_scratch_bytes(state, slot)


def count_action_scratch_bytes(state: TrainState, slot: Slot) -> int:
    """Return the number of bytes of temporary memory that an action on a page (flat parameter buffer) needs, besides
    its inputs and outputs."""
    place, itemsize = state.placement, state.placement.formats.gradients.itemsize
    assert slot.at is not None
    if slot.kind == "tie":
        tie = state.ties[slot.at]
        own_page = next(p for p in tie.pages if p in place.pages)
        return tie.count_gathered_elements(place.pages[own_page].own_range.size) * itemsize
    page = place.pages[slot.at]
    if slot.kind == "wire":
        sent = place.formats.wire
        return 0 if sent is None else place.pages[slot.at].size * sent.itemsize
    if slot.kind == "parcel":
        replicas = place.axes.replica.size
        return (
            place.get_codec_route(slot.at).replica.scratch_bytes(page.own_range.size, replicas) if replicas > 1 else 0
        )
    return place.accumulation.count_scratch_bytes(slot.kind, place.get_codec_route(slot.at), page, itemsize)
