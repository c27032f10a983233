"""A solver of mpi4py, and the same solver with a network that it trains and steps with, under MPI."""

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from test_examples import ROOT, run, start

pytestmark = pytest.mark.mpi_skip
PICTURES = ROOT / "docs" / "tutorial"
PAGE = (PICTURES / "surrogate.md").read_text()


def test_the_solver_alone_does_not_see_the_ranks() -> None:
    found = {run(ranks, "fsdpx.examples.channel").stdout for ranks in (1, 3)}
    assert found == {"after 20 states: mean height 1.0200, highest 1.1465\n"}


def test_a_surrogate_learns_from_a_running_solver_and_draws_the_pictures_of_the_page(tmp_path: Path) -> None:
    """Two short runs on four ranks: one test, since each process that runs tests would train them again."""
    try:
        import matplotlib.image
    except ImportError:
        matplotlib = None
    drawn = ("--pictures", str(tmp_path)) if matplotlib else ()
    shown = run(4, "fsdpx.examples.surrogate", "--runs", "2", "--steps", "1", *drawn).stdout
    found = re.fullmatch(
        r"run 1: loss (\S+)\nrun 2: loss (\S+)\n"
        r"error of the network's own states: (\S+)% after 1, .*, (\S+)% after 20\n"
        r"a state takes the solver \S+ ms and the network \S+ ms\n",
        shown,
    )
    assert found, shown
    first, second, one, twenty = map(float, found.groups())
    assert second < first < 1
    assert one < 60  # of the waves, after 38 steps of training
    assert one < twenty

    alone = run(1, "fsdpx.examples.surrogate", "--runs", "2", "--steps", "1").stdout
    numbers = [[float(a or b) for a, b in re.findall(r"loss (\S+)|(\d+\.\d)%", text)] for text in (alone, shown)]
    np.testing.assert_allclose(numbers[0], numbers[1], rtol=1e-2)
    if matplotlib:
        pictures_are_those_of_the_page(matplotlib.image, tmp_path)


def pictures_are_those_of_the_page(image: Any, drawn: Path) -> None:
    """Sizes of all; the parts, which depend on the solver alone, cell by cell; the others show a longer run."""
    names = sorted(path.name for path in PICTURES.glob("surrogate-*.png"))
    both = [(what, theme) for what in ("error", "field", "parts") for theme in ("dark", "light")]
    assert names == [f"surrogate-{what}-{theme}.png" for what, theme in both]
    for name in names:
        kept, made = (image.imread(folder / name)[..., :3] for folder in (PICTURES, drawn))
        assert kept.shape == made.shape
        assert kept.std() > 0.03  # there is something on it
        assert bool(kept[0, 0].sum() < 1.5) is ("-dark" in name)
        apart = float(np.abs(kept - made).mean())
        assert apart < (0.02 if "-parts-" in name else 0.2), name


def changed() -> tuple[str, int, int]:
    """The solver with the changes of the page; how many lines are new, and how many change."""
    text, new, changes = (ROOT / "fsdpx" / "examples" / "channel.py").read_text(), 0, 0
    (diff,) = re.findall(r"^```diff\n(.*?)^```", PAGE, re.S | re.M)
    for hunk in diff.split("@@\n"):
        lines = hunk.splitlines()
        before, after = ("\n".join(line[1:] for line in lines if line[:1] != sign) for sign in "+-")
        assert text.count(before) == 1, before
        text = text.replace(before, after)
        removed = sum(line.startswith("-") for line in lines)
        new, changes = new + sum(line.rstrip() > "+" for line in lines if line[:1] == "+") - removed, changes + removed
    return text, new, changes


def test_the_tutorial_changes_as_many_lines_as_it_says() -> None:
    words = {2: "two", 9: "nine"}
    _, new, changes = changed()
    assert f"needs {words[new]} new lines and {words[changes]} changed ones." in " ".join(PAGE.split())


@pytest.mark.parametrize("ranks", [1, 3])
def test_the_changed_solver_prints_what_the_page_says(tmp_path: Path, ranks: int) -> None:
    """The page starts it on four ranks; the number makes no difference."""
    text, kept = changed()[0], (PICTURES / "learn.py").read_text()
    assert text.split('"""', 2)[2] == kept.split('"""', 2)[2]
    (tmp_path / "learn.py").write_text(text)
    done = start(ranks, str(tmp_path / "learn.py"))
    assert done.returncode == 0, done.stderr
    pattern = r"20 states: mean (\S+), highest \S+, loss (\S+)\n"
    (wanted,) = re.findall(pattern, PAGE)
    found = re.fullmatch(pattern, done.stdout)
    assert found, done.stdout
    assert found[1] == wanted[0]
    assert float(found[2]) == pytest.approx(float(wanted[1]), abs=0.02)
