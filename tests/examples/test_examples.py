"""What users copy runs as written, under MPI."""

import json
import os
import re
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from amount import few

from fsdpx import spawn
from fsdpx.core.comm import Communicator
from fsdpx.core.comm.local import make_single_rank_communicator
from fsdpx.errors import ConfigError
from fsdpx.examples import digits, gpt, models, strategies
from fsdpx.ext.observe.folder import RunFolder, agree_on_run_folder_and_last_arguments
from fsdpx.launch import catalog

ROOT = Path(__file__).parents[2]
MPIEXEC = shutil.which("mpiexec", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
pytestmark = pytest.mark.mpi_skip


def start(ranks: int, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Python with these arguments on so many ranks, to its end."""
    environ = {k: v for k, v in os.environ.items() if not k.startswith(("PMI", "OMPI_", "FSDPX_"))}
    environ["OPENBLAS_NUM_THREADS"] = "1"  # small products on a busy machine: threads would only wait for each other
    environ["MPIR_CVAR_ENABLE_HEAVY_YIELD"] = "1"  # MPICH's ranks that wait leave the cores to those that work
    command = [*([str(MPIEXEC), "-n", str(ranks)] if ranks > 1 else []), sys.executable, *arguments]
    return subprocess.run(
        command, cwd=ROOT, env=environ, capture_output=True, text=True, timeout=200, stdin=subprocess.DEVNULL
    )


def run(ranks: int, module: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    done = start(ranks, "-m", module, *arguments)
    assert done.returncode == 0, done.stderr
    return done


def test_digits_learns_and_does_not_see_the_ranks() -> None:
    one, two = (run(n, "fsdpx.examples.digits", "--epochs", "3") for n in (1, 2))
    matches = [re.search(r"accuracy on 1,000 new digits: (\d+\.\d) %", done.stdout) for done in (one, two)]
    assert all(matches)
    right = [float(match[1]) for match in matches if match]
    assert right[0] > 70
    assert abs(right[0] - right[1]) < 15


def test_a_generator_learns_from_what_its_critic_says_about_its_points() -> None:
    misses = _misses(run(1, "fsdpx.examples.gan", "--steps", "500").stdout)
    assert len(misses) == 5
    assert misses[-1] < 0.25 * min(misses[0], 1.0), misses


def test_a_short_training_of_the_generator_ends_with_its_result_on_any_ranks() -> None:
    one, two = (run(n, "fsdpx.examples.gan", "--steps", "20").stdout for n in (1, 2))
    assert re.fullmatch(r"step  ?20  mean distance from the circle \S+\n", one)
    assert _misses(two) == [pytest.approx(*_misses(one), abs=0.02)]


def _misses(out: str) -> list[float]:
    return [float(miss) for miss in re.findall(r"circle (\S+)", out)]


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("digits", "--strategy", "foo"), "digits: unknown strategy 'foo': choose one of ddp, "),
        (("digits", "--batch", "0"), "digits: DataLoader(batch_size=0): the size of the global batch, 1 or more, is "),
        (("gan", "--strategy", "foo"), "gan: unknown strategy 'foo': choose one of ddp, "),
        (("gpt", "--run", f"{__file__}/x"), f"gpt: {__file__}/x: the folder of the run cannot be written (Not a dir"),
    ],
)
def test_mistakes_of_a_process_alone_are_one_line(arguments: tuple[str, ...], text: str) -> None:
    done = start(1, "-m", f"fsdpx.examples.{arguments[0]}", *arguments[1:])
    assert done.returncode == 2
    said = [line for line in done.stderr.splitlines() if not line.startswith("fsdpx: compiling kernels")]
    assert len(said) == 1
    assert said[0].startswith(text)


def test_help_of_the_layer_of_ones_own_does_not_train() -> None:
    out = run(1, "fsdpx.examples.custom_layer", "--help").stdout
    assert out.startswith("usage: python -m fsdpx.examples.custom_layer [-h] [--steps STEPS]")
    assert "loss" not in out


def test_a_solver_uses_what_others_learn_from_it() -> None:
    """Rows of the field here, columns there, in parts of different sizes."""
    code = "from fsdpx.examples import solver as s; s.SIDE, s.STEPS = 17, 24; s.main(['--trainers=2', '--rounds=18'])"
    done = start(4, "-c", code)
    assert done.returncode == 0, done.stderr
    found = done.stdout
    line = re.fullmatch(
        r"(\d) ranks solve, (\d) train: loss (\S+), (\d+)% of the small steps, largest difference (\S+)\n", found
    )
    assert line, found
    assert (int(line[1]), int(line[2])) == (2, 2)
    assert float(line[3]) < 1e-4
    assert 20 < int(line[4]) < 80  # the trainers had it go by the network for a while
    assert float(line[5]) < 0.03  # of velocities up to 0.9


def test_without_the_weights_that_come_back_the_solver_is_wrong() -> None:
    code = "from fsdpx.examples import solver as s; s.fsdpx.Trainer.load_parameters = lambda *_: None; s.main([])"
    assert float(start(2, "-c", code).stdout.split()[-1]) > 0.05


@pytest.mark.parametrize("who", ["Solver.advance_round", "run_training"])
def test_an_error_of_solver_or_trainer_ends_both(who: str) -> None:
    code = (
        "from fsdpx.examples import solver\n"
        "def fail(*_, **__): raise RuntimeError('out of fuel')\n"
        f"solver.{who} = fail; solver.main([])"
    )
    done = start(3, "-c", code)
    assert done.returncode != 0
    assert "RuntimeError: out of fuel" in done.stderr


def test_a_sweep_trains_groups_of_ranks_side_by_side() -> None:
    source = str(ROOT / "fsdpx" / "core" / "comm")
    small = ("--steps", "3", "--batch", "4", "--data", source, "--rates", "1e-3", "1e-5", "3e-3")
    lines = run(4, "fsdpx.examples.sweep", "--groups", "2", *small).stdout.splitlines()
    assert [line.split()[:2] for line in lines[:2]] == [["2", "groups"], ["rate", "group"]]
    rows = [line.split() for line in lines[2:5]]
    groups = [(float(rate), group, ranks) for rate, group, ranks, _ in rows]
    assert groups == [(1e-3, "0", "0,1"), (1e-5, "1", "2,3"), (3e-3, "0", "0,1")]
    losses = [float(row[3]) for row in rows]
    assert lines[5] == f"best: {float(rows[losses.index(min(losses))][0]):g}, {min(losses):.4f}"
    assert losses[1] > max(losses[0], losses[2])
    assert "--groups 2 of 1 ranks" in start(1, "-m", "fsdpx.examples.sweep").stderr


THEIR_OWN_WAY = {"async", "gossip", "local_sgd", "diloco", "experts"}
"""To other losses; one has a model of its own."""


@pytest.mark.parametrize("name", few(strategies.STRATEGIES, 9))
def test_every_strategy_and_axis_trains_the_same_model(name: str, tmp_path: Path) -> None:
    ranks = 8 if name == "3d" else 4
    steps = 10 if name in THEIR_OWN_WAY else 3
    ends = spawn(strategies.train_and_evaluate, ranks, name, steps, str(tmp_path))
    (before, after, report), *_ = ends
    assert {end[:2] for end in ends} == {(before, after)}
    assert report.steps == steps
    if name in THEIR_OWN_WAY:
        assert after < before
    else:
        assert (before, after) == pytest.approx(alone(), rel=1e-5)


@cache
def alone() -> tuple[float, float]:
    before, after, _ = spawn(strategies.train_and_evaluate, 1, "ddp", 3)[0]
    assert after < before - 0.1
    return before, after


def test_the_example_of_strategies_says_what_a_rank_holds_and_moves() -> None:
    out = run(2, "fsdpx.examples.strategies", "--strategy", "offload", "--steps", "2").stdout
    said = r"offload on 2 ranks: loss 4\.131, after 2 steps \d\.\d+\nrank 0 holds [\d,]+ KiB in memory, (\d+) on disk\n"
    found = re.match(said + r"and moves per step: .*shard [\d.,]+ KiB", out)
    assert found, out
    assert int(found[1]) > 0


def test_the_table_of_strategies_has_each_of_them() -> None:
    rows = re.findall(r"^\| (`[a-z0-9_`, ]+`) \| `.*?` \|", (ROOT / "docs" / "strategies.md").read_text(), re.M)
    assert re.findall(r"`(\w+)`", " ".join(rows)) == list(strategies.STRATEGIES)


SHORT = ("--data", str(ROOT / "fsdpx" / "core" / "comm"), "--steps", "2", "--batch", "4", "--validate", "2")
SHORT += ("--validation-batches", "1", "--no-tune", "--sample", "0")


CHUNKS = (*SHORT, "--chunks", "4", "--hash", "--sample", "3")


@cache
def of_one_process() -> tuple[str, str]:
    """The text, and the hash of all parameters."""
    return wrote_and_hash(run(1, "fsdpx.examples.gpt", *CHUNKS, "--no-save").stdout)


def wrote_and_hash(out: str) -> tuple[str, str]:
    return wrote(out), out.split("sha256 ")[1]


def wrote(out: str) -> str:
    """The text of the model."""
    found = re.search(r"sample:\n(.*?)\n\n(?:rank 0 of|memory of this rank)", out, re.S)
    assert found
    return found[1]


def test_gpt_leaves_a_folder_and_goes_on_there(tmp_path: Path) -> None:
    arguments = (*SHORT, "--run", str(tmp_path / "r"), "--sample", "5", "--trace")
    first = run(2, "fsdpx.examples.gpt", *arguments)
    folder, lines = tmp_path / "r", first.stdout.splitlines()
    result = next(k for k, line in enumerate(lines) if "bits per byte" in line)
    assert re.match(r"2 steps, [\d,]+ tokens/s, training loss \d\.\d+, validation loss ", lines[result])
    assert f" run folder: {folder} config.json, metrics.csv, " in " ".join(first.stdout.split())
    assert len(wrote(first.stdout).encode()) >= 5
    assert first.stdout.index("bits per byte") < first.stdout.index("memory of this rank")
    assert "time by verb" not in first.stdout
    assert "loss: of the step's batch, in nats per byte" in first.stdout
    there = {"config.json", "environment.json", "metrics.csv", "metrics.jsonl", "log.txt", "checkpoints", "model"}
    there |= {"report.html", "report.json", "report.txt", "trace"}
    assert there <= {path.name for path in folder.iterdir()}
    assert "rank 1  " in (folder / "report.html").read_text()
    assert "step 1/2  loss " in (folder / "log.txt").read_text()
    assert (folder / "curve.png").exists() is ("no curve.png" not in first.stdout)
    assert (folder / "model" / "model.safetensors").exists()

    more = run(1, "fsdpx.examples.gpt", "--resume", "--run", str(folder), "--steps", "4", "--verbose")
    assert f"fsdpx: resumes from {folder / 'checkpoints' / 'step-2'}: step 2, epoch 1\n" in more.stderr
    assert "2 steps, " in more.stdout
    assert "time by verb" in more.stdout
    assert "outside of programs: reading data, printing," in more.stdout
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows if "loss" in row] == [1, 2, 3, 4]

    before = (folder / "model" / "model.safetensors").stat().st_mtime_ns
    again = run(1, "fsdpx.examples.gpt", "--resume", "--run", str(folder))
    assert f"fsdpx: finished: 4 steps done at {folder / 'checkpoints' / 'step-4'}" in again.stderr
    assert (folder / "model" / "model.safetensors").stat().st_mtime_ns == before


def test_all_ranks_take_the_folder_of_rank_0(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)

    def chosen(given: str | None, resume: bool) -> set[str]:
        def take(comm: Communicator) -> str:
            try:
                folder, arguments = agree_on_run_folder_and_last_arguments("gpt", given, resume, comm)
            except ConfigError as error:
                return str(error)
            return f"{folder.path} {arguments}"

        return set(spawn(take, 3))

    assert chosen(None, True) == {"--resume: there is no runs/gpt-*: start without it first, or name a --run"}
    (text,) = chosen("empty", True)
    assert text.startswith("empty/config.json: the run cannot be resumed: [Errno 2]")
    for name in ("runs/gpt-1", "runs/gpt-2"):
        RunFolder(Path(name)).write_config({"lr": 0.5}, 3)
    assert chosen(None, True) == {"runs/gpt-2 {'lr': 0.5}"}
    assert chosen("runs/gpt-1", True) == {"runs/gpt-1 {'lr': 0.5}"}
    assert chosen("runs/gpt-1", False) == {"runs/gpt-1 holds a run: resume it with --resume, or name another folder"}
    times = {"1": "2026-03-01 08:30:00-0500", "2": "2026-03-01 10:30:00+0100", "3": "2025-01-01 00:00:00"}
    for name, begun in times.items():
        Path(f"runs/gpt-{name}/config.json").parent.mkdir(exist_ok=True)
        Path(f"runs/gpt-{name}/config.json").write_text(json.dumps({"arguments": {}, "begun": begun}))
    assert chosen(None, True) == {"runs/gpt-1 {}"}  # the last by UTC, neither by name nor by the hour
    Path("runs/gpt-3/config.json").write_text("{}")
    (text,) = chosen(None, True)
    assert text == "runs/gpt-3/config.json: it does not record when the run began: KeyError('begun')"
    (text,) = chosen(None, False)
    assert re.fullmatch(r"runs/gpt-\d{8}-\d{6} \{\}", text)


def test_gpt_on_a_mesh_gives_the_loss_and_the_text_of_one_process() -> None:
    mesh = ("--mesh", "pipe=2,tensor=2", "--schedule", "1f1b", "--microbatches", "4", "--recompute", "all")
    more = ("--sample", "6", "--dtype", "float64", "--no-save")
    one = run(1, "fsdpx.examples.gpt", *SHORT, *more)
    four = run(4, "fsdpx.examples.gpt", *SHORT, *more, *mesh, "--sequence", "ring")
    losses = [re.search(r"training loss (\S+), validation loss (\S+) ", done.stdout) for done in (one, four)]
    assert losses[0] is not None
    assert losses[1] is not None
    assert losses[0].groups() == losses[1].groups()
    assert wrote(one.stdout) == wrote(four.stdout)
    assert four.stdout.count("text: ") == 1  # one rank prints it
    assert "fsdp on 4 ranks (pipe=2 x replica=1 x shard=1 x tensor=2)" in four.stdout


@pytest.mark.parametrize(
    ("ranks", "options"), [(3, ""), (2, "--mesh pipe=2 --schedule zbv --strategy zero1")], ids=["ranks", "pipe"]
)
def test_gpt_hash_is_the_same_on_any_ranks(ranks: int, options: str) -> None:
    done = run(ranks, "fsdpx.examples.gpt", *CHUNKS, "--no-save", "--verbose", *options.split())
    assert wrote_and_hash(done.stdout) == of_one_process()
    for word in ("tokens/s", "bits per byte", "peak memory per rank", "all-gather over shard"):
        assert word in done.stdout or options, word
    assert "step 1/2  loss" in done.stderr


def test_gpt_hash_does_not_see_that_ranks_may_come_and_go(tmp_path: Path) -> None:
    """Of two ranks one trains at first and the other follows, then both train."""
    (tmp_path / "ranks").write_text("2")
    elastic = ("--elastic", "--resize", str(tmp_path / "ranks"), "--run", str(tmp_path / "run"), "--ranks", "1")
    done = run(2, "fsdpx.examples.gpt", *CHUNKS, *elastic)
    assert "fsdpx: 2 ranks train on from step 1" in done.stderr
    assert wrote_and_hash(done.stdout) == of_one_process()


def test_drawn_digits_are_reproducible() -> None:
    a, b = digits.draw_digits(5, seed=3), digits.draw_digits(5, seed=3)
    np.testing.assert_array_equal(a[0], b[0])
    assert a[0].shape == (5, 1, models.DIGIT_SIDE, models.DIGIT_SIDE)
    assert set(a[1]) <= set(range(10))


@pytest.mark.parametrize("name", catalog.CATALOG)
def test_catalog_models_can_be_made(name: str) -> None:
    entry = catalog.find_model(name)
    assert entry.model().specs()
    assert entry.x(3)[0][0] == entry.y(3)[0][0] == 3


def test_sizes_have_their_parameter_counts() -> None:
    """12 d^2 + 13 d per block, embeddings and the last norm."""
    for name, size in models.SIZES.items():
        d = size.d_model
        want = size.n_layers * (12 * d * d + 13 * d) + (models.BYTES + size.seq_len) * d + 2 * d
        specs = models.make_gpt(name).specs()
        assert sum(spec.size for key, spec in specs.items() if key != "head.weight") == want


def test_numbers_of_the_command_line_are_checked_before_a_folder_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:

    monkeypatch.chdir(tmp_path)
    for option, least in (("--steps", 1), ("--batch", 1), ("--keep", 1), ("--seed", 0)):
        with pytest.raises(SystemExit):
            gpt.main([option, "-3"])
        assert f"'-3': a whole number, {least} or more, is needed" in capsys.readouterr().err
    assert not [*tmp_path.iterdir()]


def test_resume_passes_over_runs_that_made_no_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:

    monkeypatch.chdir(tmp_path)
    for name in ("gpt-1", "gpt-2"):
        RunFolder(Path("runs", name)).write_config({"lr": 1}, 1)
    (tmp_path / "runs/gpt-1/metrics.jsonl").write_text('{"step": 1}\n')
    assert (
        agree_on_run_folder_and_last_arguments("gpt", None, True, make_single_rank_communicator())[0].path.name
        == "gpt-1"
    )


def test_a_job_that_is_started_again_takes_up_what_it_has_begun(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No run of another job, and none where it has not come so far."""
    monkeypatch.chdir(tmp_path)
    old = RunFolder(Path("runs", "gpt-1"))
    old.write_config({"lr": 1}, 1)
    (old.path / "metrics.jsonl").write_text('{"step": 1}\n')
    for variables in ({"FSDPX_RUN": str(tmp_path / "job" / "start-0")}, {"SLURM_JOB_ID": "7"}):
        for name, value in variables.items():
            monkeypatch.setenv(name, value.replace("start-0", "start-1"))
        monkeypatch.setenv("FSDPX_RESTART", "1")
        fresh, arguments = agree_on_run_folder_and_last_arguments("gpt", None, False, make_single_rank_communicator())
        assert (fresh.config_path.exists(), arguments) == (False, {})
        assert agree_on_run_folder_and_last_arguments("gpt", "named", False, make_single_rank_communicator())[1] == {}
        assert (
            agree_on_run_folder_and_last_arguments("gpt", None, True, make_single_rank_communicator())[0] == old
        )  # asked for by name of the option
        with pytest.raises(ConfigError, match=r"runs/gpt-1 holds a run: resume it with --resume"):
            agree_on_run_folder_and_last_arguments("gpt", str(old.path), False, make_single_rank_communicator())
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        begun = RunFolder(Path("runs", "gpt-2"))
        begun.write_config({"lr": 2}, 1)
        assert agree_on_run_folder_and_last_arguments(
            "gpt", None, False, make_single_rank_communicator()
        ) == agree_on_run_folder_and_last_arguments("gpt", str(begun.path), False, make_single_rank_communicator())
        assert agree_on_run_folder_and_last_arguments("gpt", None, False, make_single_rank_communicator()) == (
            begun,
            {"lr": 2},
        )
        monkeypatch.delenv("FSDPX_RESTART")
        with pytest.raises(ConfigError, match=r"runs/gpt-2 holds a run"):
            agree_on_run_folder_and_last_arguments("gpt", str(begun.path), False, make_single_rank_communicator())
        for name in variables:
            monkeypatch.delenv(name)
        shutil.rmtree(begun.path)
