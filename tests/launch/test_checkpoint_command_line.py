"""Processes: `python -m fsdpx ckpt`, and jobs that are killed while they save, or asked to stop."""

import json
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy
from commands import command, refused, shown, start
from models import make
from savers import steps
from stopped import READY, train
from trials import MPIEXEC, environment, heed, none_left

from fsdpx import Mesh, __version__, spawn
from fsdpx.core.checkpoint.save import SaveChoices
from fsdpx.core.comm import Communicator
from fsdpx.ext.watch.preempt import PREEMPTED_STATUS

pytestmark = pytest.mark.jobs
TESTS = Path(__file__).parents[1]
SCRIPTS = TESTS / "core" / "checkpoint"


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("saved")

    def body(comm: Communicator) -> None:
        trainer = make(comm, "wide", precision="float32")
        trainer.save(folder / "a")
        steps(trainer, "wide", 0, 1)
        trainer.save(folder / "b")

    spawn(body, 2)
    return folder


@pytest.fixture
def made(saved: Path, tmp_path: Path) -> Path:
    """Checkpoints `a`, and `b` a step later, to work with."""
    return shutil.copytree(saved, tmp_path, dirs_exist_ok=True)


def test_inspect(made: Path) -> None:
    text = shown(f"ckpt inspect {made / 'b'}")
    for line in ("  embed.weight  F32 [31, 20]", "  m/embed.weight  F32 [31, 20]", "steps: 1", "optimizer: AdamW"):
        assert line in text.splitlines()
    assert "11,020 elements of weights" in text


def noted(folder: Path) -> str:
    """What `inspect` says about who wrote a checkpoint."""
    (line,) = (line for line in shown(f"ckpt inspect {folder}").splitlines() if line.startswith("written by: "))
    return line


@pytest.mark.parametrize(
    ("ranks", "options", "words"),
    [
        (2, {"strategy": "ddp"}, "strategy ddp, mesh pipe=1 x replica=2 x shard=1 x tensor=1, ranks 2, "),
        (3, {"strategy": "fsdp", "precision": "bf16"}, "ranks 3, precision bf16, fsdpx "),
        (4, {"strategy": "hybrid", "reproducible_chunks": 4},
         "strategy hybrid, mesh pipe=1 x replica=2 x shard=2 x tensor=1, "),
        (4, {"strategy": "zero1", "mesh": Mesh(pipe=2)}, "schedule 1f1b, "),
    ],
)  # fmt: skip
def test_inspect_says_what_wrote_it(ranks: int, options: dict[str, object], words: str, tmp_path: Path) -> None:
    spawn(lambda comm: make(comm, "wide", **options).save(tmp_path / "a"), ranks)
    line = noted(tmp_path / "a")
    assert words in line
    assert f"fsdpx {__version__}, Python {platform.python_version()}, NumPy {np.__version__}, " in line
    shown(f"ckpt convert {tmp_path / 'a'} {tmp_path / 'b'} --dtype bf16")
    assert noted(tmp_path / "b") == line


def test_the_note_is_never_needed(made: Path) -> None:
    """Nor trusted: whatever is in it, the checkpoint is loaded, verified and overwritten."""
    note = made / "a/written.json"
    before = "written by: unknown software"

    def load(comm: Communicator) -> None:
        trainer = make(comm, "wide", precision="float32", strategy="ddp")
        trainer.load(made / "a")
        trainer.save(made / "a")

    for spoil, line in (
        (note.unlink, before),
        (note.mkdir, before),
        (lambda: (note.rmdir(), note.write_bytes(b"\xff")), "written by: written.json cannot be read"),
        (lambda: note.write_text("[1, 2]"), "written by: written.json cannot be read"),
        (lambda: note.write_text("{}"), "written by: "),
    ):
        spoil()
        assert noted(made / "a") == line
        shown(f"ckpt verify {made / 'a'}")
    spawn(load, 3)
    assert "ranks 3" in noted(made / "a")
    assert noted(TESTS / "core/engine/data/before") == before


def test_verify(made: Path) -> None:
    text, file = shown(f"ckpt verify {made / 'a'}"), made / "a/model.safetensors"
    assert "84 tensors" in text
    assert text.endswith("intact\n")
    assert "there are no digests to check" in shown(f"ckpt verify {file}")
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    status, text, _ = command(f"ckpt verify {made / 'a'}")
    assert (status, f"{file}: norm.weight is damaged: its digest does not fit" in text) == (1, True)
    file.write_bytes(data[:-1])
    assert refused(f"ckpt verify {made / 'a'}").startswith(f"fsdpx ckpt: {file}: truncated")


def different(one: Path, other: Path) -> list[str]:
    """The lines of `diff` that say in what."""
    status, text, _ = command(f"ckpt diff {one} {other}")
    assert status == 1
    return text.splitlines()


def test_diff(made: Path) -> None:
    assert shown(f"ckpt diff {made / 'a'} {made / 'a'}") == "the same: 84 tensors\n"
    lines = different(made / "a", made / "b")
    values = [safetensors.numpy.load_file(made / n / "model.safetensors")["norm.weight"] for n in "ab"]
    apart = np.abs(values[0].astype(float) - values[1]).max()
    assert f"norm.weight: F32, largest difference {apart:.6g}" in lines
    assert "steps: 0 and 1" in lines
    x = {"a": np.ones(3, np.float32), "b": np.ones((2, 2)), "c": np.array([1.0, np.nan]), "d": np.zeros(0)}
    y = {"a": np.ones(3), "b": np.ones(4), "c": np.array([1.0, 2.0]), "d": np.zeros(0), "e": np.ones(1)}
    safetensors.numpy.save_file(x, made / "x")
    safetensors.numpy.save_file(y, made / "y")
    assert different(made / "x", made / "y") == [
        "4 differences",
        "a: F32 and F64, largest difference 0",
        "b: shape [2, 2] and [4]",
        "c: F64, largest difference nan",
        f"e: only in {made}",
    ]


def test_convert(made: Path) -> None:
    shown(f"ckpt convert {made / 'b'} {made / 'c'} --dtype bf16 --shard-bytes 10KB")
    assert len(list((made / "c").glob("model-*.safetensors"))) > 1
    shown(f"ckpt verify {made / 'c'}")
    before = safetensors.numpy.load_file(made / "b/model.safetensors")
    for file in (made / "c").glob("model-*.safetensors"):
        for name, value in safetensors.numpy.load_file(file).items():
            np.testing.assert_array_equal(value, before[name].astype(ml_dtypes.bfloat16))
    shown(f"ckpt convert {made / 'c'} {made / 'd'} --dtype float32")

    def load(comm: Communicator) -> int:
        trainer = make(comm, "wide", precision="float32")
        trainer.load(made / "d")
        return trainer.global_step

    assert spawn(load, 2) == [1, 1]
    said = refused(f"ckpt convert {made / 'b'} {made / 'e'} --shard-bytes many")
    assert "--shard-bytes='many': a number of bytes is needed, such as 1048576, '1MiB' or '2GB'" in said
    said = refused(f"ckpt convert {made / 'nowhere'} {made / 'e'}")
    assert "nowhere: there is no such file or folder; in " in said


def test_converting_back_and_forth_gives_the_same_file(made: Path) -> None:
    data = (made / "b/model.safetensors").read_bytes()
    shown(f"ckpt convert {made / 'b/model.safetensors'} {made / 'c'} --dtype float64")
    shown(f"ckpt convert {made / 'c'} {made / 'd'} --dtype float32")
    assert (made / "d/model.safetensors").read_bytes() == data


@pytest.mark.parametrize("source", ["a", "c/../a", "a/model.safetensors", "link"])
def test_convert_never_writes_over_its_source(made: Path, source: str) -> None:
    (made / "c").mkdir()
    (made / "link").symlink_to(made / "a")
    data = (made / "a/model.safetensors").read_bytes()
    said = f"fsdpx ckpt: {made / 'a'}: source and target are the same, which would be lost: name another folder\n"
    assert refused(f"ckpt convert {made / source} {made / 'a'} --dtype bf16") == said
    assert (made / "a/model.safetensors").read_bytes() == data


def test_a_folder_of_checkpoints_stands_for_its_newest(made: Path) -> None:
    (made / "k").mkdir()
    (made / "a").rename(made / "k/step-2")
    (made / "b").rename(made / "k/step-10")
    for action in ("verify", "inspect"):
        first, *rest = shown(f"ckpt {action} {made / 'k'}").splitlines()
        assert first == f"{made / 'k'}: a folder of checkpoints, the newest is step-10"
        assert any(line.startswith(str(made / "k/step-10")) for line in rest)


def test_the_state_of_fit_is_short_and_compared_by_its_keys(tmp_path: Path) -> None:
    def body(comm: Communicator) -> None:
        trainer = make(comm, "wide", precision="float32")
        fit = {"done": 0, "first": 0, "settings": {"loss": "CrossEntropyLoss()"}, "validation": []}
        trainer.call_runner.save_checkpoint(tmp_path / "a", SaveChoices(), None, fit)
        fit |= {"done": 4, "validation": [[2, 0.5], [4, 0.25]], "settings": {"loss": "MSELoss()"}}
        trainer.call_runner.save_checkpoint(tmp_path / "b", SaveChoices(), None, fit)

    spawn(body, 1)
    assert different(tmp_path / "a", tmp_path / "b") == [
        "3 differences",
        "fit.done: 0 and 4",
        "fit.settings.loss: CrossEntropyLoss() and MSELoss()",
        "fit.validation: (0 entries) and (2 entries)",
    ]
    lines = shown(f"ckpt inspect {tmp_path / 'b'}").splitlines()
    assert "fit: done 4, first 0, settings (1 entry), validation (2 entries)" in lines


def test_it_needs_no_mpi(made: Path) -> None:
    code = "import sys; from fsdpx.__main__ import main; main(sys.argv[1:])\n"
    code += "print([m for m in ('mpi4py', 'numba') if m in sys.modules])"
    assert start(1, "-c", code, "ckpt", "verify", str(made / "a")).stdout.endswith("intact\n[]\n")


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.parametrize(("script", "kills"), [("kills.py", 12), ("kills_ranks.py", 2)])
def test_killed_while_saving(script: str, kills: int) -> None:
    """`make thorough` does more of them. kills.py: one process. kills_ranks.py: one of three ranks under mpiexec."""
    done = start(1, "-W", "error", str(SCRIPTS / script), str(kills))
    assert done.returncode == 0, done.stderr
    counted = re.search(rf"{kills} kills in (\d+) saves", done.stdout)
    assert counted
    assert int(counted[1]) >= kills


@pytest.mark.parametrize(("name", "whom"), [("SIGUSR1", "launcher"), ("SIGTERM", "ranks"), ("SIGINT", "all")])
def test_stopped_by_a_signal_and_resumed(name: str, whom: str, tmp_path: Path) -> None:
    """On two ranks, then on three; the bits are those of one rank that nobody disturbed. Ctrl-C on a terminal is a
    SIGINT to launcher and ranks alike."""
    script = SCRIPTS / "stopped.py"
    with subprocess.Popen(
        [str(MPIEXEC), "-n", "2", sys.executable, str(script), str(tmp_path)], cwd=tmp_path, env=environment(),
        stdin=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, start_new_session=True,
        preexec_fn=partial(heed, getattr(signal, name)),
    ) as job:  # fmt: skip
        while job.poll() is None and not (tmp_path / READY).exists():
            time.sleep(0.01)
        pids = json.loads((tmp_path / READY).read_text()) if job.poll() is None else []
        for pid in {"launcher": [job.pid], "ranks": pids, "all": [*pids, job.pid]}[whom]:
            os.kill(pid, getattr(signal, name))
        _, complaint = job.communicate(timeout=60)
    assert job.returncode == PREEMPTED_STATUS, complaint
    assert f"was asked to stop by {name}; all ranks ended together after step " in complaint
    of_others = re.compile(r"\s*$|\[mpiexec|fsdpx: compiling")
    assert len([line for line in complaint.splitlines() if not of_others.match(line)]) == 1, complaint
    assert none_left(tmp_path)
    (saved,) = (tmp_path / "run").iterdir()
    step = int(saved.name.removeprefix("step-"))
    assert step >= 7
    whole = spawn(train, 1, None, step + 5)
    assert set(spawn(train, 3, tmp_path, step + 5)) == set(whole)
