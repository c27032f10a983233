"""The clock of an engine: an observer that adds up time and bytes for each verb (kind of action, such as forward)."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from time import perf_counter
from typing import Any, NamedTuple

from fsdpx.core.comm.calls import TimedTransfer
from fsdpx.core.engine.observer import Observer
from fsdpx.core.engine.operations import ExecutableAction
from fsdpx.core.program import VERBS, Action

__all__ = ["BATCHES", "PROGRESS", "EngineClock", "VerbTimings"]

PROGRESS = "(progress of transfers between actions)"
"""Row in the clock's table for the time that is spent, between actions, on advancing transfers."""
BATCHES = "(batches: checked, and agreed on by all ranks)"
"""Row of the clock for checking and comparing batches. It includes the time that ranks spend waiting for the slowest
rank."""
SAVING, WAITING, LOADING = "(saving a checkpoint)", "(waiting for a save in the background)", "(loading weights)"
"""Names of the clock's rows for checkpoints. The rows for saving and loading also count the bytes that this rank writes
or reads. For a background save, only the time to make the copy is counted, because another thread writes the file."""


class VerbTimings(NamedTuple):
    """Total time and bytes of all actions of one kind, such as all forward actions.

    Attributes
    ----------
    seconds : total run time
    waited : seconds that these actions spent waiting for the results of transfers
    calls : number of actions
    nbytes : bytes that this rank sent, received, wrote to a checkpoint or read from one in these actions
    in_flight : seconds during which transfers issued by these actions were in flight
    busy : the part of `in_flight` that this rank spent advancing transfers or waiting for them instead of computing
    """

    seconds: float = 0.0
    waited: float = 0.0
    calls: int = 0
    nbytes: int = 0
    in_flight: float = 0.0
    busy: float = 0.0


class EngineClock(Observer):
    """Observer that adds up time and bytes for each verb (kind of action).

    Attributes
    ----------
    rows : for each verb, a list of the fields of its `VerbTimings`; a separate entry counts the time between actions
        that is spent on advancing transfers
    in_flight : for each mesh axis, the seconds during which transfers were in flight, and the part of these seconds
        that this rank spent advancing transfers or waiting for them
    """

    def __init__(self) -> None:
        self.reset_counts()

    def reset_counts(self) -> None:
        self.rows: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0, 0, 0, 0.0, 0.0])
        self.in_flight: dict[str, tuple[float, float]] = {}
        self.start = perf_counter()

    def on_action_end(
        self, planned: ExecutableAction, begin: float, ready: float, end: float, nbytes: int, values: Sequence[Any]
    ) -> None:
        row = self.rows[planned.action.op]
        row[0] += end - ready
        row[1] += ready - begin
        row[2] += 1
        row[3] += nbytes

    def on_outside_program(self, what: str, begin: float, end: float, nbytes: int) -> None:
        row = self.rows[what]
        row[0] += end - begin
        row[2] += 1
        row[3] += nbytes

    def on_transfer_complete(self, action: Action, transfer: TimedTransfer) -> None:
        axis, in_flight = VERBS[action.op].lane, transfer.completed_at - transfer.issued_at
        before, row = self.in_flight.get(axis, (0.0, 0.0)), self.rows[action.op]
        self.in_flight[axis] = (before[0] + in_flight, before[1] + transfer.busy_seconds)
        row[4] += in_flight
        row[5] += transfer.busy_seconds

    def get_timings(self) -> dict[str, VerbTimings]:
        """Return a dict that maps each verb to its total time and bytes so far."""
        return {
            op: VerbTimings(row[0], row[1], int(row[2]), int(row[3]), row[4], row[5]) for op, row in self.rows.items()
        }
