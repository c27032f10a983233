"""State on disk under MPI has the bits of state in memory."""

import tempfile
from typing import Any

import numpy as np
import pytest

from fsdpx import OffloadConfig, nn, optim
from fsdpx.core.comm import Communicator
from fsdpx.core.comm.init import open_world as open_world

pytestmark = [pytest.mark.world, pytest.mark.mpi]


def trained(comm: Communicator, offload: OffloadConfig | None) -> Any:
    model = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 8))
    options: dict[str, Any] = {"loss": nn.MSELoss(), "optimizer": optim.AdamW(lr=1e-2), "group_bytes": 0, "tune": False}
    with model.as_distributed(comm=comm, offload=offload, clip_norm=1.0, **options) as trainer:
        rng = np.random.default_rng(comm.rank)
        x, y = rng.standard_normal((96, 32), np.float32), rng.standard_normal((96, 8), np.float32)
        return [trainer.step(x, y) for _ in range(2)], trainer.inspect.compute_fingerprint()


@pytest.mark.parametrize("backend", ["node", "mpi"])
def test_the_same_bits_as_in_memory(backend: str) -> None:
    with open_world(backend) as comm, tempfile.TemporaryDirectory() as own:
        folder = comm.all_gather_object(own)[0]
        there = trained(comm, OffloadConfig(folder, ("optimizer", "parameters", "activations", "gradients")))
        assert there == trained(comm, None)
        comm.barrier().wait()
