"""`bench step` lets strategies take turns on the same ranks, and says how their steps compare."""

import json
from pathlib import Path

import pytest
from commands import shown

import fsdpx
from fsdpx import nn, spawn
from fsdpx.__main__ import main
from fsdpx.core.trainer.trainer import Trainer
from fsdpx.examples import models
from fsdpx.launch import bench
from fsdpx.launch.catalog import CatalogModel
from fsdpx.launch.exit_status import JobEnding

ROWS = lambda n: ((n, 8), "float32")  # noqa: E731
SMALL = CatalogModel("small", lambda: models.make_mlp(2, 8), nn.MSELoss(), ROWS, ROWS, 5)


def test_strategies_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    order, step = [], Trainer.step

    def seen(self: Trainer, *batch: object) -> float:
        if self.call_runner.rank == 0:
            order.append(id(self))
        return step(self, *batch)

    monkeypatch.setattr(Trainer, "step", seen)
    reports = spawn(lambda comm: bench.compare_strategies(comm, SMALL, ["ddp", "fsdp", "zero2"], 3), 2)
    assert reports[0] == reports[1]
    a, b, c = order[bench.WARMUP_STEPS * 3 :][:3]
    assert len({a, b, c}) == 3
    assert order[bench.WARMUP_STEPS * 3 :] == [a, b, c, b, c, a, c, a, b]
    rows = reports[0]["strategies"]
    assert [row["strategy"] for row in rows] == ["ddp", "fsdp", "zero2"]
    assert rows[0]["ratio"] == 1.0
    assert all(0 < row["least"] <= row["seconds"] for row in rows)
    assert (reports[0]["ranks"], reports[0]["batch"]) == (2, 5)
    text = bench._format_step_report("small", reports[0])
    assert text.startswith("small: small; batch 5, float32, 2 ranks on ")
    assert "relative to ddp" in text


def test_it_writes_what_it_prints(tmp_path: Path) -> None:
    fsdpx.finalize()
    file = tmp_path / "steps.json"
    words = ["bench", "step", "digits", "--strategies", "ddp, fsdp", "--batch", "2", "--rounds", "1"]
    assert "1.000" in shown([*words, "--json", str(file)])
    found = json.loads(file.read_text())
    assert (found["model"], [one["strategy"] for one in found["strategies"]]) == ("digits", ["ddp", "fsdp"])


def test_it_starts_ranks_that_are_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started = []
    monkeypatch.setattr(bench.run, "run_job", lambda *given: started.append(given) or JobEnding("done", 7))
    words = ["bench", "step", "digits", "--strategies", "ddp,fsdp", "--rounds", "1", "--precision", "float64"]
    more = ["--batch", "4", "--json", str(tmp_path / "a")]
    assert main([*words, *more, "-n", "3"]) == 7
    ((config, program),) = started
    assert (config.ranks, config.max_restarts, program) == (3, 0, ["-m", "fsdpx", *words, *more])
