"""Recording of a rank's timeline: the actions, waits, transfers, layer calls and activation bytes of the programs that
it ran last."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from time import perf_counter
from typing import Any, NamedTuple, cast

from fsdpx.core.base.dataclass import dataclass, field, replace
from fsdpx.core.comm.calls import TimedTransfer
from fsdpx.core.engine.activations import ActivationMeter
from fsdpx.core.engine.engine import Engine
from fsdpx.core.engine.observer import Observer
from fsdpx.core.engine.operations import ExecutableAction
from fsdpx.core.program import Action, Program
from fsdpx.core.state.train_state import TrainState
from fsdpx.core.state.units import Unit
from fsdpx.nn.layer import Layer
from fsdpx.nn.layer_list import Node

__all__ = [
    "ActionSpan",
    "LayerSpan",
    "LayerTime",
    "OutsideSpan",
    "ProgramRecord",
    "TimelineRecorder",
    "TransferSpan",
    "find_timeline_recorder",
]


class ActionSpan(NamedTuple):
    """The times when an action began, when its inputs were available, and when it ended, in seconds on the rank's
    clock.

    `nbytes` is the number of bytes that this rank sent or received in the action, and `alive` is the number of bytes of
    activations after the action."""

    action: Action
    begin: float
    ready: float
    end: float
    nbytes: int
    alive: int


class TransferSpan(NamedTuple):
    """The times when `action` issued a transfer and when the transfer was complete, in seconds on the rank's clock."""

    action: Action
    issued: float
    landed: float


class LayerSpan(NamedTuple):
    """The times when a method of a layer was called and when it returned. `what` is "forward" or the name of the
    backward method."""

    path: str
    what: str
    begin: float
    end: float


class LayerTime(NamedTuple):
    """Total time, in seconds, that one layer took on one rank in the forward and in the backward pass. `forwards` is
    the number of forward calls, including recomputations."""

    forwards: int = 0
    forward: float = 0.0
    backward: float = 0.0


class OutsideSpan(NamedTuple):
    """The time span of work between two programs, such as agreeing on a batch. `nbytes` is the number of bytes that it
    read or wrote."""

    what: str
    begin: float
    end: float
    nbytes: int


MAX_OUTSIDE_SPANS = 1000
"""Maximum number of spans that are kept between two training programs. Without a limit, a long series of predictions
would fill up memory, because each one adds a span for agreeing on a batch."""


@dataclass
class ProgramRecord:
    """The timeline of one run of a program (the list of actions of a step).

    Attributes
    ----------
    number : index among the runs of this trainer; it is the same on all ranks that run programs together
    steps : number of optimizer updates before the run
    program : the program that ran
    before : spans of work between the previous run and this one
    actions, transfers, layers : the actions, completed transfers and layer calls during the run
    """

    number: int
    steps: int
    program: Program
    before: list[OutsideSpan]
    actions: list[ActionSpan] = field(default_factory=list)
    transfers: list[TransferSpan] = field(default_factory=list)
    layers: list[LayerSpan] = field(default_factory=list)

    @property
    def is_complete(self) -> bool:
        """True if the program ran to its end, so that all of its actions were recorded."""
        return len(self.actions) == len(self.program.actions)


class TimelineRecorder(Observer):
    """An engine observer that records the last `keep` training programs. Evaluation and prediction are not recorded.

    Attributes
    ----------
    records : the recorded runs, oldest first
    activations : counter of the bytes of activations
    layers : path of a layer -> its total time since the start or the last `reset_counts`
    after : spans of work after the last recorded run
    written : whether all recorded runs have been written to files
    """

    def __init__(self, keep: int) -> None:
        self.records: deque[ProgramRecord] = deque(maxlen=keep)
        self.activations = ActivationMeter()
        self.layers: dict[str, LayerTime] = {}
        self._units: list[Unit] = []
        self.written = False
        self._count = 0
        self._now: ProgramRecord | None = None
        self.after: deque[OutsideSpan] = deque(maxlen=MAX_OUTSIDE_SPANS)

    def on_program_begin(self, program: Program, state: TrainState) -> None:
        self._now = None
        if program.kind not in ("evaluate", "predict"):
            self._now = ProgramRecord(self._count, state.steps, program, list(self.after))
            self.after.clear()
            self._count += 1
            self.records.append(self._now)
            self.written = False
            self.activations.exclude_arena(state.arena)

    def wrap_units(self, units: Sequence[Unit]) -> Sequence[Unit]:
        """Return the units (groups of layers), with each layer wrapped so that its calls are recorded."""
        if len(self._units) < len(units):
            self._units = [
                replace(
                    unit,
                    nodes=tuple(replace(n, layer=cast(Layer, _TimedLayer(n, self._record_call))) for n in unit.nodes),
                )
                for unit in units
            ]
        return self._units

    def _record_call(self, path: str, what: str, begin: float) -> None:
        """Record a call to the method `what` of a layer. The call began at time `begin` and has just returned."""
        if self._now is None:
            return
        end = perf_counter()
        self._now.layers.append(LayerSpan(path, what, begin, end))
        forwards, forward, backward = self.layers.get(path, LayerTime())
        if what == "forward":
            self.layers[path] = LayerTime(forwards + 1, forward + end - begin, backward)
        else:
            self.layers[path] = LayerTime(forwards, forward, backward + end - begin)

    def on_outside_program(self, what: str, begin: float, end: float, nbytes: int) -> None:
        self.after.append(OutsideSpan(what, begin, end, nbytes))

    def on_action_end(
        self, planned: ExecutableAction, begin: float, ready: float, end: float, nbytes: int, values: Sequence[Any]
    ) -> None:
        if self._now is None:
            return
        self.activations.on_action(planned.takes, planned.gives, values)
        self._now.actions.append(ActionSpan(planned.action, begin, ready, end, nbytes, self.activations.live_bytes))

    def on_transfer_complete(self, action: Action, transfer: TimedTransfer) -> None:
        if self._now is not None:
            self._now.transfers.append(TransferSpan(action, transfer.issued_at, transfer.completed_at))

    def reset_counts(self) -> None:
        """Discard the accumulated times of layers."""
        self.layers.clear()


def find_timeline_recorder(engine: Engine) -> TimelineRecorder | None:
    """Return the timeline recorder that observes `engine`, or None if there is none."""
    return next((one for one in engine.observers if isinstance(one, TimelineRecorder)), None)


LAYER_METHODS = ("forward", "backward", "backward_leaf", "backward_input", "backward_params")


class _TimedLayer:
    """A wrapper around a layer that times every call to the layer's methods."""

    def __init__(self, node: Node, note: Callable[[str, str, float], None]) -> None:
        self._layer = node.layer
        for what in LAYER_METHODS:
            setattr(self, what, self._wrap_timed(node.path, what, getattr(node.layer, what), note))

    @staticmethod
    def _wrap_timed(path: str, what: str, run: Callable[..., Any], note: Callable[[str, str, float], None]) -> Any:
        def run_timed(*arguments: Any) -> Any:
            begin = perf_counter()
            found = run(*arguments)
            note(path, what, begin)
            return found

        return run_timed

    def __getattr__(self, name: str) -> Any:
        return getattr(self._layer, name)

    def __repr__(self) -> str:
        return repr(self._layer)
