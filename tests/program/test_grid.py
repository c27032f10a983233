"""The text pictures of schedules."""

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fsdpx.program.grid import arrow, grid
from fsdpx.program.machine import Costs, Event, PipelineSchedule, simulate
from fsdpx.program.schedules import SCHEDULES, schedule
from fsdpx.program.verbs import parse

PROPERTY = settings(derandomize=True, database=None, deadline=None)


def test_one_stage_per_rank() -> None:
    assert grid(schedule("1f1b", 3, 3)) == (
        "rank 0  F0 F1 F2 .  .  .  .  B0 -- .  B1 -- .  B2 --\n"
        "rank 1  .  F0 F1 .  .  B0 -- F2 B1 -- .  B2 --\n"
        "rank 2  .  .  F0 B0 -- F1 B1 -- F2 B2 --"
    )


def test_letters_tell_stages_of_a_rank_apart() -> None:
    assert grid(schedule("zbv", 2, 3)) == (
        "rank 0  F0a F1a F2a F0b I0b W0b F1b I1b W1b I0a W0a F2b I2b W2b I1a W1a I2a W2a\n"
        "rank 1  .   F0a F0b F1a F1b I0b W0b F2a I0a W0a F2b I1b W1b I1a I2b I2a W1a W2b W2a\n"
        "a: stages 0 1; b: stages 2 3"
    )


def test_long_lines_are_cut() -> None:
    lines = grid(schedule("gpipe", 2, 30), width=40).splitlines()
    assert lines == ["rank 0  F0  F1  F2  F3  F4  F5  F6 ...", "rank 1  .   F0  F1  F2  F3  F4  F5 ..."]
    assert all(len(line) <= 40 for line in lines)


def test_events_are_drawn_in_steps_of_the_shortest() -> None:
    events = simulate(schedule("1f1b", 2, 2), Costs(0.5, 0.75, 0.25))
    assert grid(events) == "rank 0  F0 F1 .  .  B0 -- .  B1 --\nrank 1  .  F0 B0 -- F1 B1 --"
    assert grid([Event(0, parse("GATHER0")[0], 0, 1), Event(0, parse("NORM")[0], 1, 1)]) == "(nothing is computed)"


@PROPERTY
@given(name=st.sampled_from(sorted(SCHEDULES)), ranks=st.integers(1, 5), m=st.integers(1, 12))
def test_every_step_is_drawn_once_and_lines_are_as_long_as_the_time(name: str, ranks: int, m: int) -> None:
    plan = schedule(name, ranks, m)
    rows = grid(plan, width=10_000).splitlines()[:ranks]
    for rank, row in enumerate(rows):
        cells = row.split()[2:]
        wanted = [f"{a.op}{a.mb}" for a in plan.ranks[rank]]
        assert [re.sub(r"[a-z]$", "", cell) for cell in cells if cell[0] not in ".-"] == wanted
        last = max(e.end for e in simulate(plan, Costs(1, 1, 1)) if e.rank == rank)
        assert len(cells) == last


@pytest.mark.parametrize("position", [0, 5, 17, 23, 24])
def test_the_arrow_stands_under_the_step(position: int) -> None:
    plan = schedule("zb-h1", 3, 8)
    assert len(plan.ranks[1]) == 24
    for width in (30, 60, 400):
        lines = arrow(plan, 1, position, width).splitlines()
        assert [line[:6] for line in lines] == ["rank 0", "rank 1", " " * 6, "rank 2"]
        assert all(len(line) <= width for line in lines)
        under = lines[2].index("^")
        step = str(plan.ranks[1][position]) if position < 24 else ""
        assert lines[1][under : under + 4] == step


def test_the_arrow_works_for_plans_that_cannot_run() -> None:
    plan = PipelineSchedule.of("mine", ["B0.0 F0.0", "F1.0 B1.0 F1.1"], 2)
    assert arrow(plan, 0, 1) == "rank 0  B0.0 F0.0\n             ^\nrank 1  F1.0 B1.0 F1.1"
