"""Benchmarks say what they measured: failures have reasons, promises have verdicts, the page follows the results."""

import json
import sys
from pathlib import Path

import numpy as np
import pytest

import fsdpx
from fsdpx import nn, optim
from fsdpx.comm import Communicator


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        ("raise ValueError('too small')", "ValueError: too small"),
        ("import sys; sys.exit(3)", "exit status 3"),
        ("import time; time.sleep(60)", "no result after 1 s"),
        ("print('nothing of use')", "exit status 0"),
    ],
)
def test_a_job_that_fails_leaves_a_reason(code: str, reason: str) -> None:
    from jobs import environ, finish, start

    assert finish(start([sys.executable, "-c", code], environ()), 1.0) == {"failed": reason}


def test_a_program_that_is_not_there_leaves_a_reason() -> None:
    from jobs import environ, finish, start

    assert "no-such-program" in finish(start(["no-such-program"], environ()), 1.0)["failed"]


def test_the_row_of_a_failed_job_shows_the_reason_and_promises_no_figure() -> None:
    import side_by_side
    from jobs import Job

    slow, quick = Job("torch", "single", 1), Job("fsdpx", "ddp", 1)
    measured = {"seconds": [0.5, 0.25, 0.5], "rss": [1 << 20], "pss": [1 << 20], "first": 1.5}
    rows = side_by_side.rows_of("many", {slow: [{"failed": "MemoryError"}], quick: [measured, measured]})
    goals = side_by_side.verdicts(rows)
    shown = dict(side_by_side.tables({"rows": rows, "goals": goals}))
    assert "MemoryError" in shown["many"]
    assert rows[1]["rate"] == 64 / 0.5
    assert {goal["reached"] for goal in goals} == {None}
    assert "no figure" in shown["promised"]


@pytest.mark.parametrize(("figure", "ours", "reached"), [("rate", 3.0, True), ("rate", 1.9, False), ("pss", 1.1, True)])
def test_a_promise_is_a_ratio_of_two_jobs(figure: str, ours: float, reached: bool) -> None:
    from goals import Goal, verdicts

    bound = {"least": 2.0} if figure == "rate" else {"most": 1.2}
    rows = [
        {"model": "tiny", "job": "fsdpx fsdp 2x1", figure: ours},
        {"model": "tiny", "job": "torch fsdp 2x1", figure: 1.0},
    ]
    (verdict,) = verdicts(rows, [Goal("tiny", figure, "fsdpx fsdp 2x1", **bound)])
    assert verdict["ratio"] == ours
    assert verdict["reached"] is reached


def test_limits_follow_from_bytes_read_and_written() -> None:
    from collectives import limits

    assert limits({"4096": 4.0}, 2) == {
        "all_reduce": {"4096": 4.0},
        "all_gather": {"4096": 2.0},
        "reduce_scatter": {"4096": 3.0},
    }


def test_the_page_has_a_table_where_there_are_results_and_says_so_where_not(tmp_path: Path) -> None:
    from page import PAGE, render

    text = "<!-- scaling: communication -->\nold\n<!-- end -->\n<!-- breakdown: products -->\n<!-- end -->\n"
    point = {"model": "small", "units": 9, "on": 0.2, "off": 0.19, "steps": 3, "reported": 0.04, "note": ""}
    found = {"command": "here", "machine": "this", "sweeps": {}, "shares": [point]}
    (tmp_path / "scaling.json").write_text(json.dumps(found))
    made = render(text, tmp_path)
    assert "5.0 %" in made
    assert "4.0 %" in made
    assert "old" not in made
    assert "not measured yet: python bench/breakdown.py" in made
    assert render(made, tmp_path) == made
    assert render(PAGE.read_text(), tmp_path).count("<!-- end -->") == PAGE.read_text().count("<!-- end -->")


def test_silence_lets_a_rank_step_alone() -> None:
    from silent import silence

    def rank(comm: Communicator) -> tuple[float, int]:
        model = nn.Chain(nn.Linear(4, 8), nn.Linear(8, 4))
        trainer = model.as_distributed(loss=nn.MSE(), optimizer=optim.AdamW(), strategy="fsdp", comm=comm)
        x = np.random.default_rng(comm.rank).normal(size=(3, 4)).astype(np.float32)
        before = trainer.step(x, x)
        switch = silence(trainer)
        switch.on = False
        alone = trainer.step(x, x) if comm.rank == 0 else before
        comm.barrier().wait()
        return alone, switch.calls

    (alone, calls), (_, unused) = fsdpx.spawn(rank, 2, timeout=20.0)
    assert np.isfinite(alone)
    assert calls > 0
    assert unused == 0


@pytest.mark.parametrize("name", ["tiny", "small", "mlp", "many"])
def test_models_are_the_same_in_both_libraries(name: str) -> None:
    pytest.importorskip("torch")
    from workloads import MODELS, in_fsdpx, in_torch

    ours = sorted(spec.shape for spec in in_fsdpx(MODELS[name])[0].specs().values())
    theirs = sorted(tuple(p.shape) for p in in_torch(MODELS[name])[0].parameters())
    assert ours == theirs


def test_every_product_is_taken_apart() -> None:
    from inside import PRODUCTS

    from fsdpx.array import blas

    about = {"available", "choose", "chosen", "measure", "pointer", "threads"}
    assert set(PRODUCTS) == set(blas.__all__) - about


def test_ranks_share_the_batch() -> None:
    from workloads import MODELS, batch

    for model in MODELS.values():
        whole, parts = batch(model), [batch(model, rank, 2) for rank in range(2)]
        for n, array in enumerate(whole):
            assert np.array_equal(array, np.concatenate([part[n] for part in parts]))
