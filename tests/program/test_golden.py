"""The text of a few dozen programs: a refactoring leaves it as it is. `make replay` shows the difference."""

from pathlib import Path

import pytest
from cases import everything

from fsdpx.program import VERBS, check, parse

FOLDER = Path(__file__).parents[1] / "golden"
PROGRAMS = everything()


@pytest.mark.parametrize("name", PROGRAMS)
def test_program_text_is_the_golden_one(name: str) -> None:
    program = PROGRAMS[name]
    check(program)
    assert f"{program}\n" == (FOLDER / f"{name}.txt").read_text(), "run `make replay` and look at the difference"


def test_no_golden_file_is_left_over() -> None:
    assert {path.stem for path in FOLDER.glob("*.txt")} == set(PROGRAMS)


def test_every_verb_is_in_some_golden_file() -> None:
    there = {action.op for path in FOLDER.glob("*.txt") for action in parse(path.read_text())}
    assert there == set(VERBS)


@pytest.mark.parametrize("name", PROGRAMS)
def test_text_parses_back(name: str) -> None:
    assert parse(str(PROGRAMS[name])) == PROGRAMS[name].actions
