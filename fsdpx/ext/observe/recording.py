"""The timeline of a rank: the actions, waits, transfers and activations of its last programs."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from time import perf_counter
from typing import Any, NamedTuple, cast

from fsdpx.core.comm.calls import TimedTransfer
from fsdpx.core.engine.activations import ActivationMeter, is_activation_slot
from fsdpx.core.engine.engine import Engine
from fsdpx.core.engine.observer import Observer
from fsdpx.core.engine.operations import ExecutableAction
from fsdpx.core.program import Action, Program
from fsdpx.core.state.train_state import TrainState
from fsdpx.core.state.units import Unit
from fsdpx.nn.layer import Layer
from fsdpx.nn.linearize import Node

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
    """The times when an action began, had all its inputs, and ended. nbytes: bytes that this rank sent or received in
    the action. alive: bytes of activations after the action."""

    action: Action
    begin: float
    ready: float
    end: float
    nbytes: int
    alive: int


class TransferSpan(NamedTuple):
    """The times when a transfer was issued and when it was complete. action: the action that issued it."""

    action: Action
    issued: float
    landed: float


class LayerSpan(NamedTuple):
    """The times of one call of a layer in an action. what: "forward", or the name of the called backward method."""

    path: str
    what: str
    begin: float
    end: float


class LayerTime(NamedTuple):
    """Seconds of one layer on one rank. forwards: number of forward calls, including recomputation."""

    forwards: int = 0
    forward: float = 0.0
    backward: float = 0.0


class OutsideSpan(NamedTuple):
    """The times of work outside programs, such as agreeing on a batch. nbytes: bytes that this rank read or wrote."""

    what: str
    begin: float
    end: float
    nbytes: int


MAX_OUTSIDE_SPANS = 1000
"""Maximum number of spans that are kept between two training programs. Each prediction adds a span when it agrees on a
batch."""


@dataclass
class ProgramRecord:
    """One run of a program.

    number: index among the runs of this trainer, equal on all ranks that run programs together. steps: number of
    updates before the run. before: spans outside programs since the previous run. transfers: transfers that completed
    during the run. layers: calls of layers during the run."""

    number: int
    steps: int
    program: Program
    before: list[OutsideSpan]
    actions: list[ActionSpan] = field(default_factory=list)
    transfers: list[TransferSpan] = field(default_factory=list)
    layers: list[LayerSpan] = field(default_factory=list)

    @property
    def is_complete(self) -> bool:
        """True if all actions have ended."""
        return len(self.actions) == len(self.program.actions)


class TimelineRecorder(Observer):
    """Record the last `keep` training programs. Evaluation and prediction are not recorded.

    layers: path of a layer -> its time since the beginning or the last `reset_counts`. after: spans outside programs
    since the last run. written: whether all runs have been written to files."""

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
        """Return the same units with layers that record their calls."""
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
        """Record a call of a layer's method `what`, which began at `begin` and ends now."""
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
        activations = self.activations
        for slot in planned.takes:
            activations.forget_slot(slot)
        for slot, value in zip(planned.gives, values, strict=True):
            if is_activation_slot(slot) and value.__class__ is not TimedTransfer:
                activations.count_slot_bytes(slot, value)
        self._now.actions.append(ActionSpan(planned.action, begin, ready, end, nbytes, activations.live_bytes))

    def on_transfer_complete(self, action: Action, transfer: TimedTransfer) -> None:
        if self._now is not None:
            self._now.transfers.append(TransferSpan(action, transfer.issued_at, transfer.completed_at))

    def reset_counts(self) -> None:
        """Reset the times of layers."""
        self.layers.clear()


def find_timeline_recorder(engine: Engine) -> TimelineRecorder | None:
    """Return the timeline recorder among an engine's observers; None if there is none."""
    return next((one for one in engine.observers if isinstance(one, TimelineRecorder)), None)


LAYER_METHODS = ("forward", "backward", "backward_leaf", "backward_input", "backward_params")


class _TimedLayer:
    """The layer of a node, wrapped so that each call of its methods is recorded."""

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
