"""What may look at an engine while it runs programs: one class with a method for each thing that happens."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # the launcher reads flight records, and needs no engine for it
    from fsdpx.core.comm.calls import TimedTransfer
    from fsdpx.core.engine.operations import ExecutableAction
    from fsdpx.core.program import Action, Program
    from fsdpx.core.state.train_state import TrainState
    from fsdpx.core.state.units import Unit

__all__ = ["Hooks", "Observer", "collect_hooks"]


class Observer:
    """Is told what an engine does: override what you need, the rest is never called. `Engine.add_observer` adds one.

    Times are those of `perf_counter`. An exception of an observer ends the program, as one of an action does."""

    __slots__ = ()

    def on_call(self, call: str) -> None:
        """This rank has come to a call that all ranks make."""

    def on_program_begin(self, program: Program, state: TrainState) -> None:
        """A program is about to run."""

    def wrap_units(self, units: Sequence[Unit]) -> Sequence[Unit]:
        """Return the units that the program runs instead of these: the same, with layers that look as well."""
        return units

    def on_action_begin(self, words: str, now: float) -> None:
        """An action begins."""

    def on_wait(self, what: str) -> None:
        """The action now needs what another one issued."""

    def on_action_done(self, action: Action) -> None:
        """An action has given its values, which lie in the store; it counts as done when all observers have looked."""

    def on_action_end(
        self, planned: ExecutableAction, begin: float, ready: float, end: float, nbytes: int, values: Sequence[Any]
    ) -> None:
        """An action began, had all it needs, and ended. nbytes: that this rank sent or received in it."""

    def on_transfer_complete(self, action: Action, transfer: TimedTransfer) -> None:
        """A transfer that this action began is complete."""

    def on_outside_program(self, what: str, begin: float, end: float, nbytes: int) -> None:
        """Something beside actions has ended, such as agreeing on a batch, saving or loading. nbytes: that this rank
        wrote or read."""

    def on_action_failed(self, words: str, error: Exception) -> None:
        """An action has raised this error."""

    def reset_counts(self) -> None:
        """Restart counting."""

    def write_files(self) -> None:
        """Write to files what was kept. Collective."""


@dataclass(slots=True)
class Hooks:
    """By method of `Observer`: those of all observers that have one of their own."""

    on_call: tuple[Callable[[str], None], ...]
    on_program_begin: tuple[Callable[[Program, TrainState], None], ...]
    wrap_units: tuple[Callable[[Sequence[Unit]], Sequence[Unit]], ...]
    on_action_begin: tuple[Callable[[str, float], None], ...]
    on_wait: tuple[Callable[[str], None], ...]
    on_action_done: tuple[Callable[[Action], None], ...]
    on_action_end: tuple[Callable[[ExecutableAction, float, float, float, int, Sequence[Any]], None], ...]
    on_transfer_complete: tuple[Callable[[Action, TimedTransfer], None], ...]
    on_outside_program: tuple[Callable[[str, float, float, int], None], ...]
    on_action_failed: tuple[Callable[[str, Exception], None], ...]
    reset_counts: tuple[Callable[[], None], ...]
    write_files: tuple[Callable[[], None], ...]


def collect_hooks(observers: Sequence[Observer]) -> Hooks:
    """Return what to call of these observers, in their order."""
    hooks_by_event: dict[str, list[Any]] = {name: [] for name in Hooks.__slots__}
    for observer in observers:
        for name, methods in hooks_by_event.items():
            if getattr(type(observer), name) is not getattr(Observer, name):
                methods.append(getattr(observer, name))
    return Hooks(*map(tuple, hooks_by_event.values()))


class ActionCallback(Observer):
    """A function that looks after each action."""

    def __init__(self, function: Callable[[Action], None]) -> None:
        self.function = function

    def on_action_done(self, action: Action) -> None:
        self.function(action)
