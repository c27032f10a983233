"""A program with its memory on one rank, ready to run any number of times."""

from __future__ import annotations

from typing import NamedTuple

from fsdpx.engine.operations import OPERATIONS
from fsdpx.engine.run import Operation, Workspace
from fsdpx.program import SLOTS, VERBS, Action, Request, Slot, check, compile
from fsdpx.state.placement import Placement
from fsdpx.state.state import TrainState

__all__ = ["Executable", "ExecutableAction"]


class ExecutableAction(NamedTuple):
    """One action with all that running it needs. words: it as text. gives: slots given, then those added
    into."""

    operation: Operation
    action: Action
    words: str
    takes: tuple[Slot, ...]
    reads: tuple[Slot, ...]
    adds: tuple[Slot, ...]
    gives: tuple[Slot, ...]
    lane: str


class Executable:
    """Proved and planned when it is made. givers: slot -> the action that fills it, as text."""

    def __init__(self, state: TrainState, request: Request) -> None:
        place, program = state.placement, compile(request)
        check(program)
        place.pipe.prove(request, place.stages)
        self.program = program
        self.workspace = Workspace(state, program)
        self.steps = [
            ExecutableAction(
                OPERATIONS[a.op], a, f"{a} ({about(place, a, program.kind)})", s.takes, s.reads, s.adds,
                (*s.gives, *s.adds), VERBS[a.op].lane,
            )
            for a, s in zip(program.actions, program.slots, strict=True)
        ]  # fmt: skip
        self.givers = {slot: step.words for step in self.steps for slot in step.gives}


def about(placement: Placement, action: Action, kind: str) -> str:
    """The unit, page or message that an action is about, as text."""
    what, number = VERBS[action.op].about, action.unit
    if number is None or not what:
        return f"the {kind} program"
    if what == "edge":
        edge = placement.stage.edges[number]
        return f"from rank {edge.sender} to rank {edge.receiver} of the pipe"
    if what == "record":
        record = placement.stage.records[number]
        assert record.at is not None
        if record.kind in ("saved", "held"):
            return f"activations of unit {placement.layout.units[record.at].name!r}"
        return f"{SLOTS[record.kind].memory} of page {placement.name(record.at)!r}"
    return f"unit {placement.layout.units[number].name!r}" if what == "unit" else f"page {placement.name(number)!r}"
