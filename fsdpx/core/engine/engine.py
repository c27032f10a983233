"""The engine of one rank: the one loop that runs programs. It fills and empties slots as the table says, waits where a
value is first needed, moves transfers on between actions, keeps time, and names the action when something fails.

Calls from inside a solver come thousands of times: of a program that looks at few samples on one rank the layers are
left, one after the other, without slots and records between them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from time import perf_counter
from typing import Any

import numpy as np

from fsdpx.core.array import blas
from fsdpx.core.array.parallel import flushed
from fsdpx.core.comm.calls import Transfer
from fsdpx.core.comm.communicator import DONE, Handle
from fsdpx.core.engine import compute_verbs
from fsdpx.core.engine.clock import PROGRESS, Clock
from fsdpx.core.engine.observer import Hooks, Looking, Observer, hooks_of
from fsdpx.core.engine.operations import Executable, ExecutableAction, demand_finite_loss
from fsdpx.core.engine.run import ProgramRun, Views, Worlds, number_of
from fsdpx.core.program import KINDS, Action, Program, Request, Slot
from fsdpx.core.state.step_inputs import Feed, Microbatch
from fsdpx.core.state.train_state import TrainState, restore_copies
from fsdpx.core.state.units import Unit
from fsdpx.nn.layer import Env, Parameters

__all__ = ["Direct", "Engine"]


class Engine:
    """Runs programs on the state of one rank.

    added: observers that came later than the engine. hooks: what is called of all observers. ran, batch: the last
    program, and the last batch that it ran on. direct: how the layers run alone, by shape and dtype of small batches
    that were predicted (`Direct`)."""

    added: tuple[Observer, ...]
    hooks: Hooks

    def __init__(self, state: TrainState, observers: Sequence[Observer] = ()) -> None:
        self.state, self.placement = state, state.placement
        self.clock = Clock()
        self.ran: Program | None = None
        self.batch: list[Microbatch | None] = []
        self.direct: dict[tuple[Any, ...], Callable[[Any], tuple[Any, ...] | None] | None] = {}
        self._counters = self.placement.axes.counters
        self._views: Views | None = None
        self._worlds = Worlds(state)
        self._flying: list[tuple[Action, Transfer]] = []  # to move on, and what began it
        self._sends: list[Transfer] = []  # of this run, which no slot holds
        self._givers: dict[Slot, str] = {}
        self._own = (self.clock, *observers)
        self._tell(())

    @property
    def observers(self) -> tuple[Observer, ...]:
        """What is told what happens: the clock, what came with the engine, and what came later."""
        return *self._own, *self.added

    def observe(self, observer: Observer | Callable[[Action], None]) -> Observer:
        """From now on tell an observer what happens, or call a function after each action; what `ignore` takes."""
        added = observer if isinstance(observer, Observer) else Looking(observer)
        self._tell((*self.added, added))
        return added

    def ignore(self, *observers: Observer) -> None:
        """Tell these no more."""
        self._tell(tuple(one for one in self.added if one not in observers))

    def _tell(self, added: tuple[Observer, ...]) -> None:
        self.added = added
        self.hooks = hooks_of(self.observers)

    def prepare(self, request: Request) -> Executable:
        """Compile, prove and plan a program. Collective where ranks share memory."""
        return Executable(self.state, request)

    def run(self, executable: Executable, feed: Feed) -> dict[Slot, Any]:
        """Run all actions; the values of the program's result slots are taken out of the store and returned."""
        overflows = self.state.scaler.dynamic  # expected then, and seen in the gradients
        statistics = self.state.copy_statistics() if feed.training else []
        with flushed(), blas.limited(), np.errstate(over="ignore", invalid="ignore") if overflows else nullcontext():
            try:
                run = self._begin(executable, feed)
                for planned in executable.steps:
                    self._act(run, planned)
                if self._sends:
                    for transfer in self._sends:
                        transfer.wait()
                    self._sends.clear()
                if self._flying:
                    self._poke()
                results = {slot: self._result(slot) for slot in executable.program.results}
                kind = KINDS[executable.program.kind]
                if kind.loss == "LOSS" and not kind.updates and not overflows:  # nothing is added up with it
                    demand_finite_loss(run, results[Slot("mean")], run.together)
            except BaseException:  # Ctrl-C in a session that goes on, too
                restore_copies(statistics)
                self.state.forget()
                raise
        if (scale := results.get(Slot("scale"))) is not None and scale.skip:
            restore_copies(statistics)
        return results

    def _begin(self, executable: Executable, feed: Feed) -> ProgramRun:
        state, program = self.state, executable.program
        if self._flying:
            self._let_fly()
        self._sends.clear()
        self.ran, self.batch, self._givers = program, feed.batch or self.batch, executable.givers
        for begin_program in self.hooks.begin_program:
            begin_program(program, state)
        executable.workspace.enter()
        self.drop_stale_views()
        if self._views is None:
            self._views = Views(self.placement.layout, state.arena.generation, state.frozen)
        if blas.threads() != self.placement.product_threads:
            blas.threads(self.placement.product_threads)
        if self._worlds.seed != state.seed:  # the worlds of layers hold random numbers of the seed before
            self._worlds = Worlds(state)
        work, views, worlds = executable.workspace, self._views, self._worlds
        units: Sequence[Unit] = self.placement.layout.units
        for timed in self.hooks.timed:
            units = timed(units)
        fixed = self.placement, feed, work, views, worlds, units
        return ProgramRun(*fixed, state.ties, state.steps, state.scaler, state.freezing.missed, self._issue)

    def _let_fly(self) -> None:
        """Transfers under way that lie in slots belong to a later program; the others are of a program that broke off,
        alike on all ranks, and are waited for."""
        known = {id(value) for value in self.state.store.values()}
        for _, transfer in self._flying:
            if id(transfer) not in known:
                transfer.handle.wait()
        self._flying = [(action, transfer) for action, transfer in self._flying if id(transfer) in known]

    def _act(self, run: ProgramRun, planned: ExecutableAction) -> None:
        operation, action, words, takes, reads, adds, gives, lane = planned
        store, hooks, counters = self.state.store, self.hooks, self._counters
        before, begin = counters.total, perf_counter()
        for begun in hooks.begin:
            begun(words, begin)
        try:
            taken = tuple(map(self._ready, map(store.pop, takes), takes)) if takes else ()
            read = tuple(map(self._read, reads)) if reads else ()
            added = tuple(map(self._ready, map(store.get, adds), adds)) if adds else ()
            ready = perf_counter()
            values = operation(run, action, taken, read, added)
            for slot, value in zip(gives, values, strict=True):
                store[slot] = value
                if value.__class__ is Transfer and value.handle is not DONE:
                    self._flying.append((action, value))
            for look in hooks.look:
                look(action)
        except Exception as error:
            self.failed(error, words)
            raise
        end = perf_counter()
        moved = counters.total - before
        for acted in hooks.acted:
            acted(planned, begin, ready, end, moved, values)
        if lane == "compute" and self._flying:
            self._poke()
            self.clock.outside(PROGRESS, end, perf_counter(), 0)

    def failed(self, error: Exception, words: str) -> None:
        """An action has raised this error: it becomes a part of it where that was."""
        for failed in self.hooks.failed:
            failed(words, error)
        error.add_note(f"on rank {self.placement.axes.world.rank}, in action {words}")

    def _issue(self, action: Action, transfer: Transfer) -> None:
        """Look after a transfer that no slot holds, until it is complete."""
        if transfer.handle is not DONE:
            self._flying.append((action, transfer))
            self._sends.append(transfer)

    def _poke(self) -> None:
        """Move all transfers on; those that are complete are noted."""
        flying, landed = [], set[int]()
        for action, transfer in self._flying:
            if transfer.test():
                landed.add(id(transfer))
                for tell_landed in self.hooks.landed:
                    tell_landed(action, transfer)
            else:
                flying.append((action, transfer))
        self._flying = flying
        if landed and self._sends:  # what was sent is free before the program ends
            self._sends = [transfer for transfer in self._sends if id(transfer) not in landed]

    def _result(self, slot: Slot) -> Any:
        try:
            return self._ready(self.state.store.pop(slot), slot)
        except Exception as error:
            self.failed(error, self._givers[slot])
            raise

    def _read(self, slot: Slot) -> Any:
        value = self.state.store[slot]
        if value.__class__ is Transfer:
            value = self.state.store[slot] = self._ready(value, slot)
        return value

    def _ready(self, value: Any, slot: Slot) -> Any:
        if value.__class__ is not Transfer:
            return value
        if value.handle is not DONE:
            for waits in self.hooks.waits:
                waits(self._givers.get(slot, "an earlier program"))
        return value.wait()

    # -- without a program ---------------------------------------------------------------------------------------------

    @property
    def observed(self) -> bool:
        """Whether anything looks at actions, or is under way between them."""
        return bool(self.added or self._flying) or len(self._own) > 1

    def layers(self, unit: int, held: Sequence[Any], inputs: Sequence[Any]) -> tuple[list[Env], list[Parameters]]:
        """What the layers of a unit see when samples are only looked at, after a program that did so. held: the values
        of its pages and statistics."""
        assert self._views is not None
        return self._worlds.of(False, False, inputs)[1][unit], self._views.params(unit, held)

    # -- beside programs -----------------------------------------------------------------------------------------------

    def outside(self, what: str, begin: float, nbytes: int = 0) -> None:
        """Something beside programs began at that time, and has ended now. nbytes: that this rank wrote or read."""
        end = perf_counter()
        for outside in self.hooks.outside:
            outside(what, begin, end, nbytes)

    def reset(self) -> None:
        """Restart counting traffic and time."""
        self.placement.axes.counters.clear()
        for reset in self.hooks.reset:
            reset()
        self.state.storage.reset()

    def drop_stale_views(self) -> None:
        """Let go of memory that the state has given back, and of views of gradients that are not made any more."""
        views, state = self._views, self.state
        if views is not None and (views.generation, views.frozen) != (state.arena.generation, state.frozen):
            self._views = None

    def give_up(self) -> list[Handle]:
        """Forget what is under way, and give its handles: their memory must stay until they have ended."""
        handles = [transfer.handle for transfer in (*(t for _, t in self._flying), *self._sends)]
        self._flying.clear()
        self._sends.clear()
        return handles

    def close(self) -> None:
        """Let go of every buffer, of shared memory and of communicators made for this engine. Collective."""
        self.give_up()
        self._views = None
        self.direct.clear()
        self.state.close()


SMALL = 1 << 16
"""Bytes of a batch up to which it is worth it: here all values between layers stay until the end."""


class Direct:
    """engine: has just run `executable` on the array `x`, which it took as it is. A call with an array of that shape
    and dtype gives the outputs in order, or None where something has changed: then the program must run."""

    @classmethod
    def after(cls, engine: Engine, executable: Executable, x: Any) -> Direct | None:
        """None where the program does more, or what it does is recorded."""
        place, ops = engine.placement, {planned.action.op for planned in executable.steps}
        plain = type(x) is np.ndarray and x.nbytes <= SMALL and len(executable.program.stage.used) == 1
        if not plain or ops != {"LOAD", "E"} or place.axes.world.size > 1 or place.options.check_finite:
            return None
        return None if engine.state.scaler.dynamic else cls(engine, executable, x)

    def __init__(self, engine: Engine, executable: Executable, x: Any) -> None:
        place, state = engine.placement, engine.state
        self.engine, self.program = engine, executable.program
        self.shape, self.dtype = x.shape, x.dtype
        (self.input,), self.outputs = self.program.stage.used, self.program.stage.outputs
        self.valid = state.seed, state.arena.generation
        self.store: list[tuple[Any, Any]] = []  # slots that are read, and what must lie there
        self.units: list[tuple[Any, ...]] = []
        for planned in executable.steps:
            if planned.action.op == "E":
                u = number_of(planned.action)
                known = place.stage.units[u]
                pages = len(known.pages)
                slots = (*planned.reads[:pages], *planned.reads[pages + len(known.reads) :])
                held = [state.store[slot] for slot in slots]
                self.store += zip(slots, held, strict=True)
                self.units.append((place.layout.units[u], *engine.layers(u, held, (x,)), planned.words))

    def __call__(self, x: Any) -> tuple[Any, ...] | None:
        engine = self.engine
        state = engine.state
        if type(x) is not np.ndarray or x.shape != self.shape or x.dtype is not self.dtype:
            return None
        if self.valid != (state.seed, state.arena.generation) or engine.observed:
            return None
        for slot, held in self.store:
            if state.store.get(slot) is not held:
                return None
        if blas.threads() != engine.placement.product_threads:
            blas.threads(engine.placement.product_threads)
        state.moment.step, state.moment.row = state.steps, 0
        engine.ran = self.program
        begin, values = perf_counter(), {self.input: x}
        with flushed(), blas.limited():
            for unit, envs, params, words in self.units:
                try:
                    compute_verbs.unit_forward(unit, envs, params, values, False)
                except Exception as error:
                    engine.failed(error, words)
                    raise
        engine.clock.outside("E", begin, perf_counter(), 0)
        return tuple([values[v] for v in self.outputs])
