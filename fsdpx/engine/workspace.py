"""The memory of one program: where its short-lived buffers lie in the arena's slab, and views of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable
from dataclasses import replace
from typing import Any

import numpy as np

from fsdpx.array.arena import Life, SlabPlan, place
from fsdpx.engine.views import Views
from fsdpx.program import Program, Slot, lifetimes
from fsdpx.state.gradients import Gradient
from fsdpx.state.ledger import Key, local_gradient
from fsdpx.state.state import TrainState

__all__ = ["Workspace", "lives", "plan"]


class Workspace:
    """Buffers for one program on one rank: full parameters and gradients that live for a use, and scratch, per page."""

    def __init__(self, state: TrainState, program: Program) -> None:
        self.state, self.program = state, program
        self.place = state.placement
        self.plan = _agreed(state, plan(state, program))
        self.births: Counter[Slot] = Counter()
        pages, ledger = self.place.pages, state.ledger  # looked up once: what is kept stays where it is
        self._full = {p: ledger.array("full", p) for p in pages}
        parts = {p: row for p in pages if (row := ledger.rows.get(Key("part", p)))}
        self._part = {p: ledger.array("part", p) for p, row in parts.items() if not row.passing}
        self._grads = {p: ledger.rows[Key("grad", p)] for p in self.place.stage.trained}
        self._local = {s.at for s in program.begins | program.ends if s.kind == "grad"}
        self._scratch: dict[tuple[str, int], int] = {}
        self._nothing: dict[str, Any] = {}  # scratch without elements, by kind

    def enter(self) -> None:
        """Before each run: grow the slab if need be."""
        self.births.clear()
        self._nothing.clear()
        self.state.arena.lend(self.plan)

    def buffer(self, kind: str, page: int, size: int, dtype: Any) -> Any:
        """The buffer of the next life of that kind for a page: lives come in the order of the program."""
        slot = Slot(kind, page)
        life = slot, self.births[slot]
        self.births[slot] += 1
        return self.state.arena.view(self.plan.offsets[life], size, dtype)

    def full(self, page: int) -> Any:
        """Memory for the full parameters of a page, kept or lent."""
        kept = self._full[page]
        if kept is not None:
            return kept
        return self.buffer("full", page, self.place.pages[page].size, self.place.formats.compute)

    def record(self, slot: Slot) -> Any:
        """Memory for a record that is fetched."""
        assert self.state.disk is not None
        assert slot.at is not None
        nbytes = self.state.disk.buffer_nbytes(slot)
        if not nbytes:  # this rank has nothing of it
            return self.place.xp.empty((0,), dtype="uint8")
        return self.buffer(slot.kind, slot.at, nbytes, "uint8")

    def part(self, page: int) -> Any:
        """Where the reduced gradient of a page is kept until its update."""
        kept = self._part.get(page)
        return self.state.passing(Key("part", page)) if kept is None else kept

    def delta(self, page: int) -> Any:
        """Where the outer gradient of a page is found."""
        return self.state.ledger.array("delta", page)

    def gradient(self, page: int, views: Views) -> Gradient:
        """A blank full gradient of a page, kept or lent."""
        place, row = self.place, self._grads[page]
        if row.kept:
            buffer = self.state.ledger.arrays[row.key]
        elif page in self._local:
            buffer = self.state.local_gradient(local_gradient(place, page))
        else:
            buffer = self.buffer("grad", page, row.elements, row.dtype)
        shared = self.state.arena.memory is not None
        return place.accumulation.gradient(buffer, lambda b: views.leaves(b, row.span.size), at_home=shared)

    def scratch(self, kind: str, page: int) -> Any:
        """Short-lived memory of an action: bytes for a codec, elements of the gradients' format for all else."""
        if (kept := self.state.ledger.array(kind, page)) is not None:
            return kept
        nbytes = self._scratch.get((kind, page))
        if nbytes is None:
            nbytes = self._scratch[kind, page] = scratch_nbytes(self.state, Slot(kind, page))
        dtype = np.dtype("uint8") if kind in BYTES else self.place.formats.gradients
        if nbytes:
            return self.buffer(kind, page, nbytes // dtype.itemsize, dtype)
        if kind not in self._nothing:  # of the slab: in windows or not, as the scratch of other ranks
            arena = self.state.arena
            made = self.place.xp.empty((0,), dtype=dtype) if arena.slab is None else arena.view(0, 0, dtype)
            self._nothing[kind] = made
        return self._nothing[kind]


BYTES = ("carry", "join", "parcel")
"""Kinds of scratch that codecs ask for in bytes."""


def plan(state: TrainState, program: Program) -> SlabPlan:
    """Where each life of each buffer lies; lives of one buffer are numbered in order of birth."""
    births: Counter[Hashable] = Counter()
    named = []
    for life in lives(state, program):
        named.append(replace(life, name=(life.name, births[life.name])))
        births[life.name] += 1
    return place(named)


def _agreed(state: TrainState, own: SlabPlan) -> SlabPlan:
    """Shared memory is made together: the slab is as large as the largest plan of all ranks."""
    if state.arena.memory is None:
        return own
    return replace(own, nbytes=max(state.placement.axes.world.all_gather_plain(own.nbytes)))


def lives(state: TrainState, program: Program) -> list[Life]:
    """All short-lived buffers of a program with their bytes on this rank, by birth; none has memory of its own."""
    sized = ((life, _nbytes(state, life.slot)) for life in lifetimes(program))
    return [Life(life.slot, life.start, life.stop, nbytes) for life, nbytes in sized if nbytes]


def _nbytes(state: TrainState, slot: Slot) -> int:
    if state.disk is not None and slot in state.placement.stage.records:
        return state.disk.buffer_nbytes(slot)
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
