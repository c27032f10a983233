"""Simulate programs and pipeline schedules to find when each action of each rank begins and ends, and where ranks
deadlock.

A pipeline schedule lists the actions of each pipeline rank in order, by stage and microbatch. `simulate_tasks` runs the
tasks of several ranks until all are complete or the ranks deadlock. A rank issues its tasks in order, each as soon as
its dependencies are complete. A task either occupies its rank, or runs concurrently on a lane (such as a network link).
A lane runs one task at a time."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from itertools import islice

from fsdpx.core.base.dataclass import dataclass
from fsdpx.core.program.compiler import Program
from fsdpx.core.program.verbs import VERBS, Action, Slot, format_action_with_neighbors, get_partner_verb, parse_actions
from fsdpx.errors import ConfigError, ProgramError

__all__ = [
    "UNIT_COSTS", "ActionEvent", "ActionTimes", "Deadlock", "PipelineSchedule", "SimulatedTask", "StageCosts", "Waits",
    "compute_bubble", "compute_idle_share", "get_completion_key", "group_events_by_rank", "list_dependencies_of_action",
    "simulate", "simulate_programs", "simulate_programs_by_rank", "simulate_tasks", "simulate_until_deadlock",
]  # fmt: skip


@dataclass(frozen=True)
class PipelineSchedule:
    """A pipeline schedule: the order of the forward and backward actions of each pipeline rank.

    Attributes
    ----------
    name : name of the schedule in error messages and reports
    ranks : for each pipeline rank, its actions in order
    home : the rank of each stage
    stages : number of stages
    microbatches : number of microbatches per step
    """

    name: str
    ranks: tuple[tuple[Action, ...], ...]
    home: tuple[int, ...]
    stages: int
    microbatches: int

    @classmethod
    def from_rows(cls, name: str, rows: Iterable[str | Sequence[Action | str]], microbatches: int) -> PipelineSchedule:
        """Build a schedule from the actions of each rank, given as lists or as text. Each stage is placed on the first
        rank that has an F of that stage.

        Parameters
        ----------
        name : name of the schedule in error messages and reports
        rows : for each rank, a list of actions (`Action` objects or their texts), or a single string of actions
            separated by blanks
        microbatches : number of microbatches per step

        Returns
        -------
        PipelineSchedule : a schedule that is not yet validated; see `fsdpx.core.program.validate`

        Raises
        ------
        ProgramError : if a text is not a valid action, or a stage has no F
        """
        ranks = tuple(_parse_schedule_row(name, rank, row) for rank, row in enumerate(rows))
        forwards = [(a.unit, rank) for rank, row in enumerate(ranks) for a in row if a.op == "F" and a.unit is not None]
        home = dict(reversed(forwards))
        stages = max(home, default=0) + 1
        lost = [str(stage) for stage in range(stages) if stage not in home]
        if lost:
            raise ProgramError(f"schedule {name!r}: no rank has an F of stage {', '.join(lost)}")
        return cls(name, ranks, tuple(home[stage] for stage in range(stages)), stages, microbatches)

    def __str__(self) -> str:
        """Return the schedule as text in the format of schedule files: one line of actions per rank."""
        return "\n".join(" ".join(map(str, row)) for row in self.ranks)


def _parse_schedule_row(name: str, rank: int, row: str | Sequence[Action | str]) -> tuple[Action, ...]:
    words = [row] if isinstance(row, str) else row
    try:
        return tuple(a for word in words for a in ([word] if isinstance(word, Action) else parse_actions(word)))
    except ProgramError as error:
        raise ProgramError(f"schedule {name!r}, rank {rank}: {error}") from None


@dataclass(frozen=True, slots=True)
class ActionEvent:
    """The start and end of an action on one rank, simulated or measured.

    Attributes
    ----------
    rank : pipeline rank; in a trace, the rank in the entire job
    action : the action
    start, end : times in seconds, or in the unit of the simulation's costs
    nbytes : bytes that this rank sent or received in the action
    key : identifier of a transfer; it is the same on all ranks that take part in the transfer, that is, at both ends of
        a message or on all ranks of a collective
    """

    rank: int
    action: Action
    start: float
    end: float
    nbytes: int = 0
    key: Hashable = None


Waits = tuple[tuple[Hashable, float], ...]


@dataclass(frozen=True, slots=True)
class SimulatedTask:
    """An action to simulate, with its dependencies. A dependency is expressed by a key: one or more tasks have this
    key, and other tasks wait until all of them have ended.

    Attributes
    ----------
    key : key of this task; a key is complete when all tasks with this key have ended
    waits : (key, delay in seconds) pairs: the task can start once each key has been complete for its delay
    seconds : duration of the task
    lane : lane on which the task runs, concurrently with its rank; if None, the task occupies its rank
    until : an additional key, or None. The task ends only when this key is complete, but its rank may continue earlier
    """

    action: Action
    key: Hashable
    waits: Waits = ()
    seconds: float = 0.0
    lane: Hashable | None = None
    until: Hashable | None = None


@dataclass(frozen=True)
class Deadlock:
    """A rank that can never continue.

    Attributes
    ----------
    rank : index of the blocked rank
    at : index of the task that it cannot start
    keys : incomplete keys that this task waits for
    ranks : ranks that have unfinished tasks with these keys
    """

    rank: int
    at: int
    keys: tuple[Hashable, ...]
    ranks: tuple[int, ...]


def simulate_tasks(rows: Sequence[Sequence[SimulatedTask]]) -> tuple[list[list[ActionEvent]], list[Deadlock]]:
    """Simulate the tasks of all ranks until all tasks are done or none can run. Return the events of each rank, and the
    ranks that do not finish."""
    # number of unfinished tasks for each key; a key is complete when the last of these tasks ends
    left: dict[Hashable, int] = Counter([task.key for row in rows for task in row])
    ends, lanes, free = dict[Hashable, float](), dict[Hashable, float](), [0.0] * len(rows)
    spans: list[list[tuple[float, float]]] = [[] for _ in rows]

    def list_missing(task: SimulatedTask) -> list[Hashable]:
        return [key for key, _ in task.waits if left.get(key, 1)]  # a key that no task has is never complete

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
    return [_make_rank_events(rank, rows[rank], done, ends) for rank, done in enumerate(spans)], stuck


def _make_rank_events(
    rank: int, row: Sequence[SimulatedTask], spans: Sequence[tuple[float, float]], ends: Mapping[Hashable, float]
) -> list[ActionEvent]:
    done = zip(row, spans, strict=False)
    return [ActionEvent(rank, task.action, start, max((end, ends.get(task.until, end)))) for task, (start, end) in done]


def _make_deadlock(rank: int, at: int, keys: Sequence[Hashable], ahead: Sequence[Sequence[SimulatedTask]]) -> Deadlock:
    """Explain why a rank is blocked: its task with index `at` waits for `keys`. `ahead` lists the unfinished tasks of
    each rank."""
    ranks = tuple(other for other, row in enumerate(ahead) if any(task.key in keys for task in row))
    return Deadlock(rank, at, tuple(keys), ranks)


def group_events_by_rank(events: Iterable[ActionEvent]) -> dict[int, list[ActionEvent]]:
    """Group events by rank; the events of each rank keep their order."""
    rows: dict[int, list[ActionEvent]] = defaultdict(list)
    for event in events:
        rows[event.rank].append(event)
    return rows


PerStage = float | Sequence[float]
Done = tuple[str, int, int]
"""The key under which a finished action is recorded: ("F", "I" or "W", stage, microbatch). B has the same key as I; the
verifier also records the key of W."""


@dataclass(frozen=True)
class StageCosts:
    """Time that one microbatch takes in one stage, by kind of action. Each time is one number for all stages, or one
    number per stage.

    Parameters
    ----------
    forward : time of F
    backward_input : time of I, the half of the backward pass that computes input gradients
    backward_params : time of W, the half that computes parameter gradients; B takes as long as I and W together
    communication : time of a message between two ranks

    Raises
    ------
    ConfigError : if a time is negative
    """

    forward: PerStage
    backward_input: PerStage
    backward_params: PerStage
    communication: float = 0.0

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if min([value] if isinstance(value, int | float) else value, default=0) < 0:
                raise ConfigError(f"StageCosts({name}={value}): a time is at least 0")

    def cost_of(self, action: Action) -> float:
        assert action.unit is not None
        parts = {"F": [self.forward], "I": [self.backward_input], "W": [self.backward_params]}
        parts["B"] = parts["I"] + parts["W"]
        return sum(value if isinstance(value, int | float) else value[action.unit] for value in parts[action.op])

    def require_stage_count(self, stages: int) -> None:
        """Raise ConfigError if times are given per stage, but for a number of stages other than `stages`.

        Parameters
        ----------
        stages : number of stages of the schedule

        Raises
        ------
        ConfigError : if times are given for a different number of stages
        """
        for name, value in vars(self).items():
            if not isinstance(value, int | float) and len(value) != stages:
                raise ConfigError(f"StageCosts({name}=...) has {len(value)} numbers, the schedule has {stages} stages")


def get_completion_key(action: Action) -> Done:
    """Return the key under which the simulator notes that an action of a schedule is complete. B has the same key as I,
    because other stages wait only for the input gradient, and both B and I compute it."""
    assert action.unit is not None
    assert action.mb is not None
    return ("I" if action.op == "B" else action.op), action.unit, action.mb


def list_dependencies_of_action(action: Action, stages: int) -> list[Done]:
    """Return the keys of the actions that must be complete before an action of a schedule can start."""
    _, stage, mb = get_completion_key(action)
    if action.op == "F":
        return [("F", stage - 1, mb)] if stage else []
    if action.op == "W":
        return [("I", stage, mb)]
    return [("F", stage, mb), *([("I", stage + 1, mb)] if stage + 1 < stages else [])]


def simulate(schedule: PipelineSchedule, costs: StageCosts) -> list[ActionEvent]:
    """Simulate a pipeline schedule. Return one event per action, rank by rank in the order of the schedule.

    An action starts when its rank is free and its inputs have arrived. Inputs from the same rank arrive immediately,
    and inputs from another rank arrive after `costs.communication`.

    Parameters
    ----------
    schedule : a schedule, as returned by `fsdpx.core.program.make_schedule`
    costs : the time of each stage and message

    Returns
    -------
    list of ActionEvent : times in the unit of the costs

    Raises
    ------
    ConfigError : if the costs are for a different number of stages
    ProgramError : if the schedule deadlocks
    """
    rows, stuck = simulate_until_deadlock(schedule, costs)
    for wait in stuck:
        action = schedule.ranks[wait.rank][wait.at]
        raise ProgramError(f"schedule {schedule.name!r}: rank {wait.rank} waits forever at {action}; see validate()")
    return [event for row in rows for event in row]


def simulate_until_deadlock(
    schedule: PipelineSchedule, costs: StageCosts
) -> tuple[list[list[ActionEvent]], list[Deadlock]]:
    """Simulate a schedule that may deadlock. Return the events of each rank, and the ranks that do not finish."""
    costs.require_stage_count(schedule.stages)

    def make_task(rank: int, action: Action) -> SimulatedTask:
        wanted = list_dependencies_of_action(action, schedule.stages)
        waits = tuple((need, costs.communication * (schedule.home[need[1]] != rank)) for need in wanted)
        return SimulatedTask(action, get_completion_key(action), waits, costs.cost_of(action))

    return simulate_tasks([[make_task(rank, action) for action in row] for rank, row in enumerate(schedule.ranks)])


def compute_bubble(events: Sequence[ActionEvent], schedule: PipelineSchedule, costs: StageCosts) -> float:
    """Return the bubble fraction of a simulated schedule, (span - work) / span, as in table 5 of Qi et al. (ICLR 2024).

    Parameters
    ----------
    events : events returned by `simulate`; span is the maximum, over all ranks, of the time from the rank's first start
        to its last end
    schedule : the schedule that was simulated
    costs : the costs with which the schedule was simulated; work is the maximum, over all ranks, of the total time of
        the rank's actions. With equal stages, work is microbatches x stages per rank x (forward + both halves of
        backward)

    Returns
    -------
    float : from 0 to 1
    """
    span = max(row[-1].end - row[0].start for row in group_events_by_rank(events).values())
    work = max(sum(costs.cost_of(action) for action in actions) for actions in schedule.ranks)
    return (span - work) / span


Seconds = Callable[[int, Action], float]
"""Function (rank, action) that returns the duration of the action."""


@dataclass(frozen=True)
class ActionTimes:
    """Durations of actions in seconds, for `simulate_programs`.

    Parameters
    ----------
    seconds : either a function (rank, action) that returns the duration, or a mapping from (operation, unit) to the
        duration. If an entry is missing, the entry for (operation, None) is used. If this entry is also missing, the
        duration is 0. For SEND, the unit is the index of the message in `Stage.edges`, and the duration is the time
        that the message takes on the link
    """

    seconds: Mapping[tuple[str, int | None], float] | Seconds

    def seconds_of(self, rank: int, action: Action) -> float:
        if callable(self.seconds):
            return self.seconds(rank, action)
        return self.seconds.get((action.op, action.unit), self.seconds.get((action.op, None), 0.0))


def simulate_programs(programs: Sequence[Program], machine: ActionTimes) -> list[ActionEvent]:
    """Simulate the programs of all pipeline ranks. Return one event per action, rank by rank in the order of the
    programs.

    A rank issues its actions in order. Before each action it waits until the slots (named buffers) that the action uses
    are filled. Computation occupies the rank. Transfers run concurrently with computation, one at a time per mesh axis,
    and fill their slots when they end. A message starts when it is sent, and fills the slots of the receiver when it
    ends. Each pair of ranks transfers one message at a time.

    Parameters
    ----------
    programs : one program per pipeline rank
    machine : durations of the actions

    Returns
    -------
    list of ActionEvent : times in seconds from the start of the simulation

    Raises
    ------
    ProgramError : if the programs deadlock
    """
    return [event for row in simulate_programs_by_rank(programs, machine.seconds_of) for event in row]


def simulate_programs_by_rank(
    programs: Sequence[Program], seconds: Seconds, blocking: bool = False
) -> list[list[ActionEvent]]:
    """Simulate the programs of all pipeline ranks and return the events of each rank. If `blocking` is true, a rank
    waits at each synchronizing action until all ranks have reached it.

    Raise ProgramError if ranks deadlock.
    """
    events, stuck = simulate_tasks(
        [_make_tasks(program, rank, seconds, blocking) for rank, program in enumerate(programs)]
    )
    if stuck:
        lines = [line for wait in stuck for line in _explain_wait(programs[wait.rank], wait)]
        raise ProgramError("\n".join(["the ranks of the pipe wait for each other", *lines]))
    return events


def _explain_wait(program: Program, wait: Deadlock) -> Iterator[str]:
    """Yield lines that name the action at which a blocked rank waits, and the messages or ranks that it waits for."""
    messages = [key for key in wait.keys if isinstance(key, Action)]
    whom = [f"{message} of rank {program.stage.edge_of(message).sender}" for message in messages]
    whom += [] if messages else [f"rank {rank}" for rank in wait.ranks]
    yield f"rank {wait.rank} of the pipe, at {program.actions[wait.at]}, waits for {', '.join(whom)}"
    yield format_action_with_neighbors(program.actions, wait.at)


def _make_tasks(program: Program, rank: int, seconds: Seconds, blocking: bool) -> list[SimulatedTask]:
    """Convert the program of one rank to simulated tasks. Their dependencies are expressed by keys: each message has
    its own key, and all ranks that take part in a synchronization use the same key."""
    coming: dict[Slot, Hashable] = {}  # for each slot (named buffer), the key of the transfer that fills it
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


def _make_task(
    program: Program, rank: int, at: int, occurrence: int, waits: Waits, seconds: float
) -> SimulatedTask:
    """Convert the action with index `at` to a simulated task. `occurrence` is 1 for the first occurrence of this action
    in the program, 2 for the second, and so on."""
    action, key = program.actions[at], (rank, at)
    verb = VERBS[action.op]
    if verb.is_synchronizing:
        joint = action, occurrence
        return SimulatedTask(action, joint, waits, seconds, (rank, verb.lane), joint)
    if verb.is_receive:
        sent = Action(get_partner_verb(action.op), action.unit, action.mb)
        return SimulatedTask(action, key, waits, lane=(rank, verb.lane), until=sent)
    if verb.is_send:
        edge = program.stage.edge_of(action)
        return SimulatedTask(action, action, waits, seconds, ("link", edge.sender, edge.receiver))
    return SimulatedTask(action, key, waits, seconds, (rank, verb.lane) if verb.moves else None)


def compute_idle_share(events: Sequence[ActionEvent]) -> float:
    """Return the fraction of a step that ranks spend idle, averaged over ranks. `events` are the events of all programs
    in the step.

    The length of a step is the time of the slowest rank from its first to its last compute action. With this
    definition, the fraction equals the bubble as defined by Qi et al. (ICLR 2024)."""
    rows = [[e for e in row if VERBS[e.action.op].lane == "compute"] for row in group_events_by_rank(events).values()]
    spans = [max(e.end for e in row) - min(e.start for e in row) for row in rows if row]
    busy = sum(e.end - e.start for row in rows for e in row)
    return 1.0 - busy / (len(rows) * max(spans)) if spans and max(spans) > 0 else 0.0


UNIT_COSTS = StageCosts(forward=1, backward_input=1, backward_params=1)
