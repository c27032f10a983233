"""Where the short-lived buffers of a program lie in the slab of its rank, and how many bytes each has."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable
from dataclasses import replace

from fsdpx.core.array.arena import Life, SlabPlan, place
from fsdpx.core.program import Program, Slot, lifetimes
from fsdpx.core.state.ledger import Key
from fsdpx.core.state.train_state import TrainState

__all__ = ["agreed", "lives", "plan", "scratch_nbytes"]


def plan(state: TrainState, program: Program) -> SlabPlan:
    """Where each life of each buffer lies; lives of one buffer are numbered in order of birth."""
    births: Counter[Hashable] = Counter()
    named = []
    for life in lives(state, program):
        named.append(replace(life, name=(life.name, births[life.name])))
        births[life.name] += 1
    return place(named)


def agreed(state: TrainState, own: SlabPlan) -> SlabPlan:
    """Shared memory is made together: the slab is as large as the largest plan of all ranks. Collective there."""
    if state.arena.memory is None:
        return own
    return replace(own, nbytes=max(state.placement.axes.world.all_gather_plain(own.nbytes)))


def lives(state: TrainState, program: Program) -> list[Life]:
    """All short-lived buffers of a program with their bytes on this rank, by birth; none has memory of its own."""
    sized = ((life, _nbytes(state, life.slot)) for life in lifetimes(program))
    return [Life(life.slot, life.start, life.stop, nbytes) for life, nbytes in sized if nbytes]


def _nbytes(state: TrainState, slot: Slot) -> int:
    if (nbytes := state.storage.buffer_nbytes(slot)) is not None:
        return nbytes
    row = state.ledger.rows.get(Key(slot.kind, slot.at))
    if row is not None:
        return 0 if row.kept else row.nbytes
    return scratch_nbytes(state, slot)


def scratch_nbytes(state: TrainState, slot: Slot) -> int:
    """Memory that an action on a page needs beside its slots."""
    place, itemsize = state.placement, state.placement.formats.gradients.itemsize
    assert slot.at is not None
    if slot.kind == "tie":
        tie = state.ties[slot.at]
        one = next(p for p in tie.pages if p in place.pages)
        return tie.elements(place.pages[one].mine.size) * itemsize
    page = place.pages[slot.at]
    if slot.kind == "wire":
        sent = place.formats.wire
        return 0 if sent is None else place.pages[slot.at].size * sent.itemsize
    if slot.kind == "parcel":
        replicas = place.axes.replica.size
        return place.route(slot.at).replica.scratch(page.mine.size, replicas) if replicas > 1 else 0
    return place.accumulation.scratch_nbytes(slot.kind, place.route(slot.at), page, itemsize)
