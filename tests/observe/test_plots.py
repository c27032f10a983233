"""Pictures of schedules and programs are written, or a ConfigError names the reason."""

import sys
from pathlib import Path

import pytest
from amount import in_full

from fsdpx.errors import ConfigError
from fsdpx.observe.plots import DARKER, draw
from fsdpx.program.machine import Costs, simulate
from fsdpx.program.schedules import schedule
from fsdpx.program.timeline import Event
from fsdpx.program.verbs import parse

STEP = [
    Event(0, action, start, end)
    for action, start, end in zip(
        parse("GATHER0 F0.0 LOSS.0 B0.0 REDUCE0 SETTLE0 NORM UPDATE0"),
        (0, 1, 3, 3.5, 6, 8, 8, 9), (1, 3, 3.5, 6, 8, 8, 9, 10), strict=True,
    )
]  # fmt: skip


@in_full
@pytest.mark.parametrize("name", ["1f1b", "zbv"])
def test_a_schedule_is_drawn(name: str, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    path = draw(simulate(schedule(name, 3, 4), Costs(1, 1, 1, 0.1)), tmp_path / "plan.png", title=name)
    assert path.read_bytes().startswith(b"\x89PNG")


def text_of(path: Path) -> str:
    return path.read_text(encoding="utf-8")


@in_full
def test_verbs_ranks_and_microbatches_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    matplotlib = pytest.importorskip("matplotlib")
    monkeypatch.setitem(matplotlib.rcParams, "svg.fonttype", "none")
    drawn = text_of(draw(STEP, tmp_path / "step.svg", title="one step"))
    for word in ("one step", "rank 0", "GATHER", "F", "LOSS", "B", "REDUCE", "NORM", "UPDATE"):
        assert f">{word}</text>" in drawn, word
    assert ">SETTLE</text>" not in drawn  # it takes no time
    many = text_of(draw(simulate(schedule("1f1b", 2, 200), Costs(1, 1, 1)), tmp_path / "many.svg"))
    assert ">199</text>" not in many  # boxes too narrow for their number
    two = text_of(draw(simulate(schedule("zbv", 2, 3), Costs(1, 1, 1)), tmp_path / "two.svg"))
    assert (f">{DARKER}</text>" in two, f">{DARKER}</text>" in many) == (True, False)


def test_missing_matplotlib_is_said(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ConfigError, match=r"draw: matplotlib is not installed: pip install 'fsdpx\[plot\]'"):
        draw(STEP, tmp_path / "step.png")


def test_nothing_to_draw_is_said(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="there is no event that takes time"):
        draw([Event(0, parse("SETTLE0")[0], 1, 1)], tmp_path / "step.png")
