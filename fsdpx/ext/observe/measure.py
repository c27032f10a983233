"""Time: how far the clocks of ranks are apart, a step as it really ran, and from the durations of its actions a machine
to simulate other steps on."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from time import perf_counter
from typing import NamedTuple

import numpy as np

from fsdpx.core.comm.communicator import Communicator
from fsdpx.core.engine.engine import Engine
from fsdpx.core.program import (
    VERBS,
    Action,
    ActionEvent,
    ActionTimes,
    Program,
    StageCosts,
    compute_idle_share,
    simulate_programs,
)
from fsdpx.ext.observe.recording import TimelineRecorder, find_recording

__all__ = ["ClockReading", "MeasuredStep", "action_times_of", "interpolate_offset", "measure_steps", "synchronize"]

Timeline = list[tuple[Action, float, float]]
"""(action, start, end), in seconds."""


@dataclass(frozen=True)
class MeasuredStep:
    """events: of the quickest step, in seconds since its first action, of this line of the pipe. programs: what its
    ranks ran. machine: how long each action took in that step; those of other programs take as long as the same verb of
    the same unit did in the median."""

    events: list[ActionEvent]
    programs: tuple[Program, ...]
    machine: ActionTimes

    @property
    def idle_share(self) -> float:
        """Share of the step in which ranks did not compute, as measured."""
        return compute_idle_share(self.events)

    @property
    def stage_costs(self) -> StageCosts:
        """Seconds of one microbatch in each stage, in the mean of all microbatches: to simulate other schedules.

        Where both halves of backward ran as one (B), its time stands for the first."""
        homes = {u: stage for program in self.programs for stage, units in program.stage.parts for u in units}
        spent: dict[str, list[float]] = {op: [0.0] * (1 + max(homes.values())) for op in "FBIWCR"}
        for event in self.events:
            if event.action.op in spent and event.action.unit is not None:
                spent[event.action.op][homes[event.action.unit]] += event.end - event.start
        count = self.programs[0].microbatches

        def mean_seconds(ops: str) -> list[float]:
            return [sum(some) / count for some in zip(*(spent[op] for op in ops), strict=True)]

        return StageCosts(mean_seconds("FC"), mean_seconds("RBI"), mean_seconds("W"))

    def simulate_again(self) -> list[ActionEvent]:
        """The same programs on the machine that was measured, with messages that take no time."""
        return simulate_programs(self.programs, self.machine)


def measure_steps(engine: Engine, step: Callable[[], object], steps: int = 5) -> MeasuredStep:
    """Make `steps` steps (and one before, to warm up), and keep time. Collective.

    The parameters move as in any step."""
    step()
    axes = engine.placement.axes
    before, timelines = find_recording(engine), list[Timeline]()
    if before is not None:  # these steps are in no trace
        engine.remove_observers(before)
    engine.add_observer(recording := TimelineRecorder(keep=1))
    try:
        for _ in range(steps):
            axes.world.barrier(what="measure").wait()
            origin = perf_counter()  # clocks of machines begin at different times
            step()
            acted = recording.turns[-1].actions
            timelines.append([(one.action, one.ready - origin, one.end - origin) for one in acted])
    finally:
        engine.remove_observers(recording)
        if before is not None:
            engine.add_observer(before)
    rows = axes.pipe.all_gather_data((timelines, engine.last_program))
    quickest = min(range(steps), key=lambda i: max(row[0][i][-1][2] - row[0][i][0][1] for row in rows))
    lines = [found[quickest] for found, _ in rows]
    first = min(start for line in lines for _, start, _ in line)
    events = [
        ActionEvent(rank, action, start - first, end - first)
        for rank, line in enumerate(lines)
        for action, start, end in line
    ]
    return MeasuredStep(events, tuple(program for _, program in rows), action_times_of(lines))


def action_times_of(lines: list[Timeline]) -> ActionTimes:
    """Of computing only: how long something moves cannot be seen from one rank's clock."""
    exact = {(rank, action): end - start for rank, line in enumerate(lines) for action, start, end in line}
    alike: dict[tuple[str, int | None], list[float]] = defaultdict(list)
    for (_, action), took in exact.items():
        alike[action.op, action.unit].append(took)

    def get_seconds(rank: int, action: Action) -> float:
        if VERBS[action.op].lane != "compute":
            return 0.0
        known = sorted(alike.get((action.op, action.unit), [0.0]))
        return exact.get((rank, action), known[len(known) // 2])

    return ActionTimes(get_seconds)


ENOUGH, LONGEST = 10e-6, 0.1
"""Seconds: of error with which rank 0 is content, and after which it takes what it has."""
MIN_CLOCK_QUESTIONS = 20
"""Questions, however good the first answers are."""
CLOCK_TAG = 7


class ClockReading(NamedTuple):
    """At `at` seconds of this rank's clock that was `offset` seconds ahead of rank 0's, give or take `error`."""

    at: float
    offset: float
    error: float


def synchronize(comm: Communicator) -> ClockReading:
    """This rank's clock, `time.perf_counter`, beside rank 0's: that asks each rank what time it is, and takes the
    quickest answer. One that took t seconds says the other clock to t/2, whatever of the way was slow (Cristian 1989).
    Collective; one rank after the other."""
    if comm.rank == 0:
        for rank in range(1, comm.size):
            offset, error = _ask_clock(comm, rank)
            _send_clock(comm, rank, offset, error)
        return ClockReading(perf_counter(), 0.0, 0.0)
    while True:
        offset, error = _recv_clock(comm, 0)
        if error:
            return ClockReading(perf_counter(), offset, error)
        _send_clock(comm, 0, perf_counter(), 0.0)


def _ask_clock(comm: Communicator, rank: int) -> tuple[float, float]:
    """Offset and error of the quickest answer."""
    best, asked, start = (0.0, float("inf")), 0, perf_counter()
    while True:
        begin = perf_counter()
        _send_clock(comm, rank, 0.0, 0.0)  # no error yet: a question
        theirs, _ = _recv_clock(comm, rank)
        end = perf_counter()
        best, asked = min(best, (theirs - (begin + end) / 2, (end - begin) / 2), key=lambda one: one[1]), asked + 1
        if asked >= MIN_CLOCK_QUESTIONS and (best[1] <= ENOUGH or end - start > LONGEST):
            return best


def _send_clock(comm: Communicator, rank: int, *numbers: float) -> None:
    comm.send(np.array(numbers), rank, CLOCK_TAG, what="clock").wait()


def _recv_clock(comm: Communicator, rank: int) -> tuple[float, float]:
    found = np.empty(2)
    comm.recv(found, rank, CLOCK_TAG, what="clock").wait()
    return float(found[0]), float(found[1])


def interpolate_offset(readings: list[ClockReading], at: float) -> float:
    """The offset at some time of this rank's clock: on the straight line between the first reading and the last."""
    first, last = readings[0], readings[-1]
    if last.at <= first.at:
        return last.offset
    return first.offset + (last.offset - first.offset) * (at - first.at) / (last.at - first.at)
