"""Benchmarks say what they measured: failures have reasons, the page follows the results."""

import json
import re
import sys
from collections import defaultdict
from pathlib import Path

import checkpoints
import duel
import elastic
import halves
import losing
import numpy as np
import pytest
import records
import side_by_side
from collectives import limits
from jobs import Job, environ, finish, start
from page import PAGE, render
from saving import bandwidth, stall, write_plainly
from workloads import MODELS, Model, batch, in_fsdpx, in_torch

import fsdpx
from fsdpx.core.array.kernels import choice

REASONS = {
    "raise ValueError('too small')": "ValueError: too small",
    "import sys; sys.exit(3)": "exit status 3",
    "import time; time.sleep(60)": "no result after 1 s",
    "print('nothing of use')": "exit status 0",
}


@pytest.mark.parametrize(("code", "reason"), REASONS.items())
def test_a_job_that_fails_leaves_a_reason(code, reason):
    assert finish(start([sys.executable, "-c", code], environ()), 1.0) == {"failed": reason}


def test_every_compiled_kernel_has_been_measured_and_pays():
    gains = defaultdict(list)
    for row in json.loads((Path(__file__).parents[2] / "bench" / "results" / "kernels.json").read_text())["rows"]:
        if not row["size"].startswith("many"):  # of sizes that models have
            gains[row["kernel"].partition(" ")[0]].append(row["plain_us"] / row["numba_us"])
    names = choice.import_all_compiled_kernels().keys()
    assert names - gains.keys() == set()
    assert {name: most for name in names if (most := max(gains[name])) < 1.3} == {}


def test_a_program_that_is_not_there_leaves_a_reason():
    assert "no-such-program" in finish(start(["no-such-program"], environ()), 1.0)["failed"]


def test_the_row_of_a_failed_job_shows_the_reason():
    measured = {"seconds": [0.5, 0.25, 0.5], "rss": [1 << 20], "pss": [1 << 20], "first": 1.5}
    failed = {"torch single 1x1": {"failed": "MemoryError"}, "fsdpx ddp 1x1": measured}
    duels = {"fsdpx ddp 1x1": {"fsdpx ddp 1x1": {"failed": "its rival failed"}, "torch single 1x1": {"failed": "x"}}}
    rows = side_by_side.rows_of("many", failed, duels)
    shown = dict(side_by_side.tables({"rows": rows}))
    assert "MemoryError" in shown["many"]
    assert "in turns: its rival failed" in shown["many"]
    assert rows[1]["rate"] == 64 / 0.5


def test_a_duel_counts_whole_steps_by_turn_and_the_median_ratio():
    def job(second, turns, begun):
        steps = {"begun": begun, "seconds": [second] * len(begun), "turns": turns, "first": 2.0}
        return steps | {"rss": [1], "pss": [None]}

    ours = job(1.0, [(0, 3), (10, 13), (20, 23)], [-0.5, 0.0, 1.0, 2.5, 10.0, 20.0])  # the fourth ends in no turn
    theirs = job(2.0, [(3, 10), (13, 20), (23, 30)], [3.0, 13.0, 29.0])
    assert duel.outcome(ours) == [1.0, 1.0, 1.0]
    assert duel.outcome(theirs) == [2.0, 2.0, None]
    both = {"fsdpx ddp 1x1": ours, "torch single 1x1": theirs}
    by_itself = {name: said | {"seconds": [9.0], "first": 1.0} for name, said in both.items()}
    rows = side_by_side.rows_of("many", by_itself, {"fsdpx ddp 1x1": both})
    assert [(r["job"], r["rate"], r["first"], r.get("ratio")) for r in rows] == [
        ("fsdpx ddp 1x1", 64.0, 1.0, 2.0),
        ("torch single 1x1", 32.0, 1.0, None),
    ]
    by_itself["torch single 1x1"] = {"failed": "MemoryError"}  # without memory and launch, its duel is no row
    assert "rate" not in side_by_side.rows_of("many", by_itself, {"fsdpx ddp 1x1": both})[1]


@pytest.mark.parametrize(
    ("given", "replaces"),
    [("", True), ("--rounds 3", True), ("--models tiny", False), ("--only fsdp", False), ("--quick", False)],
)
def test_only_a_full_run_replaces_the_results(given, replaces, tmp_path, monkeypatch, capsys):
    folders = {name: tmp_path / name for name in ("RESULTS", "QUICK")}
    for name, folder in folders.items():
        monkeypatch.setattr(records, name, folder)
    monkeypatch.setattr(side_by_side, "QUICK", folders["QUICK"])
    monkeypatch.setattr(side_by_side, "run", lambda *_: {"failed": "not run"})
    monkeypatch.setattr("sys.argv", ["side_by_side.py", *given.split()])
    jobs = [job for job in side_by_side.JOBS if job.name == "fsdpx zero1 1x1"]
    assert side_by_side.compare("Doc.", "side_by_side", jobs) == 0
    (written,) = tmp_path.glob("*/side_by_side.json")
    assert written.parent == folders["RESULTS" if replaces else "QUICK"]
    assert f"written to {written}" in capsys.readouterr().out


JOB = """
import json, pathlib, sys, time
folder = pathlib.Path(sys.argv[sys.argv.index("--turns") + 1])
(folder / "new").write_text("1.0")
(folder / "new").rename(folder / "ready")
begun = []
while not (folder / "stop").exists():
    begun.append(time.time())
    time.sleep(0.01)
print(json.dumps({"begun": begun, "seconds": [0.01] * len(begun), "first": 0.0}))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="looks for processes in /proc")
def test_only_one_of_two_runs_at_a_time(monkeypatch):
    def command(job, model, *options):
        return ["sh", "-c", '"$@"; exit 0', "sh", sys.executable, "-c", JOB, *options]  # a child of what is started

    monkeypatch.setattr(duel, "command", command)
    one, other = duel.duel([Job("fsdpx", "ddp", 1), Job("torch", "single", 1)], "many", 2, 30.0)
    for mine, rival in ((one, other), (other, one)):
        assert len(mine["turns"]) == 2
        inside = [sum(begin + 0.05 < at < end - 0.05 for at in mine["begun"]) for begin, end in mine["turns"]]
        assert min(inside) > 3
        assert not [at for begin, end in rival["turns"] for at in mine["begun"] if begin + 0.05 < at < end - 0.05]


def test_a_rival_that_fails_ends_the_duel(monkeypatch):
    codes = {"fsdpx": JOB, "torch": "raise ValueError(1)"}
    monkeypatch.setattr(duel, "command", lambda job, model, *o: [sys.executable, "-c", codes[job.library], *o])
    jobs = [Job("fsdpx", "ddp", 1), Job("torch", "single", 1)]
    good, bad = duel.duel(jobs, "many", 2, 30.0)
    assert "failed" not in good
    assert good["turns"] == []
    assert bad["failed"] == "ValueError: 1"
    assert duel.duel(jobs[::-1], "many", 2, 30.0)[1] == {"failed": "its rival failed"}


def test_limits_follow_from_bytes_read_and_written():
    assert limits({"4096": 4.0}, 2) == {
        "all_reduce": {"4096": 4.0},
        "all_gather": {"4096": 2.0},
        "reduce_scatter": {"4096": 3.0},
    }


def test_the_page_has_a_table_where_there_are_results_and_says_so_where_not(tmp_path):
    text = "<!-- modules: small -->\nold\n<!-- end -->\n<!-- footprint: memory -->\n<!-- end -->\n"
    row = {"model": "small", "job": "torch ddp 2x1", "library": "torch", "unit": "tokens/s", "note": "too slow"}
    (tmp_path / "modules.json").write_text(json.dumps({"command": "here", "machine": "this", "rows": [row]}))
    made = render(text, tmp_path)
    assert "too slow" in made
    assert "old" not in made
    assert "not measured yet: python bench/footprint.py" in made
    assert render(made, tmp_path) == made
    rows = [render(f"<!-- modules: small of {word} -->\n<!-- end -->\n", tmp_path) for word in ("2x1", "4x1")]
    assert ["too slow" in table for table in rows] == [True, False]
    assert render(PAGE.read_text(), tmp_path).count("<!-- end -->") == PAGE.read_text().count("<!-- end -->")


@pytest.mark.parametrize("name", ["tiny", "small", "mlp", "many", "cnn"])
def test_models_are_the_same_in_both_libraries(name):
    pytest.importorskip("torch")
    ours = sorted(spec.shape for spec in in_fsdpx(MODELS[name])[0].specs().values() if not spec.state)
    theirs = sorted(tuple(p.shape) for p in in_torch(MODELS[name])[0].parameters())
    assert ours == theirs


def test_ranks_share_the_batch():
    for model in MODELS.values():
        whole, parts = batch(model), [batch(model, rank, 2) for rank in range(2)]
        for n, array in enumerate(whole):
            assert np.array_equal(array, np.concatenate([part[n] for part in parts], 2 if model.dims else 0))


def test_a_job_writes_and_reads_as_many_bytes_as_a_checkpoint_has(tmp_path, monkeypatch):
    monkeypatch.setitem(MODELS, "least", Model(8, 2, rows=4))

    found, other = fsdpx.spawn(bandwidth, 2, 0.001, 64, 1, tmp_path)
    assert found["bytes"] > 12 * 64 * 64 * round(0.001 * 2**30 / (12 * 64 * 64))
    assert found["bytes"] == other["bytes"]
    assert {len(found[name]) for name in ("plain", "save", "read", "load")} == {1}
    found, _ = fsdpx.spawn(stall, 2, "least", 1, 1, tmp_path)
    assert {len(found[name]) for name in ("with", "without", "call", "wait")} == {1}
    assert list(tmp_path.iterdir()) == []


def test_plain_files_are_as_large_as_asked(tmp_path):
    sizes = [7 << 20, 0, 5]
    write_plainly(tmp_path / "a", sizes, memoryview(bytes(4 << 20)))
    assert [(tmp_path / "a" / str(n)).stat().st_size for n in range(3)] == sizes


def test_rows_are_medians_with_verdicts_and_failures_have_reasons():
    moved = {"plain": [1.0, 2.0, 4.0], "save": [2.0, 2.0, 4.0], "read": [1.0] * 3, "load": [2.0] * 3, "bytes": 1 << 30}
    slow = moved | {"save": [2.0, 4.0, 8.0]}
    still = {"with": [4.5, 5.0], "without": [4.0, 4.0], "call": [0.1], "wait": [0.0], "window": 4, "bytes": 1 << 20}
    bad = [{"failed": "OSError: disk full"}]
    found = checkpoints.rows({"bandwidth": [[moved], [slow], bad], "stall": [[still], bad]}, "small")
    assert [r.get("saving") for r in found["bandwidth"]] == [1.0, 0.5, None]
    assert found["stall"][0]["share"] == 0.75 / 100
    wide, waits = (text for _, text in checkpoints.tables(found))
    assert re.search(r"^1 +1\.00 +537 +537 +1\.00 +yes +537 +1,074 +0\.50$", wide, re.M)
    assert re.search(r"^2 .* 0\.50 +no +537 ", wide, re.M)
    assert re.search(r"^4 +OSError: disk full$", wide, re.M)
    assert re.search(r"^1 +small +1 +1\.00 +0\.10 +0\.75 +0\.75 % +yes$", waits, re.M)
    assert re.search(r"^2 +small +OSError: disk full$", waits, re.M)


def test_rows_of_elastic_training():
    fine = {
        "elastic": [[1.01, 1.01, 1.21]], "plain": [[1.0, 1.0, 1.0]], "commit": [0.0001], "take": [0.05], "every": 20,
    }  # fmt: skip
    bad = [{"failed": "no mpiexec"}]
    lost = {"bytes": 1 << 30, "heard": 0.02, "seconds": 0.9, "phases": {"shrink": 0.1, "copy": 0.8}}
    slow = lost | {"seconds": 3.0}
    found = elastic.rows("small", [fine], {1024: [lost, slow, slow], 0.5: [lost | {"bytes": 1 << 19}], 16: bad})
    assert found["cost"]["copy"] == pytest.approx(0.2)
    assert found["cost"]["share"] == pytest.approx(0.02)
    assert found["recovery"][0]["seconds"] == 3.0
    cost, lines = (text for _, text in elastic.tables(found))
    assert re.search(r"^small +1\.000 +1\.010 +0\.1 +200\.0 +50\.0 +20 +2\.0 % +(yes|no)$", cost, re.M)
    assert re.search(r"^1,024\.00 +20\.0 +3,000\.0 +1,000\.0 +no +100\.0 +800\.0$", lines, re.M)
    assert re.search(r"^0\.50 +20\.0 +900\.0 +100\.0 +no ", lines, re.M)
    assert re.search(r"^16 +no mpiexec$", lines, re.M)
    failed = dict(elastic.tables(elastic.rows("small", bad, {16: bad})))
    assert re.search(r"^small +no mpiexec$", failed["cost"], re.M)


@pytest.mark.parametrize("mib", [0.0625, 16, 256, 1024])
def test_chains_hold_as_much_state_as_asked(mib):
    model, width = losing.chain(mib)
    state = 12 * sum(spec.size for layer in model.children().values() for spec in layer.specs().values())
    assert state == pytest.approx(mib * 2**20, rel=0.15)
    assert width >= 32


def test_steps_of_both_kinds_take_turns(monkeypatch):
    monkeypatch.setitem(MODELS, "least", Model(8, 2, rows=4))
    for found in fsdpx.spawn(losing.cost, 2, "least", 2, timeout=60):
        assert len(found["elastic"]) == len(found["plain"]) == 2
        assert len({len(steps) for kind in ("elastic", "plain") for steps in found[kind]}) == 1
        assert len(found["commit"]) == 2 * len(found["plain"][0])
        assert found["every"] >= 1


def test_without_open_mpi_it_says_what_is_missing(tmp_path, monkeypatch):
    monkeypatch.setattr("sys.executable", str(tmp_path / ".venv" / "bin" / "python"))
    monkeypatch.setattr("sys.argv", ["elastic.py"])
    with pytest.raises(SystemExit, match=r"there is no \.venv-openmpi beside this interpreter: make test-elastic"):
        elastic.main()


def test_rates_in_16_bits_are_compared_with_those_of_float32():
    rows = [
        {"model": "mlp", "job": "fsdpx ddp 1x1", "rate": 100.0},
        {"model": "mlp", "job": "fsdpx-bf16 ddp 1x1", "rate": 210.0},
        {"model": "tiny", "job": "fsdpx-bf16 ddp 1x1", "rate": 1.0},
    ]
    assert [line.split() for line in halves.beside_float32({"rows": rows}).splitlines()] == [
        ["model", "float32", "bf16", "ratio"],
        ["mlp", "100.0", "210.0", "2.10"],
    ]
    ours = {job.name for job in halves.JOBS if job.library.startswith("fsdpx-")}
    assert ours <= set(side_by_side.DUELS)
    assert {side_by_side.AGAINST[name] for name in ours} <= {job.name for job in halves.JOBS}
