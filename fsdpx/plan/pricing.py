"""What the actions of dry runs cost on a machine, and how long a step of them takes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache, partial
from math import inf
from typing import Any, NamedTuple

from fsdpx.core.program import VERBS, Action, Event
from fsdpx.core.program.simulator import run
from fsdpx.core.program.verbs import partner
from fsdpx.plan.time_model import StepTimes
from fsdpx.plan.world_step import RankRun, known_action

__all__ = ["Price", "StepClock"]


class Price(NamedTuple):
    """Seconds of computing, and of moving by axis."""

    own: float
    moving: Mapping[str, float]

    @property
    def seconds(self) -> float:
        """In all."""
        return self.own + sum(self.moving.values())


class StepClock:
    """How long the programs of dry runs take. timing: of their machine."""

    def __init__(self, runs: list[RankRun], timing: StepTimes) -> None:
        self.runs, self._timing = runs, timing
        self._few = min(min(run.programs) for run in runs)
        self._stage = next(iter(runs[0].programs.values())).stage
        self._known = cache(self._found)  # each price is asked for once

    def price(self, rank: int, action: Action) -> Price:
        """What an action costs, by rank of the pipe."""
        return self._known(rank, known_action(action, self._few))

    def _found(self, rank: int, action: Action) -> Price:
        cost, verb = self.runs[rank].costs[action], VERBS[action.op]
        if verb.receives:
            return Price(0.0, {})
        if verb.sends:
            edge = self._stage.edge(action)
            sender, receiver = (self.runs[at].found.rank for at in (edge.sender, edge.receiver))
            nbytes = sum(nbytes for _, _, _, nbytes in cost.calls)
            return Price(0.0, {"pipe": self._timing.message(sender, receiver, nbytes)})
        return Price(*self._timing.price(cost))

    def timed(self, microbatches: int) -> tuple[float, list[list[Event]]]:
        """Seconds of a step, and what happens when on each rank of the pipe."""
        rows = run(
            [one.program(microbatches) for one in self.runs], lambda rank, action: self.price(rank, action).seconds
        )
        return max(event.end for row in rows for event in row), rows

    def mean_parts(self, rows: list[list[Event]], end: float) -> dict[str, float]:
        """The parts of a step in the mean of the ranks of the pipe."""
        ways = [(partial(self.price, rank), partial(self._way, rank)) for rank in range(len(rows))]
        shares = [_parts(row, end, *both) for row, both in zip(rows, ways, strict=True)]
        names = dict.fromkeys(name for share in shares for name in share)
        return {name: sum(share.get(name, 0.0) for share in shares) / len(shares) for name in names}

    def _way(self, rank: int, action: Action) -> Any:
        """How long what an action moves is under way, without waiting for other ranks of the pipe."""
        verb = VERBS[action.op]
        if not verb.receives:
            return self.price(rank, action).seconds if verb.meets else inf
        sent = Action(partner(action.op), action.unit, action.mb)
        return self.price(self._stage.edge(sent).sender, sent).seconds


def _parts(
    row: list[Event], end: float, price: Callable[[Action], Price], way: Callable[[Action], float]
) -> dict[str, float]:
    """The seconds of one rank by what it did or waited for. way: see `StepClock._way`."""
    parts = {"compute": 0.0, "optimiser": 0.0}

    def add(name: str, seconds: float) -> None:
        parts[name] = parts.get(name, 0.0) + seconds

    free, moving = 0.0, dict[float, Action]()
    for event in row:
        action, verb = event.action, VERBS[event.action.op]
        if verb.moves:
            moving[event.end] = action
            continue
        gap, cause = event.start - free, moving.get(event.start)
        if gap > 0 and cause is not None:
            travel = min(way(cause), gap)
            add(VERBS[cause.op].moves[0].axis, travel)
            gap -= travel
        add("bubble", max(gap, 0.0))
        own, moved = price(action)
        add("optimiser" if action.op == "UPDATE" else "compute", own)
        for axis, seconds in moved.items():
            add(axis, seconds)
        free = event.end
    add("bubble", end - free)
    return parts
