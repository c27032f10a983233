"""Replay of training steps on a GPU: the forward and backward passes of units are recorded as CUDA graphs, and launched
in later steps, instead of starting each kernel from Python.

The first run of a program with given shapes computes as usual, so that kernels are compiled and constants are made. The
second run records one graph for each unit (group of layers) and microbatch, and launches it. Later runs only launch the
graphs. What cannot be recorded computes as usual, and a message says why."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
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
from fsdpx.nn.gradient_accumulation import Gradients

__all__ = ["MAX_RECORDINGS", "ReplayObserver"]

KINDS = frozenset({"step", "accumulate", "local"})
"""Kinds of programs that are replayed. The results of other programs are arrays, which belong to the caller."""
OPS = frozenset(
    "LOAD SEND RECV F C R B I W LOSS MEAN GATHER FREE REDUCE SETTLE JOIN TIE SCALE NORM COMMIT UPDATE".split()
)
"""Verbs of the programs that are replayed. Other verbs may keep or move activations between actions."""
COMPUTE_OPS = frozenset("FCRBIW")
MAX_RECORDINGS = 4
"""Maximum number of programs and batch shapes that are recorded, because each recording holds memory."""
Arrays = dict[int, Any]


class Kept(list[Any]):
    """What a replayed forward pass returns in place of the values saved for backward, which are in the memory of its
    graph.

    Attributes
    ----------
    source : the call that computed the values
    """

    def __init__(self, source: RecordedCall) -> None:
        super().__init__()
        self.source = source


@dataclass
class UnitCall:
    """One call of a function of `UnitFunctions`.

    Attributes
    ----------
    function : function that computes the call, given `saved`
    unit : the unit whose layers run
    params, grads : parameters and gradients of each of its nodes
    values : activation number -> array; inputs before the call, and also outputs after it
    saved : what an earlier call kept for this one, or None
    """

    function: Callable[[Any], Any]
    unit: Unit
    values: Arrays
    params: Sequence[Any] = ()
    grads: Sequence[Gradients] = ()
    saved: list[Any] | None = None

    @property
    def flags(self) -> list[bytearray]:
        """The flags that say which gradients of the call are blank, for all buffers with such gradients."""
        entries = [entry for node in self.grads for entry in node.entries.values()]
        return list({id(entry.flags): entry.flags for entry in entries}.values())

    def copy_flags(self) -> list[bytes]:
        return [bytes(flags) for flags in self.flags]

    def restore_flags(self, contents: Sequence[bytes]) -> None:
        for flags, content in zip(self.flags, contents, strict=True):
            flags[:] = content

    def list_arrays(self) -> list[Any]:
        """Return the arrays of the parameters and gradients."""
        arrays = [array for node in self.params for array in node.values()]
        return arrays + [entry.array for node in self.grads for entry in node.entries.values()]


@dataclass
class RecordedCall:
    """A call that was recorded as a graph.

    Attributes
    ----------
    unit, params, grads : as in `UnitCall`
    addresses : addresses of the parameters and gradients
    inputs, outputs : activation number -> array in the memory of the graphs
    blank, written : contents of the gradient flags before and after the call
    source : the call that computed `UnitCall.saved`
    keeps : whether the call saves values for another call
    """

    capture: Capture
    unit: Unit
    params: Sequence[Any]
    grads: Sequence[Gradients]
    addresses: list[int]
    inputs: Arrays
    outputs: Arrays
    blank: list[bytes]
    written: list[bytes]
    source: RecordedCall | None
    keeps: bool

    def find_mismatch(self, call: UnitCall) -> str:
        """Return why the graph cannot compute a call; "" if it can."""
        if self.unit is not call.unit:
            return "an observer has replaced its layers"
        if self.source is not None and getattr(call.saved, "source", None) is not self.source:
            return "its forward pass was not replayed"
        is_same = self.params is call.params and self.grads is call.grads
        if not is_same and self.addresses != [array.data.ptr for array in call.list_arrays()]:
            return "its parameters or gradients have moved"
        if call.copy_flags() != self.blank:
            return "its gradients are added to others"
        if self.inputs.keys() != call.values.keys() or not all(
            _is_alike(array, call.values[number]) for number, array in self.inputs.items()
        ):
            return "its inputs have other shapes"
        return ""


@dataclass
class Recording:
    """The graphs of one program for batches of given shapes.

    Attributes
    ----------
    program : the program, which is kept so that its id stays unique
    runs : number of complete runs so far
    seen : number of calls of the current run
    calls : name of an action -> its recorded call
    refusals : index of a unit that computes as usual -> the reason
    kept : id of a list of saved values -> (the list, the call that saved it), during the run that records
    """

    program: Program
    memory: GraphMemory
    runs: int = 0
    seen: int = 0
    calls: dict[str, RecordedCall] = field(default_factory=dict)
    refusals: dict[int, str] = field(default_factory=dict)
    kept: dict[int, tuple[list[Any], RecordedCall]] = field(default_factory=dict)


class ReplayObserver(Observer):
    """Engine observer that records the forward and backward passes of units as CUDA graphs, and launches them.

    Attributes
    ----------
    recordings : the recordings of this trainer
    launches : number of graphs launched so far
    reasons : why actions compute as usual, in the order in which this was found
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
        """Choose the recording of the program that is about to run, or begin one. Return functions that use it."""
        self._finish_run()
        program = self._engine.last_program
        assert program is not None
        self._now = self._get_or_begin_recording(program) if program.kind in KINDS else None
        if self._now is None:
            return functions
        place = self._state.placement
        self._sent = frozenset(edge.value for edge in place.stage.edges if edge.sender == place.axes.pipe.rank)
        if self._now.runs == 1:  # the pool holds the activations of the first run, which graphs do not use
            import_cupy().get_default_memory_pool().free_all_blocks()
        return UnitFunctions(
            partial(self._forward, functions.forward),
            partial(self._backward, functions.backward),
            partial(self._backward_input, functions.backward_input),
            partial(self._backward_params, functions.backward_params),
        )

    def _get_or_begin_recording(self, program: Program) -> Recording | None:
        if why := self._find_refusal(program):
            self._report(why)
            return None
        key = self._make_key(program)
        if key not in self.recordings:
            self.recordings = {old: one for old, one in self.recordings.items() if old[-1] == key[-1]}
            if len(self.recordings) >= MAX_RECORDINGS:
                self._report(f"there are more than {MAX_RECORDINGS} shapes of batches: pad them to a few")
                return None
            self.recordings[key] = Recording(program, GraphMemory())
        return self.recordings[key]

    def _find_refusal(self, program: Program) -> str:
        place = self._state.placement
        if others := sorted({action.op for action in program.actions} - OPS):
            return f"its program has {', '.join(others)}"
        if place.options.check_finite:
            return "check_finite reads the output of every layer"
        if place.axes.tensor.size > 1 or not place.sample_layout.has_complete_samples:
            return "its layers communicate over the tensor axis or with the owners of other parts of a sample"
        return ""

    def _make_key(self, program: Program) -> tuple[Hashable, ...]:
        """Return everything that determines which work the actions of a program issue. The last item never returns to
        an earlier value once it has changed."""
        state = self._state
        batch = tuple(
            None if one is None else tuple((x.shape, x.dtype, x.strides) for x in (*one.inputs, *one.targets))
            for one in self._engine.batch
        )
        return batch, id(program), (state.arena.generation, state.frozen, state.seed)

    def _finish_run(self) -> None:
        """Count the previous run if it was complete. If the run that records was not, drop what it has recorded."""
        now = self._now
        if now is None:
            return
        complete = now.seen == sum(action.op in COMPUTE_OPS for action in now.program.actions)
        now.seen = 0
        now.kept.clear()
        if complete:
            now.runs += 1
        if not complete and now.runs == 1:
            now.calls.clear()
            now.runs, now.memory = 0, GraphMemory()
        elif now.runs == 2 and now.refusals:
            now.calls = {w: one for w, one in now.calls.items() if one.unit.index not in now.refusals}

    def on_action_begin(self, words: str, now: float) -> None:
        self._words = words

    def on_action_done(self, action: Action) -> None:
        if self._now is not None and action.op in COMPUTE_OPS:
            self._now.seen += 1

    def _forward(
        self, run: Any, unit: Unit, envs: Any, params: Any, values: Arrays, keep: bool, *rest: Any
    ) -> list[Any]:
        call = UnitCall(lambda _: run(unit, envs, params, values, keep, *rest), unit, values, params)
        found: list[Any] = self._run_call(call)
        return found

    def _backward(
        self, run: Any, unit: Unit, envs: Any, params: Any, grads: Any, saved: Any, dvalues: Arrays, constant: Any
    ) -> None:
        function = lambda held: run(unit, envs, params, grads, held, dvalues, constant)  # noqa: E731
        self._run_call(UnitCall(function, unit, dvalues, params, grads, saved))

    def _backward_input(
        self, run: Any, unit: Unit, envs: Any, params: Any, saved: Any, dvalues: Arrays, constant: Any
    ) -> list[Any]:
        function = lambda held: run(unit, envs, params, held, dvalues, constant)  # noqa: E731
        found: list[Any] = self._run_call(UnitCall(function, unit, dvalues, params, (), saved))
        return found

    def _backward_params(self, run: Any, unit: Unit, envs: Any, grads: Any, kept: Any) -> None:
        self._run_call(UnitCall(lambda held: run(unit, envs, grads, held), unit, {}, (), grads, kept))

    def _run_call(self, call: UnitCall) -> Any:
        now = self._now
        assert now is not None
        if now.runs == 0:
            return self._compute_and_watch(now, call)
        recorded = now.calls.get(self._words)
        if recorded is not None:
            why = recorded.find_mismatch(call)
            if not why:
                return self._launch_call(recorded, call)
            if isinstance(call.saved, Kept):
                raise RuntimeError(f"{why}, but its forward pass was replayed: use replay=False")
            self._report(f"unit {call.unit.name!r}: {why}")
        elif now.runs == 1 and call.unit.index not in now.refusals and self._can_record(now, call):
            return self._record_call(now, call)
        return call.function(call.saved)

    def _compute_and_watch(self, now: Recording, call: UnitCall) -> Any:
        """Compute a call as usual, and find out whether its layers communicate."""
        counters = self._engine.placement.axes.counters
        before = counters.total
        result = call.function(call.saved)
        if counters.total != before:
            self._refuse(now, call.unit, "its layers communicate")
        return result

    def _refuse(self, now: Recording, unit: Unit, why: str) -> None:
        now.refusals.setdefault(unit.index, why)
        self._report(f"unit {unit.name!r}: {why}")

    def _report(self, why: str) -> None:
        """Log once that something computes as usual, on the first rank of each pipeline stage."""
        axes = self._state.placement.axes
        if why not in self.reasons and axes.data.rank == axes.tensor.rank == 0:
            log_line(f"fsdpx: replay: not recorded as a CUDA graph, {why}")
        self.reasons[why] = None

    def _can_record(self, now: Recording, call: UnitCall) -> bool:
        if self._state.placement.layout.units[call.unit.index] is not call.unit:
            self._refuse(now, call.unit, "an observer has replaced its layers")
        elif not all(map(is_on_gpu, call.values.values())):
            self._refuse(now, call.unit, "one of its inputs is not an array")
        elif call.saved is not None and id(call.saved) not in now.kept:
            self._refuse(now, call.unit, "its forward pass was not recorded")
        else:
            return True
        return False

    def _record_call(self, now: Recording, call: UnitCall) -> Any:
        """Record a call as a graph and launch it. If that fails, compute the call as usual."""
        blank, saved, values = call.copy_flags(), call.saved, dict(call.values)
        source = None if saved is None else now.kept.pop(id(saved))[1]
        for number, array in values.items():
            if not now.memory.has_address(array.data.ptr):
                call.values[number] = copy_into_fixed_memory(now.memory, array)
        inputs = {number: make_unowned_view(array) for number, array in call.values.items()}
        capture = Capture(now.memory)
        try:
            with capture.recording(self._state.moment):
                result = call.function(None if saved is None else list(saved))  # the call clears the list
        except Exception as error:
            self._refuse(now, call.unit, _describe_error(error))
            call.restore_flags(blank)
            call.values.clear()
            call.values.update(values)
            return call.function(call.saved)
        if saved is not None:
            saved.clear()
        capture.launch()
        self.launches += 1
        now.calls[self._words] = recorded = RecordedCall(
            capture, call.unit, call.params, call.grads, [array.data.ptr for array in call.list_arrays()], inputs,
            {number: make_unowned_view(array) for number, array in call.values.items()}, blank, call.copy_flags(),
            source, isinstance(result, list),
        )  # fmt: skip
        if recorded.keeps:
            now.kept[id(result)] = result, recorded
        self._copy_values_to_send(call.values)
        return result

    def _launch_call(self, recorded: RecordedCall, call: UnitCall) -> Any:
        for number, fixed in recorded.inputs.items():
            given = call.values[number]
            if given.data.ptr != fixed.data.ptr:
                fixed[...] = given
        recorded.capture.launch()
        self.launches += 1
        call.restore_flags(recorded.written)
        call.values.clear()
        call.values.update(recorded.outputs)
        self._copy_values_to_send(call.values)
        return Kept(recorded) if recorded.keeps else None

    def _copy_values_to_send(self, values: Arrays) -> None:
        """Replace the arrays that this rank may send to another pipeline stage by copies, because later graphs may
        write to the memory of these arrays before they have been sent."""
        for number in self._sent & values.keys():
            values[number] = values[number].copy()


def _is_alike(one: Any, other: Any) -> bool:
    return is_on_gpu(other) and (one.shape, one.dtype) == (other.shape, other.dtype)


def _describe_error(error: BaseException) -> str:
    """Return the first line of an error. If ending the capture has failed, describe the error that led to it."""
    while error.__context__ is not None:
        error = error.__context__
    return f"{type(error).__name__}: {next(iter(str(error).strip().splitlines()), '')}"
