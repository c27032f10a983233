"""The built-in schedules keep the contract; schedules that do not are found out."""

from collections.abc import Callable, Iterable

import pytest

from fsdpx.errors import ProgramError
from fsdpx.program import Action, PipelineSchedule
from fsdpx.program.schedules import one_f_one_b
from fsdpx.testing import ScheduleContract


class TestGPipe(ScheduleContract):
    def make(self) -> str:
        return "gpipe"

    def most_in_flight(self, ranks: int, microbatches: int, rank: int) -> int:
        return microbatches


class Test1F1B(ScheduleContract):
    def make(self) -> str:
        return "1f1b"

    def most_in_flight(self, ranks: int, microbatches: int, rank: int) -> int:
        return ranks - rank


class TestInterleaved(ScheduleContract):
    def make(self) -> str:
        return "interleaved"

    def most_in_flight(self, ranks: int, microbatches: int, rank: int) -> int:
        return 2 * (ranks - rank - 1) + ranks + 1


class TestInterleavedDeeply(ScheduleContract):
    per_rank = 3

    def make(self) -> str:
        return "interleaved"


class TestZBH1(ScheduleContract):
    def make(self) -> str:
        return "zb-h1"

    def most_in_flight(self, ranks: int, microbatches: int, rank: int) -> int:
        return ranks


class TestZBH2(ScheduleContract):
    def make(self) -> str:
        return "zb-h2"

    def most_in_flight(self, ranks: int, microbatches: int, rank: int) -> int:
        return 2 * ranks - 1


class TestZBV(ScheduleContract):
    def make(self) -> str:
        return "zbv"

    def most_in_flight(self, ranks: int, microbatches: int, rank: int) -> int:
        return 2 * ranks


Change = Callable[[list[Action]], Iterable[Action]]


def contract(change: Change, most: int | None = None) -> ScheduleContract:
    """That of 1F1B with the list of every rank changed, its schedule made without being validated."""

    class Changed(ScheduleContract):
        def _made(self) -> Iterable[PipelineSchedule]:
            made = one_f_one_b(2, 3)
            rows = tuple(tuple(change(list(row))) for row in made.ranks)
            return [PipelineSchedule(made.name, rows, made.home, made.stages, made.microbatches)]

        def most_in_flight(self, ranks: int, microbatches: int, rank: int) -> int | None:
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
        ("no_rank_waits_for_ever", lambda row: row[::-1], None, "waits forever at B0.2"),
        ("programs_of_all_ranks_come_to_their_end", lambda row: row[::-1], None, "wait for each other"),
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
        Impatient().test_it_can_run_at_every_size()
    with pytest.raises(TypeError, match=r"must define make\(\)"):
        ScheduleContract().test_it_can_run_at_every_size()
