"""The timeline of a rank: actions, waits, transfers and activations of its last programs, kept until it is read."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from time import perf_counter
from typing import Any, NamedTuple, cast

from fsdpx.core.comm.calls import Transfer
from fsdpx.core.engine.activations import Activations, is_activation
from fsdpx.core.engine.engine import Engine
from fsdpx.core.engine.observer import Observer
from fsdpx.core.engine.operations import ExecutableAction
from fsdpx.core.program import Action, Program
from fsdpx.core.state.train_state import TrainState
from fsdpx.core.state.units import Unit
from fsdpx.nn.layer import Layer
from fsdpx.nn.linearize import Node

__all__ = ["Acted", "LayerSpan", "LayerTime", "Outside", "Recording", "TransferSpan", "Turn", "recording_of"]


class Acted(NamedTuple):
    """An action began, had all it needs, and ended. nbytes: that this rank sent or received in it. alive: bytes of
    activations after it."""

    action: Action
    begin: float
    ready: float
    end: float
    nbytes: int
    alive: int


class TransferSpan(NamedTuple):
    """A transfer that an action began was under way."""

    action: Action
    issued: float
    landed: float


class LayerSpan(NamedTuple):
    """A layer ran inside of an action. what: "forward", or which part of its backward."""

    path: str
    what: str
    begin: float
    end: float


class LayerTime(NamedTuple):
    """Seconds of one layer on one rank. forwards: how often it ran, recomputing included."""

    forwards: int = 0
    forward: float = 0.0
    backward: float = 0.0


class Outside(NamedTuple):
    """Something beside programs, such as agreeing on a batch. nbytes: that this rank wrote or read."""

    what: str
    begin: float
    end: float
    nbytes: int


MOST_OUTSIDE = 1000
"""Kept between two programs that train: predictions agree on a batch each time."""


@dataclass
class Turn:
    """One run of a program. number: among those of this trainer, alike on all ranks that run programs together. steps:
    updates made before. before: what was done since the turn before. flights: of transfers that landed in it.
    layers: that ran in it."""

    number: int
    steps: int
    program: Program
    before: list[Outside]
    acted: list[Acted] = field(default_factory=list)
    flights: list[TransferSpan] = field(default_factory=list)
    layers: list[LayerSpan] = field(default_factory=list)

    @property
    def complete(self) -> bool:
        """Whether all actions came to their end."""
        return len(self.acted) == len(self.program.actions)


class Recording(Observer):
    """The last `keep` programs that train; evaluating and predicting leave no turn. layers: path -> time since the
    beginning, or the last `reset`. after: what was done since the last turn. written: whether all turns were written to
    files."""

    def __init__(self, keep: int) -> None:
        self.turns: deque[Turn] = deque(maxlen=keep)
        self.activations = Activations()
        self.layers: dict[str, LayerTime] = {}
        self._units: list[Unit] = []
        self.written = False
        self._count = 0
        self._now: Turn | None = None
        self.after: deque[Outside] = deque(maxlen=MOST_OUTSIDE)

    def begin_program(self, program: Program, state: TrainState) -> None:
        """A program is about to run."""
        self._now = None
        if program.kind not in ("evaluate", "predict"):
            self._now = Turn(self._count, state.steps, program, list(self.after))
            self.after.clear()
            self._count += 1
            self.turns.append(self._now)
            self.written = False
            self.activations.within(state.arena)

    def timed(self, units: Sequence[Unit]) -> Sequence[Unit]:
        """The same units with layers that note when they run."""
        if len(self._units) < len(units):
            self._units = [
                replace(unit, nodes=tuple(replace(n, layer=cast(Layer, _TimedLayer(n, self._ran))) for n in unit.nodes))
                for unit in units
            ]
        return self._units

    def _ran(self, path: str, what: str, begin: float) -> None:
        """A part of a layer that began at that time has ended now."""
        if self._now is None:
            return
        end = perf_counter()
        self._now.layers.append(LayerSpan(path, what, begin, end))
        forwards, forward, backward = self.layers.get(path, LayerTime())
        if what == "forward":
            self.layers[path] = LayerTime(forwards + 1, forward + end - begin, backward)
        else:
            self.layers[path] = LayerTime(forwards, forward, backward + end - begin)

    def outside(self, what: str, begin: float, end: float, nbytes: int) -> None:
        """Something beside programs has ended."""
        self.after.append(Outside(what, begin, end, nbytes))

    def acted(
        self, planned: ExecutableAction, begin: float, ready: float, end: float, nbytes: int, values: Sequence[Any]
    ) -> None:
        """An action came to its end and gave these values."""
        if self._now is None:
            return
        activations = self.activations
        for slot in planned.takes:
            activations.take(slot)
        for slot, value in zip(planned.gives, values, strict=True):
            if is_activation(slot) and value.__class__ is not Transfer:
                activations.give(slot, value)
        self._now.acted.append(Acted(planned.action, begin, ready, end, nbytes, activations.alive))

    def landed(self, action: Action, transfer: Transfer) -> None:
        """A transfer that this action began is complete."""
        if self._now is not None:
            self._now.flights.append(TransferSpan(action, transfer.issued, transfer.landed))

    def reset(self) -> None:
        """Restart adding up the time of layers."""
        self.layers.clear()


def recording_of(engine: Engine) -> Recording | None:
    """Return the timeline that an engine's rank keeps, if it keeps one."""
    return next((one for one in engine.observers if isinstance(one, Recording)), None)


PARTS = ("forward", "backward", "backward_leaf", "backward_input", "backward_params")


class _TimedLayer:
    """The layer of a node, which notes each of its parts that has run."""

    def __init__(self, node: Node, note: Callable[[str, str, float], None]) -> None:
        self._layer = node.layer
        for what in PARTS:
            setattr(self, what, self._noted(node.path, what, getattr(node.layer, what), note))

    @staticmethod
    def _noted(path: str, what: str, run: Callable[..., Any], note: Callable[[str, str, float], None]) -> Any:
        def timed(*arguments: Any) -> Any:
            begin = perf_counter()
            found = run(*arguments)
            note(path, what, begin)
            return found

        return timed

    def __getattr__(self, name: str) -> Any:
        return getattr(self._layer, name)

    def __repr__(self) -> str:
        return repr(self._layer)
