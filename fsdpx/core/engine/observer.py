"""What may look at an engine while it runs programs: one class with a method for each thing that happens."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # the launcher reads flight records, and needs no engine for it
    from fsdpx.core.comm.calls import Transfer
    from fsdpx.core.engine.operations import ExecutableAction
    from fsdpx.core.program import Action, Program
    from fsdpx.core.state.train_state import TrainState
    from fsdpx.core.state.units import Unit

__all__ = ["Hooks", "Observer", "hooks_of"]


class Observer:
    """Is told what an engine does: override what you need, the rest is never called. `Engine.observe` adds one.

    Times are those of `perf_counter`. An exception of an observer ends the program, as one of an action does."""

    __slots__ = ()

    def enter(self, call: str) -> None:
        """This rank has come to a call that all ranks make."""

    def begin_program(self, program: Program, state: TrainState) -> None:
        """A program is about to run."""

    def timed(self, units: Sequence[Unit]) -> Sequence[Unit]:
        """Return the units that the program runs instead of these: the same, with layers that look as well."""
        return units

    def begin(self, words: str, now: float) -> None:
        """An action begins."""

    def waits(self, what: str) -> None:
        """The action now needs what another one issued."""

    def look(self, action: Action) -> None:
        """An action has given its values, which lie in the store; it counts as done when all observers have looked."""

    def acted(
        self, planned: ExecutableAction, begin: float, ready: float, end: float, nbytes: int, values: Sequence[Any]
    ) -> None:
        """An action began, had all it needs, and ended. nbytes: that this rank sent or received in it."""

    def landed(self, action: Action, transfer: Transfer) -> None:
        """A transfer that this action began is complete."""

    def outside(self, what: str, begin: float, end: float, nbytes: int) -> None:
        """Something beside actions has ended, such as agreeing on a batch, saving or loading. nbytes: that this rank
        wrote or read."""

    def failed(self, words: str, error: Exception) -> None:
        """An action has raised this error."""

    def reset(self) -> None:
        """Restart counting."""

    def write(self) -> None:
        """Write to files what was kept. Collective."""


@dataclass(slots=True)
class Hooks:
    """By method of `Observer`: those of all observers that have one of their own."""

    enter: tuple[Callable[[str], None], ...]
    begin_program: tuple[Callable[[Program, TrainState], None], ...]
    timed: tuple[Callable[[Sequence[Unit]], Sequence[Unit]], ...]
    begin: tuple[Callable[[str, float], None], ...]
    waits: tuple[Callable[[str], None], ...]
    look: tuple[Callable[[Action], None], ...]
    acted: tuple[Callable[[ExecutableAction, float, float, float, int, Sequence[Any]], None], ...]
    landed: tuple[Callable[[Action, Transfer], None], ...]
    outside: tuple[Callable[[str, float, float, int], None], ...]
    failed: tuple[Callable[[str, Exception], None], ...]
    reset: tuple[Callable[[], None], ...]
    write: tuple[Callable[[], None], ...]


def hooks_of(observers: Sequence[Observer]) -> Hooks:
    """Return what to call of these observers, in their order."""
    found: dict[str, list[Any]] = {name: [] for name in Hooks.__slots__}
    for observer in observers:
        for name, methods in found.items():
            if getattr(type(observer), name) is not getattr(Observer, name):
                methods.append(getattr(observer, name))
    return Hooks(*map(tuple, found.values()))


class Looking(Observer):
    """A function that looks after each action."""

    def __init__(self, function: Callable[[Action], None]) -> None:
        self.function = function

    def look(self, action: Action) -> None:
        self.function(action)
