"""Predicts a step with many microbatches from dry runs with only a few microbatches, since the time grows linearly with
the number of microbatches. The compiled programs show how often each action runs."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import cast

from fsdpx.core.array.arena import BufferLifetime
from fsdpx.core.base.dataclass import dataclass, replace
from fsdpx.core.engine.temporary_memory_plan import find_buffer_lifetimes
from fsdpx.core.program import SLOTS, VERBS, ActionEvent, Slot
from fsdpx.core.program.simulator import group_events_by_rank
from fsdpx.core.program.traffic import iterate_buffer_lifetimes
from fsdpx.plan.pricing import StepClock
from fsdpx.plan.time_model import StepTimes
from fsdpx.plan.world_step import CONTROL, RankClass, RankDryRun, WorldStep

__all__ = ["StepDryRuns"]


@dataclass(frozen=True)
class StepDryRuns:
    """Shape-only runs of a step on a few ranks, used to predict the time of the step on any machine.

    Attributes
    ----------
    step : the step
    runs : the runs of all pipeline ranks that belong to the data rank with the most samples
    others : the same for the data rank with the fewest samples, and for the data rank with the most communication,
        unless these runs are already in `runs`
    ran : number of microbatches in each run
    simulated, period : see `WorldStep.count_simulated_microbatches_and_period`
    """

    step: WorldStep
    runs: list[RankDryRun]
    others: list[RankDryRun]
    ran: int
    simulated: int
    period: int

    @classmethod
    def from_step(cls, step: WorldStep, ran: int) -> StepDryRuns:
        """Run the step with `ran` microbatches (see `WorldStep.count_dry_run_microbatches`). If these microbatches do
        not represent the remaining ones, run the step with all microbatches."""
        found = cls._dry_run_one_rank_per_kind(step, ran, *step.count_simulated_microbatches_and_period())
        m = step.microbatches
        return found if found._can_extrapolate() else cls._dry_run_one_rank_per_kind(step, m, m, 0)

    @classmethod
    def _dry_run_one_rank_per_kind(cls, step: WorldStep, ran: int, simulated: int, period: int) -> StepDryRuns:
        """Run the step on one rank of each kind. This means all pipeline ranks of up to three data ranks: the data rank
        with the most samples, the one with the fewest samples, and, if data ranks share samples, the one with the most
        communication."""
        last, runs, others = step.sample_group_count - 1, list[RankDryRun](), list[RankDryRun]()
        if step.count_samples_of_group(0) < step.count_samples_of_group(last) and (
            step.count_samples_of_group(0) or step.options.get("reproducible_chunks") is None
        ):
            others += step.dry_run_pipe_ranks(0, ran)
        runs += step.dry_run_pipe_ranks(last, ran)
        if len(step.domain.busiest_ranks) > 1:
            others += step.dry_run_pipe_ranks(last, ran, 1)
        return cls(step, runs, others, ran, simulated, period)

    def _can_extrapolate(self) -> bool:
        """Return whether the dry runs represent all microbatches. This requires that every action of the full program
        repeats an action that ran, and that each additional group of `period` microbatches adds the same actions."""
        m, simulated, period = self.step.microbatches, self.simulated, self.period
        times = (m - simulated) // period if period else 0
        for one in () if self.ran == m else self.runs:
            counts, whole = one.count_actions(simulated), one.count_actions(m)
            more = one.count_actions(simulated + period) if period else counts
            grown = {action: counts[action] + (n - counts[action]) * times for action, n in more.items()}
            if whole != grown or not whole.keys() <= one.costs.keys():
                return False
        return True

    def predict_step_time_and_events(
        self, timing: StepTimes
    ) -> tuple[float, dict[str, float], tuple[ActionEvent, ...]]:
        """Return the predicted time of the step in seconds, the breakdown of this time by cause, and the simulated
        events. The machine's overhead per step is not included.

        Only some of the microbatches are simulated, since each additional microbatch adds the same amount of time."""
        simulated, period, clock = self.simulated, self.period, StepClock(self.runs, timing)
        seconds, rows = clock.simulate_step_timeline(simulated)
        parts = clock.average_seconds_by_cause_over_ranks(rows, seconds)
        if period:
            times = (self.step.microbatches - simulated) // period
            more, longer = clock.simulate_step_timeline(simulated + period)
            bigger = clock.average_seconds_by_cause_over_ranks(longer, more)
            seconds += (more - seconds) * times
            parts = {name: parts[name] + (bigger[name] - parts[name]) * times for name in parts}
        return seconds, parts, tuple(event for row in rows for event in row)

    def extrapolate_traffic_and_memory(self) -> tuple[RankClass, ...]:
        """Return the traffic and the memory peak of each kind of rank. The results of the dry runs are extrapolated to
        all microbatches."""
        step = self.step
        rows = step.sample_count // step.sample_group_count // step.microbatches * (step.microbatches - self.ran)
        busy = (self.others, step.count_bytes_per_sample(1)), (self.runs, step.count_bytes_per_sample(0))
        return tuple(
            self._extrapolate_rank_traffic_and_memory(run, rows * nbytes) for some, nbytes in busy for run in some
        )

    def _extrapolate_rank_traffic_and_memory(self, run: RankDryRun, nbytes: int) -> RankClass:
        """Return the traffic and the memory peak of one rank, extrapolated to all microbatches. `nbytes` is the size
        in bytes of all samples in the microbatches that did not run."""
        if self.ran == self.step.microbatches:
            return run.found
        traffic, more = dict(run.found.traffic), run.count_actions(self.step.microbatches)
        more.subtract(run.count_actions(self.ran))
        for action, times in more.items():
            for axis, call, calls, moved in run.costs[action].calls if times else ():
                if axis != CONTROL:
                    before = traffic[axis, call]
                    traffic[axis, call] = before[0] + calls * times, before[1] + moved * times
        return replace(run.found, peak=run.found.peak.with_larger_batch(nbytes), traffic=traffic)

    def make_memory_timelines(self, events: Sequence[ActionEvent]) -> list[dict[str, list[tuple[float, int]]]]:
        """Return how the memory of each pipeline rank changes over a simulated step, as {kind of memory: [(seconds,
        bytes in use from that time on)]} per rank.

        A buffer of the program is counted only while it is in use. For activations, the maximum during each action is
        counted. The dry runs must include all microbatches that occur in `events`."""
        rows = group_events_by_rank(events)
        return [_make_memory_timeline(run, self.simulated, rows[rank]) for rank, run in enumerate(self.runs)]


def _make_memory_timeline(
    run: RankDryRun, microbatches: int, row: list[ActionEvent]
) -> dict[str, list[tuple[float, int]]]:
    """Return {kind of memory: [(seconds, bytes in use from that time on)]} for one pipeline rank. `row` contains the
    simulated events of this rank."""
    state, program = run.session.state, run.programs[microbatches]
    held = state.ledger.count_bytes_by_kind()
    changes: dict[str, list[tuple[float, int]]] = {kind: [(0.0, n)] for kind, n in held.items()}
    passing = {
        one.key.page: one.nbytes for one in state.ledger if one.is_freed_by_update
    }  # gradient sums that an update frees are on the heap, not in the arena, so they are added separately
    parts = [BufferLifetime(one.slot, one.start, one.stop,
    passing[one.slot.at]) for one in iterate_buffer_lifetimes(program)
             if one.slot.kind == "part" and one.slot.at in passing]  # fmt: skip
    changes.setdefault("gradients", []).append((0.0, -sum(passing.values())))
    for life in (*find_buffer_lifetimes(state, program), *parts):
        own = changes.setdefault(SLOTS[cast(Slot, life.name).kind].memory, [])
        own += [(row[life.start].start, life.nbytes), (row[life.stop].end, -life.nbytes)]
    free, now = 0.0, 0
    own = changes["activations"] = []
    for event, alive in zip(row, run.alive, strict=True):
        times = (free, free) if VERBS[event.action.op].moves else (event.start, event.end)
        for free, nbytes in zip(times, alive, strict=True):
            own.append((free, nbytes - now))
            now = nbytes
    return {kind: _compute_memory_in_use_over_time(some) for kind, some in changes.items()}


def _compute_memory_in_use_over_time(changes: list[tuple[float, int]]) -> list[tuple[float, int]]:
    """Convert (seconds, change in bytes) pairs to (seconds, bytes in use) pairs, with one pair per point in time. At
    equal times, memory is freed before it is allocated."""
    changes.sort()
    now = accumulate(nbytes for _, nbytes in changes)
    return list(dict(zip((time for time, _ in changes), now, strict=True)).items())
