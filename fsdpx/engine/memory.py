"""The memory of one program: where its short-lived buffers lie in the arena's slab, and views of them."""

from collections import Counter
from dataclasses import replace
from typing import Any

import numpy as np

from fsdpx.array.arena import Life, Plan, place
from fsdpx.engine.engine import Engine
from fsdpx.engine.gradients import Chunked, Gradient, Plainly, scratch_nbytes
from fsdpx.engine.views import Views
from fsdpx.program import Program, kind_of, lifetimes

__all__ = ["Room", "lives", "plan"]


class Room:
    """Buffers by name for one program on one rank: full, grad, wire (16-bit parameters) and scratch, per page."""

    def __init__(self, engine: Engine, program: Program) -> None:
        self.engine, self.program = engine, program
        self.plan = _agreed(engine, plan(engine, program))
        self.births: Counter[str] = Counter()

    def enter(self) -> None:
        """Before each run: grow the slab if need be; all views of an old one are forgotten."""
        engine = self.engine
        self.births.clear()
        engine.arena.lend(self.plan)
        if engine.views is None or engine.views.generation != engine.arena.generation:
            engine.views = Views(engine.layout, engine.state, engine.arena.generation)

    @property
    def views(self) -> Views:
        assert self.engine.views is not None
        return self.engine.views

    def buffer(self, name: str, size: int, dtype: Any) -> Any:
        """The buffer of the next life of `name`: lives come in the order of the program."""
        life = _life(name, self.births[name])
        self.births[name] += 1
        return self.engine.arena.view(self.plan.offsets[life], size, dtype)

    def gradient(self, page: int) -> Gradient:
        """A blank full gradient of a page, kept or lent."""
        engine = self.engine
        state, copies = engine.pages[page], engine.copies
        size = state.page.size
        if state.grad is not None:
            buffer = state.grad
        elif f"grad{page}" in self.program.begins | self.program.ends:
            buffer = engine.arena.keep(f"local{page}", "gradients", size, engine.dtype, passing=True)
        else:
            buffer = self.buffer(f"grad{page}", size * copies, engine.dtype)
        if engine.options.chunks is None:
            return Plainly(buffer)
        return Chunked(self.views.leaves(buffer, size), engine.chunks, engine.options.chunks)

    def scratch(self, page: int, stage: int) -> Any:
        """Memory for a reduce (stage 0) or a join (stage 1): bytes for a codec, elements for a tree."""
        nbytes = scratch_nbytes(self.engine, self.engine.pages[page])[stage]
        dtype = np.dtype("uint8") if self.engine.options.chunks is None else self.engine.dtype
        if nbytes == 0:
            return self._nothing(dtype)
        return self.buffer(f"scratch{page}", nbytes // dtype.itemsize, dtype)

    def tie(self, page: int) -> Any:
        """Memory for the gradients of all copies of a page."""
        elements = _tied_elements(self.engine, page)
        if elements == 0:
            return self._nothing(self.engine.dtype)
        return self.buffer(f"tie{page}", elements, self.engine.dtype)

    def _nothing(self, dtype: Any) -> Any:
        """No elements, but of the slab: in windows or not, as the scratch of other ranks."""
        arena = self.engine.arena
        return self.engine.xp.empty((0,), dtype=dtype) if arena.slab is None else arena.view(0, 0, dtype)


def plan(engine: Engine, program: Program) -> Plan:
    """Where each life of each buffer lies; lives of one name are numbered in order of birth."""
    births: Counter[str] = Counter()
    named = []
    for life in sorted(lives(engine, program), key=lambda life: life.start):
        named.append(replace(life, name=_life(life.name, births[life.name])))
        births[life.name] += 1
    return place(named)


def _agreed(engine: Engine, own: Plan) -> Plan:
    """Shared memory is made together: the slab is as large as the largest plan of all ranks."""
    if engine.arena.memory is None:
        return own
    return replace(own, nbytes=max(engine.axes.world.all_gather_object(own.nbytes)))


def _life(name: str, number: int) -> str:
    return f"{name}#{number}"


def lives(engine: Engine, program: Program) -> list[Life]:
    """All short-lived buffers of a program with their bytes on this rank."""
    result = []
    for life in lifetimes(program):
        kind = kind_of(life.name)
        page = int(life.name[len(kind) :])
        state = engine.pages[page]
        if kind == "full" and state.full is None:
            result.append(Life(life.name, life.start, life.stop, state.page.size * engine.dtype.itemsize))
        if kind == "grad" and state.grad is None:
            nbytes = state.page.size * engine.copies * engine.dtype.itemsize
            result.append(Life(life.name, life.start, life.stop, nbytes))
    return result + _wires(engine, program) + _scratches(engine, program)


def _tied_elements(engine: Engine, page: int) -> int:
    tie = engine.ties[page]
    one = next(p for p in tie.pages if p in engine.pages)
    return tie.elements(engine.pages[one].mine.size)


def _wires(engine: Engine, program: Program) -> list[Life]:
    """16-bit parameters on their way: from the gather to the first action that needs the page."""
    if engine.wire is None:
        return []
    result: list[Life] = []
    born: dict[str, int] = {}
    for at, (action, slots) in enumerate(zip(program.actions, program.slots, strict=True)):
        for slot in (*slots.reads, *slots.takes):
            if slot in born:
                page = int(slot[len("full") :])
                nbytes = engine.pages[page].page.size * engine.wire.itemsize
                result.append(Life(f"wire{page}", born.pop(slot), at, nbytes))
        if action.op == "GATHER":
            born[f"full{action.unit}"] = at
    return result


def _scratches(engine: Engine, program: Program) -> list[Life]:
    """What reduces need beside the gradient: from the reduce to its settle, with chunks to the join; and joins."""
    result: list[Life] = []
    born: dict[int, int] = {}
    end = "SETTLE" if engine.options.chunks is None else "JOIN"
    for at, action in enumerate(program.actions):
        if action.unit is not None and action.op == "TIE":
            elements = _tied_elements(engine, action.unit)
            result += [Life(f"tie{action.unit}", at, at, elements * engine.dtype.itemsize)] if elements else []
        if action.unit is None or action.op not in ("REDUCE", "SETTLE", "JOIN"):
            continue
        first, second = scratch_nbytes(engine, engine.pages[action.unit])
        if action.op == "REDUCE":
            born[action.unit] = at
        if action.op == end and first:
            result.append(Life(f"scratch{action.unit}", born[action.unit], at, first))
        if action.op == "JOIN" and second:
            result.append(Life(f"scratch{action.unit}", at, at, second))
    return result
