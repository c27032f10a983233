"""The clock: where the time of a rank goes, by verb and by mesh axis."""

from collections import defaultdict
from dataclasses import dataclass, field
from time import perf_counter
from typing import NamedTuple

__all__ = ["BATCHES", "PROGRESS", "Clock", "Spent"]

PROGRESS = "(moving transfers on)"
"""A row of the clock beside those of the verbs."""
BATCHES = "(batches: checked, and agreed on by all ranks)"
"""Another one: the first ranks to get there wait for the others."""


class Spent(NamedTuple):
    """What went into the actions of one verb.

    seconds: in them. waited: for transfers that they were the first to need. calls: of actions. nbytes: that this rank
    sent or received in them. flown: seconds that transfers which they began were under way. busy: those of them in
    which this rank moved the transfer on or waited for it; the rest was computed over."""

    seconds: float = 0.0
    waited: float = 0.0
    calls: int = 0
    nbytes: int = 0
    flown: float = 0.0
    busy: float = 0.0


@dataclass
class Clock:
    """rows: by verb, the numbers of a `Spent`. Moving transfers on between actions is a row of its own. in_flight: by
    mesh axis, the seconds that transfers were under way, and those of them in which this rank did nothing else."""

    rows: dict[str, list[float]] = field(default_factory=lambda: defaultdict(lambda: [0.0, 0.0, 0, 0, 0.0, 0.0]))
    in_flight: dict[str, tuple[float, float]] = field(default_factory=dict)
    start: float = field(default_factory=perf_counter)

    def landed(self, op: str, axis: str, seconds: float, busy: float) -> None:
        """A transfer over `axis` that an action of this verb began is complete."""
        before = self.in_flight.get(axis, (0.0, 0.0))
        self.in_flight[axis] = (before[0] + seconds, before[1] + busy)
        row = self.rows[op]
        row[4] += seconds
        row[5] += busy

    def ran(self, op: str, begin: float, ready: float, end: float, nbytes: int = 0) -> None:
        """An action of this verb began, had all it needs, and ended."""
        row = self.rows[op]
        row[0] += end - ready
        row[1] += ready - begin
        row[2] += 1
        row[3] += nbytes

    def spent(self) -> dict[str, Spent]:
        """By verb, as it is now."""
        return {op: Spent(row[0], row[1], int(row[2]), int(row[3]), row[4], row[5]) for op, row in self.rows.items()}
