"""One rank fails, all end: real MPI jobs that would hang without the hook."""

from __future__ import annotations

import subprocess
import sys
import time

import pytest
from amount import pairs
from trials import MPIEXEC, environment

pytestmark = pytest.mark.mpi_skip

START = "import threading, time, numpy as np, fsdpx as f\ncomm = f.init()\n"
RAISE = START + "if comm.rank == 1: raise KeyError('lost\\nand found')\nf.barrier(); f.barrier()\n"
IN_THREAD = (
    START
    + "def work():\n    raise KeyError('lost\\nand found')\n"
    + "if comm.rank == 1: threading.Thread(target=work, name='loader').start()\n"
    + "f.barrier()\nwhile True: f.all_reduce(np.zeros(3)); time.sleep(0.01)\n"
)
WHILE_BLOCKED = (
    START
    + "def work():\n    time.sleep(0.3); raise KeyError('lost\\nand found')\n"
    + "if comm.rank == 1: threading.Thread(target=work).start()\n"
    + "if comm.rank == 1: comm.recv(np.zeros(1), 0).wait()\n"
    + "f.barrier()\n"
)


def job(tmp_path, program, *, ranks=2, module=False, **variables):
    """Run `program` on MPI ranks; returns exit status, stderr and seconds."""
    (tmp_path / "job.py").write_text(program)
    launcher, words = [MPIEXEC, "-n", str(ranks)] if ranks else [], ["-m", "job"] if module else ["job.py"]
    begin = time.monotonic()
    done = subprocess.run(
        [*launcher, sys.executable, *words], cwd=tmp_path, env=environment(**variables), stdin=subprocess.DEVNULL,
        capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    return done.returncode, done.stderr, time.monotonic() - begin


@pytest.mark.parametrize(("where", "module"), pairs(["main", "thread", "blocked"], [False, True]))
def test_an_exception_on_one_rank_ends_the_job(tmp_path, where, module):
    program = {"main": RAISE, "thread": IN_THREAD, "blocked": WHILE_BLOCKED}[where]
    status, err, seconds = job(tmp_path, program, module=module)
    assert status != 0
    assert seconds < 30  # it would wait for ever
    assert err.count("Traceback (most recent call last)") == 1, err
    assert err.count("[rank 1/") == 1
    trace = err[err.index("[rank 1/") :]
    assert "KeyError: 'lost\\nand found'" in trace
    assert ("in thread loader" in trace) == (where == "thread")


TRAIN = (
    "import numpy as np, fsdpx\nfrom fsdpx import nn, optim\n"
    "def trainer(**options):\n"
    "    return nn.Linear(4, 2).as_distributed(loss=nn.MSELoss(), optimizer=optim.SGD(lr=1), **options)\n"
)
TOGETHER = {
    "a batch": ("rank = fsdpx.rank()\ntrainer().step(np.ones((2, 4)), np.ones((2 + rank, 2)))\n", "the target has 3"),
    "a number": ("trainer(microbatches=0)\n", "ConfigError: microbatches=0: a whole number, 1 or more"),
}


@pytest.mark.parametrize("what", TOGETHER)
def test_what_all_ranks_raise_is_printed_once(tmp_path, what):
    program, text = TOGETHER[what]
    status, err, _ = job(tmp_path, TRAIN + program)
    assert status != 0
    assert err.count("Traceback (most recent call last)") == 1, err
    assert err.count("[rank 0/") == 1
    assert text in err


def test_an_error_of_ours_on_one_rank_alone_is_printed_too(tmp_path):
    fails = "if fsdpx.rank() == 1:\n    raise fsdpx.errors.ConfigError('mine')\n"
    program = TRAIN + "one = trainer()\n" + fails + "fsdpx.barrier()\n"
    status, err, _ = job(tmp_path, program)
    assert status != 0
    assert err.count("Traceback (most recent call last)") == err.count("[rank 1/") == 1, err
    assert "ConfigError: mine" in err


def test_a_wrong_argument_on_one_rank_alone_is_printed_once(tmp_path):
    status, err, _ = job(tmp_path, TRAIN + "trainer(microbatches=int(fsdpx.rank() != 1))\nfsdpx.barrier()\n")
    assert status != 0
    assert err.count("Traceback (most recent call last)") == 1, err
    assert "ConfigError: rank 1: microbatches=0" in err


def test_a_job_without_exceptions_ends_well(tmp_path):
    program = START + "assert f.all_reduce(1) == 2; assert f.local_rank() == comm.rank; f.finalize()\n"
    assert job(tmp_path, program)[:2] == (0, "")


def test_one_process_needs_no_launcher(tmp_path):
    assert job(tmp_path, START + "assert comm.size == 1\n", ranks=0)[:2] == (0, "")


def test_a_rank_started_without_the_others_says_so(tmp_path):
    status, err, seconds = job(tmp_path, START, ranks=0, OMPI_COMM_WORLD_SIZE="4")
    assert status != 0
    assert seconds < 30  # it would wait for ever
    assert "LaunchError: this rank was started without the others: mpiexec of Open MPI" in err
    assert "says 4 ranks, but MPI (MPICH" in err or "says 4 ranks, but MPI (" in err


def test_a_rank_that_calls_something_else_ends_the_job_with_names(tmp_path):
    program = START + "f.broadcast(np.zeros(3)) if comm.rank == 2 else f.all_reduce(np.zeros(3))\n"
    status, err, seconds = job(tmp_path, program, ranks=3, FSDPX_CHECK="1")
    assert status != 0
    assert seconds < 30  # it would wait for ever
    assert "ranks 0, 1: all_reduce, dtype float64, shape [3], op SUM" in err
    assert "rank 2: broadcast, dtype float64, shape [3], root 0" in err
