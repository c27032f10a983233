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
from fsdpx.core.program.verbs import VERBS, Action, Slot, marked, parse, partner
from fsdpx.errors import ConfigError, ProgramError

__all__ = [
    "UNIT", "ActionTimes", "Costs", "Event", "PipelineSchedule", "Stuck", "Task", "Waits", "bubble", "by_rank",
    "done_as", "idle", "needs", "run", "simulate", "simulate_programs", "walk", "walked",
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
    def of(cls, name: str, rows: Iterable[str | Sequence[Action | str]], microbatches: int) -> PipelineSchedule:
        """From lists of actions, or their text, per rank. A stage is at home where its first F stands.

        Raises ProgramError for text that is no action, and for stages without any F."""
        ranks = tuple(_row(name, rank, row) for rank, row in enumerate(rows))
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


def _row(name: str, rank: int, row: str | Sequence[Action | str]) -> tuple[Action, ...]:
    words = [row] if isinstance(row, str) else row
    try:
        return tuple(a for word in words for a in ([word] if isinstance(word, Action) else parse(word)))
    except ProgramError as error:
        raise ProgramError(f"schedule {name!r}, rank {rank}: {error}") from None


@dataclass(frozen=True, slots=True)
class Event:
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
class Task:
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
class Stuck:
    """A rank that cannot go on. at: its next task. keys: what that waits for. ranks: those that have it still to do."""

    rank: int
    at: int
    keys: tuple[Hashable, ...]
    ranks: tuple[int, ...]


def walk(rows: Sequence[Sequence[Task]]) -> tuple[list[list[Event]], list[Stuck]]:
    """The events of each rank's tasks as far as they get, and the ranks that do not finish."""
    left: dict[Hashable, int] = Counter([task.key for row in rows for task in row])  # tasks that complete a key
    ends, lanes, free = dict[Hashable, float](), dict[Hashable, float](), [0.0] * len(rows)
    spans: list[list[tuple[float, float]]] = [[] for _ in rows]

    def missing(task: Task) -> list[Hashable]:
        return [key for key, _ in task.waits if left.get(key, 1)]  # 1: no task completes it

    def issue(rank: int, task: Task) -> None:
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

    def advance(rank: int) -> bool:
        done = spans[rank]
        before = len(done)
        for task in islice(rows[rank], before, None):
            for key, _ in task.waits:
                if left.get(key, 1):
                    return len(done) > before
            issue(rank, task)
        return len(done) > before

    while [rank for rank in range(len(rows)) if advance(rank)]:
        pass
    ahead = [row[len(done) :] for row, done in zip(rows, spans, strict=True)]
    stuck = [_stuck(rank, len(spans[rank]), missing(row[0]), ahead) for rank, row in enumerate(ahead) if row]
    return [_events(rank, rows[rank], done, ends) for rank, done in enumerate(spans)], stuck


def _events(
    rank: int, row: Sequence[Task], spans: Sequence[tuple[float, float]], ends: Mapping[Hashable, float]
) -> list[Event]:
    done = zip(row, spans, strict=False)
    return [Event(rank, task.action, start, max((end, ends.get(task.until, end)))) for task, (start, end) in done]


def _stuck(rank: int, at: int, keys: Sequence[Hashable], ahead: Sequence[Sequence[Task]]) -> Stuck:
    """ahead: what every rank has still to do."""
    ranks = tuple(other for other, row in enumerate(ahead) if any(task.key in keys for task in row))
    return Stuck(rank, at, tuple(keys), ranks)


def by_rank(events: Iterable[Event]) -> dict[int, list[Event]]:
    """The events of each rank, in the order given."""
    rows: dict[int, list[Event]] = defaultdict(list)
    for event in events:
        rows[event.rank].append(event)
    return rows


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
    schedule : what `fsdpx.core.program.schedule` gives
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


Seconds = Callable[[int, Action], float]
"""How long an action takes on a rank."""


@dataclass(frozen=True)
class ActionTimes:
    """How long actions take. seconds: by (verb, unit), else by (verb, None), else 0; or a function of rank and action.

    A unit of SEND is an edge: its seconds are those of the message on the link."""

    seconds: Mapping[tuple[str, int | None], float] | Seconds

    def of(self, rank: int, action: Action) -> float:
        if callable(self.seconds):
            return self.seconds(rank, action)
        return self.seconds.get((action.op, action.unit), self.seconds.get((action.op, None), 0.0))


def simulate_programs(programs: Sequence[Program], machine: ActionTimes) -> list[Event]:
    """One event per action, rank by rank in the order of the programs; programs: one per rank of the pipe.

    A rank issues its actions in order. It waits for the slots that an action takes, reads or adds to. What it computes
    occupies it; what moves runs beside it, one at a time per lane, and completes its slots at its end. A message leaves
    when it is sent, one at a time per pair of ranks, and completes what is received for it.

    Raises ProgramError if ranks wait for each other."""
    return [event for row in run(programs, machine.of) for event in row]


def run(programs: Sequence[Program], seconds: Seconds, blocking: bool = False) -> list[list[Event]]:
    """The events of each rank. blocking: a rank goes on only when all the ranks it meets have arrived.

    Raises ProgramError if ranks wait for each other."""
    events, stuck = walk([_tasks(program, rank, seconds, blocking) for rank, program in enumerate(programs)])
    if stuck:
        lines = [line for wait in stuck for line in _explained(programs[wait.rank], wait)]
        raise ProgramError("\n".join(["the ranks of the pipe wait for each other", *lines]))
    return events


def _explained(program: Program, wait: Stuck) -> Iterator[str]:
    """Whom a rank waits for, and where it stands."""
    messages = [key for key in wait.keys if isinstance(key, Action)]
    whom = [f"{message} of rank {program.stage.edge(message).sender}" for message in messages]
    whom += [] if messages else [f"rank {rank}" for rank in wait.ranks]
    yield f"rank {wait.rank} of the pipe, at {program.actions[wait.at]}, waits for {', '.join(whom)}"
    yield marked(program.actions, wait.at)


def _tasks(program: Program, rank: int, seconds: Seconds, blocking: bool) -> list[Task]:
    """The program as tasks of one rank. What is sent completes its message; ranks that meet complete one key."""
    coming: dict[Slot, Hashable] = {}  # slots that are filled beside the computing, and the key that completes them
    times: Counter[Action] = Counter()
    met: list[Hashable] = []
    tasks = []
    for at, (action, slots) in enumerate(zip(program.actions, program.slots, strict=True)):
        keys = [*(coming[s] for s in (*slots.takes, *slots.reads, *slots.adds) if s in coming), *met]
        times[action] += 1
        task = _task(program, rank, at, times[action], tuple((key, 0.0) for key in keys), seconds(rank, action))
        tasks.append(task)
        if task.lane is not None:
            coming |= dict.fromkeys((*slots.adds, *slots.gives), task.key if task.until is None else task.until)
        met = [task.until] if blocking and VERBS[action.op].meets else []
    return tasks


def _task(program: Program, rank: int, at: int, time: int, waits: Waits, seconds: float) -> Task:
    """Action `at` of a program, there for the nth time."""
    action, key = program.actions[at], (rank, at)
    verb = VERBS[action.op]
    if verb.meets:
        return Task(action, (action, time), waits, seconds, (rank, verb.lane), (action, time))
    if verb.receives:
        sent = Action(partner(action.op), action.unit, action.mb)
        return Task(action, key, waits, lane=(rank, verb.lane), until=sent)
    if verb.sends:
        edge = program.stage.edge(action)
        return Task(action, action, waits, seconds, ("link", edge.sender, edge.receiver))
    return Task(action, key, waits, seconds, (rank, verb.lane) if verb.moves else None)


def idle(events: Sequence[Event]) -> float:
    """The share of a step in which ranks do not compute, in the mean of all ranks; from events of programs.

    A step is as long as its longest rank takes from its first to its last action that computes, the bubble of Qi et al.
    """
    rows = [[e for e in row if VERBS[e.action.op].lane == "compute"] for row in by_rank(events).values()]
    spans = [max(e.end for e in row) - min(e.start for e in row) for row in rows if row]
    busy = sum(e.end - e.start for row in rows for e in row)
    return 1.0 - busy / (len(rows) * max(spans)) if spans and max(spans) > 0 else 0.0


UNIT = Costs(forward=1, backward_input=1, backward_params=1)
