"""Observers of an engine: objects that are notified of each event while programs run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from fsdpx.core.base.dataclass import dataclass

# import the engine only for type checking, because the launcher imports this module and must not load the engine
if TYPE_CHECKING:
    from fsdpx.core.comm.calls import TimedTransfer
    from fsdpx.core.engine.operations import ExecutableAction
    from fsdpx.core.engine.run import UnitFunctions
    from fsdpx.core.program import Action, Program
    from fsdpx.core.state.train_state import TrainState
    from fsdpx.core.state.units import Unit

__all__ = ["Hooks", "Observer", "collect_hooks"]


class Observer:
    """Base class for observers of an engine. Override the methods for the events you need; the engine calls only
    overridden methods. Add an observer with `Engine.add_observer`.

    Times are values of `perf_counter`. An exception raised in an observer ends the program, like one raised in an
    action."""

    __slots__ = ()

    def on_collective_call(self, call: str) -> None:
        """Called when this rank begins a collective call of the trainer, such as "step"."""

    def on_program_begin(self, program: Program, state: TrainState) -> None:
        """Called before a program runs."""

    def wrap_units(self, units: Sequence[Unit]) -> Sequence[Unit]:
        """Return replacements for the units (groups of layers) of the program that is about to run, for example, units
        whose layers measure time."""
        return units

    def wrap_unit_functions(self, functions: UnitFunctions) -> UnitFunctions:
        """Return the functions that run the layers of units in the program that is about to run: `functions` itself, or
        replacements, such as functions that launch recorded work."""
        return functions

    def on_action_begin(self, words: str, now: float) -> None:
        """Called when an action begins. `words` names the action; `now` is the time."""

    def on_wait(self, what: str) -> None:
        """Called when the current action starts to wait for a transfer. `what` names the action that started the
        transfer."""

    def on_action_done(self, action: Action) -> None:
        """Called when an action has stored its results. The action counts as done once all observers have returned."""

    def on_action_end(
        self, planned: ExecutableAction, begin: float, ready: float, end: float, nbytes: int, values: Sequence[Any]
    ) -> None:
        """Called at the end of an action. `begin`, `ready` and `end` are the times at which the action began, had all
        its inputs, and ended. `nbytes` is the number of bytes that this rank sent or received during the action."""

    def on_transfer_complete(self, action: Action, transfer: TimedTransfer) -> None:
        """Called when a transfer that `action` started is complete."""

    def on_outside_program(self, what: str, begin: float, end: float, nbytes: int) -> None:
        """Called at the end of work outside programs. `what` names the work, such as comparing batches, saving or
        loading. `nbytes` is the number of bytes that this rank wrote or read."""

    def on_action_failed(self, words: str, error: Exception) -> None:
        """Called when an action has raised `error`. `words` names the action."""

    def reset_counts(self) -> None:
        """Set the counters of this observer to zero."""

    def write_files(self) -> None:
        """Write the recorded data to files. Collective."""


@dataclass(slots=True)
class Hooks:
    """For each method of `Observer`, the bound methods of all observers that override it."""

    on_collective_call: tuple[Callable[[str], None], ...]
    on_program_begin: tuple[Callable[[Program, TrainState], None], ...]
    wrap_units: tuple[Callable[[Sequence[Unit]], Sequence[Unit]], ...]
    wrap_unit_functions: tuple[Callable[[UnitFunctions], UnitFunctions], ...]
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
    """Collect the methods that these observers override, in the order of `observers`."""
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
