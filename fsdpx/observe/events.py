"""The events of what a rank recorded, of the same type as those of the simulator."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

from fsdpx.comm.mesh import AXES, Axes
from fsdpx.engine.recording import Acted, TransferSpan, Turn
from fsdpx.program import VERBS, Action, Event

__all__ = ["TracePlace", "events_of", "waits_of"]

LEAST = 1e-6
"""Seconds: what is shorter is no wait but Python."""


@dataclass(frozen=True)
class TracePlace:
    """Where a rank stands. lines: lane of a verb -> a name for the ranks it communicates with there, the same on all of
    them."""

    rank: int
    lines: dict[str, str]

    @classmethod
    def of(cls, axes: Axes) -> TracePlace:
        here = axes.coordinates._asdict()
        lines = {axis: ".".join(f"{name}{at}" for name, at in here.items() if name != axis) for axis in AXES}
        together = "" if axes.group is axes.world else f"replica{axes.coordinates.replica}"
        return cls(axes.world.rank, {**lines, "world": together})

    def key(self, turn: Turn, action: Action, time: int) -> Hashable:
        """The common name of a transfer on all ranks that take part; None if no other rank does. time: the action is
        there for the nth time."""
        verb = VERBS[action.op]
        if verb.lane not in self.lines:
            return None
        kind = "message" if verb.sends or verb.receives else action.op
        return (verb.lane, self.lines[verb.lane], turn.number, kind, action.unit, action.mb, time)


def events_of(turn: Turn, place: TracePlace) -> list[Event]:
    """One event for each action, in the order of the program. An action that computes lasts from when it had all it
    needed to its end; one that moves data beside the computing from the same moment to when this rank saw that it was
    complete."""
    flights: dict[Action, list[TransferSpan]] = defaultdict(list)
    for flight in turn.flights:
        flights[flight.action].append(flight)
    times: Counter[Action] = Counter()
    found = []
    for one in turn.acted:
        times[one.action] += 1
        start, end = _span(one, flights[one.action])
        found.append(
            Event(place.rank, one.action, start, end, one.nbytes, place.key(turn, one.action, times[one.action]))
        )
    return found


def _span(one: Acted, flights: Sequence[TransferSpan]) -> tuple[float, float]:
    """From when the action had all it needed to the end of the last transfer that it began, if it began any. A message
    may arrive before the call that sends it has returned, on a machine that then does something else."""
    landed = [flight.landed for flight in flights if one.ready <= flight.issued <= one.end]
    return one.ready, max(landed, default=one.end)


def waits_of(turn: Turn, events: Sequence[Event]) -> list[Event]:
    """Where the rank stood still before an action, until transfers were complete that it was the first to need. action
    and key are those of the last of these; of the action itself where none is known. events: of the turn."""
    moving = [event for event in events if VERBS[event.action.op].moves]
    found = []
    for one, event in zip(turn.acted, events, strict=True):
        if one.ready - one.begin > LEAST:
            late = max((e for e in moving if one.begin < e.end <= one.ready), key=lambda e: e.end, default=None)
            action, key = (one.action, None) if late is None else (late.action, late.key)
            found.append(Event(event.rank, action, one.begin, one.ready, 0, key))
    return found
