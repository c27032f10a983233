"""The benchmark of mesh axes: its cases can be built, its page has a table for each model, failures have reasons."""

import json
import re
from pathlib import Path

import pytest

import fsdpx
from fsdpx.program import SCHEDULES


def test_every_case_fills_its_ranks_and_names_itself() -> None:
    from axes import CASES

    assert len({(case.table, case.ranks, case.name) for case in CASES}) == len(CASES)
    for case in CASES:
        assert fsdpx.Mesh.parse(case.mesh).resolve(case.ranks).size == case.ranks
        options = dict(zip(case.options[::2], case.options[1::2], strict=True))
        assert set(options) <= {"--microbatches", "--schedule", "--sequence", "--recompute"}
        assert options.get("--schedule", "1f1b") in SCHEDULES
    assert "fsdp pipe=4 interleaved" in {case.name for case in CASES}


def test_rows_are_medians_of_rounds_and_of_the_largest_rank() -> None:
    from axes import Case, row, tables

    case = Case("tiny", 2, "fsdp", "pipe=2", ("--microbatches", "8", "--schedule", "zb-h1"))
    first = {
        "seconds": [0.5, 1.0, 0.5],
        "rss": [3 << 20, 5 << 20],
        "pss": [1 << 20, 2 << 20],
        "moved": {"pipe": 1 << 22},
    }
    found = row(case, [first, first | {"seconds": [0.25]}])
    assert found["rate"] == (2048 / 0.5 + 2048 / 0.25) / 2
    assert (found["pss"], found["rss"]) == (2 << 20, 5 << 20)
    failed = row(case, [{"failed": "MemoryError"}])
    ((name, text),) = tables({"rows": [found, failed], "cores": 2})
    assert name == "tiny"
    assert re.search(r"^2 +fsdp pipe=2 zb-h1 +6,144 +2 +5 +4\.0$", text, re.M)
    assert re.search(r"^2 +fsdp pipe=2 zb-h1 +MemoryError$", text, re.M)
    assert "2 cores: with more ranks they take turns" in text


@pytest.mark.parametrize("measured", [False, True])
def test_the_page_builds_with_and_without_results(measured: bool, tmp_path: Path) -> None:
    from axes import MODELS
    from page import PAGES, render

    text = PAGES[1].read_text()
    marks = re.findall(r"<!-- axes: (\w+) -->", text)
    assert set(marks) == {"command", "machine", *MODELS}
    if measured:
        rows = [{"model": model, "ranks": 1, "case": f"one {model}", "note": "none"} for model in MODELS]
        (tmp_path / "axes.json").write_text(
            json.dumps({"command": "here", "machine": "this", "cores": 2, "rows": rows})
        )
    made = render(text, tmp_path)
    assert made.count("not measured yet: python bench/axes.py") == (0 if measured else len(marks))
    assert all(f"one {model}" in made for model in MODELS) is measured
    assert render(made, tmp_path) == made


def test_ranks_of_a_line_have_the_same_tokens() -> None:
    from meshed import tokens
    from workloads import MODELS

    whole = tokens(MODELS["tiny"], 16, 0, 1)
    parts = [tokens(MODELS["tiny"], 16, rank, 2) for rank in range(2)]
    for i in (0, 1):
        assert (whole[i][:4] == parts[0][i]).all()
        assert (whole[i][4:] == parts[1][i]).all()
    assert (whole[0][:, 1:] == whole[1][:, :-1]).all()
