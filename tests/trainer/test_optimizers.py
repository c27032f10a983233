"""Optimisers whose slots are not as large as the shard: on any number of ranks, in checkpoints and in reports."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import fsdpx
from fsdpx import Mesh, nn, optim, spawn
from fsdpx.checkpoint.pieces import held
from fsdpx.checkpoint.state import restore, scalars_of
from fsdpx.comm import Communicator
from fsdpx.elastic.recut import recut
from fsdpx.errors import CheckpointError, ConfigError

X, Y = (np.random.default_rng(7).standard_normal((12, n)).astype(np.float32) for n in (6, 3))
MAKE: dict[str, Any] = {
    "Adafactor": lambda: optim.Adafactor(weight_decay=0.1),
    "SOAP": lambda: optim.SOAP(lr=1e-2, block=32, every=2),
    "AdamW8bit": lambda: optim.AdamW8bit(lr=1e-2, block=64),
}
ALL = pytest.mark.parametrize("name", MAKE)


def make(comm: Communicator, name: str, **options: Any) -> fsdpx.Trainer:
    model = nn.Chain(nn.Linear(6, 70), nn.GELU(), nn.Linear(70, 50), nn.GELU(), nn.Linear(50, 3))
    options = {"optimizer": MAKE[name](), "chunks": 12, **options}
    return model.as_distributed(loss=nn.MSE(), comm=comm, **options)


def train(trainer: fsdpx.Trainer, steps: int) -> str:
    size, rank = trainer.data.size, trainer.data.rank
    mine = slice(12 * rank // size, 12 * (rank + 1) // size)
    for _ in range(steps):
        trainer.step(X[mine], Y[mine])
    return trainer.fingerprint()


@ALL
@pytest.mark.parametrize("precision", ["float32", "bf16-true"])
def test_with_chunks_the_bits_are_the_same_at_any_world_size(name: str, precision: str) -> None:
    meshes = [(1, {}), (3, {}), (4, {"mesh": Mesh(replica=2)}), (5, {}), (2, {"strategy": "zero1", "group_bytes": 0})]
    seen = [spawn(lambda c, o=o: train(make(c, name, precision=precision, **o), 4), n) for n, o in meshes]
    assert len({one for ranks in seen for one in ranks}) == 1


@ALL
def test_a_checkpoint_goes_on_at_another_number_of_ranks(name: str, tmp_path: Path) -> None:
    def save(comm: Communicator) -> str:
        trainer = make(comm, name)
        train(trainer, 2)
        trainer.save(tmp_path / "a")
        return train(trainer, 2)

    def load(comm: Communicator) -> str:
        trainer = make(comm, name)
        trainer.load(tmp_path / "a")
        return train(trainer, 2)

    assert set(spawn(save, 3)) == set(spawn(load, 2))


@ALL
def test_a_state_is_re_cut_in_memory(name: str) -> None:
    def run(comm: Communicator) -> str:
        old, group = make(comm, name), comm.split(0 if comm.rank < 2 else None)
        train(old, 2)
        new = None if group is None else make(group, name, seed=9)
        recut(comm, list(held(old.engine.state)), [] if new is None else list(held(new.engine.state)))
        if new is None:
            return ""
        restore(new.engine.state, scalars_of(old.engine.state, None, None))
        new.engine.state.replaced()
        return train(new, 2)

    assert spawn(run, 3)[:2] == spawn(lambda c: train(make(c, name), 4), 1) * 2


@ALL
def test_frozen_parameters_keep_their_state(name: str) -> None:
    def run(comm: Communicator) -> None:
        trainer = make(comm, name)
        train(trainer, 1)
        trainer.freeze("2.*")
        before = {one.name: one.array.copy() for one in held(trainer.engine.state)}
        train(trainer, 1)
        for one in held(trainer.engine.state):
            assert np.array_equal(one.array, before[one.name]) == ("2." in one.name), one.name

    spawn(run, 2)


def test_8_bits_are_as_many_bytes_as_the_formula_says() -> None:
    """2 bytes an element, and 8 for each block of each parameter."""

    def run(comm: Communicator) -> int:
        trainer = make(comm, "AdamW8bit", optimizer=optim.AdamW8bit(), chunks=None)
        trainer.step(X, Y)
        return int(trainer.report().memory["optimiser"])

    sizes = [6 * 70, 70, 70 * 50, 50, 50 * 3, 3]
    wanted = sum(2 * n + 8 * -(-n // 256) for n in sizes)
    assert [sum(spawn(run, n)) for n in (1, 3)] == [wanted, wanted]


def test_what_does_not_fit_is_named(tmp_path: Path) -> None:
    def run(comm: Communicator) -> None:
        with pytest.raises(ConfigError, match="AdamW8bit needs whole parameters, the tensor axis of 2 ranks cuts them"):
            make(comm, "AdamW8bit", mesh=Mesh(tensor=2), chunks=None, tensor_plan={"0": nn.Column, "2": nn.Row})
        make(comm, "AdamW8bit").save(tmp_path / "a")
        other = make(comm, "AdamW8bit", optimizer=optim.AdamW8bit(block=256))
        with pytest.raises(CheckpointError, match=r"m_scale/0.weight is \(7,\) instead of \(2,\)"):
            other.load(tmp_path / "a")
        with pytest.raises(CheckpointError, match="AdamW8bit with slots m, v, m_scale, v_scale in the checkpoint"):
            make(comm, "AdamW8bit", optimizer=optim.AdamW()).load(tmp_path / "a")

    spawn(run, 2)
