"""machine: when each action of compiled programs runs, what of the moving computing hides, and which memory it takes.

As in `simulate`, a rank computes one action at a time in the order of its program; what moves runs beside it.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from fsdpx.errors import ProgramError
from fsdpx.program.action import Action
from fsdpx.program.compiler import Program
from fsdpx.program.simulate import Event, by_rank
from fsdpx.program.slots import SLOTS, Slot, buffer_of
from fsdpx.program.verbs import VERBS

__all__ = ["Machine", "Overlap", "idle", "memory", "overlap", "peak_memory", "simulate_programs"]


@dataclass(frozen=True)
class Machine:
    """How long actions take. seconds: by (verb, unit), else by (verb, None), else 0; or a function of rank and action.

    A unit of SEND is an edge: its seconds are those of the message on the link.
    """

    seconds: Mapping[tuple[str, int | None], float] | Callable[[int, Action], float]

    def of(self, rank: int, action: Action) -> float:
        if callable(self.seconds):
            return self.seconds(rank, action)
        return self.seconds.get((action.op, action.unit), self.seconds.get((action.op, None), 0.0))


def simulate_programs(programs: Sequence[Program], machine: Machine) -> list[Event]:
    """One event per action, rank by rank in the order of the programs; programs: one per rank of the pipe.

    A rank issues its actions in order. It waits for the slots that an action takes, reads or adds to. What it computes
    occupies it; what moves runs beside it, one at a time per lane, and completes its slots at its end. A message leaves
    when it is sent, one at a time per pair of ranks, and completes what is received for it.

    Raises ProgramError if ranks wait for each other.
    """
    run = _Run(programs, machine)
    lines = [_Line(rank, program, run) for rank, program in enumerate(programs)]
    while [line for line in lines if line.advance()]:
        pass
    stuck = [line.waits() for line in lines if len(line.events) < len(line.program.actions)]
    if stuck:
        raise ProgramError("the ranks of the pipe wait for each other\n" + "\n".join(stuck))
    return [event for line in lines for event in line.finished()]


Key = tuple[object, ...]


@dataclass
class _Run:
    """What the ranks know of each other: ends of messages by (edge, microbatch), arrivals at barriers by their key."""

    programs: Sequence[Program]
    machine: Machine
    ends: dict[Key, float] = field(default_factory=dict)
    links: dict[tuple[int, int], float] = field(default_factory=lambda: defaultdict(float))
    arrivals: dict[Key, list[float]] = field(default_factory=lambda: defaultdict(list))
    expected: dict[Key, int] = field(default_factory=lambda: defaultdict(int))

    def __post_init__(self) -> None:
        for program in self.programs:
            for key in filter(None, _barriers(program)):
                self.expected[key] += 1

    def send(self, program: Program, action: Action, issued: float, seconds: float) -> tuple[float, float]:
        assert action.unit is not None
        edge = program.stage.edges[action.unit]
        start = max(issued, self.links[edge.sender, edge.receiver])
        self.links[edge.sender, edge.receiver] = self.ends[action.unit, action.mb] = start + seconds
        return start, start + seconds

    def arrive(self, key: Key, issued: float) -> None:
        self.arrivals[key].append(issued)
        if len(self.arrivals[key]) == self.expected[key]:
            self.ends[key] = max(self.arrivals[key])


def _barriers(program: Program) -> Iterator[Key | None]:
    """For each action the barrier it belongs to: its verb for the nth time, or for pages that are one parameter."""
    times: dict[Key, int] = defaultdict(int)
    for action in program.actions:
        if not VERBS[action.op].meets:
            yield None
            continue
        times[action.op, action.unit] += 1
        yield action.op, action.unit, times[action.op, action.unit]


class _Line:
    """The time line of one rank: what it has issued, when it is free, and when its slots are complete."""

    def __init__(self, rank: int, program: Program, run: _Run) -> None:
        self.rank, self.program, self.run = rank, program, run
        self.events: list[Event] = []
        self.free = 0.0
        self.lanes: dict[str, float] = defaultdict(float)
        self.complete: dict[Slot, float | Key] = dict.fromkeys(program.begins, 0.0)  # a key: ends when others say so
        self.late: dict[int, Key] = {}  # events that end with what others do
        self.barriers = list(_barriers(program))

    def advance(self) -> bool:
        before = len(self.events)
        for at in range(before, len(self.program.actions)):
            wanted = [self._ready(slot) for slot in self._wanted(at)]
            if None in wanted:
                break
            self._issue(at, max([self.free, *(time for time in wanted if time is not None)]))
        return len(self.events) > before

    def finished(self) -> list[Event]:
        for at, key in self.late.items():
            event = self.events[at]
            self.events[at] = Event(event.rank, event.action, event.start, max(event.start, self.run.ends[key]))
        return self.events

    def waits(self) -> str:
        at = len(self.events)
        missing = [slot for slot in self._wanted(at) if self._ready(slot) is None]
        return f"rank {self.rank} at {self.program.actions[at]} for {', '.join(map(str, missing))}"

    def _wanted(self, at: int) -> list[Slot]:
        slots = self.program.slots[at]
        # what an action adds to need not be there yet
        return [*slots.takes, *slots.reads, *(slot for slot in slots.adds if slot in self.complete)]

    def _ready(self, slot: Slot) -> float | None:
        time = self.complete.get(slot)
        return self.run.ends.get(time) if isinstance(time, tuple) else time

    def _issue(self, at: int, issued: float) -> None:
        """The rank is free again at once, unless it computes."""
        action, verb = self.program.actions[at], VERBS[self.program.actions[at].op]
        seconds, barrier = self.run.machine.of(self.rank, action), self.barriers[at]
        self.free, start, key = issued, issued, None
        if verb.calls("send"):
            start, end = self.run.send(self.program, action, issued, seconds)
        elif verb.calls("recv") or barrier:
            key, end = barrier or (action.unit, action.mb), issued
            if barrier:
                self.run.arrive(barrier, issued)
            self.late[at] = key
        elif verb.moves:
            start = max(issued, self.lanes[verb.lane])
            self.lanes[verb.lane] = end = start + seconds
        else:
            self.free = end = issued + seconds
        self.events.append(Event(self.rank, action, start, end))
        slots = self.program.slots[at]
        for slot in slots.takes:
            self.complete.pop(slot, None)
        self.complete |= dict.fromkeys((*slots.adds, *slots.gives), end if key is None else key)


@dataclass(frozen=True)
class Overlap:
    """Seconds in which a rank moves something, and those of them in which it computes as well."""

    moving: float
    hidden: float

    @property
    def share(self) -> float:
        """Of the moving that computing hides; 1 if nothing moves."""
        return self.hidden / self.moving if self.moving else 1.0


def overlap(events: Sequence[Event]) -> dict[int, Overlap]:
    """Per rank, from events of programs, simulated or measured. Waiting for others (RECV, NORM) is not moving."""
    found = {}
    for rank, row in sorted(by_rank(events).items()):
        moving = _union(e for e in row if _moves(e.action))
        computing = _union(e for e in row if VERBS[e.action.op].lane == "compute")
        hidden = sum(max(0.0, min(a[1], b[1]) - max(a[0], b[0])) for a in moving for b in computing)
        found[rank] = Overlap(sum(stop - start for start, stop in moving), hidden)
    return found


def idle(events: Sequence[Event]) -> float:
    """The share of a step in which ranks do not compute, in the mean of all ranks; from events of programs.

    A step is as long as its longest rank takes from its first to its last action that computes, the bubble of Qi et al.
    """
    rows = [[e for e in row if VERBS[e.action.op].lane == "compute"] for row in by_rank(events).values()]
    spans = [max(e.end for e in row) - min(e.start for e in row) for row in rows if row]
    busy = sum(e.end - e.start for row in rows for e in row)
    return 1.0 - busy / (len(rows) * max(spans)) if spans and max(spans) > 0 else 0.0


def _moves(action: Action) -> bool:
    verb = VERBS[action.op]
    return bool(verb.moves) and not verb.meets and not verb.calls("recv")


def _union(events: Iterator[Event]) -> list[tuple[float, float]]:
    """The times covered by events, without counting any twice."""
    spans: list[tuple[float, float]] = []
    for start, stop in sorted((e.start, e.end) for e in events if e.end > e.start):
        if spans and start <= spans[-1][1]:
            spans[-1] = (spans[-1][0], max(spans[-1][1], stop))
        else:
            spans.append((start, stop))
    return spans


ACTIVATIONS = tuple(kind for kind, slot in SLOTS.items() if slot.memory == "activations")


def memory(
    programs: Sequence[Program],
    events: Sequence[Event],
    nbytes: Callable[[Slot], int],
    kinds: Sequence[str] = ACTIVATIONS,
) -> list[list[tuple[float, int]]]:
    """Per rank, the bytes in slots of the given kinds over time: (time, bytes from then on), ascending in time.

    events: those of `simulate_programs(programs, ...)`. nbytes: of a slot. A slot lives from
    the start of the action that fills it to the end of the one that takes it.
    """
    rows = by_rank(events)
    return [_curve(_changes(program, rows[rank], nbytes, kinds)) for rank, program in enumerate(programs)]


def peak_memory(
    programs: Sequence[Program],
    events: Sequence[Event],
    nbytes: Callable[[Slot], int],
    kinds: Sequence[str] = ACTIVATIONS,
) -> list[int]:
    """The most bytes per rank at any time; arguments as for `memory`."""
    return [max((now for _, now in curve), default=0) for curve in memory(programs, events, nbytes, kinds)]


def _changes(
    program: Program, row: Sequence[Event], nbytes: Callable[[Slot], int], kinds: Sequence[str]
) -> Iterator[tuple[float, int]]:
    alive = {buffer_of(slot): slot for slot in program.begins if slot.kind in kinds}
    yield from ((0.0, nbytes(slot)) for slot in alive.values())
    for slots, event in zip(program.slots, row, strict=True):
        for slot in (*slots.gives, *slots.adds):
            if slot.kind in kinds and buffer_of(slot) not in alive:
                alive[buffer_of(slot)] = slot
                yield event.start, nbytes(slot)
        for slot in slots.takes:
            if slot.kind in kinds:
                yield event.end, -nbytes(alive.pop(buffer_of(slot)))


def _curve(changes: Iterator[tuple[float, int]]) -> list[tuple[float, int]]:
    """What is freed at a moment is freed before what is taken at that moment."""
    points: list[tuple[float, int]] = []
    now = 0
    for time, change in sorted(changes):
        now += change
        points.append((time, now))
    return [here for here, after in pairwise([*points, (float("inf"), 0)]) if here[0] != after[0]]
