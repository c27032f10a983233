"""A timeline: the tasks of several ranks in time, to their end or to where ranks wait for each other.

A rank issues its tasks in order, each as soon as what it waits for is there. A task occupies its rank, or runs beside
it on a lane, where one runs at a time."""

from collections import Counter, defaultdict
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from fsdpx.program.verbs import Action

__all__ = ["Event", "Stuck", "Task", "Waits", "by_rank", "walk"]


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
    left = Counter(task.key for row in rows for task in row)
    ends, lanes, free = dict[Hashable, float](), defaultdict[Hashable, float](float), [0.0] * len(rows)
    spans: list[list[tuple[float, float]]] = [[] for _ in rows]

    def missing(task: Task) -> list[Hashable]:
        return [key for key, _ in task.waits if key not in ends or left[key]]

    def issue(rank: int, task: Task) -> None:
        issued = max([free[rank], *[ends[key] + way for key, way in task.waits]])
        start = issued if task.lane is None else max(issued, lanes[task.lane])
        end = start + task.seconds
        free[rank] = end if task.lane is None else issued
        lanes[task.lane] = end
        ends[task.key] = max(end, ends.get(task.key, 0.0))
        left[task.key] -= 1
        spans[rank].append((start, end))

    def advance(rank: int) -> bool:
        row, done = rows[rank], spans[rank]
        before = len(done)
        while len(done) < len(row) and not missing(row[len(done)]):
            issue(rank, row[len(done)])
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
    return [Event(rank, task.action, start, max(end, ends.get(task.until, end))) for task, (start, end) in done]


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
