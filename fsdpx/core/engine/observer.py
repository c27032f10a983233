"""Observers of an engine: a class with one method for each kind of event while programs run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # the launcher reads flight records without loading the engine
    from fsdpx.core.comm.calls import TimedTransfer
    from fsdpx.core.engine.operations import ExecutableAction
    from fsdpx.core.program import Action, Program
    from fsdpx.core.state.train_state import TrainState
    from fsdpx.core.state.units import Unit

__all__ = ["Hooks", "Observer", "collect_hooks"]


class Observer:
    """Base class of objects that receive the events of an engine: override the methods you need; the others are never
    called. Add one with `Engine.add_observer`.

    Times are those of `perf_counter`. An exception in an observer ends the program, like one in an action.
    """

    __slots__ = ()

    def on_collective_call(self, call: str) -> None:
        """Handle that this rank enters a call that all ranks make."""

    def on_program_begin(self, program: Program, state: TrainState) -> None:
        """Handle that a program is about to run."""

    def wrap_units(self, units: Sequence[Unit]) -> Sequence[Unit]:
        """Return the units that the program runs instead of these: the same, with layers that also observe."""
        return units

    def on_action_begin(self, words: str, now: float) -> None:
        """Handle that an action begins. words: the action as text."""

    def on_wait(self, what: str) -> None:
        """Handle that the action waits for a transfer. what: the action that issued it."""

    def on_action_done(self, action: Action) -> None:
        """Handle that an action has put its values into the store; it counts as done when all observers have
        returned."""

    def on_action_end(
        self, planned: ExecutableAction, begin: float, ready: float, end: float, nbytes: int, values: Sequence[Any]
    ) -> None:
        """Handle the end of an action. begin, ready, end: when it began, had its inputs, and ended. nbytes: that this
        rank sent or received in it."""

    def on_transfer_complete(self, action: Action, transfer: TimedTransfer) -> None:
        """Handle that a transfer issued by this action is complete."""

    def on_outside_program(self, what: str, begin: float, end: float, nbytes: int) -> None:
        """Handle the end of something outside actions, such as agreeing on a batch, saving or loading. nbytes: that
        this rank wrote or read."""

    def on_action_failed(self, words: str, error: Exception) -> None:
        """Handle an error that an action has raised."""

    def reset_counts(self) -> None:
        """Reset counters."""

    def write_files(self) -> None:
        """Write what was recorded to files. Collective."""


@dataclass(slots=True)
class Hooks:
    """By method of `Observer`: the bound methods of all observers that override it."""

    on_collective_call: tuple[Callable[[str], None], ...]
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
    """Return the methods that these observers override, in their order."""
    hooks_by_event: dict[str, list[Any]] = {name: [] for name in Hooks.__slots__}
    for observer in observers:
        for name, methods in hooks_by_event.items():
            if getattr(type(observer), name) is not getattr(Observer, name):
                methods.append(getattr(observer, name))
    return Hooks(*map(tuple, hooks_by_event.values()))


class ActionCallback(Observer):
    """An observer that calls a function after each action."""

    def __init__(self, function: Callable[[Action], None]) -> None:
        self.function = function

    def on_action_done(self, action: Action) -> None:
        self.function(action)
