"""Real jobs of `fsdpx run` and `fsdpx.launch`: what ranks print and return, and how they end."""

import importlib
import json
import subprocess
import sys
import time
from pathlib import Path
from types import ModuleType

import pytest
from commands import start
from trials import MPIEXEC, TRAINER, environment, none_left

import fsdpx
from fsdpx.__main__ import main
from fsdpx.errors import LaunchError
from fsdpx.launch.rank_status import LogFollower

pytestmark = [pytest.mark.mpi_skip, pytest.mark.jobs]


def run(folder, program, *options, args=(), ranks=2):
    """A job, and the seconds from `open("at", "w")` in it to its end."""
    (folder / "job.py").write_text(program)
    words = ["-m", "fsdpx", "run", "-n", str(ranks), "--max-restarts", "0", *options, "job.py", *args]
    done = start(1, *words, folder=folder, TMPDIR=str(folder))
    at = folder / "at"
    return done, time.time() - at.stat().st_mtime if at.exists() else 0.0


FAILS = """
import threading
trainer.step(*(array[mine] for array in batches[0]))
if comm.rank == comm.size - 1:
    open("at", "w").close()
    {what}
fsdpx.barrier()
"""
WAYS = {
    "exception": ("1 / 0", "ended with ZeroDivisionError", "1", 2),
    "exit": ("sys.exit(3)", "ended with exit status 3", "3", 2),
    "_exit": ("os._exit(3)", "ended with exit status 3", "3", 3),
    "thread": ("threading.Thread(target=lambda: 1 / 0).start()", "ended with ZeroDivisionError", "1", 2),
    "SEGV": ("import ctypes; ctypes.string_at(0)", "died (status ", "11|139", 2),
    "KILL": ("os.kill(os.getpid(), signal.SIGKILL)", "died (status ", "9|137", 2),
}


@pytest.mark.parametrize(("what", "said", "statuses", "ranks"), WAYS.values(), ids=WAYS)
def test_however_one_rank_ends_the_job_ends_soon_and_names_it(tmp_path, what, said, statuses, ranks):
    done, seconds = run(tmp_path, TRAINER + FAILS.format(what=what), ranks=ranks)
    assert str(done.returncode) in statuses.split("|"), done.stderr
    assert f" {said}" in done.stderr.partition(f"fsdpx run: rank {ranks - 1} on ")[2], done.stderr
    assert seconds < 20  # most of a second when nothing else runs
    assert none_left(tmp_path)


@pytest.fixture
def in_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The variables of a job whose launcher runs in this process."""
    for name, value in environment(TMPDIR=str(tmp_path)).items():
        monkeypatch.setenv(name, value)


@pytest.mark.parametrize(("what", "status"), [("pass", 0), ("sys.exit(3)", 3), ("os.kill(os.getpid(), 9)", 1)])
def test_a_launcher_that_goes_on_without_ranks_is_killed(tmp_path, capsys, monkeypatch, in_job, what, status):
    launcher, script = tmp_path / "mpiexec", tmp_path / "job.py"
    launcher.write_text(f'#!/bin/sh\n{MPIEXEC} "$@"\ntrap "" TERM\n[ $1 = --version ] || while :; do sleep 1; done\n')
    launcher.chmod(0o700)
    script.write_text(f"import os, sys, fsdpx\nfsdpx.init()\nfsdpx.barrier()\n{what}\n")
    monkeypatch.setattr("fsdpx.launch.exit_status._MAX_LAUNCHER_SECONDS", 0.2)
    assert main(["run", "-n", "2", "--max-restarts", "0", "--mpiexec", str(launcher), str(script)]) == status
    assert f"all ranks have ended, but the launcher, {launcher}, has not: it was killed\n" in capsys.readouterr().err
    assert none_left(tmp_path)


PRINTS = """
import os, sys, fsdpx
comm = fsdpx.init()
print("begun", comm.rank, sys.argv[1:])
fsdpx.barrier()
os.write(2, b"raw\\n")
print("threads", os.environ["OMP_NUM_THREADS"], end="")
sys.exit(3 * (comm.rank == 1))
"""


def test_each_rank_has_its_log_and_a_record_of_its_end(tmp_path: Path) -> None:
    args = [":", "touch", "other", "a b", "::", "\n$(touch other)"]  # launchers begin another program at ":"
    done, _ = run(tmp_path, PRINTS, "--logs", "logs", "--threads", "1", args=args)
    assert done.returncode == 3, done.stderr
    for rank in range(2):
        text = (tmp_path / "logs" / f"rank-000{rank}.log").read_text()
        assert f"begun {rank} {args}\nraw\n" in text
        own = "".join(line for line in done.stdout.splitlines(keepends=True) if line.startswith(f"[{rank}]"))
        assert f"[{rank}] begun {rank} {args}\n[{rank}] raw\n" in own
    assert not (tmp_path / "other").exists()
    assert "threads 1" in (tmp_path / "logs" / "rank-0001.log").read_text()
    assert json.loads((tmp_path / "logs" / "rank-0001.json").read_text())["status"] == 3


JOINED = """
import os, sys, time
import numpy as np
import fsdpx
from fsdpx import CheckpointConfig, data, nn, optim

comm = fsdpx.init()
trainer = nn.Sequential(nn.Linear(6, 16), nn.GELU(), nn.Linear(16, 3)).as_distributed(
    loss=nn.CrossEntropyLoss(), optimizer=optim.AdamW(lr=0.01), strategy="fsdp", comm=comm,
    reproducible_chunks=4, tune=False,
    elastic="--elastic" in sys.argv,
)
def slowly(action):  # until the others come
    if os.environ.get("FSDPX_RESTART") == "0" and str(action) in ("SCALE", "NORM") and trainer.global_step > 4:
        open("slow", "w").close()
        time.sleep(0.4)
trainer.inspect.engine.add_observer(slowly)
rng = np.random.default_rng(0)
source = data.ArrayDataset(rng.standard_normal((200, 6)).astype(np.float32), rng.integers(0, 3, 200))
loader = data.DataLoader(source, 4, comm=trainer.data_group, shuffle=True, reproducible_chunks=4)
history = trainer.fit(loader, epochs=1, checkpoints=CheckpointConfig("saved" + str(comm.size > 1), every=50),
    progress=False)
digest = trainer.inspect.compute_fingerprint()
if comm.rank == 0: print("ended", comm.size, history.earlier_steps > 4, digest, flush=True)
"""


def test_ranks_that_were_not_there_at_the_start_join_and_the_bits_stay(tmp_path, capsys, monkeypatch):
    (tmp_path / "job.py").write_text(JOINED)
    with monkeypatch.context() as patch:
        patch.chdir(tmp_path)
        fsdpx.spawn(lambda comm: exec(JOINED, {}), 1)
    alone = capsys.readouterr().out
    kept = {"cwd": tmp_path, "env": environment(TMPDIR=str(tmp_path)), "text": True}
    said = subprocess.run([str(MPIEXEC), "--version"], **kept, capture_output=True).stdout
    elastic = ["--elastic"] if "(Open MPI) 5" in said else []
    (tmp_path / "job").mkdir()
    job = subprocess.Popen(
        [sys.executable, "-m", "fsdpx", "run", "-n", "2", "--max-restarts", "0", "--folder", "job", *elastic, "job.py",
         *elastic], **kept, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    while not (tmp_path / "slow").exists() and job.poll() is None:
        time.sleep(0.05)
    for ranks, status, text in ((0, 2, "one or more is needed"), (1, 0, "the job saves and goes on with 1 more")):
        assert main(["run", "-n", str(ranks), "--join", str(tmp_path / "job")]) == status
        assert text in "".join(capsys.readouterr())
    out, err = job.communicate(timeout=100)
    assert job.returncode == 0, err
    assert "fsdpx run: all have saved, for 1 more to join; they go on: 3 ranks\n" in err
    assert out == alone.replace("ended 1 False", "ended 3 True")
    assert none_left(tmp_path)


def test_only_whole_lines_are_followed_until_the_end(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "rank-0002.log").write_text("of an earlier start\n")
    follower = LogFollower(tmp_path)
    with (tmp_path / "rank-0002.log").open("a") as file:
        file.write("one\ntw")
        file.flush()
        while "one" not in (said := capsys.readouterr().out):
            time.sleep(0.01)
        file.write("o")
    follower.stop_and_write_rank_statuses({2: "done"})
    assert said == "[2] one\n"
    assert capsys.readouterr().out == "[2] two\n"
    assert (tmp_path / "rank-0002.json").read_text() == "done"


SUMS = """
import fsdpx
def add(comm, more):
    print("rank", comm.rank, "adds")
    if more < 0:
        raise ValueError("less")
    return comm.rank, int(fsdpx.all_reduce(comm.rank + more))
"""


def test_a_function_gives_what_it_returned_on_each_rank(tmp_path, capsys, monkeypatch, in_job):
    monkeypatch.delenv("PYTHONPATH")  # ranks find fsdpx as this process does, from any folder
    monkeypatch.chdir(tmp_path)
    (tmp_path / "sums.py").write_text(SUMS)
    monkeypatch.syspath_prepend(tmp_path)
    add = importlib.import_module("sums").add
    assert fsdpx.launch(add, 2, ranks=2) == [(0, 5), (1, 5)]
    assert "[1] rank 1 adds\n" in capsys.readouterr().out
    with pytest.raises(LaunchError, match=r"^rank [01] on .* ended with ValueError"):
        fsdpx.launch(add, -1, config=fsdpx.LaunchConfig(ranks=2, max_restarts=0))


IN_A_NOTEBOOK = """
class Sum:
    def __init__(self, total):
        self.total = total

def add(comm, more):
    return Sum(comm.rank + more.total)
"""


def test_a_notebook_gives_functions_and_classes_of_its_own(monkeypatch: pytest.MonkeyPatch, in_job: None) -> None:
    pytest.importorskip("cloudpickle")
    cell = ModuleType("__main__")
    exec(IN_A_NOTEBOOK, cell.__dict__)
    monkeypatch.setitem(sys.modules, "__main__", cell)
    sums = fsdpx.launch(cell.add, cell.Sum(3), ranks=1)
    assert [(type(one), one.total) for one in sums] == [(cell.Sum, 3)]
