"""Muon on shards: matrices are made whole for their updates, and the bits are those of one rank."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import fsdpx
from fsdpx import Mesh, nn, optim, spawn
from fsdpx.comm import Communicator
from fsdpx.errors import ConfigError

X, Y = (np.random.default_rng(7).standard_normal((12, n)).astype(np.float32) for n in (6, 3))


def make(comm: Communicator, **options: Any) -> fsdpx.Trainer:
    model = nn.Chain(nn.Linear(6, 70), nn.GELU(), nn.Linear(70, 50), nn.GELU(), nn.Linear(50, 3))
    options = {"optimizer": optim.Muon(lr=1e-2), "chunks": 12, **options}
    return model.as_distributed(loss=nn.MSE(), comm=comm, **options)


def train(trainer: fsdpx.Trainer, steps: int) -> str:
    size, rank = trainer.data.size, trainer.data.rank
    mine = slice(12 * rank // size, 12 * (rank + 1) // size)
    for _ in range(steps):
        trainer.step(X[mine], Y[mine])
    return trainer.fingerprint()


@pytest.mark.parametrize("precision", ["float32", "bf16", "bf16-true"])
def test_with_chunks_the_bits_are_the_same_at_any_world_size(precision: str) -> None:
    meshes = [(1, {}), (3, {}), (4, {"mesh": Mesh(replica=2)}), (2, {"strategy": "zero1", "group_bytes": 0})]
    seen = [spawn(lambda c, o=o: train(make(c, precision=precision, **o), 4), n) for n, o in meshes]
    assert len({one for ranks in seen for one in ranks}) == 1


def test_a_checkpoint_goes_on_at_another_number_of_ranks(tmp_path: Path) -> None:
    def save(comm: Communicator) -> str:
        trainer = make(comm)
        train(trainer, 2)
        trainer.save(tmp_path / "a")
        return train(trainer, 2)

    def load(comm: Communicator) -> str:
        trainer = make(comm)
        trainer.load(tmp_path / "a")
        return train(trainer, 2)

    assert set(spawn(save, 3)) == set(spawn(load, 2))


def test_a_tensor_axis_is_refused() -> None:
    def run(comm: Communicator) -> None:
        with pytest.raises(ConfigError, match="Muon needs whole parameters, the tensor axis of 2 ranks cuts them; use"):
            make(comm, mesh=Mesh(tensor=2), chunks=None, tensor_plan={"0": nn.Column, "2": nn.Row})

    spawn(run, 2)
