"""Examples under MPI, several in one job, as their pages say; and the pictures of the page of the surrogate."""

import re
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
from commands import start
from started import run_several, run_threads
from trials import ROOT

from fsdpx.examples import digits, gan

pytestmark = pytest.mark.mpi_skip
PICTURES = ROOT / "docs" / "tutorial"
PAGE = (PICTURES / "surrogate.md").read_text()
SOURCE = str(ROOT / "fsdpx" / "core" / "comm")
LEARNS = ["--runs", "2", "--steps", "1"]
SMALL_SOLVER = "from fsdpx.examples import solver as s; s.SIDE, s.STEPS, s.GOOD = 11, 16, 1e-3; "


def test_examples_of_four_ranks(tmp_path: Path) -> None:
    matplotlib = find_spec("matplotlib")
    drawn = ["--pictures", str(tmp_path)] if matplotlib else []
    sweep = ["--groups", "2", "--steps", "3", "--batch", "4", "--data", SOURCE, "--rates", "1e-3", "1e-5", "3e-3"]
    channel, surrogate, solver, rates = run_several(
        4,
        ["-m", "fsdpx.examples.channel"],
        ["-c", f"from fsdpx.examples import surrogate as s; s.run_solver_and_train = lambda *_: 0; s.main({drawn})"],
        ["-c", SMALL_SOLVER + "s.main(['--trainers=2', '--rounds=20'])"],
        ["-m", "fsdpx.examples.sweep", *sweep],
    )
    assert channel == "after 20 states: mean height 1.0200, highest 1.1465\n"
    assert errors_of(surrogate)[0] > 100
    if matplotlib:
        pictures_are_those_of_the_page(tmp_path)
    the_solver_uses_what_others_learn_from_it(solver)
    a_sweep_trains_groups_of_ranks_side_by_side(rates.splitlines())


def test_examples_of_two_ranks(tmp_path: Path) -> None:
    text, new, changes = changed()
    assert text.split('"""', 2)[2] == (PICTURES / "learn.py").read_text().split('"""', 2)[2]
    words = {2: "two", 9: "nine"}
    assert f"needs {words[new]} new lines and {words[changes]} changed ones." in " ".join(PAGE.split())
    (tmp_path / "learn.py").write_text(text)
    of_digits, of_gan = ["--strategy", "zero2", "--epochs", "1", "--batch", "500"], ["--steps", "20"]
    shown, circle, strategies, heat, surrogate, learn, without = run_several(
        2,
        ["-m", "fsdpx.examples.digits", *of_digits],
        ["-m", "fsdpx.examples.gan", *of_gan],
        ["-m", "fsdpx.examples.strategies", "--strategy", "offload", "--steps", "2"],
        ["-m", "fsdpx.examples.heat"],
        ["-m", "fsdpx.examples.surrogate", *LEARNS],
        ["-c", f"import runpy; runpy.run_path({str(tmp_path / 'learn.py')!r}, run_name='__main__')"],
        ["-c", SMALL_SOLVER + "s.fsdpx.Trainer.load_parameters = lambda *_: None; s.main(['--rounds=20'])"],
    )
    accuracy = [float(text.split()[-2]) for text in (shown, run_threads(1, digits.main, *of_digits)[0])]
    assert re.fullmatch(r"accuracy on 1,000 new digits: \d+\.\d %\n", shown)
    assert accuracy[0] == pytest.approx(accuracy[1], abs=1.0)
    misses = [float(text.split()[-1]) for text in (circle, run_threads(1, gan.main, *of_gan)[0])]
    assert re.fullmatch(r"step  ?20  mean distance from the circle \S+\n", circle)
    assert misses[0] == pytest.approx(misses[1], abs=0.02)
    the_example_of_strategies_says_what_a_rank_holds_and_moves(strategies)
    ghost_cells_and_walls_are_what_a_network_learns_with(heat.split())
    a_surrogate_learns_from_a_running_solver(surrogate)
    the_changed_solver_prints_what_the_page_says(learn)
    assert float(without.split()[-1]) > 0.05, "without the weights that come back the solver is wrong"


def the_solver_uses_what_others_learn_from_it(shown: str) -> None:
    """Rows of the field here, columns there, in parts of different sizes."""
    said = r"2 ranks solve, 2 train: loss (\S+), (\d+)% of the small steps, largest difference (\S+)\n"
    line = re.fullmatch(said, shown)
    assert line, shown
    assert float(line[1]) < 1e-4
    assert 20 < int(line[2]) < 80  # the trainers had it go by the network for a while
    assert float(line[3]) < 0.03  # of velocities up to 0.9


def a_sweep_trains_groups_of_ranks_side_by_side(lines: list[str]) -> None:
    assert [line.split()[:2] for line in lines[:2]] == [["2", "groups"], ["rate", "group"]]
    rows = [line.split() for line in lines[2:5]]
    groups = [(float(rate), group, ranks) for rate, group, ranks, _ in rows]
    assert groups == [(1e-3, "0", "0,1"), (1e-5, "1", "2,3"), (3e-3, "0", "0,1")]
    losses = [float(row[3]) for row in rows]
    assert lines[5] == f"best: {groups[losses.index(min(losses))][0]:g}, {min(losses):.4f}"
    assert losses[1] > max(losses[0], losses[2])


def the_example_of_strategies_says_what_a_rank_holds_and_moves(shown: str) -> None:
    said = r"offload on 2 ranks: loss 4\.131, after 2 steps \d\.\d+\nrank 0 holds [\d,]+ KiB in memory, (\d+) on disk\n"
    found = re.match(said + r"and moves per step: .*shard [\d.,]+ KiB", shown)
    assert found, shown
    assert int(found[1]) > 0


def ghost_cells_and_walls_are_what_a_network_learns_with(shown: list[str]) -> None:
    """The page's numbers, whatever the ranks."""
    (wanted,) = (line.split() for line in PAGE.splitlines() if line.startswith("loss ") and "of its own" in line)
    assert [word for word in shown if not word[0].isdigit()] == [word for word in wanted if not word[0].isdigit()]
    assert float(shown[1].rstrip(",")) < 1e-7
    assert float(shown[-1]) < 0.02


def errors_of(shown: str) -> list[float]:
    """Of the network's own states, in percent of the waves."""
    found = re.search(
        r"^error of the network's own states: (\S+)% after 1, (\S+)% after 5, (\S+)% after 10, (\S+)% after 20\n"
        r"a state takes the solver \S+ ms and the network \S+ ms\n$", shown, re.M,
    )  # fmt: skip
    assert found, shown
    return [float(error) for error in found.groups()]


def a_surrogate_learns_from_a_running_solver(shown: str) -> None:
    """As one rank does."""
    done = start(1, "-m", "fsdpx.examples.surrogate", *LEARNS)
    assert done.returncode == 0, done.stderr
    losses = re.compile(r"^run \d: loss (\S+)$", re.M)
    numbers = [[*map(float, losses.findall(text)), *errors_of(text)] for text in (shown, done.stdout)]
    first, second, one, *_, twenty = numbers[0]
    assert second < first < 1
    assert one < 60  # after 38 steps of training
    assert one < twenty
    np.testing.assert_allclose(numbers[0], numbers[1], rtol=1e-2)


def the_changed_solver_prints_what_the_page_says(shown: str) -> None:
    """The page starts it on four ranks; the number makes no difference."""
    pattern = r"20 states: mean (\S+), highest \S+, loss (\S+)\n"
    (wanted,) = re.findall(pattern, PAGE)
    found = re.fullmatch(pattern, shown)
    assert found, shown
    assert found[1] == wanted[0]
    assert float(found[2]) == pytest.approx(float(wanted[1]), abs=0.02)


def pictures_are_those_of_the_page(drawn: Path) -> None:
    """Sizes of all; the parts, which depend on the solver alone, cell by cell; the others show a longer run."""
    from matplotlib import image

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


@pytest.mark.parametrize("who", ["Solver.advance_round", "run_training"])
def test_an_error_of_solver_or_trainer_ends_both(who: str) -> None:
    code = (
        "from fsdpx.examples import solver\n"
        "def fail(*_, **__): raise RuntimeError('out of fuel')\n"
        f"solver.{who} = fail; solver.main([])"
    )
    done = start(2, "-c", code)
    assert done.returncode != 0
    assert "RuntimeError: out of fuel" in done.stderr
