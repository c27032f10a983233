"""The clock: where the time of a rank goes, by verb and by mesh axis."""

from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from time import perf_counter

from fsdpx.program import Action

__all__ = ["BATCHES", "PROGRESS", "Clock", "Timeline"]

PROGRESS = "(moving transfers on)"
"""A row of the clock beside those of the verbs."""
BATCHES = "(batches: checked, and agreed on by all ranks)"
"""Another one: who comes first waits there for the others."""

Timeline = list[tuple[Action, float, float]]
"""(action, start, end), in seconds of perf_counter."""


@dataclass
class Clock:
    """rows: by verb, the seconds spent in its actions, those spent waiting for transfers that they were the first to
    need, and how many actions there were. Moving transfers on between actions is a row of its own. in_flight: by mesh
    axis, the seconds that transfers were under way, and those of them in which this rank did nothing else."""

    rows: dict[str, list[float]] = field(default_factory=lambda: defaultdict(lambda: [0.0, 0.0, 0]))
    in_flight: dict[str, tuple[float, float]] = field(default_factory=dict)
    start: float = field(default_factory=perf_counter)
    _timeline: Timeline | None = None

    def landed(self, axis: str, seconds: float, busy: float) -> None:
        """A transfer over `axis` is complete."""
        before = self.in_flight.get(axis, (0.0, 0.0))
        self.in_flight[axis] = (before[0] + seconds, before[1] + busy)

    def add(self, op: str, spent: float, waited: float) -> None:
        row = self.rows[op]
        row[0] += spent
        row[1] += waited
        row[2] += 1

    def ran(self, action: Action, begin: float, ready: float, end: float) -> None:
        """An action began, had all it needs, and ended."""
        row = self.rows[action.op]  # as `add`, without another call for each action
        row[0] += end - ready
        row[1] += ready - begin
        row[2] += 1
        if self._timeline is not None:
            self._timeline.append((action, ready, end))

    @contextmanager
    def timeline(self) -> Iterator[Timeline]:
        """Every action that runs inside the block is added to the list."""
        found: Timeline = []
        self._timeline = found
        try:
            yield found
        finally:
            self._timeline = None
