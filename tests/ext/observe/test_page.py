"""The folder of a run: the summary over all ranks, the page about it, lists of runs, and who waits for whom."""

import json
import logging
import re
import shutil
import sys
import time
from datetime import UTC
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
from commands import refused, shown
from models import CASES, make

from fsdpx import Mesh, data, spawn
from fsdpx.core.base import messages
from fsdpx.core.program.schedules import make_schedule
from fsdpx.core.program.simulator import ActionEvent, StageCosts, simulate
from fsdpx.core.program.verbs import parse_actions
from fsdpx.errors import ConfigError, install_hint
from fsdpx.ext.observe.chrome import RankTrace, TraceHeader
from fsdpx.ext.observe.folder import RunFolder
from fsdpx.ext.observe.html_page import compute_wait_matrix
from fsdpx.ext.observe.measure import ClockReading
from fsdpx.ext.observe.plots import DARKER, THEMES, StepLanes, draw_steps, make_step_figure


@pytest.fixture(scope="module")
def of_a_mesh(tmp_path_factory):
    """A pipe of two stages on two ranks each; tests only write its page again."""
    folder = RunFolder(tmp_path_factory.mktemp("page") / "r")

    def run(comm):
        if comm.rank == 0:
            folder.write_config({"lr": 0.01, "name": "<b>"}, 4)
        comm.barrier().wait()
        trainer = make(comm, "gpt", trace=folder.trace_folder, mesh=Mesh(pipe=2, shard=2), microbatches=2)
        x, y = CASES["gpt"].batch(np.random.default_rng(0), 24)
        loader = data.DataLoader(data.ArrayDataset(x, y), 8, comm=trainer.data_group)
        trainer.fit(loader, validation=[(x[:4], y[:4])], log=folder.path, progress=False)
        summary = trainer.inspect.gather_summary()
        if comm.rank == 0:
            folder.write_report(str(summary), summary.to_json())

    spawn(run, 4)
    return folder


class Checked(HTMLParser):
    """Tags that are opened are closed, in turn."""

    def __init__(self):
        super().__init__()
        self.open, self.seen = [], []

    def handle_starttag(self, tag, attrs):
        self.seen.append(tag)
        if tag not in ("meta", "br", "img"):
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def seen(folder):
    """The tags of the page, which is well formed and asks for no other file."""
    text = folder.page_path.read_text()
    checked = Checked()
    checked.feed(text)
    assert checked.open == []
    assert "script" not in checked.seen
    assert re.findall(r"(?:href|url)\s*[=(]|src=\"(?!data:)|https?:", text) == []
    return checked.seen


WORDS = "measured", "simulated", "idle", "reduce-scatter, shard", "for 3", "mean s", "in addition to", "rank 3  "


def test_the_page_of_a_run_is_whole_by_itself(of_a_mesh):
    pytest.importorskip("matplotlib")
    said, text = shown(["report", str(of_a_mesh.path)]), of_a_mesh.page_path.read_text()
    assert said.endswith(f"\n{of_a_mesh.page_path}\n")
    assert seen(of_a_mesh).count("img") == 2
    assert "&lt;b&gt;" in text
    assert "<b>" not in text
    for words in WORDS:
        assert words in text, words
        assert words in said, words


def test_without_matplotlib_there_is_text_and_what_to_install(of_a_mesh, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    said = shown(["report", str(of_a_mesh.path)])
    assert f"\nit has no pictures: matplotlib is not installed: {install_hint('plot')}\n" in said
    assert all(words in said for words in WORDS)
    assert "img" not in seen(of_a_mesh)
    assert not of_a_mesh.draw_curve()


def test_a_run_without_a_trace_says_how_to_get_one(tmp_path):
    folder = RunFolder(tmp_path)
    folder.write_config({}, 1)
    shown(["report", str(tmp_path)])
    assert folder.page_path.read_text().count("no trace was recorded: --trace of the main job") == 1


def test_a_folder_of_traces_alone_has_a_page(of_a_mesh, tmp_path):
    traces = Path(shutil.copytree(of_a_mesh.trace_folder, tmp_path / "trace"))
    assert f"\n{traces / 'report.html'}\n" in shown(["report", str(traces)])
    text = (traces / "report.html").read_text()
    for words in ("ranks  4", "measured", "for 1", "MiB, in addition"):
        assert words in text
    for words in ("no trace was recorded", "the run has not ended", "not yet, or with an error", "Bytes sent"):
        assert words not in text
    (traces / "rank-00001.json.gz").unlink()
    assert "of 4 ranks the files of 1 are missing" in refused(["report", str(traces)])


def test_a_resumed_run_keeps_when_it_began_and_its_jobs(tmp_path, monkeypatch):
    folder = RunFolder(tmp_path / "run")
    for hour, job in ((8, "7"), (9, "8")):
        monkeypatch.setattr(time, "strftime", lambda form, hour=hour: f"2026-03-01 0{hour}:00:00+0000")
        monkeypatch.setenv("SLURM_JOB_ID", job)
        folder.write_config({"lr": hour}, 1)
    assert (folder.begin_time.astimezone(UTC).hour, folder.start_time.astimezone(UTC).hour) == (8, 9)
    assert folder.is_begun_or_resumed_by_any_job(["Slurm job 7"])
    assert folder.is_begun_or_resumed_by_any_job(["Slurm job 8"])
    assert folder.read_arguments() == {"lr": 9}
    shown(["report", str(folder.path)])
    assert re.search(r"begun +2026-03-01 08:.*\nresumed +2026-03-01 09:", folder.page_path.read_text())


def test_runs_are_listed_and_compared(tmp_path):
    for name, rate, loss in (("a", 0.1, 2.0), ("b", 0.2, 1.5)):
        folder = RunFolder(tmp_path / name)
        folder.write_config({"lr": rate, "size": "tiny"}, 2)
        rows = [{"step": step, "loss": loss, "rate": 100.0} for step in (1, 2)] + [{"step": 2, "validation_loss": loss}]
        (folder.path / "metrics.jsonl").write_text("\n".join(map(json.dumps, rows)) + '\n{"step": 3, "lo')
    folder.write_report("text", [])
    head, _, *lines = shown(["runs", "--in", str(tmp_path)]).splitlines()
    assert head.split() == ["run", "begun", "ranks", "steps", "loss", "validation", "rate", "ended"]
    wanted = ["2 2.0000 2.0000 100 no", "2 1.5000 1.5000 100 yes"]
    assert [line.split()[-5:] for line in lines] == [line.split() for line in wanted]
    assert "lr         0.1  0.2" in shown(["runs", "--in", str(tmp_path), "a", "b"]).splitlines()
    says = f"{tmp_path}/c holds no run: there is no config.json; `fsdpx runs` lists those in"
    assert says in refused(["runs", "--in", str(tmp_path), "c"])
    says = "none/ holds no run: train one, or name the folder with --in"
    assert says in refused(["runs", "--in", str(tmp_path / "none")])
    says = f"{tmp_path} holds no run and no traces: there is no config.json, and no rank-*.json.gz"
    assert says in refused(["report", str(tmp_path)])


def test_the_summary_has_the_numbers_of_the_reports():
    def run(comm):
        trainer = make(comm, "mlp", group_bytes=0)
        trainer.inspect.reset_counters()
        for _ in range(2):
            trainer.step(*CASES["mlp"].batch(np.random.default_rng(comm.rank), 4))
        return trainer.inspect.gather_summary()

    summary = spawn(run, 3)[0]
    text = str(summary)
    moved = sum(one.nbytes for one in summary.list_timings_of_verb("GATHER"))
    assert moved == sum(report.traffic["shard", "all_gather"].bytes for report in summary.reports) > 0
    assert summary.compute_mean_bandwidth_of_verb("GATHER") > 0
    assert summary.compute_mean_bandwidth_of_verb("F") is None
    assert sum(one.calls for one in summary.list_timings_of_verb("F")) == 3 * 2 * 3
    (line,) = (line for line in text.splitlines() if line.startswith("UPDATE "))
    assert line.split()[1] == "18"
    held = summary.reports[0].high_water
    assert {kind: most for kind, (_, most) in held.items()} == summary.reports[0].memory
    assert all(planned == most for planned, most in held.values())
    assert "peak memory of a rank  " in text


def test_gradients_beyond_the_plan_are_seen():
    """`no_sync` keeps whole gradients that the placement does not lay out."""

    def run(comm):
        trainer = make(comm, "mlp")
        x, y = CASES["mlp"].batch(np.random.default_rng(0), 4)
        with trainer.no_sync():
            trainer.accumulate(x, y)
        trainer.step(x, y)
        return trainer.report()

    report = spawn(run, 2)[0]
    planned, most = report.high_water["gradients"]
    assert most > planned == report.memory["gradients"]


# -- waiting -----------------------------------------------------------------------------------------------------------


def rank_of(n, begins, ends, ahead=0.0):
    """A step of 10 ms with one meeting, in which the rank stands still; times in ms of rank 0. ahead: its clock, s."""
    told = TraceHeader(n, 3, "", {}, "", 0.0, [ClockReading(0.0, ahead, 0.0)])

    def span(cat, begin, end, **args):
        return {"ph": "X", "cat": cat, "ts": 1e6 * ahead + 1e3 * begin, "dur": 1e3 * (end - begin), "args": args}

    meeting = span("world", begins, ends, key="k", stops=True)
    return RankTrace(told, [span("step", 0, 10), span("compute", 0, begins), meeting])


def test_who_comes_last_is_waited_for():
    found = compute_wait_matrix([rank_of(0, 1, 7), rank_of(1, 6, 7, ahead=5.0), rank_of(2, 2, 7, ahead=-3.0)])
    np.testing.assert_allclose(found.matrix, [[0, 5e-3, 0], [0, 0, 0], [0, 4e-3, 0]], atol=1e-9)
    np.testing.assert_allclose([span.transferring for span in found.spans], [1e-3] * 3, atol=1e-9)
    np.testing.assert_allclose([span.computing for span in found.spans], [1e-3, 6e-3, 2e-3], atol=1e-9)
    assert found.steps == 1


# -- logging -----------------------------------------------------------------------------------------------------------


def test_what_is_said_goes_through_logging(tmp_path, capsys):
    handler = logging.FileHandler(tmp_path / "own.txt")
    messages.LOGGER.addHandler(handler)
    try:
        messages.log_line("100 % done")
    finally:
        messages.LOGGER.removeHandler(handler)
        handler.close()
    assert (tmp_path / "own.txt").read_text() == "100 % done\n"
    assert capsys.readouterr().err == "100 % done\n"


def test_tensorboard_that_is_asked_for_and_missing_is_an_error(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "tensorboardX", None)
    with pytest.raises(ConfigError, match=r"tensorboard=True\): .* pip install '\.\[tensorboard\]'"):
        spawn(lambda comm: make(comm, "mlp").fit([], log=tmp_path, tensorboard=True), 1)


STEP = [
    ActionEvent(0, action, start, end)
    for action, start, end in zip(
        parse_actions("GATHER0 F0.0 LOSS.0 B0.0 REDUCE0 SETTLE0 NORM UPDATE0"),
        (0, 1, 3, 3.5, 6, 8, 8, 9), (1, 3, 3.5, 6, 8, 8, 9, 10), strict=True,
    )
]  # fmt: skip


def test_what_ranks_do_and_microbatches_are_named(tmp_path, monkeypatch):
    matplotlib = pytest.importorskip("matplotlib")
    monkeypatch.setitem(matplotlib.rcParams, "svg.fonttype", "none")
    drawn = draw_steps(STEP, tmp_path / "step.svg", title="one step").read_text()
    for word in ("one step", "rank 0", "gather", "forward", "backward", "reduce", "update", "waiting"):
        assert f">{word}</text>" in drawn, word
    assert ">message</text>" not in drawn
    many = draw_steps(simulate(make_schedule("1f1b", 2, 100), StageCosts(1, 1, 1)), tmp_path / "many.svg").read_text()
    assert ">99</text>" not in many  # boxes too narrow for their number
    schedule = simulate(make_schedule("zbv", 2, 3), StageCosts(1, 1, 1, 0.1))
    two = draw_steps(schedule, tmp_path / "two.svg").read_text()
    assert (">2</text>" in two, f">{DARKER}</text>" in two, f">{DARKER}</text>" in many) == (True, True, False)
    assert draw_steps(schedule, tmp_path / "two.png").read_bytes().startswith(b"\x89PNG")


def test_a_picture_has_both_themes_memory_by_kind_and_arrows(tmp_path):
    pytest.importorskip("matplotlib")
    held = [{"activations": [(0.0, 3 << 20), (6.0, 1 << 20)], "parameters": [(0.0, 4 << 20)], "odd": [(5.0, 1 << 20)]}]
    panel = StepLanes("name: about", STEP, ["rank 0"], held, "unit", second=2.0)
    both = [make_step_figure([panel, panel], theme) for theme in THEMES]
    assert [one.get_facecolor()[0] > 0.5 for one in both] == [True, False]
    words = [text.get_text() for text in both[0].axes[1].texts]
    for word in ("name", "about", "rank 0", "parameters", "activations", "8 MiB", "5 s", "memory"):  # at 5.0 in all
        assert word in words, word
    ends = [(text.xyann[0], text.xy[0]) for text in both[0].axes[1].texts if hasattr(text, "xyann")][1:]
    assert ends == [(1, 1)]  # F waits for GATHER0; what other ranks are late with comes from no box


def test_an_arrow_comes_from_the_message_of_the_same_line():
    """Two lines of a pipe send messages of one name."""
    pytest.importorskip("matplotlib")
    times = {"F0.0": (0, 2), "SEND0.0": (2, 3), "RECV0.0": (0, 3), "F1.0": (3, 4)}
    events = [
        ActionEvent(2 * n + line, action, start + line, end + line, key=line)
        for n, words in enumerate(("F0.0 SEND0.0", "RECV0.0 F1.0"))
        for line in (0, 1)
        for action in parse_actions(words)
        for start, end in [times[str(action)]]
    ]
    (axes,) = make_step_figure([StepLanes("pipe: two lines", events, ["a", "b", "c", "d"])]).axes
    arrows = [text for text in axes.texts if hasattr(text, "xyann") and not text.get_text()]
    assert [(arrow.xyann[0], arrow.xy[0]) for arrow in arrows] == [(2, 3), (3, 4)]  # from SEND to F, of each line


def test_missing_matplotlib_is_said(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ConfigError, match=r"draw: matplotlib is not installed: pip install '\.\[plot\]'"):
        draw_steps(STEP, tmp_path / "step.png")


def test_nothing_to_draw_is_said(tmp_path):
    with pytest.raises(ConfigError, match="there is no event that takes time"):
        draw_steps([ActionEvent(0, parse_actions("SETTLE0")[0], 1, 1)], tmp_path / "step.png")
