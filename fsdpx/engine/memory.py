"""The memory of one program: where its short-lived buffers lie in the arena's slab, and views of them."""

from collections import Counter
from dataclasses import replace
from typing import Any

import numpy as np

from fsdpx.array.arena import Life, Plan, place
from fsdpx.engine.engine import Engine
from fsdpx.engine.gradients import Chunked, Gradient, Plainly, scratch_nbytes
from fsdpx.engine.views import Views
from fsdpx.program import Program, lifetimes

__all__ = ["Room", "lives", "plan"]


class Room:
    """Buffers by name for one program on one rank: full, grad, wire (16-bit parameters) and scratch, per page."""

    def __init__(self, engine: Engine, program: Program) -> None:
        self.engine, self.program = engine, program
        self.plan = plan(engine, program)
        self.generation = -1

    def enter(self) -> None:
        """Before each run: the slab may have moved since the last one."""
        arena = self.engine.arena
        arena.lend(self.plan)
        self.births: Counter[str] = Counter()
        if self.generation != arena.generation:
            self.generation = arena.generation
            self.buffers: dict[str, Any] = {}
            self.views = Views(self.engine.layout, self.engine.state)

    def buffer(self, name: str, size: int, dtype: Any) -> Any:
        """The buffer of the next life of `name`: lives come in the order of the program."""
        life = _life(name, self.births[name])
        self.births[name] += 1
        have = self.buffers.get(life)
        if have is None:
            have = self.buffers[life] = self.engine.arena.view(self.plan.offsets[life], size, dtype)
        return have

    def gradient(self, page: int) -> Gradient:
        """A zeroed full gradient of a page, kept or lent."""
        engine = self.engine
        state, copies = engine.pages[page], engine.copies
        size = state.page.size
        if state.grad is not None:
            buffer = state.grad
        elif f"grad{page}" in self.program.begins | self.program.ends:
            buffer = engine.arena.keep(f"local{page}", "gradients", size, engine.dtype)
        else:
            buffer = self.buffer(f"grad{page}", size * copies, engine.dtype)
        if engine.options.chunks is None:
            return Plainly(buffer)
        return Chunked(buffer, size, copies, engine.chunks, engine.options.chunks)

    def scratch(self, page: int) -> Any:
        """Memory for one reduce: bytes for a codec, elements for a tree."""
        nbytes = scratch_nbytes(self.engine, self.engine.pages[page])
        dtype = np.dtype("uint8") if self.engine.options.chunks is None else self.engine.dtype
        if nbytes == 0:
            return self.engine.xp.empty((0,), dtype=dtype)
        return self.buffer(f"scratch{page}", nbytes // dtype.itemsize, dtype)


def plan(engine: Engine, program: Program) -> Plan:
    """Where each life of each buffer lies; lives of one name are numbered in order of birth."""
    births: Counter[str] = Counter()
    named = []
    for life in sorted(lives(engine, program), key=lambda life: life.start):
        named.append(replace(life, name=_life(life.name, births[life.name])))
        births[life.name] += 1
    return place(named)


def _life(name: str, number: int) -> str:
    return f"{name}#{number}"


def lives(engine: Engine, program: Program) -> list[Life]:
    """All short-lived buffers of a program with their bytes on this rank."""
    result = []
    for life in lifetimes(program):
        kind, page = life.name.rstrip("0123456789"), int(life.name.lstrip("abcdefghijklmnopqrstuvwxyz"))
        state = engine.pages[page]
        if kind == "full" and state.full is None:
            result.append(Life(life.name, life.start, life.stop, state.page.size * engine.dtype.itemsize))
        if kind == "grad" and state.grad is None:
            nbytes = state.page.size * engine.copies * engine.dtype.itemsize
            result.append(Life(life.name, life.start, life.stop, nbytes))
    return result + _wires(engine, program) + _scratches(engine, program)


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
    """What reduces need beside the gradient: from the reduce to its settle."""
    result: list[Life] = []
    born: dict[int, int] = {}
    for at, action in enumerate(program.actions):
        if action.op in ("REDUCE", "SETTLE") and action.unit is not None:
            nbytes = scratch_nbytes(engine, engine.pages[action.unit])
            if action.op == "REDUCE":
                born[action.unit] = at
            elif nbytes:
                result.append(Life(f"scratch{action.unit}", born[action.unit], at, nbytes))
    return result
