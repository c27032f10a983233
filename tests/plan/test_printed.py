"""What a plan prints: the answer first, what nothing measured supports, and lines that a terminal shows whole."""

import ast
import io
import json
import re
from dataclasses import replace

import numpy as np
import pytest
from commands import command, refused
from steps import X, gpt

import fsdpx
from fsdpx import nn
from fsdpx.__main__ import COMMANDS
from fsdpx.core.base.messages import COLUMNS, format_table
from fsdpx.errors import ConfigError
from fsdpx.ext.observe import plots
from fsdpx.launch.show import make_step_lanes
from fsdpx.plan import Machine, predict
from fsdpx.plan.grounds import describe_unmeasured_figures
from fsdpx.plan.kernels import KernelRates
from fsdpx.plan.prediction import dry_run_one_rank_per_group, predict_from_dry_runs
from fsdpx.plan.printed import wrap_call_into_lines

FIELD = ((8, 3, 16, 16), "float32")


@pytest.fixture(scope="module")
def plans():
    """With long labels, long options and much that does not fit."""
    many = {"machine": "a100-dgx-200g", "codecs": ("bf16", "int8"), "most": 12}
    fields = {"machine": "ethernet-10g", "domain": "any", "microbatches": 2, "memory": "300KiB", "most": 8}
    return [
        fsdpx.plan(gpt(), batch=(X, X), ranks=4, memory="580KiB", recompute=None, **many),
        fsdpx.plan(nn.UNet(3, 2, 2, 4, 1), batch=(FIELD, ((8, 2, 16, 16), "float32")), ranks=2, **fields),
    ]


def test_no_line_is_longer_than_a_terminal(plans):
    assert COLUMNS == 80
    for plan in plans:
        text = plan.format_plan("gpt-tiny: a GPT of some blocks of a width, with some heads and a context")
        for line in f"{text}\n{plan.best_candidate.prediction.peak}".splitlines():
            assert len(line) <= 80, line


@pytest.mark.parametrize("columns", [80, 100])
def test_a_terminal_breaks_no_cell(plans, columns):
    """Rendered by a terminal of that width, rows of a table are one line each, and all numbers of a column end below
    each other."""
    rich = pytest.importorskip("rich.console", reason="rich is not installed")
    for plan in plans:
        shown = io.StringIO()
        rich.Console(width=columns, file=shown).print(str(plan), markup=False, highlight=False)
        assert [line.rstrip() for line in shown.getvalue().splitlines()] == str(plan).splitlines()
        tables = re.findall(r"^(kind .*)\n-+\n((?:.+\n)+)", str(plan), re.MULTILINE)
        assert len(tables) == 2
        for head, rows in tables:
            ends = [head.index(word) + len(word) for word in ("step", "memory", "fits", "sends")]
            for row in (row for row in rows.splitlines() if not row.startswith(" ")):
                assert all(len(row) == end or row[end : end + 2] in ("", "  ") for end in ends), row
                assert all(row[end - 1] != " " for end in ends), row


def test_the_answer_stands_first(plans):
    for plan in plans:
        best = plan.best_candidate.prediction
        first = " ".join(str(plan).split("\nnot measured: ")[0].split())
        begin = f"{plan.best_candidate.label} on {plan.rank_count} ranks: {best.seconds:.3g} s per step, "
        assert first.startswith(begin)
        assert first.endswith(" per rank: it fits")
        assert plan.to_json()["answer"] == first
    unknown = replace(plans[0], memory=None)
    assert unknown.fastest_configuration_line.endswith(" per rank (the memory of a100-dgx-200g is not known)")


def test_what_does_not_fit_is_marked(plans):
    plan = plans[0]
    assert plan.large
    text = str(plan)
    scaling = text[text.index("on other numbers of ranks") :].split("\n\n")[0].splitlines()[3:]
    fits = {int(line.split()[0]): "NO" not in line for line in scaling}
    assert fits == {one.mesh.size: one.memory <= 580 << 10 for one in plan.scaling}
    assert set(fits.values()) == {True, False}
    rows = text[text.index("the fastest of each kind") :].split("\n\n")[0].splitlines()
    large = {one.label for one in plan.large} - {one.label for one in plan.candidates}
    assert all(any(row.startswith(label) and " NO " in row for row in rows) for label in large)


def test_the_line_of_python_is_the_same_in_several_lines(plans):
    for plan in plans:
        assert ast.dump(ast.parse(wrap_call_into_lines(plan.python_line))) == ast.dump(ast.parse(plan.python_line))
        assert wrap_call_into_lines(plan.python_line) in str(plan)


def test_words_of_a_table_go_below_rows_where_they_are_too_long():
    assert format_table([("a", "with"), ("x", "")], text=True).splitlines() == ["a  with", "-------", "x"]
    long = " ".join(["words"] * 20)
    found = format_table([("a", "b", "with"), ("x", "1", long), ("yy", "10", "few")], text=True).splitlines()
    assert [line.split() for line in found if line[:4].strip()] == [["a", "b"], ["------"], ["x", "1"], ["yy", "10"]]
    assert max(map(len, found)) <= COLUMNS
    assert " ".join(" ".join(found).split()).count("words") == 20


def grounds(machine, ranks=2, **options):
    return " | ".join(describe_unmeasured_figures(predict(gpt(), (X, X), ranks=ranks, machine=machine, **options)))


def test_what_nothing_measured_supports_is_said():
    sharded = "zero1 to fsdp"
    for strategy in ("zero1", "zero2", "fsdp"):
        assert sharded in grounds("a100-dgx-200g", strategy=strategy)
    assert sharded not in grounds("a100-dgx-200g", strategy="ddp")
    assert sharded not in grounds("a100-dgx-200g", 1, strategy="fsdp")
    assert sharded not in grounds("ethernet-10g", strategy="fsdp")
    assert "links" in grounds("h200", 2)
    assert "links" not in grounds("h200", 1)
    for name in ("h100-dgx-400g", "xeon-200g", "laptop"):
        assert f"{name} has published figures" in grounds(name)
    assert "bf16 on h100-dgx-400g goes at a published rate" in grounds("h100-dgx-400g", precision="bf16")
    assert "xeon-200g has no rate for bf16" in grounds("xeon-200g", precision="bf16")
    assert "bf16" not in grounds("xeon-200g")


def test_a_machine_file_from_before_kernels_were_measured_says_so():
    laptop = Machine.load("laptop")
    old = replace(laptop, name="old", measured=None)
    assert "old does not say what of it was measured" in grounds(old)
    assert "no kernel of old was measured" in grounds(old)
    amx = replace(old, compute=replace(old.compute, flops={"float32": 1e12, "bf16": 5e13}))
    assert "bf16 on old goes at a published rate, which is reached with oneDNN alone" in grounds(amx, precision="bf16")
    rates = KernelRates({"float32": {"elements": [1e9, 1e9]}})
    new = replace(laptop, name="new", measured=("compute", "links"), compute=replace(laptop.compute, kernels=rates))
    assert grounds(new, precision="bf16") == ""
    assert "links" in grounds(replace(new, measured=("compute",)))


def test_a_plan_says_it_in_its_first_lines(plans):
    for plan in plans:
        said = describe_unmeasured_figures(plan.best_candidate.prediction)
        assert said
        first = " ".join(str(plan).split("\n\n")[0].split())
        assert all(f"not measured: {one}" in first for one in said)
        assert plan.to_json()["not_measured"] == said
    assert json.dumps(plans[0].to_json())


def test_a_plan_without_a_machine_names_plan():
    with pytest.raises(ConfigError, match=r"^fsdpx\.plan\(.*\): missing a required .*'machine'; machine= is a100-dgx"):
        fsdpx.plan(gpt(), batch=(X, X), ranks=2)
    with pytest.raises(ConfigError, match=r"^fsdpx\.plan\("):
        fsdpx.plan()


@pytest.mark.parametrize(
    ("name", "says"),
    [(name, f"^{name}=array") for name in ("ranks", "hosts", "most", "memory", "domain", "machine", "codecs")]
    + [(name, name) for name in ("microbatches", "precision", "strategy", "mesh", "schedule", "recompute", "batch")],
)
def test_arrays_as_arguments_are_errors_in_words(name, says):
    given = {"batch": (X, X), "machine": "laptop", **({} if name == "hosts" else {"ranks": 2})}
    with pytest.raises(ConfigError, match=says):
        fsdpx.plan(gpt(), **given | {name: np.array([1, 2])})


def test_ctrl_c_ends_quietly(monkeypatch):
    def interrupted(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr("fsdpx.launch.plan.plan.search", interrupted)
    assert command("plan gpt-tiny --ranks 2 --machine laptop") == (130, "", "")
    assert "plan" in COMMANDS


@pytest.mark.parametrize("option", ["--png", "--ranks-png"])
def test_pictures_are_asked_for_before_the_search(monkeypatch, tmp_path, option):
    path, says = str(tmp_path / "step.png"), "matplotlib is not installed: pip install 'fsdpx[plot]'"
    monkeypatch.setattr("fsdpx.launch.plan.plan.search", None)  # it is not asked
    monkeypatch.setattr(plots, "format_missing_matplotlib_message", lambda: says)
    err = refused(["plan", "gpt-tiny", "--ranks", "2", "--machine", "laptop", option, path])
    assert err == f"fsdpx plan: {option} {path}: {says}\n"


def test_pictures_have_the_line_of_the_memory_that_there_is():
    pytest.importorskip("matplotlib", reason="the extra plot is not installed")
    dry = dry_run_one_rank_per_group(gpt(), (X, X), 2, False, strategy="fsdp")
    found = predict_from_dry_runs(dry, Machine.load("laptop"))
    for limit, lines in ((2 * found.memory, 1), (found.memory // 2, 1), (10**12, 0)):
        (axes,) = plots.make_step_figure([make_step_lanes(dry, found, "fsdp: a GPT", limit)]).axes
        assert [line.get_gid() for line in axes.lines].count(plots.LIMIT_COLOR) == lines
        assert [text.get_gid() for text in axes.texts].count(plots.LIMIT_COLOR) == 1
    figure = plots.make_step_figure([make_step_lanes(dry, found, "fsdp: a GPT")])  # what the machine says
    (axes,) = figure.axes
    assert [text.get_text() for text in figure.legends[1].texts] == list(plots.MEMORY)
    assert plots.LIMIT_COLOR in [text.get_gid() for text in axes.texts]
    rows = [(1, 2.0, 3e9), (2, 1.0, 2e9)]
    _, memory = plots.draw_scaling("a GPT", rows, 2.0**31).axes
    (line,) = (line for line in memory.lines if line.get_gid() == plots.LIMIT_COLOR)
    assert set(line.get_ydata()) == {2.0}
    assert not [line for line in plots.draw_scaling("a GPT", rows).axes[1].lines if line.get_gid() == plots.LIMIT_COLOR]
