"""Pipes, tensor axes and 3D meshes under real MPI, at whatever number of ranks the tests are run with."""

from typing import Any

import numpy as np
import pytest
from bits import bits
from meshes import reference, train

from fsdpx import Mesh, spawn
from fsdpx.comm import Communicator
from fsdpx.testing import demand_close

pytestmark = [pytest.mark.world, pytest.mark.mpi]


MESHES = [
    *(Mesh(shard=1, pipe=n) for n in (2, 3, 4, 5)),
    *(Mesh(shard=1, tensor=n) for n in (2, 3, 4, 5)),
    Mesh(shard=1, pipe=2, tensor=2),
    Mesh(shard=2, pipe=2),
    Mesh(shard=2, tensor=2),
    Mesh(shard=2, pipe=2, tensor=2),
    Mesh(replica=2, shard=1, pipe=2, tensor=2),
]


def fits(world: Communicator, mesh: Mesh) -> None:
    if mesh.size != world.size:
        pytest.skip(f"{mesh} needs {mesh.size} ranks")


def check(world: Communicator, mesh: Mesh, strategy: str, case: str = "wide", **options: Any) -> None:
    losses, want, _ = reference(case)
    got_losses, got, trainer = train(world, case, mesh, strategy, check=True, **options)
    np.testing.assert_allclose(got_losses, losses, rtol=1e-12)
    demand_close(got, want, 1e-12)
    trainer.close()


@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_every_mesh_equals_one_process(world: Communicator, mesh: Mesh) -> None:
    fits(world, mesh)
    for strategy in ("ddp",) if mesh.shard == 1 else ("zero1", "fsdp"):
        check(world, mesh, strategy, microbatches=3)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "interleaved", "zb-h1", "zb-h2", "zbv"])
def test_every_schedule_equals_one_process(world: Communicator, schedule: str) -> None:
    if world.size == 1 or (world.size > 2 and schedule in ("interleaved", "zbv")):
        pytest.skip("the model has four layers")
    if world.size > 4:
        pytest.skip("the model has four layers")
    check(world, Mesh(shard=1, pipe=world.size), "zero1", schedule=schedule)


@pytest.mark.parametrize("sequence", ["parallel", "ulysses", "ring"])
def test_sequences_equal_one_process(world: Communicator, sequence: str) -> None:
    if world.size not in (2, 3, 4):
        pytest.skip("five heads")
    for case in ("wide", "uneven"):
        check(world, Mesh(shard=1, tensor=world.size), "ddp", case, sequence=sequence, recompute="all")
    if world.size == 4:  # a pipe's messages of no bytes
        check(world, Mesh(shard=1, pipe=2, tensor=2), "ddp", "uneven", sequence=sequence, microbatches=3)


def test_one_hash(world: Communicator) -> None:
    """A pipe of MPI ranks ends with the bits of one thread rank."""
    if world.size > 4:
        pytest.skip("the model has four layers")

    def run(comm: Communicator, mesh: Mesh) -> str:
        trainer = train(comm, "wide", mesh, "ddp", sizes=(8, 8, 4), chunks=4, precision="float32")[2]
        digest = bits(trainer)
        trainer.close()
        return digest

    assert run(world, Mesh(shard=1, pipe=world.size)) == spawn(run, 1, Mesh(shard=1))[0]


def test_ranks_with_and_without_frozen_parameters_bind_alike(world: Communicator) -> None:
    """What a step leaves differs between stages; the memory that they share is made together all the same."""
    if world.size > 4:
        pytest.skip("the model has four layers")
    mesh = Mesh(shard=1, pipe=world.size)

    def run(comm: Communicator, mesh: Mesh) -> dict[str, np.ndarray]:
        trainer = train(comm, "wide", mesh, "ddp", sizes=(6, 6), frozen=["embed.*"], microbatches=2)[2]
        x = np.random.default_rng(0).integers(0, 31, (3, 12))
        trainer.evaluate(x, x)
        trainer.step(x, x)
        found = trainer.parameters()
        trainer.close()
        return found

    demand_close(run(world, mesh), spawn(run, 1, Mesh(shard=1))[0], 1e-12)
