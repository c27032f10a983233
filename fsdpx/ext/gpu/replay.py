"""Replay of training steps on a GPU. The forward and backward passes of units are recorded as CUDA graphs. Later steps
launch these graphs instead of launching each kernel from Python.

The first run of a program with given shapes computes as usual, which compiles kernels and creates constants. The second
run records and launches one graph for each unit (group of layers) and microbatch. Later runs only launch the graphs.
Work that cannot be recorded runs as usual, and a message gives the reason."""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from functools import partial
from typing import Any

from fsdpx.core.base.messages import log_line
from fsdpx.core.engine.engine import Engine
from fsdpx.core.engine.observer import Observer
from fsdpx.core.engine.run import UnitFunctions
from fsdpx.core.program import Action, Program
from fsdpx.core.state.train_state import TrainState
from fsdpx.core.state.units import Unit
from fsdpx.errors import ConfigError
from fsdpx.ext.gpu.capture import Capture, GraphMemory, copy_into_fixed_memory, make_unowned_view
from fsdpx.ext.gpu.cupy_devices import import_cupy, is_on_gpu
from fsdpx.ext.gpu.recording import Kept, RecordedCall, Recording, UnitCall, UnitPart

__all__ = ["MAX_RECORDINGS", "CudaGraphObserver"]

KINDS = frozenset({"step", "accumulate", "local"})
"""Kinds of programs that are replayed. Other programs return arrays to the caller. They are not replayed, because later
launches of a graph would overwrite these arrays."""
OPS = frozenset(
    "LOAD SEND RECV F C R B I W LOSS MEAN GATHER FREE REDUCE SETTLE JOIN TIE SCALE NORM COMMIT UPDATE".split()
)
"""Names of the actions that a replayed program may contain. Other actions may keep or move activations, so a program
that contains them is not replayed."""
COMPUTE_OPS = frozenset("FCRBIW")
MAX_RECORDINGS = 4
"""Maximum number of recordings, one per program and batch shape. The number is limited because each recording holds
memory."""
Arrays = dict[int, Any]


class CudaGraphObserver(Observer):
    """Engine observer that records the forward and backward passes of units as CUDA graphs, and launches them.

    Attributes
    ----------
    recordings : the recordings of this trainer
    launches : number of graphs launched so far
    reasons : the reasons why some actions run without a graph, in order of discovery
    """

    def __init__(self, engine: Engine) -> None:
        if engine.placement.device.name != "cuda":
            raise ConfigError(f"replay=True: only device='cuda' records graphs, not {engine.placement.device.name!r}")
        self.recordings: dict[tuple[Hashable, ...], Recording] = {}
        self.launches = 0
        self.reasons: dict[str, None] = {}
        self._engine = engine
        self._state: TrainState = engine.state
        self._now: Recording | None = None
        self._words = ""
        self._sent: frozenset[int] = frozenset()
        engine.add_observer(self)

    def wrap_unit_functions(self, functions: UnitFunctions) -> UnitFunctions:
        """Choose the recording of the program that is about to run, or begin a new recording. Return functions that use
        this recording."""
        self._count_complete_run_or_record_again()
        program = self._engine.last_program
        assert program is not None
        self._now = self._get_or_begin_recording(program) if program.kind in KINDS else None
        if self._now is None:
            return functions
        place = self._state.placement
        self._sent = frozenset(edge.value for edge in place.stage.edges if edge.sender == place.axes.pipe.rank)
        # free the memory of the first run's activations, which the pool still caches; graphs use other memory
        if self._now.runs == 1:
            import_cupy().get_default_memory_pool().free_all_blocks()
        return UnitFunctions(
            partial(self._forward, functions.forward),
            partial(self._backward, functions.backward),
            partial(self._backward_input, functions.backward_input),
            partial(self._backward_params, functions.backward_params),
        )

    def _get_or_begin_recording(self, program: Program) -> Recording | None:
        if why := self._explain_unrecordable_program(program):
            self._log_why_not_recorded(why)
            return None
        key = self._make_program_key(program)
        if key not in self.recordings:
            self.recordings = {old: one for old, one in self.recordings.items() if old[-1] == key[-1]}
            if len(self.recordings) >= MAX_RECORDINGS:
                self._log_why_not_recorded(f"there are more than {MAX_RECORDINGS} shapes of batches: pad them to a few")
                return None
            self.recordings[key] = Recording(program, GraphMemory())
        return self.recordings[key]

    def _explain_unrecordable_program(self, program: Program) -> str:
        place = self._state.placement
        if others := sorted({action.op for action in program.actions} - OPS):
            return f"its program has {', '.join(others)}"
        if place.options.check_finite:
            return "check_finite reads the output of every layer"
        if place.axes.tensor.size > 1 or not place.sample_layout.has_complete_samples:
            return "its layers communicate over the tensor axis or with the owners of other parts of a sample"
        return ""

    def _make_program_key(self, program: Program) -> tuple[Hashable, ...]:
        """Return a key for the recording of a program. Whenever the key is the same, the program issues the same work.
        If the last item of the key has changed, all recordings with an older value are useless, because this item never
        returns to an earlier value."""
        state = self._state
        batch = tuple(
            None if one is None else tuple((x.shape, x.dtype, x.strides) for x in (*one.inputs, *one.targets))
            for one in self._engine.batch
        )
        return batch, id(program), (state.arena.generation, state.frozen, state.seed)

    def _count_complete_run_or_record_again(self) -> None:
        """Count the previous run if it was complete. If the previous run was incomplete, or if units must be split
        differently, discard the graphs that it recorded, so that the next run records again."""
        now = self._now
        if now is None:
            return
        complete = now.seen == sum(action.op in COMPUTE_OPS for action in now.program.actions)
        now.seen = 0
        now.kept.clear()
        if complete:
            now.runs += 1
        if not complete and now.runs == 1:
            now.forget_graphs(runs=0)
        elif complete and now.runs == 2:
            if now.split_unrecordable_units(self._state.placement.layout.units):
                now.forget_graphs(runs=1)
            now.calls = {k: one for k, one in now.calls.items() if (one.unit.index, k[1]) not in now.refusals}

    def on_action_begin(self, words: str, now: float) -> None:
        self._words = words

    def on_action_done(self, action: Action) -> None:
        if self._now is not None and action.op in COMPUTE_OPS:
            self._now.seen += 1

    def _get_unit_parts(self, unit: Unit) -> list[UnitPart]:
        """Return the parts that a unit is split into for recording. If the unit is not split, return the unit itself as
        one part."""
        now = self._now
        assert now is not None
        if unit.index in now.parts and self._state.placement.layout.units[unit.index] is unit:
            return now.parts[unit.index]
        return [UnitPart(0, unit, slice(0, len(unit.nodes)))]

    def _forward(
        self, run: Any, unit: Unit, envs: Any, params: Any, values: Arrays, keep: bool, constant: Any = (),
        released: Any = (),
    ) -> list[Any]:  # fmt: skip
        parts, found = self._get_unit_parts(unit), []
        for part in parts:
            at, inputs = part.nodes, part.input_activation_numbers if len(parts) > 1 else set()
            inner = {v: values[v] for v in inputs} if len(parts) > 1 else values
            function = partial(_run_forward, run, part.unit, envs[at], params[at], inner, keep, constant, released[at])
            found.append(self._run_or_record_or_replay_call(UnitCall(function, part.unit, inner, params[at]), part))
            if inner is not values:
                for v in inputs - inner.keys():
                    del values[v]
                values.update(inner)
        return found[0] if len(parts) == 1 else found

    def _backward(
        self, run: Any, unit: Unit, envs: Any, params: Any, grads: Any, saved: Any, dvalues: Arrays, constant: Any
    ) -> None:
        for part, held, inner in self._iterate_unit_parts_backward(unit, saved, dvalues):
            at = part.nodes
            function = partial(_run_backward, run, part.unit, envs[at], params[at], grads[at], inner, constant)
            self._run_or_record_or_replay_call(UnitCall(function, part.unit, inner, params[at], grads[at], held), part)

    def _backward_input(
        self, run: Any, unit: Unit, envs: Any, params: Any, saved: Any, dvalues: Arrays, constant: Any = ()
    ) -> list[Any]:
        found = []
        for part, held, inner in self._iterate_unit_parts_backward(unit, saved, dvalues):
            at = part.nodes
            function = partial(_run_backward, run, part.unit, envs[at], params[at], None, inner, constant)
            found.append(
                self._run_or_record_or_replay_call(UnitCall(function, part.unit, inner, params[at], (), held), part)
            )
        return found[0] if len(found) == 1 else found[::-1]

    def _backward_params(self, run: Any, unit: Unit, envs: Any, grads: Any, kept: Any) -> None:
        for part, held, inner in self._iterate_unit_parts_backward(unit, kept, {}):
            at = part.nodes
            function = partial(_run_backward_params, run, part.unit, envs[at], grads[at])
            self._run_or_record_or_replay_call(UnitCall(function, part.unit, inner, (), grads[at], held), part)

    def _iterate_unit_parts_backward(
        self, unit: Unit, saved: Any, dvalues: Arrays
    ) -> Iterator[tuple[UnitPart, Any, Arrays]]:
        """Yield each part of a unit, last part first, with its saved values and the gradients that it needs. After each
        part, put the gradients that the part computed into `dvalues`."""
        parts = self._get_unit_parts(unit)
        if len(parts) == 1:
            yield parts[0], saved, dvalues
            return
        for part in reversed(parts):
            inner = {v: dvalues.pop(v) for v in part.activations & dvalues.keys()}
            held, saved[part.number] = saved[part.number], None
            yield part, held, inner
            dvalues.update(inner)

    def _run_or_record_or_replay_call(self, call: UnitCall, part: UnitPart) -> Any:
        now = self._now
        assert now is not None
        if now.runs == 0:
            return self._run_call_and_note_communication(now, call, part)
        recorded = now.calls.get((self._words, part.number))
        if recorded is not None:
            why = recorded.find_mismatch(call)
            if not why:
                return self._launch_graph_of_call(recorded, call)
            if isinstance(call.saved, Kept):
                raise RuntimeError(f"{why}, but its forward pass was replayed: use replay=False")
            self._log_why_not_recorded(f"unit {call.unit.name!r}: {why}")
        elif (
            now.runs == 1
            and (call.unit.index, part.number) not in now.refusals
            and self._can_record_call_of_unit_part(now, call, part)
        ):
            return self._record_call(now, call, part)
        return call.function(call.saved)

    def _run_call_and_note_communication(self, now: Recording, call: UnitCall, part: UnitPart) -> Any:
        """Run a call as usual, and find out whether its layers communicate."""
        counters = self._engine.placement.axes.counters
        before = counters.total
        result = call.function(call.saved)
        if counters.total != before:
            self._refuse_unit_part(now, call.unit, part.number, "its layers communicate")
        return result

    def _refuse_unit_part(self, now: Recording, unit: Unit, number: int, why: str) -> None:
        """From now on, run the part with index `number` of a unit as usual, without a graph. `why` is the reason."""
        now.refusals.add((unit.index, number))
        self._log_why_not_recorded(f"unit {unit.name!r}: {why}")

    def _log_why_not_recorded(self, why: str) -> None:
        """Log once, on the first rank of each pipeline stage, why something is not recorded as a CUDA graph."""
        axes = self._state.placement.axes
        if why not in self.reasons and axes.data.rank == axes.tensor.rank == 0:
            log_line(f"fsdpx: replay: not recorded as a CUDA graph, {why}")
        self.reasons[why] = None

    def _can_record_call_of_unit_part(self, now: Recording, call: UnitCall, part: UnitPart) -> bool:
        index = call.unit.index
        if index not in now.parts and self._state.placement.layout.units[index] is not call.unit:
            why = "an observer has replaced its layers"
        elif not all(map(is_on_gpu, call.values.values())):
            why = "one of its inputs is not an array"
        elif call.saved is not None and id(call.saved) not in now.kept:
            why = "its forward pass was not recorded"
        else:
            return True
        self._refuse_unit_part(now, call.unit, part.number, why)
        return False

    def _record_call(self, now: Recording, call: UnitCall, part: UnitPart) -> Any:
        """Record a call as a graph, and launch the graph. If recording fails, run the call as usual."""
        blank, saved, values = call.copy_flags(), call.saved, dict(call.values)
        source = None if saved is None else now.kept.pop(id(saved))[1]
        for number, array in values.items():
            if not now.memory.has_address(array.data.ptr):
                call.values[number] = copy_into_fixed_memory(now.memory, array)
        inputs = {number: make_unowned_view(array) for number, array in call.values.items()}
        capture = Capture(now.memory)
        try:
            with capture.recording(self._state.moment):
                # pass a copy because the function clears the list that it gets
                result = call.function(None if saved is None else list(saved))
        except Exception as error:
            if call.unit.index in now.parts or len(call.unit.nodes) == 1:
                self._refuse_unit_part(now, call.unit, part.number, _describe_error(error))
            else:  # report the reason later, once it is known which layer cannot be recorded
                now.splitting.add(call.unit.index)
                now.refusals.add((call.unit.index, 0))
            call.restore_flags(blank)
            call.values.clear()
            call.values.update(values)
            return call.function(call.saved)
        if saved is not None:
            saved.clear()
        capture.launch_graph()
        self.launches += 1
        now.calls[self._words, part.number] = recorded = RecordedCall(
            capture, call.unit, call.params, call.grads, [array.data.ptr for array in call.list_arrays()], inputs,
            {number: make_unowned_view(array) for number, array in call.values.items()}, blank, call.copy_flags(),
            source, isinstance(result, list),
        )  # fmt: skip
        if recorded.keeps:
            now.kept[id(result)] = result, recorded
        self._copy_values_to_send(call.values)
        return result

    def _launch_graph_of_call(self, recorded: RecordedCall, call: UnitCall) -> Any:
        for number, fixed in recorded.inputs.items():
            given = call.values[number]
            if given.data.ptr != fixed.data.ptr:
                fixed[...] = given
        recorded.capture.launch_graph()
        self.launches += 1
        call.restore_flags(recorded.written)
        call.values.clear()
        call.values.update(recorded.outputs)
        self._copy_values_to_send(call.values)
        return Kept(recorded) if recorded.keeps else None

    def _copy_values_to_send(self, values: Arrays) -> None:
        """Replace the arrays that this rank may send to another pipeline stage with copies, because later graphs may
        overwrite the arrays before they have been sent."""
        for number in self._sent & values.keys():
            values[number] = values[number].copy()


def _run_forward(run: Any, unit: Unit, envs: Any, params: Any, values: Arrays, *rest: Any) -> Any:
    """Run the forward pass of a part (consecutive nodes of a unit). Ignore the last argument, which is None. For other
    passes, this argument holds the values that an earlier call saved, but a forward pass needs no such values."""
    return run(unit, envs, params, values, *rest[:-1])


def _run_backward(
    run: Any, unit: Unit, envs: Any, params: Any, grads: Any, dvalues: Arrays, constant: Any, saved: Any
) -> Any:
    given = (params,) if grads is None else (params, grads)
    return run(unit, envs, *given, saved, dvalues, constant)


def _run_backward_params(run: Any, unit: Unit, envs: Any, grads: Any, kept: Any) -> Any:
    return run(unit, envs, grads, kept)


def _describe_error(error: BaseException) -> str:
    """Return the first line of an error. If the capture failed to end, describe the error that caused this failure."""
    while error.__context__ is not None:
        error = error.__context__
    return f"{type(error).__name__}: {next(iter(str(error).strip().splitlines()), '')}"
