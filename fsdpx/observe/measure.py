"""A step as it really ran: events of all ranks of a pipe, and from their durations a machine to simulate others on."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from time import perf_counter

from fsdpx.engine.engine import Engine
from fsdpx.engine.recording import Recording
from fsdpx.program import VERBS, Action, ActionTimes, Costs, Event, Program, idle, simulate_programs

__all__ = ["Measured", "machine_of", "measure"]

Timeline = list[tuple[Action, float, float]]
"""(action, start, end), in seconds."""


@dataclass(frozen=True)
class Measured:
    """events: of the quickest step, in seconds since its first action, of this line of the pipe. programs: what its
    ranks ran. machine: how long each action took in that step; those of other programs take as long as the same verb of
    the same unit did in the median."""

    events: list[Event]
    programs: tuple[Program, ...]
    machine: ActionTimes

    @property
    def idle(self) -> float:
        """Share of the step in which ranks did not compute, as measured."""
        return idle(self.events)

    @property
    def costs(self) -> Costs:
        """Seconds of one microbatch in each stage, in the mean of all microbatches: to simulate other schedules.

        Where both halves of backward ran as one (B), its time stands for the first."""
        homes = {u: stage for program in self.programs for stage, units in program.stage.parts for u in units}
        spent: dict[str, list[float]] = {op: [0.0] * (1 + max(homes.values())) for op in "FBIWCR"}
        for event in self.events:
            if event.action.op in spent and event.action.unit is not None:
                spent[event.action.op][homes[event.action.unit]] += event.end - event.start
        count = self.programs[0].microbatches

        def mean(ops: str) -> list[float]:
            return [sum(some) / count for some in zip(*(spent[op] for op in ops), strict=True)]

        return Costs(mean("FC"), mean("RBI"), mean("W"))

    def simulated(self) -> list[Event]:
        """The same programs on the machine that was measured, with messages that take no time."""
        return simulate_programs(self.programs, self.machine)


def measure(engine: Engine, step: Callable[[], object], steps: int = 5) -> Measured:
    """Make `steps` steps (and one before, to warm up), and keep time. Collective.

    The parameters move as in any step."""
    step()
    axes = engine.placement.axes
    before, timelines = engine.recording, list[Timeline]()
    engine.recording = recording = Recording(keep=1)
    try:
        for _ in range(steps):
            axes.world.barrier(what="measure").wait()
            origin = perf_counter()  # clocks of machines begin at different times
            step()
            acted = recording.turns[-1].acted
            timelines.append([(one.action, one.ready - origin, one.end - origin) for one in acted])
    finally:
        engine.recording = before
    rows = axes.pipe.all_gather_plain((timelines, engine.ran))
    quickest = min(range(steps), key=lambda i: max(row[0][i][-1][2] - row[0][i][0][1] for row in rows))
    lines = [found[quickest] for found, _ in rows]
    first = min(start for line in lines for _, start, _ in line)
    events = [
        Event(rank, action, start - first, end - first)
        for rank, line in enumerate(lines)
        for action, start, end in line
    ]
    return Measured(events, tuple(program for _, program in rows), machine_of(lines))


def machine_of(lines: list[Timeline]) -> ActionTimes:
    """Of computing only: how long something moves cannot be seen from one rank's clock."""
    exact = {(rank, action): end - start for rank, line in enumerate(lines) for action, start, end in line}
    alike: dict[tuple[str, int | None], list[float]] = defaultdict(list)
    for (_, action), took in exact.items():
        alike[action.op, action.unit].append(took)

    def seconds(rank: int, action: Action) -> float:
        if VERBS[action.op].lane != "compute":
            return 0.0
        known = sorted(alike.get((action.op, action.unit), [0.0]))
        return exact.get((rank, action), known[len(known) // 2])

    return ActionTimes(seconds)
