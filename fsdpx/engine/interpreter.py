"""The one loop that runs programs: fills and empties slots as the table says, waits where a value is first needed,
pokes transfers between actions, keeps time, and names the action when something fails."""

from time import perf_counter
from typing import Any

from fsdpx.engine.engine import Engine
from fsdpx.engine.gradients import Pending
from fsdpx.engine.memory import Room
from fsdpx.engine.operations import OPERATIONS
from fsdpx.program import VERBS, Program, check

__all__ = ["Bound"]


class Bound:
    """A program with its memory on one rank, ready to run any number of times."""

    def __init__(self, engine: Engine, program: Program) -> None:
        check(program)
        self.engine, self.program = engine, program
        self.room = Room(engine, program)
        self._steps = [
            (OPERATIONS[a.op], a, s.takes, s.reads, s.adds, (*s.gives, *s.adds), VERBS[a.op].lane == "compute")
            for a, s in zip(program.actions, program.slots, strict=True)
        ]

    def run(self) -> dict[str, Any]:
        """Run all actions; the values of the program's result slots are taken out of the store and returned."""
        engine = self.engine
        store, clock, room = engine.store, engine.clock, self.room
        for handle in engine.flying:  # of a program that broke off, alike on all ranks
            handle.wait()
        engine.flying.clear()
        room.enter()
        for operation, action, takes, reads, adds, fills, computes in self._steps:
            begin = perf_counter()
            try:
                taken = tuple([self._ready(slot, store.pop(slot)) for slot in takes])
                read = tuple([self._read(slot) for slot in reads])
                added = tuple([store.get(slot) for slot in adds])
                ready = perf_counter()
                values = operation(engine, room, action, taken, read, added)
                for observe in engine.observers:
                    observe(action)
            except Exception as error:
                engine.forget()
                error.add_note(f"on rank {engine.axes.world.rank}, in action {action} ({self._about(action)})")
                raise
            for slot, value in zip(fills, values, strict=True):
                store[slot] = value
                if value.__class__ is Pending:
                    engine.flying.append(value.handle)
            if computes and engine.flying:
                engine.flying = [handle for handle in engine.flying if not handle.test()]
            clock.add(action.op, perf_counter() - ready, ready - begin)
        engine.flying.clear()
        return {slot: self._ready(slot, store.pop(slot)) for slot in self.program.results}

    def _read(self, slot: str) -> Any:
        store = self.engine.store
        value = store[slot]
        if value.__class__ is Pending:
            value = store[slot] = value.wait()
        return value

    @staticmethod
    def _ready(slot: str, value: Any) -> Any:
        return value.wait() if value.__class__ is Pending else value

    def _about(self, action: Any) -> str:
        kind = VERBS[action.op].about
        if kind == "unit":
            return f"unit {self.engine.layout.units[action.unit].name!r}"
        return f"page {self.engine.name(action.unit)!r}" if kind == "page" else f"the {self.program.kind} program"
