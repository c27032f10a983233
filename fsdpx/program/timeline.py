"""A timeline: the tasks of several ranks in time, to their end or to where ranks wait for each other.

A rank issues its tasks in order, each as soon as what it waits for is there. A task occupies its rank, or runs beside
it on a lane, where one runs at a time.
"""

from collections import Counter, defaultdict
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass

from fsdpx.program.action import Action

__all__ = ["Event", "Stuck", "Task", "by_rank", "walk"]


@dataclass(frozen=True, slots=True)
class Event:
    """An action that ran on a rank of the pipe from `start` to `end`, in seconds (or the unit of the costs)."""

    rank: int
    action: Action
    start: float
    end: float


@dataclass(frozen=True, slots=True)
class Task:
    """key: what it completes; where several tasks have one key, the last of them completes it.

    waits: keys, and for each how long it takes from there to here. lane: None if the task occupies its rank.
    until: a key without which the task does not end, though its rank goes on.
    """

    action: Action
    key: Hashable
    waits: tuple[tuple[Hashable, float], ...] = ()
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
    """The events of each rank's tasks as far as they come, and the ranks that do not come to their end."""
    walker = _Walker(rows)
    while [rank for rank in range(len(rows)) if walker.advance(rank)]:
        pass
    return [walker.events(rank) for rank in range(len(rows))], list(walker.stuck())


class _Walker:
    def __init__(self, rows: Sequence[Sequence[Task]]) -> None:
        self.rows = rows
        self.spans: list[list[tuple[float, float]]] = [[] for _ in rows]
        self.free = [0.0 for _ in rows]
        self.lanes: dict[Hashable, float] = defaultdict(float)
        self.ends: dict[Hashable, float] = {}
        self.left = Counter(task.key for row in rows for task in row)

    def advance(self, rank: int) -> bool:
        """Issue what can be issued; whether there was any."""
        row, spans = self.rows[rank], self.spans[rank]
        before = len(spans)
        while len(spans) < len(row) and all(self._there(key) for key, _ in row[len(spans)].waits):
            self._issue(rank, row[len(spans)])
        return len(spans) > before

    def _there(self, key: Hashable) -> bool:
        return key in self.ends and self.left[key] == 0

    def _issue(self, rank: int, task: Task) -> None:
        issued = max([self.free[rank], *(self.ends[key] + way for key, way in task.waits)])
        start = issued if task.lane is None else max(issued, self.lanes[task.lane])
        end = start + task.seconds
        self.free[rank] = end if task.lane is None else issued
        self.lanes[task.lane] = end
        self.ends[task.key] = max(end, self.ends.get(task.key, 0.0))
        self.left[task.key] -= 1
        self.spans[rank].append((start, end))

    def events(self, rank: int) -> list[Event]:
        return [
            Event(rank, task.action, start, end if task.until is None else max(start, self.ends.get(task.until, start)))
            for task, (start, end) in zip(self.rows[rank], self.spans[rank], strict=False)
        ]

    def stuck(self) -> Iterable[Stuck]:
        ahead = [row[len(spans) :] for row, spans in zip(self.rows, self.spans, strict=True)]
        for rank, row in enumerate(ahead):
            if row:
                keys = tuple(dict.fromkeys(key for key, _ in row[0].waits if not self._there(key)))
                ranks = tuple(r for r, others in enumerate(ahead) if any(task.key in keys for task in others))
                yield Stuck(rank, len(self.spans[rank]), keys, ranks)


def by_rank(events: Iterable[Event]) -> dict[int, list[Event]]:
    """The events of each rank, in the order given."""
    rows: dict[int, list[Event]] = defaultdict(list)
    for event in events:
        rows[event.rank].append(event)
    return rows
