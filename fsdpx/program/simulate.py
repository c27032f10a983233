"""simulate: when each action of a schedule runs, on a machine of given speeds, and how long ranks are idle.

The machine model is that of Qi et al., "Zero Bubble Pipeline Parallelism" (ICLR 2024): a rank computes one action at a
time, in the order of its list; messages travel beside the computing and delay only the ranks that wait for them."""

from collections.abc import Sequence
from dataclasses import dataclass

from fsdpx.errors import ConfigError, ProgramError
from fsdpx.program.action import Action
from fsdpx.program.pipeline_schedule import PipelineSchedule
from fsdpx.program.timeline import Event, Stuck, Task, by_rank, walk

__all__ = ["Costs", "Event", "bubble", "by_rank", "done_as", "needs", "simulate", "walked"]

PerStage = float | Sequence[float]
Done = tuple[str, int, int]
"""What an action has done: ("F" | "I" | "W", stage, microbatch). B does what I does, and W as well."""


@dataclass(frozen=True)
class Costs:
    """Time of one microbatch in one stage: a number for all stages, or one per stage.

    Parameters
    ----------
    forward : of F
    backward_input : of I
    backward_params : of W; B takes both
    communication : of a message between two ranks

    Raises
    ------
    ConfigError : a time below 0
    """

    forward: PerStage
    backward_input: PerStage
    backward_params: PerStage
    communication: float = 0.0

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if min([value] if isinstance(value, int | float) else value, default=0) < 0:
                raise ConfigError(f"Costs({name}={value}): a time is at least 0")

    def of(self, action: Action) -> float:
        assert action.unit is not None
        parts = {"F": [self.forward], "I": [self.backward_input], "W": [self.backward_params]}
        parts["B"] = parts["I"] + parts["W"]
        return sum(value if isinstance(value, int | float) else value[action.unit] for value in parts[action.op])

    def check(self, stages: int) -> None:
        """Raise ConfigError where there is one number per stage, but for another number of stages."""
        for name, value in vars(self).items():
            if not isinstance(value, int | float) and len(value) != stages:
                raise ConfigError(f"Costs({name}=...) has {len(value)} numbers, the schedule has {stages} stages")


def done_as(action: Action) -> Done:
    """What others can wait for once the action of a schedule is done."""
    assert action.unit is not None
    assert action.mb is not None
    return ("I" if action.op == "B" else action.op), action.unit, action.mb


def needs(action: Action, stages: int) -> list[Done]:
    """What the action of a schedule waits for."""
    _, stage, mb = done_as(action)
    if action.op == "F":
        return [("F", stage - 1, mb)] if stage else []
    if action.op == "W":
        return [("I", stage, mb)]
    return [("F", stage, mb), *([("I", stage + 1, mb)] if stage + 1 < stages else [])]


def simulate(schedule: PipelineSchedule, costs: Costs) -> list[Event]:
    """When each action of a schedule runs: one event per action, rank by rank in the order of the schedule.

    An action starts when its rank is free and what it needs has arrived: at once on the same rank, after
    `costs.communication` from another.

    Parameters
    ----------
    schedule : what `fsdpx.program.schedule` gives
    costs : the time of each stage and message

    Raises
    ------
    ConfigError : costs of another number of stages
    ProgramError : ranks wait for each other
    """
    rows, stuck = walked(schedule, costs)
    for wait in stuck:
        action = schedule.ranks[wait.rank][wait.at]
        raise ProgramError(f"schedule {schedule.name!r}: rank {wait.rank} waits forever at {action}; see validate()")
    return [event for row in rows for event in row]


def walked(schedule: PipelineSchedule, costs: Costs) -> tuple[list[list[Event]], list[Stuck]]:
    """How far every rank of a schedule gets: all the way, unless ranks wait for each other."""
    costs.check(schedule.stages)

    def task(rank: int, action: Action) -> Task:
        wanted = needs(action, schedule.stages)
        waits = tuple((need, costs.communication * (schedule.home[need[1]] != rank)) for need in wanted)
        return Task(action, done_as(action), waits, costs.of(action))

    return walk([[task(rank, action) for action in row] for rank, row in enumerate(schedule.ranks)])


def bubble(events: Sequence[Event], schedule: PipelineSchedule, costs: Costs) -> float:
    """The idle share of the busiest time line: (span - work) / span, as in table 5 of Qi et al. (ICLR 2024).

    span: the longest time of a rank from its first start to its last end. work: time of all its actions, of the rank
    with most of it; with equal stages, microbatches x stages per rank x (forward + both halves of backward)."""
    span = max(row[-1].end - row[0].start for row in by_rank(events).values())
    work = max(sum(costs.of(action) for action in actions) for actions in schedule.ranks)
    return (span - work) / span
