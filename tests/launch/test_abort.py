"""One rank fails, all end: real MPI jobs that would hang without the hook."""

import time

import pytest
from amount import pairs
from commands import start

pytestmark = pytest.mark.mpi_skip

START = "import threading, time, numpy as np, fsdpx as f\ncomm = f.init()\n"
WORK = START + "def work():\n    time.sleep({}); raise KeyError('lost\\nand found')\n"
LOST = {
    "main": START + "if comm.rank == 1: raise KeyError('lost\\nand found')\nf.barrier(); f.barrier()\n",
    "thread": WORK.format(0) + "if comm.rank == 1: threading.Thread(target=work, name='loader').start()\n"
    "f.barrier()\nwhile True: f.all_reduce(np.zeros(3)); time.sleep(0.01)\n",
    "blocked": WORK.format(0.3) + "if comm.rank == 1: threading.Thread(target=work).start()\n"
    "if comm.rank == 1: comm.recv(np.zeros(1), 0).wait()\nf.barrier()\n",
}
"""By where the error is raised."""


def run_job(folder, program, ranks=2, module=False, **variables):
    (folder / "job.py").write_text(program)
    return start(ranks, *(["-m", "job"] if module else ["job.py"]), folder=folder, **variables)


def run_failing_job(*arguments, **options):
    """Its errors; without the hook it would wait for ever."""
    begin = time.monotonic()
    done = run_job(*arguments, **options)
    assert done.returncode != 0
    assert time.monotonic() - begin < 30
    return done.stderr


@pytest.mark.parametrize(("where", "module"), pairs(LOST, [False, True]))
def test_an_exception_on_one_rank_ends_the_job(tmp_path, where, module):
    err = run_failing_job(tmp_path, LOST[where], module=module)
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


@pytest.mark.parametrize(
    ("program", "rank", "text"),
    [
        ("trainer().step(np.ones((2, 4)), np.ones((2 + fsdpx.rank(), 2)))\n", 0, "the target has 3"),
        ("trainer(microbatches=0)\n", 0, "ConfigError: microbatches=0: a whole number, 1 or more"),
        ("trainer(microbatches=int(fsdpx.rank() != 1))\nfsdpx.barrier()\n", 0, "ConfigError: rank 1: microbatches=0"),
        ("one = trainer()\nif fsdpx.rank() == 1: raise fsdpx.errors.ConfigError('mine')\nfsdpx.barrier()\n", 1,
         "ConfigError: mine"),
    ],
    ids=["a batch of one rank", "a number on all ranks", "a number on one rank", "an error of one rank alone"],
)  # fmt: skip
def test_an_error_of_ours_is_printed_once(tmp_path, program, rank, text):
    err = run_failing_job(tmp_path, TRAIN + program)
    assert err.count("Traceback (most recent call last)") == err.count(f"[rank {rank}/") == 1, err
    assert text in err


def test_one_process_needs_no_launcher(tmp_path):
    done = run_job(tmp_path, START + "assert comm.size == 1\n", ranks=1)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_rank_started_without_the_others_says_so(tmp_path):
    err = run_failing_job(tmp_path, START, ranks=1, OMPI_COMM_WORLD_SIZE="4")
    assert "LaunchError: this rank was started without the others: mpiexec of Open MPI" in err
    assert "says 4 ranks, but MPI (MPICH" in err or "says 4 ranks, but MPI (" in err


def test_a_rank_that_calls_something_else_ends_the_job_with_names(tmp_path):
    program = START + "f.broadcast(np.zeros(3)) if comm.rank == 2 else f.all_reduce(np.zeros(3))\n"
    err = run_failing_job(tmp_path, program, ranks=3, FSDPX_CHECK="1")
    assert "ranks 0, 1: all_reduce, dtype float64, shape [3], op SUM" in err
    assert "rank 2: broadcast, dtype float64, shape [3], root 0" in err
