"""simulate: when each action of a schedule runs, on a machine of given speeds, and how long ranks are idle.

The machine model is that of Qi et al., "Zero Bubble Pipeline Parallelism" (ICLR 2024): a rank computes one action at a
time, in the order of its list; messages travel beside the computing and delay only who waits for them.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from fsdpx.errors import ConfigError, ProgramError
from fsdpx.program.action import Action
from fsdpx.program.plan import Plan

__all__ = ["Costs", "Event", "bubble", "by_rank", "done_as", "needs", "reached", "simulate"]

PerStage = float | Sequence[float]
Done = tuple[str, int, int]
"""What an action has done: ("F" | "I" | "W", stage, microbatch). B does what I does, and W as well."""


@dataclass(frozen=True, slots=True)
class Event:
    """An action that ran on a rank of the pipe from `start` to `end`, in seconds (or the unit of the costs)."""

    rank: int
    action: Action
    start: float
    end: float


@dataclass(frozen=True)
class Costs:
    """Time of one microbatch in one stage: a number for all stages, or one per stage. communication: a message between
    two ranks. B takes backward_input + backward_params.
    """

    forward: PerStage
    backward_input: PerStage
    backward_params: PerStage
    communication: float = 0.0

    def __post_init__(self) -> None:
        for name in ("forward", "backward_input", "backward_params", "communication"):
            value = getattr(self, name)
            if min([value] if isinstance(value, int | float) else value, default=0) < 0:
                raise ConfigError(f"Costs({name}={value}): a time is at least 0")

    def of(self, action: Action) -> float:
        assert action.unit is not None
        forward, first, second = (
            value if isinstance(value, int | float) else value[action.unit]
            for value in (self.forward, self.backward_input, self.backward_params)
        )
        return {"F": forward, "I": first, "W": second, "B": first + second}[action.op]

    def check(self, stages: int) -> None:
        """Raise ConfigError where there is one number per stage, but for another number of stages."""
        for name in ("forward", "backward_input", "backward_params"):
            value = getattr(self, name)
            if not isinstance(value, int | float) and len(value) != stages:
                raise ConfigError(f"Costs({name}=...) has {len(value)} numbers, the schedule has {stages} stages")


def done_as(action: Action) -> Done:
    """What others can wait for once the action of a schedule is done."""
    assert action.unit is not None
    assert action.mb is not None
    return ("I" if action.op == "B" else action.op), action.unit, action.mb


def needs(action: Action, stages: int) -> list[Done]:
    """What the action of a schedule waits for."""
    assert action.unit is not None
    assert action.mb is not None
    stage, mb = action.unit, action.mb
    if action.op == "F":
        return [("F", stage - 1, mb)] if stage else []
    if action.op == "W":
        return [("I", stage, mb)]
    return [("F", stage, mb), *([("I", stage + 1, mb)] if stage + 1 < stages else [])]


def simulate(plan: Plan, costs: Costs) -> list[Event]:
    """One event per action, rank by rank in the order of the plan. An action starts when its rank is free and what it
    needs has arrived: at once on the same rank, after `costs.communication` from another.

    Raises ConfigError for costs of another number of stages, ProgramError for a plan whose ranks wait for each other.
    """
    rows = reached(plan, costs)
    for rank, (row, actions) in enumerate(zip(rows, plan.ranks, strict=True)):
        if len(row) < len(actions):
            raise ProgramError(
                f"schedule {plan.name!r}: rank {rank} waits forever at {actions[len(row)]}; see validate()"
            )
    return [event for row in rows for event in row]


def reached(plan: Plan, costs: Costs) -> list[list[Event]]:
    """How far every rank of a plan gets: all the way, unless ranks wait for each other."""
    costs.check(plan.stages)
    done: dict[Done, float] = {}
    rows: list[list[Event]] = [[] for _ in plan.ranks]

    def arrival(need: Done, rank: int) -> float:
        return done[need] + (costs.communication if plan.home[need[1]] != rank else 0.0)

    def advance(rank: int) -> bool:
        row, actions = rows[rank], plan.ranks[rank]
        before = len(row)
        while len(row) < len(actions):
            action = actions[len(row)]
            wanted = needs(action, plan.stages)
            if any(need not in done for need in wanted):
                break
            start = max([row[-1].end if row else 0.0, *(arrival(need, rank) for need in wanted)])
            row.append(Event(rank, action, start, start + costs.of(action)))
            done[done_as(action)] = row[-1].end
        return len(row) > before

    while [rank for rank in range(len(rows)) if advance(rank)]:
        pass
    return rows


def bubble(events: Sequence[Event], plan: Plan, costs: Costs) -> float:
    """The idle share of the busiest time line: (span - work) / span, as in table 5 of Qi et al. (ICLR 2024).

    span: the longest time of a rank from its first start to its last end. work: time of all its actions, of the rank
    with most of it; with equal stages, microbatches x stages per rank x (forward + both halves of backward).
    """
    span = max(row[-1].end - row[0].start for row in by_rank(events).values())
    work = max(sum(costs.of(action) for action in actions) for actions in plan.ranks)
    return (span - work) / span


def by_rank(events: Sequence[Event]) -> dict[int, list[Event]]:
    """The events of each rank, in the order given."""
    rows: dict[int, list[Event]] = defaultdict(list)
    for event in events:
        rows[event.rank].append(event)
    return rows
