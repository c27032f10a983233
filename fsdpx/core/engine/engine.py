"""The engine of one rank: the loop that runs programs. Before an action, it waits for pending transfers that the action
needs; between actions, it advances transfers. It also measures time, and names the action in error messages.

A solver may call a model thousands of times. For programs that predict on one rank, `DirectPrediction` therefore runs
only the layers, without the overhead of a program."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from time import perf_counter
from typing import Any

import numpy as np

from fsdpx.core.array import blas
from fsdpx.core.array.parallel import flush_denormals
from fsdpx.core.comm.calls import TimedTransfer
from fsdpx.core.comm.communicator import COMPLETED, Handle
from fsdpx.core.engine import compute_verbs
from fsdpx.core.engine.clock import PROGRESS, EngineClock
from fsdpx.core.engine.observer import ActionCallback, Hooks, Observer, collect_hooks
from fsdpx.core.engine.operations import Executable, ExecutableAction, require_finite_loss
from fsdpx.core.engine.run import BufferViews, LayerContextCache, ProgramRun, get_action_target
from fsdpx.core.program import PROGRAM_KINDS, Action, Program, ProgramRequest, Slot
from fsdpx.core.state.step_inputs import Microbatch, StepInputs
from fsdpx.core.state.train_state import TrainState, restore_from_copies
from fsdpx.core.state.units import Unit, list_values_released_by_node
from fsdpx.nn.layer import LayerContext, Parameters

__all__ = ["DirectPrediction", "Engine"]


class Engine:
    """Runs programs on one rank, using and changing the state of that rank.

    Attributes
    ----------
    added_observers : observers added after construction
    hooks : for each event, the observer methods to call
    last_program, batch : the program that ran last, and its batch
    direct : functions that run the layers without a program (`DirectPrediction`), keyed by the (shape, dtype) of the
        batch
    """

    added_observers: tuple[Observer, ...]
    hooks: Hooks

    def __init__(self, state: TrainState, observers: Sequence[Observer] = ()) -> None:
        self.state, self.placement = state, state.placement
        self.clock = EngineClock()
        self.last_program: Program | None = None
        self.batch: list[Microbatch | None] = []
        self.direct: dict[tuple[Any, ...], Callable[[Any], tuple[Any, ...] | None] | None] = {}
        self._counters = self.placement.axes.counters
        self._views: BufferViews | None = None
        self._contexts = LayerContextCache(state)
        # pending transfers, each with the action that started it
        self._in_flight: list[tuple[Action, TimedTransfer]] = []
        # pending sends: no action waits for them, so each program run waits for them at its end
        self._sends: list[TimedTransfer] = []
        self._producers: dict[Slot, str] = {}
        self._own = (self.clock, *observers)
        self._set_observers(())

    @property
    def observers(self) -> tuple[Observer, ...]:
        """All observers: the clock, the observers passed to the constructor, and those added later."""
        return *self._own, *self.added_observers

    def add_observer(self, observer: Observer | Callable[[Action], None]) -> Observer:
        """Add an observer, or a function to call after each action. Return the observer, for use with
        `remove_observers`."""
        added = observer if isinstance(observer, Observer) else ActionCallback(observer)
        self._set_observers((*self.added_observers, added))
        return added

    def remove_observers(self, *observers: Observer) -> None:
        """Remove observers that `add_observer` added."""
        self._set_observers(tuple(one for one in self.added_observers if one not in observers))

    def _set_observers(self, added: tuple[Observer, ...]) -> None:
        self.added_observers = added
        self.hooks = collect_hooks(self.observers)

    def prepare_program(self, request: ProgramRequest) -> Executable:
        """Compile and verify a program, and plan its memory. Collective if ranks share memory."""
        return Executable(self.state, request)

    def run_program(self, executable: Executable, feed: StepInputs) -> dict[Slot, Any]:
        """Run all actions of a program and return a dict of its results, keyed by slot (name of a value). Collective
        if the program communicates."""
        # with a dynamic loss scale, overflow is expected: do not raise an error now, because overflow is detected in
        # the gradients
        overflows = self.state.scaler.dynamic
        statistics = self.state.back_up_running_statistics() if feed.training else []
        with (
            flush_denormals(),
            blas.limit_threads(),
            np.errstate(over="ignore", invalid="ignore") if overflows else nullcontext(),
        ):
            try:
                run = self._begin_run(executable, feed)
                for planned in executable.steps:
                    self._run_action(run, planned)
                if self._sends:
                    for transfer in self._sends:
                        transfer.wait()
                    self._sends.clear()
                if self._in_flight:
                    self._progress_transfers()
                results = {slot: self._pop_slot_and_wait_for_value(slot) for slot in executable.program.results}
                kind = PROGRAM_KINDS[executable.program.kind]
                # if the program has no update, check the loss before it is accumulated
                if kind.loss == "LOSS" and not kind.updates and not overflows:
                    require_finite_loss(run, results[Slot("mean")], run.sync_group)
            except BaseException:  # catch KeyboardInterrupt too, because an interactive session continues after Ctrl-C
                restore_from_copies(statistics)
                self.state.discard_after_error()
                raise
        if (scale := results.get(Slot("scale"))) is not None and scale.skip:
            restore_from_copies(statistics)
        return results

    def _begin_run(self, executable: Executable, feed: StepInputs) -> ProgramRun:
        state, program = self.state, executable.program
        if self._in_flight:
            self._wait_for_transfers_of_failed_program()
        self._sends.clear()
        self.last_program, self.batch, self._producers = program, feed.batch or self.batch, executable.producers
        for begin_program in self.hooks.on_program_begin:
            begin_program(program, state)
        executable.workspace.grow_slab_for_run()
        self.drop_stale_views()
        if self._views is None:
            self._views = BufferViews(self.placement.layout, state.arena.generation, state.frozen)
        if blas.get_product_threads() != self.placement.product_threads:
            blas.set_product_threads(self.placement.product_threads)
        # if the seed has changed, replace the cached layer contexts, which hold the random state of the old seed
        if self._contexts.seed != state.seed:
            self._contexts = LayerContextCache(state)
        work, views, contexts = executable.workspace, self._views, self._contexts
        units: Sequence[Unit] = self.placement.layout.units
        for timed in self.hooks.wrap_units:
            units = timed(units)
        functions = compute_verbs.UNIT_FUNCTIONS
        for wrap in self.hooks.wrap_unit_functions:
            functions = wrap(functions)
        fixed = self.placement, feed, work, views, contexts, units, functions
        return ProgramRun(*fixed, state.ties, state.steps, state.scaler, state.freezing.missed, self._track_transfer)

    def _wait_for_transfers_of_failed_program(self) -> None:
        """Wait for the transfers that a failed program left pending, except transfers whose results a later program
        still needs. All ranks wait for the same transfers."""
        known = {id(value) for value in self.state.store.values()}
        for _, transfer in self._in_flight:
            if id(transfer) not in known:
                transfer.handle.wait()
        self._in_flight = [(action, transfer) for action, transfer in self._in_flight if id(transfer) in known]

    def _run_action(self, run: ProgramRun, planned: ExecutableAction) -> None:
        operation, action, words, takes, reads, adds, gives, lane = planned
        store, hooks, counters = self.state.store, self.hooks, self._counters
        before, begin = counters.total, perf_counter()
        for begun in hooks.on_action_begin:
            begun(words, begin)
        try:
            taken = tuple(map(self._wait_for_value, map(store.pop, takes), takes)) if takes else ()
            read = tuple(map(self._read_slot, reads)) if reads else ()
            added = tuple(map(self._wait_for_value, map(store.get, adds), adds)) if adds else ()
            ready = perf_counter()
            values = operation(run, action, taken, read, added)
            for slot, value in zip(gives, values, strict=True):
                store[slot] = value
                if value.__class__ is TimedTransfer and value.handle is not COMPLETED:
                    self._in_flight.append((action, value))
            for look in hooks.on_action_done:
                look(action)
        except Exception as error:
            self.annotate_error_and_notify_observers(error, words)
            raise
        end = perf_counter()
        moved = counters.total - before
        for acted in hooks.on_action_end:
            acted(planned, begin, ready, end, moved, values)
        if lane == "compute" and self._in_flight:
            self._progress_transfers()
            self.clock.on_outside_program(PROGRESS, end, perf_counter(), 0)

    def annotate_error_and_notify_observers(self, error: Exception, words: str) -> None:
        """Add a note to `error` with the rank and the action (`words`) that raised it. Then report the error to
        observers."""
        for failed in self.hooks.on_action_failed:
            failed(words, error)
        error.add_note(f"on rank {self.placement.axes.world.rank}, in action {words}")

    def _track_transfer(self, action: Action, transfer: TimedTransfer) -> None:
        """Make sure that a transfer keeps advancing until it is complete, although no action waits for it."""
        if transfer.handle is not COMPLETED:
            self._in_flight.append((action, transfer))
            self._sends.append(transfer)

    def _progress_transfers(self) -> None:
        """Let all pending transfers make progress, and report completed ones to observers."""
        pending, completed = [], set[int]()
        for action, transfer in self._in_flight:
            if transfer.test():
                completed.add(id(transfer))
                for on_complete in self.hooks.on_transfer_complete:
                    on_complete(action, transfer)
            else:
                pending.append((action, transfer))
        self._in_flight = pending
        if completed and self._sends:  # free each array once it has been sent, not only at the end of the program
            self._sends = [transfer for transfer in self._sends if id(transfer) not in completed]

    def _pop_slot_and_wait_for_value(self, slot: Slot) -> Any:
        try:
            return self._wait_for_value(self.state.store.pop(slot), slot)
        except Exception as error:
            self.annotate_error_and_notify_observers(error, self._producers[slot])
            raise

    def _read_slot(self, slot: Slot) -> Any:
        value = self.state.store[slot]
        if value.__class__ is TimedTransfer:
            value = self.state.store[slot] = self._wait_for_value(value, slot)
        return value

    def _wait_for_value(self, value: Any, slot: Slot) -> Any:
        if value.__class__ is not TimedTransfer:
            return value
        if value.handle is COMPLETED:
            return value.finish()
        for waits in self.hooks.on_wait:
            waits(self._producers.get(slot, "an earlier program"))
        return value.wait()

    @property
    def has_observers_or_transfers(self) -> bool:
        """True if there are observers besides the clock, or if transfers are pending."""
        return bool(self.added_observers or self._in_flight) or len(self._own) > 1

    def get_inference_contexts_and_parameters(
        self, unit: int, held: Sequence[Any], inputs: Sequence[Any]
    ) -> tuple[list[LayerContext], list[Parameters]]:
        """Return the contexts and the parameters with which the layers of a unit (group of layers) run inference. An
        inference program must have run before. `held` holds the unit's gathered pages (flat parameter buffers) and
        running statistics."""
        assert self._views is not None
        return self._contexts.get_contexts(False, False, inputs)[1][unit], self._views.view_unit_parameters(unit, held)

    def record_outside_program(self, what: str, begin: float, nbytes: int = 0) -> None:
        """Report work done outside programs to observers. `what` names the work. The work began at time `begin` and
        ends now; this rank wrote or read `nbytes` bytes in that time."""
        end = perf_counter()
        for outside in self.hooks.on_outside_program:
            outside(what, begin, end, nbytes)

    def reset_counters(self) -> None:
        """Set the counters of traffic and time to zero."""
        self.placement.axes.counters.clear()
        for reset in self.hooks.reset_counts:
            reset()
        self.state.storage.reset_counters()

    def drop_stale_views(self) -> None:
        """Drop cached array views if their memory was freed, or if the set of frozen parameters has changed."""
        views, state = self._views, self.state
        if views is not None and (views.generation, views.frozen) != (state.arena.generation, state.frozen):
            self._views = None

    def abandon_transfers(self) -> list[Handle]:
        """Forget pending transfers and return their handles. The caller must not free or reuse the memory of these
        transfers until they are complete."""
        handles = [transfer.handle for transfer in (*(t for _, t in self._in_flight), *self._sends)]
        self._in_flight.clear()
        self._sends.clear()
        return handles

    def close(self) -> None:
        """Free buffers, shared memory, and the communicators that were made for this engine. Collective."""
        self.abandon_transfers()
        self._views = None
        self.direct.clear()
        self.state.close()


MAX_DIRECT_BYTES = 1 << 22
"""Size in bytes of the largest batch for which `DirectPrediction` is used."""


class DirectPrediction:
    """Callable that predicts without running the program, for inputs of one shape and dtype. It returns the outputs in
    order. If anything other than the values of the inputs has changed, it returns None, and the caller must run the
    program.

    The object can be made only after `engine` has run the program `executable` on the array `x`."""

    @classmethod
    def from_last_program_run(cls, engine: Engine, executable: Executable, x: Any) -> DirectPrediction | None:
        """Return a `DirectPrediction` that repeats the last run. Return None unless the program did only inference, on
        a single rank."""
        place, ops = engine.placement, {planned.action.op for planned in executable.steps}
        plain = (
            type(x) is np.ndarray and x.nbytes <= MAX_DIRECT_BYTES and len(executable.program.stage.used_inputs) == 1
        )
        if not plain or ops != {"LOAD", "E"} or place.axes.world.size > 1 or place.options.check_finite:
            return None
        return None if engine.state.scaler.dynamic else cls(engine, executable, x)

    def __init__(self, engine: Engine, executable: Executable, x: Any) -> None:
        place, state = engine.placement, engine.state
        self.engine, self.program = engine, executable.program
        self.shape, self.dtype = x.shape, x.dtype
        (self.input,), self.outputs = self.program.stage.used_inputs, self.program.stage.outputs
        self.valid = state.seed, state.arena.generation
        self.store: list[tuple[Any, Any]] = []  # pairs (slot that the layers read, value that the slot must still hold)
        self.units: list[tuple[Any, ...]] = []
        for planned in executable.steps:
            if planned.action.op == "E":
                u = get_action_target(planned.action)
                known = place.stage.units[u]
                pages = len(known.pages)
                slots = (*planned.reads[:pages], *planned.reads[pages + len(known.reads) :])
                held = [state.store[slot] for slot in slots]
                self.store += zip(slots, held, strict=True)
                contexts, params = engine.get_inference_contexts_and_parameters(u, held, (x,))
                self.units.append((place.layout.units[u], contexts, params, planned.words))
        released = list_values_released_by_node(
            [node for unit, *_ in self.units for node in unit.nodes], {*self.outputs, self.input}
        )
        self.released = [[released.pop(0) for _ in unit.nodes] for unit, *_ in self.units]

    def __call__(self, x: Any) -> tuple[Any, ...] | None:
        engine = self.engine
        state = engine.state
        if type(x) is not np.ndarray or x.shape != self.shape or x.dtype is not self.dtype:
            return None
        if self.valid != (state.seed, state.arena.generation) or engine.has_observers_or_transfers:
            return None
        for slot, held in self.store:
            if state.store.get(slot) is not held:
                return None
        if blas.get_product_threads() != engine.placement.product_threads:
            blas.set_product_threads(engine.placement.product_threads)
        state.moment.step, state.moment.row = state.steps, 0
        engine.last_program = self.program
        begin, values = perf_counter(), {self.input: x}
        with flush_denormals(), blas.limit_threads():
            for (unit, envs, params, words), released in zip(self.units, self.released, strict=True):
                try:
                    compute_verbs.run_unit_forward(unit, envs, params, values, False, (), released)
                except Exception as error:
                    engine.annotate_error_and_notify_observers(error, words)
                    raise
        engine.clock.on_outside_program("E", begin, perf_counter(), 0)
        return tuple([values[v] for v in self.outputs])
