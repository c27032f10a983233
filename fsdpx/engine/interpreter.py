"""The one loop that runs programs: fills and empties slots as the table says, waits where a value is first needed,
pokes transfers between actions, keeps time, and names the action when something fails."""

import threading
from time import perf_counter
from typing import Any

from fsdpx.array import blas
from fsdpx.array.denormals import flushed
from fsdpx.comm.communicator import DONE
from fsdpx.engine.engine import PROGRESS, Engine
from fsdpx.engine.gradients import Pending
from fsdpx.engine.memory import Room
from fsdpx.engine.operations import OPERATIONS
from fsdpx.errors import CommTimeout
from fsdpx.program import VERBS, Request, check, compile
from fsdpx.watch.flight import label
from fsdpx.watch.watchdog import Watchdog

__all__ = ["Bound"]


class Bound:
    """A program with its memory on one rank, ready to run any number of times. dog: keeps the record of its actions."""

    def __init__(self, engine: Engine, request: Request, dog: Watchdog | None = None) -> None:
        program = compile(request)
        check(program)
        engine.pipe.prove(request, engine.stages)
        self.engine, self.program = engine, program
        self.room = Room(engine, program)
        self._steps = [
            (OPERATIONS[a.op], a, self._words(a), s.takes, s.reads, s.adds, (*s.gives, *s.adds), VERBS[a.op].lane)
            for a, s in zip(program.actions, program.slots, strict=True)
        ]
        self._dog = dog
        self._record = None if dog is None else dog.record
        self._givers = {
            slot: step[2]
            for step, s in zip(self._steps, program.slots, strict=True)
            for slot in (*s.gives, *s.adds)
        }  # fmt: skip

    def run(self) -> dict[str, Any]:
        """Run all actions; the values of the program's result slots are taken out of the store and returned."""
        with flushed():
            return self._run()

    def _run(self) -> dict[str, Any]:
        engine = self.engine
        store, clock, room, poker = engine.store, engine.clock, self.room, engine.poker
        for _, transfer in engine.flying:  # of a program that broke off, alike on all ranks
            transfer.handle.wait()
        engine.flying.clear()
        engine.sends.clear()
        engine.ran = self.program
        record = self._record
        if record is not None:
            record.program(engine.steps, self.program.kind, threading.get_ident())
        room.enter()
        if blas.threads() != engine.product_threads:
            blas.threads(engine.product_threads)
        for operation, action, words, takes, reads, adds, fills, lane in self._steps:
            begin = perf_counter()
            if record is not None:
                record.begin(words, begin)
            try:
                taken = tuple([self._ready(store.pop(slot), slot) for slot in takes]) if takes else ()
                read = tuple([self._read(slot) for slot in reads]) if reads else ()
                added = tuple([self._ready(store.get(slot), slot) for slot in adds]) if adds else ()
                ready = perf_counter()
                if poker is None or lane != "compute" or not engine.flying:
                    values = operation(engine, room, action, taken, read, added)
                else:
                    with poker.during(self._poke):
                        values = operation(engine, room, action, taken, read, added)
                for slot, value in zip(fills, values, strict=True):
                    store[slot] = value
                    if value.__class__ is Pending and value.handle is not DONE:
                        engine.flying.append((lane, value))
                for observe in engine.observers:
                    observe(action)
            except Exception as error:
                if self._dog is not None and isinstance(error, CommTimeout):
                    self._dog.ask()
                engine.forget()
                error.add_note(f"on rank {engine.axes.world.rank}, in action {action} ({self._about(action)})")
                raise
            end = perf_counter()
            if record is not None:
                record.end(end)
            clock.add(action.op, end - ready, ready - begin)
            if clock.timeline is not None:
                clock.timeline.append((action, ready, end))
            if lane == "compute" and engine.flying:
                self._poke()
                clock.add(PROGRESS, perf_counter() - end, 0.0)
        for transfer in engine.sends:
            transfer.wait()
        engine.sends.clear()
        self._poke()
        return {slot: self._ready(store.pop(slot), slot) for slot in self.program.results}

    def _poke(self) -> None:
        """Move all transfers on; those that are complete are noted."""
        engine, flying = self.engine, []
        for lane, transfer in engine.flying:
            if transfer.test():
                engine.clock.land(lane, transfer.landed - transfer.issued, transfer.busy)
            else:
                flying.append((lane, transfer))
        engine.flying = flying

    def _read(self, slot: str) -> Any:
        store = self.engine.store
        value = store[slot]
        if value.__class__ is Pending:
            value = store[slot] = self._ready(value, slot)
        return value

    def _ready(self, value: Any, slot: str) -> Any:
        if value.__class__ is not Pending:
            return value
        if self._record is not None and value.handle is not DONE:
            self._record.waits(self._givers.get(slot, b"an earlier program"))
        return value.wait()

    def _words(self, action: Any) -> bytes:
        return label(f"{action} ({self._about(action)})")

    def _about(self, action: Any) -> str:
        kind = VERBS[action.op].about
        if kind == "edge":
            edge = self.engine.stage.edges[action.unit]
            return f"from rank {edge.sender} to rank {edge.receiver} of the pipe"
        if kind == "unit":
            return f"unit {self.engine.layout.units[action.unit].name!r}"
        return f"page {self.engine.name(action.unit)!r}" if kind == "page" else f"the {self.program.kind} program"
