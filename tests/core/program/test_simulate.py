"""Simulated times equal the published figures and the closed formulas; programs take the time of their schedule."""

from dataclasses import dataclass, replace
from typing import Any

import pytest
from cases import CHAIN, STAGES, pipe, requests
from hypothesis import given, settings
from hypothesis import strategies as st

from fsdpx.core.program import Action, Program, ProgramRequest, compile, make_stages
from fsdpx.core.program.schedules import make_schedule
from fsdpx.core.program.simulator import (
    ActionEvent,
    ActionTimes,
    Deadlock,
    PipelineSchedule,
    SimulatedTask,
    StageCosts,
    compute_bubble,
    group_events_by_rank,
    simulate,
    simulate_programs,
    simulate_tasks,
)
from fsdpx.errors import ConfigError, ProgramError

PROPERTY = settings(derandomize=True, database=None, deadline=None)
EQUAL = StageCosts(1, 1, 1)


@dataclass(frozen=True)
class Published:
    """A row of tables 9 and 5 of Qi et al. (ICLR 2024): milliseconds per microbatch and stage, and bubbles."""

    ranks: int
    microbatches: int
    forward: float
    backward_input: float
    backward_params: float
    communication: float
    bubbles: dict[str, float]
    per_rank: int  # stages of "interleaved": one transformer layer each
    interleaved_here: float  # where every message takes its time

    def costs(self, per_rank: int = 1) -> StageCosts:
        parts = (self.forward, self.backward_input, self.backward_params)
        return StageCosts(*(time / per_rank for time in parts), self.communication)


PUBLISHED = [
    Published(8, 24, 18.522, 18.086, 9.337, 0.601,
              {"1f1b": 0.2431, "zb-h1": 0.1585, "zb-h2": 0.1083, "interleaved": 0.1055}, 3, 0.1090),
    Published(8, 24, 29.718, 29.444, 19.927, 0.527,
              {"1f1b": 0.2347, "zb-h1": 0.1323, "zb-h2": 0.0698, "interleaved": 0.0808}, 4, 0.0827),
    Published(16, 48, 11.347, 11.248, 8.132, 0.377,
              {"1f1b": 0.2552, "zb-h1": 0.1397, "zb-h2": 0.0672, "interleaved": 0.1104}, 3, 0.1136),
]  # fmt: skip


@pytest.mark.parametrize("row", PUBLISHED, ids=lambda row: f"{row.ranks}x{row.microbatches}-{row.forward}")
@pytest.mark.parametrize("name", ["1f1b", "zb-h1", "zb-h2"])
def test_published_bubbles(name: str, row: Published) -> None:
    plan, costs = make_schedule(name, row.ranks, row.microbatches), row.costs()
    assert round(compute_bubble(simulate(plan, costs), plan, costs), 4) == row.bubbles[name]


@pytest.mark.parametrize("row", PUBLISHED, ids=lambda row: f"{row.ranks}x{row.microbatches}-{row.forward}")
def test_published_bubbles_of_interleaved_leave_out_a_message_per_microbatch(row: Published) -> None:
    """The published figure is P messages shorter: see docs/schedules.md."""
    plan, costs = make_schedule("interleaved", row.ranks, row.microbatches, row.per_rank), row.costs(row.per_rank)
    events = simulate(plan, costs)
    assert round(compute_bubble(events, plan, costs), 4) == row.interleaved_here
    spans = [line[-1].end - line[0].start for line in group_events_by_rank(events).values()]
    span = max(spans) - row.ranks * row.communication
    work = row.microbatches * (row.forward + row.backward_input + row.backward_params)
    assert round((span - work) / span, 4) == pytest.approx(row.bubbles["interleaved"], abs=1e-9)


def lost(plan: PipelineSchedule, costs: StageCosts) -> float:
    """The span less the work, in the unit of the costs."""
    spans = [row[-1].end - row[0].start for row in group_events_by_rank(simulate(plan, costs)).values()]
    return max(spans) - max(sum(map(costs.cost_of, row)) for row in plan.ranks)


SIZES = {"ranks": st.integers(1, 6), "m": st.integers(1, 14)}
TIME = st.integers(1, 9)


@PROPERTY
@given(**SIZES, f=TIME, i=TIME, w=TIME)
def test_gpipe_and_1f1b_lose_the_ramp(ranks: int, m: int, f: int, i: int, w: int) -> None:
    costs = StageCosts(f, i, w)
    for name in ("gpipe", "1f1b"):
        plan = make_schedule(name, ranks, m)
        assert lost(plan, costs) == (ranks - 1) * (f + i + w)
        assert compute_bubble(simulate(plan, costs), plan, costs) == pytest.approx((ranks - 1) / (m + ranks - 1))


@PROPERTY
@given(ranks=st.integers(1, 6), rounds=st.integers(1, 4), v=st.integers(2, 4), f=TIME, i=TIME, w=TIME)
def test_interleaving_divides_the_ramp(ranks: int, rounds: int, v: int, f: int, i: int, w: int) -> None:
    m, costs = rounds * ranks, StageCosts(f, i, w)
    plan = make_schedule("interleaved", ranks, m, v)
    assert lost(plan, costs) == (ranks - 1) * (f + i + w)
    assert compute_bubble(simulate(plan, costs), plan, costs) == pytest.approx((ranks - 1) / (v * m + ranks - 1))


@PROPERTY
@given(**SIZES, f=TIME, i=TIME, w=TIME)
def test_half_backwards_fill_the_ramp(ranks: int, m: int, f: int, i: int, w: int) -> None:
    """Table 2 of Qi et al., where there are microbatches enough; for W longer than F more is lost."""
    w = min(w, f)
    costs = StageCosts(f, i, w)
    assert lost(make_schedule("zb-h1", ranks, m + ranks), costs) == (ranks - 1) * (f + i - w)
    assert lost(make_schedule("zb-h2", ranks, m + 2 * ranks - 2), costs) == (ranks - 1) * max(f + i - 2 * w, 0)


@PROPERTY
@given(**SIZES)
def test_zbv_loses_nothing_for_equal_times(ranks: int, m: int) -> None:
    assert lost(make_schedule("zbv", ranks, m + 2 * ranks - 2), EQUAL) == 0


@PROPERTY
@given(
    name=st.sampled_from(["gpipe", "1f1b", "interleaved", "zb-h1", "zb-h2", "zbv"]),
    ranks=st.integers(1, 5), m=st.integers(1, 8), costs=st.builds(StageCosts, TIME, TIME, TIME, st.floats(0, 3)),
)  # fmt: skip
def test_no_action_starts_before_what_it_needs(name: str, ranks: int, m: int, costs: StageCosts) -> None:
    plan = make_schedule(name, ranks, m)
    events = simulate(plan, costs)
    assert [e.action for e in events] == [a for row in plan.ranks for a in row]
    ends = {(e.action.op.replace("B", "I"), e.action.unit, e.action.mb): e for e in events}
    for row in group_events_by_rank(events).values():
        assert all(a.end <= b.start for a, b in zip(row, row[1:], strict=False))
    for event in events:
        assert event.end == event.start + costs.cost_of(event.action)
        stage, mb = event.action.unit, event.action.mb
        assert stage is not None
        before = {"F": ("F", stage - 1, mb), "W": ("I", stage, mb)}.get(event.action.op, ("I", stage + 1, mb))
        if before in ends:
            way = costs.communication if ends[before].rank != event.rank else 0
            assert event.start >= ends[before].end + way


def test_costs_per_stage() -> None:
    plan = make_schedule("1f1b", 2, 1)
    assert [e.end for e in simulate(plan, StageCosts([1, 2], [3, 4], 5))] == [1, 20, 3, 12]
    with pytest.raises(ConfigError, match=r"Costs\(backward_input=...\) has 3 numbers, the schedule has 2 stages"):
        simulate(plan, StageCosts(1, [1, 2, 3], 1))
    with pytest.raises(ConfigError, match=r"Costs\(forward=-1\): a time is at least 0"):
        StageCosts(-1, 1, 1)


def test_a_plan_that_waits_for_ever_is_named() -> None:
    plan = PipelineSchedule.from_rows("mine", ["F0.0 B0.0 F0.1 B0.1", "F1.0 F1.1 B1.0 B1.1"], 2)
    with pytest.raises(ProgramError, match=r"schedule 'mine': rank 0 waits forever at B0\.0; see validate"):
        simulate(plan, EQUAL)


# compiled programs


def compiled(plan: PipelineSchedule, **options: Any) -> list[Program]:
    """A chain with one unit per stage, all of which have a gradient of their input to make."""
    units = [((u,), (u,), (u + 1,)) for u in range(plan.stages)]
    known = (units, [True] * plan.stages, [0], [plan.stages], range(plan.stages), plan.home)
    stages = make_stages(*known, constant=frozenset(), **options)
    return [
        compile(ProgramRequest("step", stage, plan.microbatches, keep_full=True, reduce_each=False, order=row))
        for stage, row in zip(stages, plan.ranks, strict=True)
    ]


def speeds(costs: StageCosts, **others: float) -> ActionTimes:
    def seconds(rank: int, action: Action) -> float:
        return costs.cost_of(action) if action.op in ("F", "B", "I", "W") else others.get(action.op, 0.0)

    return ActionTimes(seconds)


@PROPERTY
@given(
    name=st.sampled_from(["gpipe", "1f1b", "interleaved", "zb-h1", "zb-h2", "zbv"]),
    ranks=st.integers(1, 4), m=st.integers(1, 6), costs=st.builds(StageCosts, TIME, TIME, TIME, st.just(0.5)),
)  # fmt: skip
def test_programs_take_the_time_of_their_schedule(name: str, ranks: int, m: int, costs: StageCosts) -> None:
    plan = make_schedule(name, ranks, m)
    programs = compiled(plan)
    events = simulate_programs(programs, speeds(costs, SEND=costs.communication))
    assert [e.action for e in events] == [a for p in programs for a in p.actions]
    assert [e for e in events if e.action.op in ("F", "B", "I", "W")] == simulate(plan, costs)


@pytest.mark.parametrize("name", STAGES)
@pytest.mark.parametrize("placement", ["ddp", "fsdp"])
def test_one_program_without_moves_takes_the_sum(name: str, placement: str) -> None:
    program = compile(requests("step", STAGES[name], 2, placement))
    seconds = {("F", None): 1.0, ("F", 1): 3.0, ("B", None): 2.0, ("UPDATE", None): 0.5}
    events = simulate_programs([program], ActionTimes(seconds))
    total = sum(seconds.get((a.op, a.unit), seconds.get((a.op, None), 0.0)) for a in program.actions)
    assert max(e.end for e in events) == pytest.approx(total)


def test_gathers_run_beside_the_computing() -> None:
    """Four units, pages one ahead: only the first gather has nothing to hide behind."""
    program = compile(requests("predict", CHAIN, 1, "fsdp"))
    assert [a.op + str(a.unit) for a in program.actions if a.op in "GATHER E"][:3] == ["GATHER0", "GATHER1", "E0"]
    events = simulate_programs([program], ActionTimes({("GATHER", None): 1, ("E", None): 1}))
    assert max(e.end for e in events) == 5
    slow = simulate_programs([program], ActionTimes({("GATHER", None): 2, ("E", None): 1}))
    assert max(e.end for e in slow) == 9  # one at a time on their lane


def test_a_link_carries_one_message_at_a_time() -> None:
    plan = make_schedule("gpipe", 2, 3)
    events = simulate_programs(compiled(plan), speeds(EQUAL, SEND=5))
    sends = [e for e in events if e.action.op == "SEND" and e.rank == 0]
    assert [(e.start, e.end) for e in sends] == [(1, 6), (6, 11), (11, 16)]
    assert [e.start for e in events if e.action.op == "F" and e.rank == 1] == [6, 11, 16]
    received = [e.end for e in events if e.action.op == "RECV" and e.rank == 1]
    assert received == [6, 11, 16]


def test_who_adds_to_what_is_received_waits_for_it() -> None:
    """The gradient of value 1 goes from stage 3 to stage 1, which adds its own; the message takes long."""
    programs = pipe("1f1b", 1)
    (slow,) = [e.number for e in programs[0].stage.edges if e.gradient and (e.source, e.target) == (3, 1)]
    events = simulate_programs(programs, ActionTimes({("SEND", slow): 100, ("B", None): 1}))
    starts = {str(event.action): event.start for event in events}
    assert (starts["B3.0"], starts["B2.0"], starts["B1.0"], starts["B0.0"]) == (0, 1, 101, 102)


def test_the_norm_waits_for_all_ranks() -> None:
    programs = compiled(make_schedule("1f1b", 2, 2))
    events = simulate_programs(programs, speeds(EQUAL, UPDATE=1))
    backwards = [max(e.end for e in events if e.rank == rank and e.action.op == "B") for rank in (0, 1)]
    assert backwards == [9, 7]
    assert [e.start for e in events if e.action.op == "UPDATE"] == [9, 9]


def test_programs_that_wait_for_each_other_are_named() -> None:
    first, second = compiled(make_schedule("1f1b", 2, 1))
    silent = replace(first, actions=tuple(a for a in first.actions if a.op != "SEND"))
    message = r"wait for each other\nrank 0 of .*, at B0\.0, waits for SEND1\.0 of rank 1\n"
    with pytest.raises(ProgramError, match=message):
        simulate_programs([silent, second], ActionTimes({}))


def test_pages_that_are_one_parameter_wait_for_each_other() -> None:
    """The last unit has a twin of the first one's page; the ranks of both add up before they update."""
    events = simulate_programs(compiled(make_schedule("1f1b", 3, 1), twins=((0, 2),)), speeds(EQUAL))
    ties = [e for e in events if e.action.op == "TIE"]
    assert [(e.rank, e.start, e.end) for e in ties] == [(0, 9, 9), (2, 5, 9)]


def task(name: str, *waits: str, way: float = 0.0, **options: Any) -> SimulatedTask:
    """A task of a second that completes the key of its name."""
    return SimulatedTask(Action(name), name, tuple((key, way) for key in waits), **{"seconds": 1.0, **options})


def meet(rank: int) -> SimulatedTask:
    return SimulatedTask(Action("M", rank), "met", lane=rank, until="met")


TASKS: dict[str, tuple[list[list[SimulatedTask]], list[list[tuple[float, float]]]]] = {
    "a rank does one task after the other": (
        [[task("A"), task("B", seconds=2)], [task("C")]],
        [[(0, 1), (1, 3)], [(0, 1)]],
    ),
    "what comes from elsewhere takes its way": (
        [[task("A", "B", way=0.5)], [task("B", seconds=2)]],
        [[(2.5, 3.5)], [(0, 2)]],
    ),
    "tasks on a lane run beside the rank one at a time": (
        [[task("A", lane="x"), task("B", lane="x"), task("C", seconds=5), task("D", lane="y"), task("E", "B")]],
        [[(0, 1), (1, 2), (0, 5), (5, 6), (5, 6)]],
    ),
    "a key of several tasks is complete with the last": (
        [[task("A", seconds=3), meet(0)], [meet(1), task("B"), task("C", "met")]],
        [[(0, 3), (3, 3)], [(0, 3), (0, 1), (3, 4)]],
    ),
    "a task may end with another": (
        [[task("A", lane="x", seconds=0, until="B"), task("C", "B")], [task("B", seconds=4)]],
        [[(0, 4), (4, 5)], [(0, 4)]],
    ),
}
"""Tasks of each rank, and when each of them starts and ends."""


@pytest.mark.parametrize("rule", TASKS)
def test_tasks_start_and_end_by_rules(rule: str) -> None:
    rows, spans = TASKS[rule]
    wanted = [
        [ActionEvent(rank, one.action, *span) for one, span in zip(row, of_rank, strict=True)]
        for rank, (row, of_rank) in enumerate(zip(rows, spans, strict=True))
    ]
    assert simulate_tasks(rows) == (wanted, [])


def test_who_waits_for_whom() -> None:
    rows = [[task("A"), task("B", "A", "D")], [task("C", "B"), task("D")], [task("E", "nobody")]]
    stuck = [Deadlock(0, 1, ("D",), (1,)), Deadlock(1, 0, ("B",), (0,)), Deadlock(2, 0, ("nobody",), ())]
    assert simulate_tasks(rows) == ([[ActionEvent(0, Action("A"), 0, 1)], [], []], stuck)
