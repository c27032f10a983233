"""Optimisers that see more than an element at a time: on any number of ranks, in checkpoints and in reports."""

from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from amount import in_full
from bits import Bits, bits
from ranks import from_rank_0

import fsdpx
from fsdpx import Mesh, nn, optim, spawn
from fsdpx.array.sums import PARTS
from fsdpx.checkpoint.pieces import held
from fsdpx.checkpoint.state import restore, scalars_of
from fsdpx.comm import Communicator
from fsdpx.elastic.recut import recut
from fsdpx.errors import CheckpointError, ConfigError
from fsdpx.program import Traffic

X, Y = (np.random.default_rng(7).standard_normal((12, n)).astype(np.float32) for n in (6, 3))
MAKE: dict[str, Any] = {
    "LAMB": lambda: optim.LAMB(lr=1e-2),
    "Muon": lambda: optim.Muon(lr=1e-2),
}
ALL = pytest.mark.parametrize("name", MAKE)


def make(comm: Communicator, name: str, **options: Any) -> fsdpx.Trainer:
    model = nn.Chain(nn.Linear(6, 70), nn.GELU(), nn.Linear(70, 50), nn.GELU(), nn.Linear(50, 3))
    options = {"optimizer": MAKE[name](), "chunks": 12, **options}
    return model.as_distributed(loss=nn.MSE(), comm=comm, **options)


def train(trainer: fsdpx.Trainer, steps: int) -> Bits:
    size, rank = trainer.data.size, trainer.data.rank
    mine = slice(12 * rank // size, 12 * (rank + 1) // size)
    for _ in range(steps):
        trainer.step(X[mine], Y[mine])
    return bits(trainer)


@in_full
@pytest.mark.parametrize(("name", "precision"), [*product(MAKE, ["float32", "bf16-true"]), ("Muon", "bf16")])
def test_with_chunks_the_bits_are_the_same_at_any_world_size(name: str, precision: str) -> None:
    meshes = [(1, {}), (3, {}), (4, {"mesh": Mesh(replica=2)}), (5, {}), (2, {"strategy": "zero1", "group_bytes": 0})]
    seen = [spawn(lambda c, o=o: train(make(c, name, precision=precision, **o), 4), n) for n, o in meshes]
    assert len({one for ranks in seen for one in ranks}) == 1


@pytest.mark.parametrize(
    ("optimizer", "nbytes"),
    [
        (optim.Muon(), 4 * 32),
        (optim.AdamW(), 0),
    ],
)
def test_ranks_send_parts_of_matrices_as_arrays(optimizer: Any, nbytes: int) -> None:
    """One message per page and update, of the bytes that are predicted; each of two ranks has half of a matrix."""
    options: dict[str, Any] = {"loss": nn.MSE(), "optimizer": optimizer, "tune": False, "strategy": "fsdp"}
    x = np.ones((2, 8), np.float32)

    def run(comm: Communicator) -> Any:
        trainer = nn.Linear(8, 8, bias=False).as_distributed(comm=comm, **options)
        trainer.inspect.placement.axes.shard.all_gather_bytes = None  # no objects are sent
        trainer.step(x, x)
        return trainer.report()

    reports = [*spawn(run, 2), fsdpx.dry_run(nn.Linear(8, 8, bias=False), x, x, ranks=2, **options).report]
    wanted = Traffic(1, nbytes) if nbytes else None
    for report in reports:
        assert report.traffic.get(("shard", "all_to_all")) == report.predicted.get(("shard", "all_to_all")) == wanted


@pytest.mark.parametrize("mesh", [Mesh(shard=2), Mesh(shard=2, tensor=2)])
def test_lamb_sends_its_norms_as_arrays(mesh: Mesh) -> None:
    """Two sums of each of four parameters go to the other rank of the shard axis, and those of both over the tensor
    axis."""
    width = mesh.width("tensor")
    plan = {"0": nn.Column, "2": nn.Row} if width > 1 else None
    options: dict[str, Any] = {"loss": nn.MSE(), "tune": False, "mesh": mesh, "tensor_plan": plan}

    def run(comm: Communicator) -> Any:
        found = []
        for optimizer in (optim.LAMB(), optim.AdamW()):
            model = nn.Chain(nn.Linear(6, 8), nn.GELU(), nn.Linear(8, 3))
            trainer = model.as_distributed(comm=comm, optimizer=optimizer, **options)
            for axis in (trainer.inspect.placement.axes.shard, trainer.inspect.placement.axes.tensor):
                axis.all_gather_bytes = None  # no objects are sent
            trainer.step(X, Y)
            report = trainer.report()
            assert {key: report.traffic[key] for key in report.predicted} == report.predicted
            found.append({axis: report.predicted.get((axis, "all_gather")) for axis in ("shard", "tensor")})
        return found

    one = 8 * 2 * PARTS * 4
    for lamb, adamw in spawn(run, 2 * width):
        assert lamb["shard"] == Traffic(adamw["shard"].calls + 1, adamw["shard"].bytes + one)
        tensor = adamw["tensor"] or Traffic()
        assert lamb["tensor"] == (Traffic(tensor.calls + 1, tensor.bytes + 2 * one) if width > 1 else None)


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
        recut(comm, list(held(old.inspect.engine.state)), [] if new is None else list(held(new.inspect.engine.state)))
        if new is None:
            return ""
        restore(new.inspect.engine.state, scalars_of(old.inspect.engine.state, None, None))
        new.inspect.engine.state.replaced()
        return train(new, 2)

    assert spawn(run, 3)[:2] == spawn(lambda c: train(make(c, name), 4), 1) * 2


@pytest.mark.parametrize("name", [name for name in MAKE if name != "Muon"])  # whose v of matrices is never written
def test_frozen_parameters_keep_their_state(name: str) -> None:
    def run(comm: Communicator) -> None:
        trainer = make(comm, name)
        train(trainer, 1)
        trainer.freeze("2.*")
        before = {one.name: one.array.copy() for one in held(trainer.inspect.engine.state)}
        train(trainer, 1)
        for one in held(trainer.inspect.engine.state):
            assert np.array_equal(one.array, before[one.name]) == ("2." in one.name), one.name

    spawn(run, 2)


def test_what_does_not_fit_is_named(tmp_path: Path) -> None:
    def run(comm: Communicator) -> None:
        with pytest.raises(ConfigError, match="Muon needs whole parameters, the tensor axis of 2 ranks cuts t"):
            make(comm, "Muon", mesh=Mesh(tensor=2), chunks=None, tensor_plan={"0": nn.Column, "2": nn.Row})
        make(comm, "LAMB").save(tmp_path / "a")
        with pytest.raises(CheckpointError, match="LAMB with slots m, v in the checkpoint"):
            make(comm, "LAMB", optimizer=optim.SGD()).load(tmp_path / "a")

    spawn(run, 2)


@pytest.mark.world
@pytest.mark.mpi
@pytest.mark.parametrize("name", MAKE)
def test_processes_find_the_bits_of_one(world: Communicator, name: str) -> None:
    with make(world, name, group_bytes=0) as trainer:
        found = train(trainer, 2)
    assert found == from_rank_0(world, lambda: spawn(lambda comm: train(make(comm, name), 2), 1)[0])
