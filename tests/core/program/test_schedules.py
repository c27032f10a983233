"""Schedules of pipelines keep their contract, and those of published tables."""

import re
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fsdpx.core.program.drawing import draw_schedule, format_marked_schedule_step
from fsdpx.core.program.schedules import (
    SCHEDULES,
    count_in_flight,
    gpipe,
    interleaved,
    make_placed_schedule,
    make_schedule,
    one_f_one_b,
)
from fsdpx.core.program.simulator import ActionEvent, PipelineSchedule, StageCosts, simulate
from fsdpx.core.program.verbs import Action, parse_actions
from fsdpx.core.program.verifier import validate
from fsdpx.errors import ConfigError, ProgramError
from fsdpx.testing import ScheduleContract

PROPERTY = settings(derandomize=True, database=None, deadline=None)
PREFERRED = {"interleaved": 2, "zbv": 2}


@st.composite
def plans(draw: st.DrawFn, least: int = 1) -> PipelineSchedule:
    name = draw(st.sampled_from(sorted(SCHEDULES)))
    per_rank = draw(st.integers(2, 4)) if name == "interleaved" else PREFERRED.get(name, 1)
    return SCHEDULES[name].make_schedule(draw(st.integers(least, 6)), draw(st.integers(least, 12)), per_rank)


@PROPERTY
@given(plans())
def test_every_schedule_is_valid(plan: PipelineSchedule) -> None:
    validate(plan)
    assert PipelineSchedule.from_rows(plan.name, str(plan).splitlines(), plan.microbatches) == plan
    per_rank = plan.stages // len(plan.ranks)
    assert [plan.home.count(rank) for rank in range(len(plan.ranks))] == [per_rank] * len(plan.ranks)


def with_row(plan: PipelineSchedule, rank: int, row: list[Action]) -> PipelineSchedule:
    return replace(plan, ranks=tuple(tuple(row) if r == rank else old for r, old in enumerate(plan.ranks)))


@PROPERTY
@given(plans(), st.data())
def test_a_dropped_or_repeated_step_is_rejected(plan: PipelineSchedule, data: st.DataObject) -> None:
    rank = data.draw(st.integers(0, len(plan.ranks) - 1))
    row = list(plan.ranks[rank])
    at = data.draw(st.integers(0, len(row) - 1))
    with pytest.raises(ProgramError, match=rf"schedule '{plan.name}': .*\n(.*\n)* *\^"):
        validate(with_row(plan, rank, row[:at] + row[at + 1 :]))
    again = data.draw(st.integers(0, len(row)))
    with pytest.raises(ProgramError, match=rf"stage {row[at].unit}"):
        validate(with_row(plan, rank, row[:again] + [row[at]] + row[again:]))


@PROPERTY
@given(plans(least=2), st.data())
def test_a_step_on_another_rank_is_rejected(plan: PipelineSchedule, data: st.DataObject) -> None:
    rank = data.draw(st.integers(0, len(plan.ranks) - 1))
    row = list(plan.ranks[rank])
    step = row.pop(data.draw(st.integers(0, len(row) - 1)))
    other = (rank + 1) % len(plan.ranks)
    moved = with_row(with_row(plan, rank, row), other, [*plan.ranks[other], step])
    wrong = rf"{step} is on rank {other}, but stage {step.unit} is on rank {rank}|has no|before"
    with pytest.raises(ProgramError, match=wrong):
        validate(moved)


@PROPERTY
@given(plans(least=2), st.data())
def test_swapped_dependent_steps_are_rejected(plan: PipelineSchedule, data: st.DataObject) -> None:
    """Dependent: of one stage and microbatch, or both adding to the gradients of one stage."""
    rank = data.draw(st.integers(0, len(plan.ranks) - 1))
    row = list(plan.ranks[rank])
    pairs = [
        (i, j) for i, a in enumerate(row) for j, b in enumerate(row[i + 1 :], i + 1)
        if a.unit == b.unit and (a.mb == b.mb or (a.op in "BW" and b.op in "BW"))
    ]  # fmt: skip
    i, j = data.draw(st.sampled_from(pairs))
    row[i], row[j] = row[j], row[i]
    with pytest.raises(ProgramError, match=r"comes before|order of the microbatches|wait for each other"):
        validate(with_row(plan, rank, row))


@PROPERTY
@given(st.integers(1, 8), st.integers(1, 16))
def test_activations_in_flight(ranks: int, m: int) -> None:
    assert count_in_flight(make_schedule("gpipe", ranks, m)) == (m,) * ranks
    assert count_in_flight(make_schedule("1f1b", ranks, m)) == tuple(min(ranks - r, m) for r in range(ranks))
    h1, h2, v = (make_schedule(name, ranks, m) for name in ("zb-h1", "zb-h2", "zbv"))
    assert count_in_flight(h1) == (min(ranks, m),) * ranks
    assert count_in_flight(h1, until="I") == tuple(min(ranks - r, m) for r in range(ranks))
    assert count_in_flight(h2) == (min(2 * ranks - 1, m),) * ranks
    assert count_in_flight(h2, until="I") == tuple(min(2 * (ranks - r) - 1, m) for r in range(ranks))
    assert max(count_in_flight(v)) <= 2 * ranks
    if m >= 2 * ranks - 1:
        assert count_in_flight(v) == (2 * ranks,) * ranks


def test_interleaved_in_flight_is_that_of_the_paper() -> None:
    """Megatron's warm-up, 2 (P - r - 1) + (v - 1) P forwards, and the one before the first backward."""
    assert count_in_flight(interleaved(4, 16, 3)) == tuple(2 * (4 - r - 1) + 2 * 4 + 1 for r in range(4))


def test_a_stage_is_at_home_where_its_first_forward_stands() -> None:
    """Those of zbv lie along a V."""
    assert make_schedule("zbv", 3, 4).home == (0, 1, 2, 2, 1, 0)
    assert make_schedule("interleaved", 3, 4).home == (0, 1, 2, 0, 1, 2)
    assert PipelineSchedule.from_rows("mine", ["F0.0 F2.0", "F1.0 F0.1", "F2.1"], 2).home == (0, 1, 0)


def test_1f1b_as_text() -> None:
    assert str(make_schedule("1f1b", 2, 3)) == "F0.0 F0.1 B0.0 F0.2 B0.1 B0.2\nF1.0 B1.0 F1.1 B1.1 F1.2 B1.2"


def test_half_backwards_may_mix_with_whole_ones() -> None:
    make_schedule(lambda ranks, m, per_rank: ["F0.0 F0.1 B0.0 I0.1 W0.1", "F1.0 F1.1 I1.0 W1.0 B1.1"], 2, 2)


BAD: dict[str, tuple[list[str], str]] = {
    "deadlock": (
        ["B0.0 F0.0", "F1.0 B1.0"],
        "B0.0 comes before the forward of stage 0, microbatch 0\nrank 0  B0.0 F0.0\n        ^\nrank 1  F1.0 B1.0",
    ),
    "cycle": (
        ["F0.0 B0.0 F0.1 B0.1", "F1.0 F1.1 B1.0 B1.1"],
        "ranks wait for each other: rank 0 at B0.0 for B1.0 or I1.0 of rank 1; rank 1 at F1.1 for F0.1 of rank 0\n"
        "rank 0  F0.0 B0.0 F0.1 B0.1\n             ^\nrank 1  F1.0 F1.1 B1.0 B1.1",
    ),
    "both": (
        ["F0.0 I0.0 B0.0 W0.0"],
        "B0.0 occurs twice: the gradient of the input of stage 0, microbatch 0, has already run\n"
        "rank 0  F0.0 I0.0 B0.0 W0.0\n                  ^",
    ),
    "half": (["F0.0 I0.0"], "rank 0 has no W of stage 0, microbatch 0 of 1\nrank 0  F0.0 I0.0\n                  ^"),
    "order": (
        ["F0.0 F0.1 B0.1 B0.0"],
        "B0.0 adds to the gradients of stage 0 after B0.1; they are added in the order of the microbatches, so that "
        "every schedule gives the same bits\nrank 0  F0.0 F0.1 B0.1 B0.0\n                       ^",
    ),
    "elsewhere": (["F0.0 B0.0 B1.0", "F1.0"], "B1.0 is on rank 0, but stage 1 is on rank 1\n"),
    "verb": (["F0.0 GATHER0 B0.0"], "GATHER0 is no step of a schedule: expected F, B, I or W, a stage and .microbatch"),
    "text": (["F0.0", "F1.0 b1.0"], "rank 1: 'b1.0' is no action: expected a verb in capitals"),
    "stage": (["F0.0 B0.0 F2.0 B2.0"], "no rank has an F of stage 1"),
    "microbatch": (["F0.0 B0.0 B0.1"], "B0.1 does not exist: there are stages 0 to 0 and microbatches 0 to 0"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_the_message_says_what_is_wrong_and_where(name: str) -> None:
    rows, wanted = BAD[name]
    microbatches = 2 if name in ("order", "cycle") else 1
    with pytest.raises(ProgramError) as caught:
        make_schedule(lambda ranks, m, per_rank: rows, len(rows), microbatches)
    assert str(caught.value).startswith("schedule '<lambda>'")
    assert wanted in str(caught.value)


def test_a_text_file_is_a_schedule(tmp_path: Path) -> None:
    file = tmp_path / "mine.txt"
    file.write_text("# two ranks\nF0.0 F0.1 B0.0 B0.1  # the first\n\nF1.0 B1.0 F1.1 B1.1\n")
    plan = make_schedule(file, 2, 2)
    assert plan == make_schedule(str(file), 2, 2) == PipelineSchedule.from_rows("mine.txt", str(plan).splitlines(), 2)
    assert plan.ranks == make_schedule("1f1b", 2, 2).ranks
    with pytest.raises(ConfigError, match=r"'mine\.txt' is for 2 ranks, but the pipe has 3"):
        make_schedule(file, 3, 2)
    with pytest.raises(ProgramError, match=r"rank 0 has no F of stage 0, microbatch 2 of 3"):
        make_schedule(file, 2, 3)


def test_a_function_may_return_a_plan_actions_or_text() -> None:
    makers: list[Callable[..., object]] = [
        gpipe,
        lambda ranks, m, per_rank: [list(row) for row in gpipe(ranks, m).ranks],
        lambda ranks, m, per_rank: [[str(a) for a in row] for row in gpipe(ranks, m).ranks],
        lambda ranks, m, per_rank: str(gpipe(ranks, m)).splitlines(),
    ]
    assert {make_schedule(maker, 3, 4).ranks for maker in makers} == {gpipe(3, 4).ranks}
    assert make_schedule(interleaved, 2, 4).stages == 4  # per_rank as the function prefers
    assert make_schedule(lambda ranks, m, per_rank: zigzag(per_rank), 1, 1, per_rank=3).stages == 3


def zigzag(stages: int) -> list[tuple[Action, ...]]:
    return [parse_actions(" ".join([f"F{s}.0" for s in range(stages)] + [f"B{s}.0" for s in reversed(range(stages))]))]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (("1f1b", 4, 8, 3), "schedule '1f1b' puts 1 stage on each rank, not per_rank=3, which makes 12 stages"),
        (("zbv", 4, 8, 1), "'zbv' puts 2 stages on each rank, not per_rank=1"),
        (("interleaved", 4, 8, 1), "'interleaved' puts 2 stages or more on each rank, not per_rank=1"),
        (("gpipe", 2, 0), "'gpipe': ranks=2 and microbatches=0 must both be at least 1"),
        ((lambda ranks, m, per_rank: zigzag(3), 1, 1, 2), "has 3 stages on 1 ranks, not the 2 of per_rank=2"),
        ((lambda ranks, m, per_rank: gpipe(ranks, 4), 2, 2), "is for 4 microbatches, but microbatches=2"),
        (("1f2b", 2, 2), "schedule='1f2b' is none of 'gpipe', '1f1b', .*, no function, and no text file"),
    ],
)
def test_numbers_that_do_not_fit(given: tuple[Any, ...], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make_schedule(*given)


MOST: dict[str, tuple[str, Callable[[int, int, int], int]]] = {
    "GPipe": ("gpipe", lambda ranks, microbatches, rank: microbatches),
    "1F1B": ("1f1b", lambda ranks, microbatches, rank: ranks - rank),
    "Interleaved": ("interleaved", lambda ranks, microbatches, rank: 2 * (ranks - rank - 1) + ranks + 1),
    "ZBH1": ("zb-h1", lambda ranks, microbatches, rank: ranks),
    "ZBH2": ("zb-h2", lambda ranks, microbatches, rank: 2 * ranks - 1),
    "ZBV": ("zbv", lambda ranks, microbatches, rank: 2 * ranks),
}
"""Schedules, and the microbatches that are in flight on a rank at most."""

for _name, (_schedule, _most) in MOST.items():
    _body = {"make": lambda self, made=_schedule: made, "max_in_flight": lambda self, *at, most=_most: most(*at)}
    globals()[f"Test{_name}"] = type(f"Test{_name}", (ScheduleContract,), _body)


class TestInterleavedDeeply(ScheduleContract):
    per_rank, ranks, microbatches = 3, (1, 2, 4), (2, 4, 9)

    def make(self) -> str:
        return "interleaved"


Change = Callable[[list[Action]], Iterable[Action]]


def contract(change: Change, most: int | None = None) -> ScheduleContract:
    """That of 1F1B with the list of every rank changed, its schedule made without being validated."""

    class Changed(ScheduleContract):
        def _iterate_schedules(self) -> Iterable[PipelineSchedule]:
            made = one_f_one_b(2, 3)
            rows = tuple(tuple(change(list(row))) for row in made.ranks)
            return [PipelineSchedule(made.name, rows, made.home, made.stages, made.microbatches)]

        def max_in_flight(self, ranks: int, microbatches: int, rank: int) -> int | None:
            return most

    return Changed()


def swapped(row: list[Action]) -> list[Action]:
    """The last two backwards the other way round."""
    return [*row[:-3], row[-1], row[-2], row[-3]]


@pytest.mark.parametrize(
    ("test", "change", "most", "message"),
    [
        ("every_microbatch_goes_forward_and_backward_through_every_stage", lambda row: row[:-1], None, "microbatch 2"),
        ("gradients_are_added_in_the_order_of_microbatches", swapped, None, r"stage 0 adds \[0, 2, 1\]"),
        ("no_rank_waits_forever", lambda row: row[::-1], None, "waits forever at B0.2"),
        ("compiled_programs_complete", lambda row: row[::-1], None, "wait for each other"),
        ("activations_in_flight_stay_in_bounds", lambda row: row, 1, "2 in flight on rank 0, not 1"),
    ],
)
def test_the_contract_finds_out(test: str, change: Change, most: int | None, message: str) -> None:
    with pytest.raises((AssertionError, ProgramError), match=message):
        getattr(contract(change, most), f"test_{test}")()


def test_what_is_no_schedule_at_all_is_refused() -> None:
    class Impatient(ScheduleContract):
        def make(self) -> Callable[..., list[str]]:
            return lambda ranks, microbatches, per_rank: [f"B{rank}.0 F{rank}.0" for rank in range(ranks)]

    with pytest.raises(ProgramError, match=r"B0\.0 comes before the forward"):
        Impatient().test_schedule_is_valid_at_every_size()
    with pytest.raises(TypeError, match=r"must define make\(\)"):
        ScheduleContract().test_schedule_is_valid_at_every_size()


def test_one_stage_per_rank() -> None:
    assert draw_schedule(make_schedule("1f1b", 3, 3)) == (
        "rank 0  F0 F1 F2 .  .  .  .  B0 -- .  B1 -- .  B2 --\n"
        "rank 1  .  F0 F1 .  .  B0 -- F2 B1 -- .  B2 --\n"
        "rank 2  .  .  F0 B0 -- F1 B1 -- F2 B2 --"
    )


def test_letters_tell_stages_of_a_rank_apart() -> None:
    assert draw_schedule(make_schedule("zbv", 2, 3)) == (
        "rank 0  F0a F1a F2a F0b I0b W0b F1b I1b W1b I0a W0a F2b I2b W2b I1a W1a I2a W2a\n"
        "rank 1  .   F0a F0b F1a F1b I0b W0b F2a I0a W0a F2b I1b W1b I1a I2b I2a W1a W2b W2a\n"
        "a: stages 0 1; b: stages 2 3"
    )


def test_long_lines_are_cut() -> None:
    lines = draw_schedule(make_schedule("gpipe", 2, 30), width=40).splitlines()
    assert lines == ["rank 0  F0  F1  F2  F3  F4  F5  F6 ...", "rank 1  .   F0  F1  F2  F3  F4  F5 ..."]
    assert all(len(line) <= 40 for line in lines)


def test_events_are_drawn_in_steps_of_the_shortest() -> None:
    events = simulate(make_schedule("1f1b", 2, 2), StageCosts(0.5, 0.75, 0.25))
    assert draw_schedule(events) == "rank 0  F0 F1 .  .  B0 -- .  B1 --\nrank 1  .  F0 B0 -- F1 B1 --"
    events = [ActionEvent(0, parse_actions("GATHER0")[0], 0, 1), ActionEvent(0, parse_actions("NORM")[0], 1, 1)]
    assert draw_schedule(events) == "(nothing is computed)"


@PROPERTY
@given(name=st.sampled_from(sorted(SCHEDULES)), ranks=st.integers(1, 5), m=st.integers(1, 12))
def test_every_step_is_drawn_once_and_lines_are_as_long_as_the_time(name: str, ranks: int, m: int) -> None:
    plan = make_schedule(name, ranks, m)
    rows = draw_schedule(plan, width=10_000).splitlines()[:ranks]
    for rank, row in enumerate(rows):
        cells = row.split()[2:]
        wanted = [f"{a.op}{a.mb}" for a in plan.ranks[rank]]
        assert [re.sub(r"[a-z]$", "", cell) for cell in cells if cell[0] not in ".-"] == wanted
        last = max(e.end for e in simulate(plan, StageCosts(1, 1, 1)) if e.rank == rank)
        assert len(cells) == last


@pytest.mark.parametrize("position", [0, 5, 17, 23, 24])
def test_the_arrow_stands_under_the_step(position: int) -> None:
    plan = make_schedule("zb-h1", 3, 8)
    assert len(plan.ranks[1]) == 24
    for width in (30, 60, 400):
        lines = format_marked_schedule_step(plan, 1, position, width).splitlines()
        assert [line[:6] for line in lines] == ["rank 0", "rank 1", " " * 6, "rank 2"]
        assert all(len(line) <= width for line in lines)
        under = lines[2].index("^")
        step = str(plan.ranks[1][position]) if position < 24 else ""
        assert lines[1][under : under + 4] == step


def test_the_arrow_works_for_plans_that_cannot_run() -> None:
    plan = PipelineSchedule.from_rows("mine", ["B0.0 F0.0", "F1.0 B1.0 F1.1"], 2)
    assert format_marked_schedule_step(plan, 0, 1) == "rank 0  B0.0 F0.0\n             ^\nrank 1  F1.0 B1.0 F1.1"


@pytest.mark.parametrize("name", SCHEDULES)
def test_what_is_said_of_a_schedule_is_so(name: str) -> None:
    """Plans and remedies believe the table: how many microbatches are alive, and where stages may lie."""
    known = SCHEDULES[name]
    most, usual = (max(count_in_flight(make_schedule(one, 4, 12))) for one in (name, "1f1b"))
    assert known.frugal == (most <= usual)
    home = (0, 0, 1, 2, 3)
    if known.fixed:
        with pytest.raises(ConfigError, match=re.escape(known.fixed)):
            make_placed_schedule(name, 4, 8, home)
    else:
        assert make_placed_schedule(name, 4, 8, home).home == home
