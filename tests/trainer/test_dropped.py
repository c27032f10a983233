"""Trainers that are dropped without `close` give back what is theirs alone, and a process without files says so."""

from __future__ import annotations

import gc
import os
import resource
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import fsdpx
from fsdpx import Offload, nn, optim, spawn
from fsdpx.comm import Communicator

KINDS: tuple[dict[str, Any], ...] = ({}, {"strategy": "async"}, {"strategy": "ddp"})


def held() -> tuple[int, int]:
    """Open files of this process, and its mappings of memory that ranks share."""
    maps = Path("/proc/self/maps").read_text()
    return len(os.listdir("/proc/self/fd")), maps.count("/dev/shm/fsdpx-")


def dropped(comm: Communicator, kinds: tuple[dict[str, Any], ...] = KINDS, times: int = 20) -> None:
    """Make trainers and drop them, on all ranks."""
    before = None
    for i in range(times):
        model = nn.Chain(nn.Linear(4, 8), nn.Linear(8, 1))
        trainer: Any = model.as_distributed(
            loss=nn.MSE(), optimizer=optim.SGD(lr=0.1, momentum=0.9), comm=comm, **kinds[i % len(kinds)]
        )
        trainer.step(np.ones((2, 4)), np.ones((2, 1)))
        del trainer
        gc.collect()
        comm.barrier().wait()  # thread ranks have the files of the process in common: one of them counts
        if i == 2 * len(kinds) and comm.rank == 0:
            before = held()
        if i == times - 1 and comm.rank == 0:
            assert held() == before
        comm.barrier().wait()


def too_many(comm: Communicator) -> None:
    """All ranks get the same error, with the remedy, where one of them has no more files."""
    kept, hard = [], resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    if comm.rank == comm.size - 1:
        resource.setrlimit(resource.RLIMIT_NOFILE, (held()[0] + 7, hard))
    with pytest.raises(fsdpx.errors.ConfigError, match=r"rank 1: \d+ bytes .* Too many open files; close\(\) trainers"):
        kept.extend(comm.window(8) for _ in range(8))
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    comm.window(8).close()


def test_among_threads() -> None:
    spawn(dropped, 2, KINDS[:2])


def test_a_folder_of_offloaded_state_is_free_again(tmp_path: Path) -> None:
    spawn(dropped, 1, ({"offload": Offload(tmp_path)},), 6)


@pytest.mark.jobs
def test_among_processes(tmp_path: Path) -> None:
    from trials import job  # ranks run this file without the folders of the tests

    done = job(tmp_path, Path(__file__).read_text(), ranks=2)
    assert done.status == 0, done.out + done.err


if __name__ == "__main__":
    dropped(fsdpx.init())
    too_many(fsdpx.init())
