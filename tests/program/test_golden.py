"""The text of a few dozen programs: a refactoring leaves it as it is. `make replay` shows the difference."""

from pathlib import Path

import pytest
from cases import golden

from fsdpx.program import check, parse

FOLDER = Path(__file__).parents[1] / "golden"
PROGRAMS = golden()


@pytest.mark.parametrize("name", PROGRAMS)
def test_program_text_is_the_golden_one(name: str) -> None:
    program = PROGRAMS[name]
    check(program)
    assert f"{program}\n" == (FOLDER / f"{name}.txt").read_text(), "run `make replay` and look at the difference"


def test_no_golden_file_is_left_over() -> None:
    assert {path.stem for path in FOLDER.glob("*.txt")} == set(PROGRAMS)


@pytest.mark.parametrize("name", PROGRAMS)
def test_text_parses_back(name: str) -> None:
    assert parse(str(PROGRAMS[name])) == PROGRAMS[name].actions
