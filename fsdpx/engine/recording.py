"""The timeline of a rank: actions, waits, transfers and activations of its last programs, kept until it is read."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from fsdpx.array.arena import Arena
from fsdpx.engine.activations import Activations, is_activation
from fsdpx.engine.executable import ExecutableAction
from fsdpx.program import Action, Program
from fsdpx.state.transfer import Transfer

__all__ = ["Acted", "Outside", "Recording", "TransferSpan", "Turn"]


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


class Outside(NamedTuple):
    """Something beside programs, such as agreeing on a batch."""

    what: str
    begin: float
    end: float


@dataclass
class Turn:
    """One run of a program. number: among those of this trainer, alike on all ranks that run programs together. steps:
    updates made before. before: what was done since the turn before. flights: of transfers that landed in it."""

    number: int
    steps: int
    program: Program
    before: list[Outside]
    acted: list[Acted] = field(default_factory=list)
    flights: list[TransferSpan] = field(default_factory=list)

    @property
    def complete(self) -> bool:
        """Whether all actions came to their end."""
        return len(self.acted) == len(self.program.actions)


class Recording:
    """The last `keep` programs that train; evaluating and predicting leave no turn."""

    def __init__(self, keep: int) -> None:
        self.turns: deque[Turn] = deque(maxlen=keep)
        self.activations = Activations()
        self._count = 0
        self._now: Turn | None = None
        self._before: list[Outside] = []

    def begin(self, program: Program, steps: int, arena: Arena) -> None:
        """A program is about to run."""
        self._now = None
        if program.kind not in ("evaluate", "predict"):
            self._now = Turn(self._count, steps, program, self._before)
            self._count += 1
            self.turns.append(self._now)
            self.activations.within(arena)
        self._before = []

    def outside(self, what: str, begin: float, end: float) -> None:
        """Something beside programs has ended."""
        self._before.append(Outside(what, begin, end))

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

    def landed(self, action: Action, issued: float, landed: float) -> None:
        """A transfer that this action began is complete."""
        if self._now is not None:
            self._now.flights.append(TransferSpan(action, issued, landed))
