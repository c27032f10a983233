"""Programs run on paper: when each action of each rank begins and ends, where ranks wait for each other.

A pipeline schedule says what each rank of the pipe does in which order, stage by stage, microbatch by microbatch. A
timeline runs the tasks of several ranks to their end, or to where ranks wait for each other: a rank issues its tasks in
order, each as soon as what it waits for is there. A task occupies its rank, or runs beside it on a lane, where one runs
at a time."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice

from fsdpx.core.program.compiler import Program
from fsdpx.core.program.verbs import VERBS, Action, Slot, get_partner, mark_action, parse_actions
from fsdpx.errors import ConfigError, ProgramError

__all__ = [
    "UNIT_COSTS",
    "ActionEvent",
    "ActionTimes",
    "Deadlock",
    "PipelineSchedule",
    "SimulatedTask",
    "StageCosts",
    "Waits",
    "compute_bubble",
    "compute_idle_share",
    "get_completion_key",
    "group_by_rank",
    "list_dependencies",
    "run_tasks",
    "simulate",
    "simulate_by_rank",
    "simulate_programs",
    "simulate_until_deadlock",
]  # fmt: skip


@dataclass(frozen=True)
class PipelineSchedule:
    """What a schedule gives. ranks: one list of actions per rank of the pipe. home: the rank of each stage."""

    name: str
    ranks: tuple[tuple[Action, ...], ...]
    home: tuple[int, ...]
    stages: int
    microbatches: int

    @classmethod
    def from_rows(cls, name: str, rows: Iterable[str | Sequence[Action | str]], microbatches: int) -> PipelineSchedule:
        """From lists of actions, or their text, per rank. A stage is at home where its first F stands.

        Raises ProgramError for text that is no action, and for stages without any F."""
        ranks = tuple(_parse_row(name, rank, row) for rank, row in enumerate(rows))
        forwards = [(a.unit, rank) for rank, row in enumerate(ranks) for a in row if a.op == "F" and a.unit is not None]
        home = dict(reversed(forwards))
        stages = max(home, default=0) + 1
        lost = [str(stage) for stage in range(stages) if stage not in home]
        if lost:
            raise ProgramError(f"schedule {name!r}: no rank has an F of stage {', '.join(lost)}")
        return cls(name, ranks, tuple(home[stage] for stage in range(stages)), stages, microbatches)

    def __str__(self) -> str:
        """One line per rank: what a text file of this schedule says."""
        return "\n".join(" ".join(map(str, row)) for row in self.ranks)


def _parse_row(name: str, rank: int, row: str | Sequence[Action | str]) -> tuple[Action, ...]:
    words = [row] if isinstance(row, str) else row
    try:
        return tuple(a for word in words for a in ([word] if isinstance(word, Action) else parse_actions(word)))
    except ProgramError as error:
        raise ProgramError(f"schedule {name!r}, rank {rank}: {error}") from None


@dataclass(frozen=True, slots=True)
class ActionEvent:
    """An action that ran on a rank from `start` to `end`, in seconds (or the unit of the costs).

    rank: of the pipe; of the world in a trace. nbytes: that this rank sent or received in it. key: of what moves, the
    same on all ranks that take part: both ends of a message, or all of a collective."""

    rank: int
    action: Action
    start: float
    end: float
    nbytes: int = 0
    key: Hashable = None


Waits = tuple[tuple[Hashable, float], ...]


@dataclass(frozen=True, slots=True)
class SimulatedTask:
    """key: what it completes; where several tasks have one key, the last of them completes it.

    waits: keys, and for each how long it takes from there to here. lane: None if the task occupies its rank.
    until: a key without which the task does not end, though its rank goes on."""

    action: Action
    key: Hashable
    waits: Waits = ()
    seconds: float = 0.0
    lane: Hashable | None = None
    until: Hashable | None = None


@dataclass(frozen=True)
class Deadlock:
    """A rank that cannot go on. at: its next task. keys: what that waits for. ranks: those that have it still to do."""

    rank: int
    at: int
    keys: tuple[Hashable, ...]
    ranks: tuple[int, ...]


def run_tasks(rows: Sequence[Sequence[SimulatedTask]]) -> tuple[list[list[ActionEvent]], list[Deadlock]]:
    """The events of each rank's tasks as far as they get, and the ranks that do not finish."""
    left: dict[Hashable, int] = Counter([task.key for row in rows for task in row])  # tasks that complete a key
    ends, lanes, free = dict[Hashable, float](), dict[Hashable, float](), [0.0] * len(rows)
    spans: list[list[tuple[float, float]]] = [[] for _ in rows]

    def list_missing(task: SimulatedTask) -> list[Hashable]:
        return [key for key, _ in task.waits if left.get(key, 1)]  # 1: no task completes it

    def issue_task(rank: int, task: SimulatedTask) -> None:
        key, lane, start = task.key, task.lane, free[rank]
        if task.waits:
            start = max([start, *[ends[key] + way for key, way in task.waits]])
        if lane is None:
            free[rank] = end = start + task.seconds
        else:
            free[rank], start = start, max((start, lanes.get(lane, 0.0)))
            lanes[lane] = end = start + task.seconds
        ends[key] = max((end, ends[key])) if key in ends else end
        left[key] -= 1
        spans[rank].append((start, end))

    def advance_rank(rank: int) -> bool:
        done = spans[rank]
        before = len(done)
        for task in islice(rows[rank], before, None):
            for key, _ in task.waits:
                if left.get(key, 1):
                    return len(done) > before
            issue_task(rank, task)
        return len(done) > before

    while [rank for rank in range(len(rows)) if advance_rank(rank)]:
        pass
    ahead = [row[len(done) :] for row, done in zip(rows, spans, strict=True)]
    stuck = [
        _make_deadlock(rank, len(spans[rank]), list_missing(row[0]), ahead) for rank, row in enumerate(ahead) if row
    ]
    return [_make_events(rank, rows[rank], done, ends) for rank, done in enumerate(spans)], stuck


def _make_events(
    rank: int, row: Sequence[SimulatedTask], spans: Sequence[tuple[float, float]], ends: Mapping[Hashable, float]
) -> list[ActionEvent]:
    done = zip(row, spans, strict=False)
    return [ActionEvent(rank, task.action, start, max((end, ends.get(task.until, end)))) for task, (start, end) in done]


def _make_deadlock(rank: int, at: int, keys: Sequence[Hashable], ahead: Sequence[Sequence[SimulatedTask]]) -> Deadlock:
    """ahead: what every rank has still to do."""
    ranks = tuple(other for other, row in enumerate(ahead) if any(task.key in keys for task in row))
    return Deadlock(rank, at, tuple(keys), ranks)


def group_by_rank(events: Iterable[ActionEvent]) -> dict[int, list[ActionEvent]]:
    """The events of each rank, in the order given."""
    rows: dict[int, list[ActionEvent]] = defaultdict(list)
    for event in events:
        rows[event.rank].append(event)
    return rows


PerStage = float | Sequence[float]
Done = tuple[str, int, int]
"""What an action has done: ("F" | "I" | "W", stage, microbatch). B does what I does, and W as well."""


@dataclass(frozen=True)
class StageCosts:
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

    def cost_of(self, action: Action) -> float:
        assert action.unit is not None
        parts = {"F": [self.forward], "I": [self.backward_input], "W": [self.backward_params]}
        parts["B"] = parts["I"] + parts["W"]
        return sum(value if isinstance(value, int | float) else value[action.unit] for value in parts[action.op])

    def check(self, stages: int) -> None:
        """Raise ConfigError where there is one number per stage, but for another number of stages."""
        for name, value in vars(self).items():
            if not isinstance(value, int | float) and len(value) != stages:
                raise ConfigError(f"Costs({name}=...) has {len(value)} numbers, the schedule has {stages} stages")


def get_completion_key(action: Action) -> Done:
    """What others can wait for once the action of a schedule is done."""
    assert action.unit is not None
    assert action.mb is not None
    return ("I" if action.op == "B" else action.op), action.unit, action.mb


def list_dependencies(action: Action, stages: int) -> list[Done]:
    """What the action of a schedule waits for."""
    _, stage, mb = get_completion_key(action)
    if action.op == "F":
        return [("F", stage - 1, mb)] if stage else []
    if action.op == "W":
        return [("I", stage, mb)]
    return [("F", stage, mb), *([("I", stage + 1, mb)] if stage + 1 < stages else [])]


def simulate(schedule: PipelineSchedule, costs: StageCosts) -> list[ActionEvent]:
    """When each action of a schedule runs: one event per action, rank by rank in the order of the schedule.

    An action starts when its rank is free and what it needs has arrived: at once on the same rank, after
    `costs.communication` from another.

    Parameters
    ----------
    schedule : what `fsdpx.core.program.make_schedule` gives
    costs : the time of each stage and message

    Raises
    ------
    ConfigError : costs of another number of stages
    ProgramError : ranks wait for each other
    """
    rows, stuck = simulate_until_deadlock(schedule, costs)
    for wait in stuck:
        action = schedule.ranks[wait.rank][wait.at]
        raise ProgramError(f"schedule {schedule.name!r}: rank {wait.rank} waits forever at {action}; see validate()")
    return [event for row in rows for event in row]


def simulate_until_deadlock(
    schedule: PipelineSchedule, costs: StageCosts
) -> tuple[list[list[ActionEvent]], list[Deadlock]]:
    """How far every rank of a schedule gets: all the way, unless ranks wait for each other."""
    costs.check(schedule.stages)

    def make_task(rank: int, action: Action) -> SimulatedTask:
        wanted = list_dependencies(action, schedule.stages)
        waits = tuple((need, costs.communication * (schedule.home[need[1]] != rank)) for need in wanted)
        return SimulatedTask(action, get_completion_key(action), waits, costs.cost_of(action))

    return run_tasks([[make_task(rank, action) for action in row] for rank, row in enumerate(schedule.ranks)])


def compute_bubble(events: Sequence[ActionEvent], schedule: PipelineSchedule, costs: StageCosts) -> float:
    """The idle share of the busiest time line: (span - work) / span, as in table 5 of Qi et al. (ICLR 2024).

    span: the longest time of a rank from its first start to its last end. work: time of all its actions, of the rank
    with most of it; with equal stages, microbatches x stages per rank x (forward + both halves of backward)."""
    span = max(row[-1].end - row[0].start for row in group_by_rank(events).values())
    work = max(sum(costs.cost_of(action) for action in actions) for actions in schedule.ranks)
    return (span - work) / span


Seconds = Callable[[int, Action], float]
"""How long an action takes on a rank."""


@dataclass(frozen=True)
class ActionTimes:
    """How long actions take. seconds: by (verb, unit), else by (verb, None), else 0; or a function of rank and action.

    A unit of SEND is an edge: its seconds are those of the message on the link."""

    seconds: Mapping[tuple[str, int | None], float] | Seconds

    def seconds_of(self, rank: int, action: Action) -> float:
        if callable(self.seconds):
            return self.seconds(rank, action)
        return self.seconds.get((action.op, action.unit), self.seconds.get((action.op, None), 0.0))


def simulate_programs(programs: Sequence[Program], machine: ActionTimes) -> list[ActionEvent]:
    """One event per action, rank by rank in the order of the programs; programs: one per rank of the pipe.

    A rank issues its actions in order. It waits for the slots that an action takes, reads or adds to. What it computes
    occupies it; what moves runs beside it, one at a time per lane, and completes its slots at its end. A message leaves
    when it is sent, one at a time per pair of ranks, and completes what is received for it.

    Raises ProgramError if ranks wait for each other."""
    return [event for row in simulate_by_rank(programs, machine.seconds_of) for event in row]


def simulate_by_rank(programs: Sequence[Program], seconds: Seconds, blocking: bool = False) -> list[list[ActionEvent]]:
    """The events of each rank. blocking: a rank goes on only when all the ranks it meets have arrived.

    Raises ProgramError if ranks wait for each other."""
    events, stuck = run_tasks([_make_tasks(program, rank, seconds, blocking) for rank, program in enumerate(programs)])
    if stuck:
        lines = [line for wait in stuck for line in _explain_wait(programs[wait.rank], wait)]
        raise ProgramError("\n".join(["the ranks of the pipe wait for each other", *lines]))
    return events


def _explain_wait(program: Program, wait: Deadlock) -> Iterator[str]:
    """Whom a rank waits for, and where it stands."""
    messages = [key for key in wait.keys if isinstance(key, Action)]
    whom = [f"{message} of rank {program.stage.edge_of(message).sender}" for message in messages]
    whom += [] if messages else [f"rank {rank}" for rank in wait.ranks]
    yield f"rank {wait.rank} of the pipe, at {program.actions[wait.at]}, waits for {', '.join(whom)}"
    yield mark_action(program.actions, wait.at)


def _make_tasks(program: Program, rank: int, seconds: Seconds, blocking: bool) -> list[SimulatedTask]:
    """The program as tasks of one rank. What is sent completes its message; ranks that meet complete one key."""
    coming: dict[Slot, Hashable] = {}  # slots that are filled beside the computing, and the key that completes them
    times: Counter[Action] = Counter()
    met: list[Hashable] = []
    tasks = []
    for index, (action, slots) in enumerate(zip(program.actions, program.slots, strict=True)):
        keys = [*(coming[s] for s in (*slots.takes, *slots.reads, *slots.adds) if s in coming), *met]
        times[action] += 1
        task = _make_task(program, rank, index, times[action], tuple((key, 0.0) for key in keys), seconds(rank, action))
        tasks.append(task)
        if task.lane is not None:
            coming |= dict.fromkeys((*slots.adds, *slots.gives), task.key if task.until is None else task.until)
        met = [task.until] if blocking and VERBS[action.op].is_synchronizing else []
    return tasks


def _make_task(program: Program, rank: int, at: int, time: int, waits: Waits, seconds: float) -> SimulatedTask:
    """Action `at` of a program, there for the nth time."""
    action, key = program.actions[at], (rank, at)
    verb = VERBS[action.op]
    if verb.is_synchronizing:
        return SimulatedTask(action, (action, time), waits, seconds, (rank, verb.lane), (action, time))
    if verb.is_receive:
        sent = Action(get_partner(action.op), action.unit, action.mb)
        return SimulatedTask(action, key, waits, lane=(rank, verb.lane), until=sent)
    if verb.is_send:
        edge = program.stage.edge_of(action)
        return SimulatedTask(action, action, waits, seconds, ("link", edge.sender, edge.receiver))
    return SimulatedTask(action, key, waits, seconds, (rank, verb.lane) if verb.moves else None)


def compute_idle_share(events: Sequence[ActionEvent]) -> float:
    """The share of a step in which ranks do not compute, in the mean of all ranks; from events of programs.

    A step is as long as its longest rank takes from its first to its last action that computes, the bubble of Qi et al.
    """
    rows = [[e for e in row if VERBS[e.action.op].lane == "compute"] for row in group_by_rank(events).values()]
    spans = [max(e.end for e in row) - min(e.start for e in row) for row in rows if row]
    busy = sum(e.end - e.start for row in rows for e in row)
    return 1.0 - busy / (len(rows) * max(spans)) if spans and max(spans) > 0 else 0.0


UNIT_COSTS = StageCosts(forward=1, backward_input=1, backward_params=1)
