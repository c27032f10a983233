"""Timing across ranks: clock offsets, the timeline of a real step, and measured durations for simulating other
schedules."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from time import perf_counter
from typing import NamedTuple

import numpy as np

from fsdpx.core.base.dataclass import dataclass
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
from fsdpx.ext.observe.recording import TimelineRecorder, find_timeline_recorder

__all__ = ["ClockReading", "MeasuredStep", "interpolate_offset", "make_action_times", "measure_clock_offset",
           "measure_timeline_of_fastest_step"]  # fmt: skip

Timeline = list[tuple[Action, float, float]]
"""(action, start, end) for each action of a rank, with times in seconds."""


@dataclass(frozen=True)
class MeasuredStep:
    """The timeline of one measured training step on all pipeline ranks.

    Attributes
    ----------
    events : events of the fastest step, with times in seconds since its first action
    programs : the program (list of actions) of each pipeline rank
    machine : the duration of each action in this step. In simulations, an action that did not occur in this step gets
        the median duration of the actions with the same verb and unit (group of layers)
    """

    events: list[ActionEvent]
    programs: tuple[Program, ...]
    machine: ActionTimes

    @property
    def idle_share(self) -> float:
        """Share of the measured step, from 0 to 1, during which ranks did not compute, averaged over ranks."""
        return compute_idle_share(self.events)

    @property
    def stage_costs(self) -> StageCosts:
        """Computation time of each pipeline stage in seconds per microbatch, averaged over microbatches. Other
        schedules can be simulated with these times.

        Input gradients and parameter gradients of a unit (group of layers) may be computed by two actions, or together
        by one action B. The time of B counts as time for input gradients."""
        homes = {u: stage for program in self.programs for stage, units in program.stage.own_stages for u in units}
        spent: dict[str, list[float]] = {op: [0.0] * (1 + max(homes.values())) for op in "FBIWCR"}
        for event in self.events:
            if event.action.op in spent and event.action.unit is not None:
                spent[event.action.op][homes[event.action.unit]] += event.end - event.start
        count = self.programs[0].microbatches

        def mean_seconds(ops: str) -> list[float]:
            return [sum(some) / count for some in zip(*(spent[op] for op in ops), strict=True)]

        return StageCosts(mean_seconds("FC"), mean_seconds("RBI"), mean_seconds("W"))

    def simulate_again(self) -> list[ActionEvent]:
        """Simulate the measured programs, and return the events. Computations take as long as measured, and messages
        take no time."""
        return simulate_programs(self.programs, self.machine)


def measure_timeline_of_fastest_step(engine: Engine, step: Callable[[], object], steps: int = 5) -> MeasuredStep:
    """Run a warm-up step and `steps` further steps, and return the timeline of the fastest one. Collective.

    These are training steps, so the parameters change."""
    step()
    axes = engine.placement.axes
    before, timelines = find_timeline_recorder(engine), list[Timeline]()
    # the user's recorder is removed temporarily, so that the user's trace does not show the steps of this measurement
    if before is not None:
        engine.remove_observers(before)
    engine.add_observer(recording := TimelineRecorder(keep=1))
    try:
        for _ in range(steps):
            axes.world.barrier(what="measure").wait()
            origin = perf_counter()  # times are relative to this origin, because hosts' clocks start at different times
            step()
            acted = recording.records[-1].actions
            timelines.append([(one.action, one.ready - origin, one.end - origin) for one in acted])
    finally:
        engine.remove_observers(recording)
        if before is not None:
            engine.add_observer(before)
    rows = axes.pipe.all_gather_value((timelines, engine.last_program))
    quickest = min(range(steps), key=lambda i: max(row[0][i][-1][2] - row[0][i][0][1] for row in rows))
    lines = [found[quickest] for found, _ in rows]
    first = min(start for line in lines for _, start, _ in line)
    events = [
        ActionEvent(rank, action, start - first, end - first)
        for rank, line in enumerate(lines)
        for action, start, end in line
    ]
    return MeasuredStep(events, tuple(program for _, program in rows), make_action_times(lines))


def make_action_times(lines: list[Timeline]) -> ActionTimes:
    """Return a lookup of the measured durations of computations, for use in simulations.

    Transfers have duration 0, because the clock of one rank cannot measure how long they take."""
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


CLOCK_ERROR_SECONDS, MAX_CLOCK_SECONDS = 10e-6, 0.1
"""Rank 0 stops asking a rank for its time once the clock error is at most CLOCK_ERROR_SECONDS, or after
MAX_CLOCK_SECONDS."""
MIN_CLOCK_QUESTIONS = 20
"""Minimum number of times that rank 0 asks a rank for its time, even if the first replies are accurate enough."""
CLOCK_TAG = 7


class ClockReading(NamedTuple):
    """A comparison with rank 0's clock: at time `at`, this rank's clock was `offset` seconds ahead, with an error of at
    most `error` seconds."""

    at: float
    offset: float
    error: float


def measure_clock_offset(comm: Communicator) -> ClockReading:
    """Measure how far this rank's clock, `time.perf_counter`, is ahead of rank 0's clock. Collective.

    Rank 0 asks one rank after another for its time, several times each, and uses the fastest reply. A reply that took
    t seconds has an error of at most t/2, whichever direction was slow (Cristian 1989)."""
    if comm.rank == 0:
        for rank in range(1, comm.size):
            offset, error = _measure_clock_offset_and_error(comm, rank)
            _send_clock(comm, rank, offset, error)
        return ClockReading(perf_counter(), 0.0, 0.0)
    while True:
        offset, error = _recv_clock(comm, 0)
        if error:
            return ClockReading(perf_counter(), offset, error)
        _send_clock(comm, 0, perf_counter(), 0.0)


def _measure_clock_offset_and_error(comm: Communicator, rank: int) -> tuple[float, float]:
    """Return the offset of a rank's clock from rank 0's clock and the error of this offset, in seconds, both determined
    from the rank's fastest reply."""
    best, asked, start = (0.0, float("inf")), 0, perf_counter()
    while True:
        begin = perf_counter()
        # an error of 0.0 (the last number) marks this message as a request for the time
        _send_clock(comm, rank, 0.0, 0.0)
        theirs, _ = _recv_clock(comm, rank)
        end = perf_counter()
        best, asked = min(best, (theirs - (begin + end) / 2, (end - begin) / 2), key=lambda one: one[1]), asked + 1
        if asked >= MIN_CLOCK_QUESTIONS and (best[1] <= CLOCK_ERROR_SECONDS or end - start > MAX_CLOCK_SECONDS):
            return best


def _send_clock(comm: Communicator, rank: int, *numbers: float) -> None:
    comm.send(np.array(numbers), rank, CLOCK_TAG, what="clock").wait()


def _recv_clock(comm: Communicator, rank: int) -> tuple[float, float]:
    found = np.empty(2)
    comm.recv(found, rank, CLOCK_TAG, what="clock").wait()
    return float(found[0]), float(found[1])


def interpolate_offset(readings: list[ClockReading], at: float) -> float:
    """Return how many seconds this rank's clock is ahead of rank 0's at time `at`, interpolated between the first and
    the last reading."""
    first, last = readings[0], readings[-1]
    if last.at <= first.at:
        return last.offset
    return first.offset + (last.offset - first.offset) * (at - first.at) / (last.at - first.at)
