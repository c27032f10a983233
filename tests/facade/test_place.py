"""Which rank of how many this is: asked without communicating, and said of which world; `with` around a job."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from amount import few, in_full
from trials import environment, job, none_left

import fsdpx
from fsdpx import nn, optim
from fsdpx.comm import default as places
from fsdpx.errors import ConfigError
from fsdpx.facade.functional import _local_rank, finalize

HALF = """
import numpy as np
from mpi4py import MPI
import fsdpx
from fsdpx import nn, optim

world = MPI.COMM_WORLD
half = world.Split(world.rank % 2)
if world.rank % 2 == 0:
    trainer = nn.Linear(6, 3).as_distributed(loss=nn.CrossEntropy(), optimizer=optim.SGD(lr=0.1), comm=half)
    trainer.step(np.ones((2, 6)), np.array([0, 1]))
    found = fsdpx.info()
    places = fsdpx.rank(), fsdpx.world_size(), fsdpx.local_rank(), found["rank"], found["size"], trainer.host.rank
    print("at", world.rank, *places, flush=True)
else:
    print("at", world.rank, fsdpx.rank(), fsdpx.world_size(), fsdpx.local_rank(), flush=True)
world.Barrier()
"""
BEFORE = """
import sys
import fsdpx
place = fsdpx.rank(), fsdpx.world_size(), fsdpx.local_rank()
assert "mpi4py" not in sys.modules
with fsdpx.init() as comm:
    assert place[:2] == (comm.rank, comm.size)
    assert place == (fsdpx.rank(), fsdpx.world_size(), fsdpx.local_rank())
    assert fsdpx.info()["backend"] == "node"
assert not fsdpx.is_initialized()
if comm.rank == 0: print(f"rank {comm.rank} of {fsdpx.world_size()}", fsdpx.info()["world"], flush=True)
"""


@pytest.mark.jobs
def test_half_of_the_ranks_ask_and_the_others_do_not_come(tmp_path: Path) -> None:
    done = job(tmp_path, HALF, ranks=4)
    assert done.status == 0, done.err
    said = [[int(word) for word in line.split()[1:]] for line in done.out.splitlines() if line.startswith("at ")]
    assert sorted(numbers[:3] + numbers[4:] for numbers in said) == [
        [0, 0, 4, 0, 4, 0], [1, 1, 4], [2, 2, 4, 2, 4, 1], [3, 3, 4],
    ]  # fmt: skip
    assert sorted(numbers[3] for numbers in said) == [0, 1, 2, 3]  # of the host
    note = "fsdpx: rank() is of all ranks of MPI (MPI_COMM_WORLD), 4 in number; the communicator given to distribute() "
    assert done.err.count(f"{note}has 2, and trainer.host.rank is the rank there") == 1


@pytest.mark.jobs
def test_before_init_the_launcher_says_and_mpi_is_not_loaded(tmp_path: Path) -> None:
    done = job(tmp_path, BEFORE)
    assert done.status == 0, done.err
    assert "rank 0 of 3 all ranks of MPI (MPI_COMM_WORLD)" in done.out
    assert none_left(tmp_path)


@in_full
@pytest.mark.parametrize("call", few(["rank()", "world_size()", "init()", "all_reduce(1.0)"], 4))
def test_ranks_of_torchrun_do_not_train_alone_in_silence(tmp_path: Path, call: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", f"import fsdpx; fsdpx.{call}"],
        cwd=tmp_path, env=environment(RANK="1", WORLD_SIZE="2"), capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert done.returncode == 1
    assert "LaunchError: RANK=1 and WORLD_SIZE=2 say that this process is one of 2" in done.stderr.splitlines()[-1]


@in_full
def test_a_process_of_a_slurm_allocation_trains_alone_with_a_note(tmp_path: Path) -> None:
    code = "import fsdpx; print(fsdpx.init().size, fsdpx.rank())"
    for tasks, notes in (("1", 0), ("8", 1)):
        done = subprocess.run(
            [sys.executable, "-c", code],
            cwd=tmp_path, env=environment(SLURM_JOB_ID="7", SLURM_NTASKS=tasks, SLURM_PROCID="0"),
            capture_output=True, text=True, timeout=60,
        )  # fmt: skip
        assert done.stdout == "1 0\n"
        assert done.stderr.count("fsdpx: this process is alone, in a Slurm job of 8 tasks") == notes


def test_a_launcher_that_does_not_say_which_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    fsdpx.finalize()  # what a test before has left open
    monkeypatch.setattr(places, "running_mpi", lambda: None)
    monkeypatch.setenv("FSDPX_EXPECT_SIZE", "4")
    with pytest.raises(ConfigError, match="FSDPX_EXPECT_SIZE does not say which rank of how many this is: call "):
        fsdpx.rank()
    monkeypatch.setenv("PMI_RANK", "3")
    monkeypatch.setenv("PMI_SIZE", "4")
    assert (fsdpx.rank(), fsdpx.world_size()) == (3, 4)
    with pytest.raises(ConfigError, match=r"local_rank is not known of all ranks that the launcher started: call "):
        fsdpx.local_rank()


def test_numbers_on_a_host_are_the_launchers_where_it_numbers_all_of_them() -> None:
    said = [("a", 1), ("b", 0), ("a", 0), ("b", None)]
    assert [_local_rank(rank, said) for rank in range(4)] == [1, 0, 0, 1]  # Open MPI may number backwards
    half = [("a", 0), ("a", 2)]  # of a communicator of one's own
    assert [_local_rank(rank, half) for rank in range(2)] == [0, 1]


def test_info_is_a_dict_and_its_text_a_table() -> None:
    found = fsdpx.info()
    assert isinstance(found, dict)
    assert (found["rank"], found["size"], found["local_rank"], found["backend"]) == (0, 1, 0, "local")
    assert found["device"] in ("cpu", "cuda")
    lines = str(found).splitlines()
    assert len(lines) == len(found)
    assert any(line.startswith("NumPy ") and np.__version__ in line for line in lines)


def test_with_closes_the_default_communicator_and_the_trainer() -> None:
    with fsdpx.init() as comm:
        assert fsdpx.is_initialized()
        with nn.Linear(6, 3).as_distributed(loss=nn.CrossEntropy(), optimizer=optim.SGD(lr=0.1)) as trainer:
            assert fsdpx.init() is comm
            trainer.step(np.ones((2, 6)), np.array([0, 1]))
        with pytest.raises(ConfigError, match="this trainer is closed"):
            trainer.step(np.ones((2, 6)), np.array([0, 1]))
    assert not fsdpx.is_initialized()


def test_with_leaves_the_communicator_of_a_thread_rank_open() -> None:
    def body(comm: Any) -> float:
        with fsdpx.init() as own:
            assert own is comm
        return float(fsdpx.all_reduce(1.0))

    assert fsdpx.spawn(body, 2) == [2.0, 2.0]


def test_after_an_exception_nothing_collective_is_called() -> None:
    """The other ranks would not come to it."""

    def body() -> None:
        with fsdpx.init() as comm:
            comm.leave = lambda: pytest.fail("closed")
            raise KeyError

    with pytest.raises(KeyError):
        body()
    finalize()
