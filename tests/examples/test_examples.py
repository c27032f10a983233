"""What users copy runs as written, and does the same on ranks that are threads."""

import io
import json
import re
import runpy
import shutil
import sys
from contextlib import redirect_stderr, redirect_stdout
from functools import cache
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
from amount import few
from commands import start
from started import run_threads
from trials import ROOT

import fsdpx
from fsdpx import spawn
from fsdpx.core.comm import Communicator
from fsdpx.core.comm.local import make_single_rank_communicator
from fsdpx.errors import ConfigError
from fsdpx.examples import digits, gan, gpt, models, strategies
from fsdpx.ext.observe.folder import RunFolder, agree_on_run_folder_and_last_arguments
from fsdpx.launch import catalog

pytestmark = pytest.mark.mpi_skip


def test_digits_learns() -> None:
    out, _ = run_threads(1, digits.main, "--epochs", "3")
    assert float(re.search(r"accuracy on 1,000 new digits: (\d+\.\d) %", out)[1]) > 70


def test_a_generator_learns_from_what_its_critic_says_about_its_points() -> None:
    misses = [float(miss) for miss in re.findall(r"circle (\S+)", run_threads(1, gan.main, "--steps", "500")[0])]
    assert len(misses) == 5
    assert misses[-1] < 0.25 * min(misses[0], 1.0), misses


def alone(monkeypatch: pytest.MonkeyPatch, name: str, *arguments: str) -> tuple[int, str, str]:
    """The status of the script of an example in this process, and what it says."""
    monkeypatch.setattr(sys, "argv", [f"{name}.py", *arguments])
    fsdpx.finalize()
    with redirect_stdout(io.StringIO()) as out, redirect_stderr(io.StringIO()) as err, pytest.raises(SystemExit) as end:
        runpy.run_path(str(ROOT / "fsdpx" / "examples" / f"{name}.py"), run_name="__main__")
    fsdpx.finalize()
    return int(end.value.code or 0), out.getvalue(), err.getvalue()


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("digits", "--strategy", "foo"), "digits: unknown strategy 'foo': choose one of ddp, "),
        (("digits", "--batch", "0"), "digits: DataLoader(batch_size=0): the size of the global batch, 1 or more, is "),
        (("gan", "--strategy", "foo"), "gan: unknown strategy 'foo': choose one of ddp, "),
        (("gpt", "--run", f"{__file__}/x"), f"gpt: {__file__}/x: the folder of the run cannot be written (Not a dir"),
        (("sweep",), "sweep: --groups 2 of 1 ranks"),
    ],
)
def test_mistakes_of_a_process_alone_are_one_line(arguments, text, monkeypatch):
    status, _, err = alone(monkeypatch, *arguments)
    assert status == 2
    said = [line for line in err.splitlines() if not line.startswith("fsdpx: compiling kernels")]
    assert len(said) == 1
    assert said[0].startswith(text)


def test_a_mistake_of_ranks_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that it ends all of them."""
    monkeypatch.setenv("PMI_RANK", "0")
    monkeypatch.setenv("PMI_SIZE", "2")
    with pytest.raises(ConfigError, match="unknown"):
        gpt.run_main(Mock(side_effect=ConfigError("unknown")))


def test_help_of_the_layer_of_ones_own_does_not_train(monkeypatch: pytest.MonkeyPatch) -> None:
    status, out, _ = alone(monkeypatch, "custom_layer", "--help")
    assert status == 0
    assert out.startswith("usage: python -m fsdpx.examples.custom_layer [-h] [--steps STEPS]")
    assert "loss" not in out


THEIR_OWN_WAY = {"async": 4, "gossip": 4, "local_sgd": 10, "diloco": 10, "experts": 4}
"""To other losses, after so many steps; one has a model of its own."""


@pytest.mark.parametrize("name", few(strategies.STRATEGIES, 9))
def test_every_strategy_and_axis_trains_the_same_model(name: str, tmp_path: Path) -> None:
    ranks = {"3d": 8, "auto": 2}.get(name, 4)
    steps = THEIR_OWN_WAY.get(name, 2)
    ends = spawn(strategies.train_and_evaluate, ranks, name, steps, str(tmp_path))
    before, after, report = ends[0]
    assert {end[:2] for end in ends} == {(before, after)}
    assert report.steps == steps
    if name in THEIR_OWN_WAY:
        assert after < before
    else:
        assert (before, after) == pytest.approx(of_one_rank(), rel=1e-5)


@cache
def of_one_rank() -> tuple[float, float]:
    before, after, _ = spawn(strategies.train_and_evaluate, 1, "ddp", 2)[0]
    assert after < before - 0.1
    return before, after


def test_the_table_of_strategies_has_each_of_them() -> None:
    rows = re.findall(r"^\| (`[a-z0-9_`, ]+`) \| `.*?` \|", (ROOT / "docs" / "strategies.md").read_text(), re.M)
    assert re.findall(r"`(\w+)`", " ".join(rows)) == list(strategies.STRATEGIES)


SHORT = ("--data", str(ROOT / "fsdpx" / "core" / "comm"), "--steps", "2", "--batch", "4", "--validate", "2")
SHORT += ("--validation-batches", "1", "--no-tune", "--sample", "0")
CHUNKS = (*SHORT, "--chunks", "4", "--hash", "--sample", "3")
SIZE = models.GPTSize(32, 4, 4, 32)
SMALL_GPT = f"""
from fsdpx.examples import gpt, models
models.SIZES["tiny"] = models.{SIZE}
exit(gpt.run_main(gpt.main))
"""


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """A model that is smaller than any that users can choose."""
    monkeypatch.setitem(models.SIZES, "tiny", SIZE)


@cache
def of_one_process() -> tuple[str, str]:
    """The text, and the hash of all parameters."""
    return wrote_and_hash(run_threads(1, gpt.main, *CHUNKS, "--no-save")[0])


def wrote_and_hash(out: str) -> tuple[str, str]:
    return wrote(out), out.split("sha256 ")[1]


def wrote(out: str) -> str:
    """The text of the model."""
    return re.search(r"sample:\n(.*?)\n\n(?:rank 0 of|memory of this rank)", out, re.S)[1]


@pytest.mark.usefixtures("small")
def test_gpt_leaves_a_folder_and_goes_on_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = (*SHORT, "--run", str(tmp_path / "r"), "--sample", "5", "--trace")
    first = start(2, "-c", SMALL_GPT, *arguments)
    assert first.returncode == 0, first.stderr
    folder = tmp_path / "r"
    (result,) = (line for line in first.stdout.splitlines() if "bits per byte" in line)
    assert re.match(r"2 steps, [\d,]+ tokens/s, training loss \d\.\d+, validation loss ", result)
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

    monkeypatch.setitem(sys.modules, "matplotlib", None)  # the curve is there
    out, err = run_threads(1, gpt.main, "--resume", "--run", str(folder), "--steps", "4", "--verbose")
    assert f"fsdpx: resumes from {folder / 'checkpoints' / 'step-2'}: step 2, epoch 1\n" in err
    assert "2 steps, " in out
    assert "time by verb" in out
    assert "outside of programs: reading data, printing," in out
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows if "loss" in row] == [1, 2, 3, 4]

    before = (folder / "model" / "model.safetensors").stat().st_mtime_ns
    again = run_threads(1, gpt.main, "--resume", "--run", str(folder))[1]
    assert f"fsdpx: finished: 4 steps done at {folder / 'checkpoints' / 'step-4'}" in again
    assert (folder / "model" / "model.safetensors").stat().st_mtime_ns == before


def test_all_ranks_take_the_folder_of_rank_0(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)

    def chosen(given: str | None, resume: bool) -> set[str]:
        def take(comm: Communicator) -> str:
            try:
                folder, arguments = agree_on_run_folder_and_last_arguments("gpt", given, resume, comm)
                return f"{folder.path} {arguments}"
            except ConfigError as error:
                return str(error)

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
    said = "runs/gpt-3/config.json: it does not record when the run began: KeyError('begun')"
    assert chosen(None, True) == {said}
    (text,) = chosen(None, False)
    assert re.fullmatch(r"runs/gpt-\d{8}-\d{6} \{\}", text)


@pytest.mark.usefixtures("small")
def test_gpt_on_a_mesh_gives_the_loss_and_the_text_of_one_process() -> None:
    mesh = ("--mesh", "pipe=2,tensor=2", "--schedule", "1f1b", "--microbatches", "4", "--recompute", "all")
    more = ("--sample", "6", "--dtype", "float64", "--no-save")
    one = run_threads(1, gpt.main, *SHORT, *more)[0]
    four = run_threads(4, gpt.main, *SHORT, *more, *mesh, "--sequence", "ring")[0]
    losses = [re.findall(r"training loss (\S+), validation loss (\S+) ", out) for out in (one, four)]
    assert losses[0] == losses[1] != []
    assert wrote(one) == wrote(four)
    assert four.count("text: ") == 1  # one rank prints it
    assert "fsdp on 4 ranks (pipe=2 x replica=1 x shard=1 x tensor=2)" in four


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize(
    ("ranks", "options"), [(3, ""), (2, "--mesh pipe=2 --schedule zbv --strategy zero1")], ids=["ranks", "pipe"]
)
def test_gpt_hash_is_the_same_on_any_ranks(ranks: int, options: str) -> None:
    out, err = run_threads(ranks, gpt.main, *CHUNKS, "--no-save", "--verbose", *options.split())
    assert wrote_and_hash(out) == of_one_process()
    for word in ("tokens/s", "bits per byte", "peak memory per rank", "all-gather over shard"):
        assert word in out or options, word
    assert "step 1/2  loss" in err


@pytest.mark.usefixtures("small")
def test_gpt_hash_does_not_see_that_ranks_may_come_and_go(tmp_path: Path) -> None:
    """Of two ranks one trains at first and the other follows, then both train."""
    (tmp_path / "ranks").write_text("2")
    elastic = ("--elastic", "--resize", str(tmp_path / "ranks"), "--run", str(tmp_path / "run"), "--ranks", "1")
    done = start(2, "-c", SMALL_GPT, *CHUNKS, *elastic)
    assert done.returncode == 0, done.stderr
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
        assert sum(spec.size for key, spec in models.make_gpt(name).specs().items() if key != "head.weight") == want


def test_numbers_of_the_command_line_are_checked_before_a_folder_is_made(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for option, least in (("--steps", 1), ("--batch", 1), ("--keep", 1), ("--seed", 0)):
        with pytest.raises(SystemExit):
            gpt.main([option, "-3"])
        assert f"'-3': a whole number, {least} or more, is needed" in capsys.readouterr().err
    assert not [*tmp_path.iterdir()]


def taken(run: str | None = None, resume: bool = False) -> tuple[RunFolder, dict[str, Any]]:
    """Of one rank."""
    return agree_on_run_folder_and_last_arguments("gpt", run, resume, make_single_rank_communicator())


def test_resume_passes_over_runs_that_made_no_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:

    monkeypatch.chdir(tmp_path)
    for name in ("gpt-1", "gpt-2"):
        RunFolder(Path("runs", name)).write_config({"lr": 1}, 1)
    (tmp_path / "runs/gpt-1/metrics.jsonl").write_text('{"step": 1}\n')
    assert taken(resume=True)[0].path.name == "gpt-1"


def test_a_job_that_is_started_again_takes_up_what_it_has_begun(tmp_path, monkeypatch):
    """No run of another job, and none where it has not come so far."""
    monkeypatch.chdir(tmp_path)
    old = RunFolder(Path("runs", "gpt-1"))
    old.write_config({"lr": 1}, 1)
    (old.path / "metrics.jsonl").write_text('{"step": 1}\n')
    for name, value in (("FSDPX_RUN", str(tmp_path / "job" / "start-0")), ("SLURM_JOB_ID", "7")):
        monkeypatch.setenv(name, value.replace("start-0", "start-1"))
        monkeypatch.setenv("FSDPX_RESTART", "1")
        fresh, arguments = taken()
        assert (fresh.config_path.exists(), arguments) == (False, {})
        assert taken("named")[1] == {}
        assert taken(resume=True)[0] == old  # asked for by name of the option
        with pytest.raises(ConfigError, match=r"runs/gpt-1 holds a run: resume it with --resume"):
            taken(str(old.path))
        monkeypatch.setenv(name, value)
        begun = RunFolder(Path("runs", "gpt-2"))
        begun.write_config({"lr": 2}, 1)
        assert taken() == taken(str(begun.path)) == (begun, {"lr": 2})
        monkeypatch.delenv("FSDPX_RESTART")
        with pytest.raises(ConfigError, match=r"runs/gpt-2 holds a run"):
            taken(str(begun.path))
        monkeypatch.delenv(name)
        shutil.rmtree(begun.path)
