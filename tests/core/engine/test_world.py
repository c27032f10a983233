"""The same promises under real MPI, at whatever number of ranks the tests are run with."""

import numpy as np
import pytest
from bits import bits
from meshes import reference
from meshes import train as train_on_mesh
from models import HYBRID, STRATEGIES, make, report_a_second_step, train
from present import needs
from ranks import from_rank_0

import fsdpx
from fsdpx import Mesh, spawn
from fsdpx.errors import DataError, DesyncError
from fsdpx.testing import assert_close

pytestmark = [pytest.mark.world, pytest.mark.mpi]


EACH = pytest.mark.parametrize("strategy", [*STRATEGIES, "hybrid"])


@pytest.fixture(autouse=True)
def _says_something(request, world):
    """See test_parity.py."""
    strategy = request.node.callspec.params.get("strategy", "fsdp")
    if strategy == "hybrid" and world.size not in HYBRID:
        pytest.skip("hybrid is fsdp on so many ranks")
    if strategy != "fsdp" and world.size == 1:
        pytest.skip("on one rank all strategies are one")


def check(world, mesh, strategy, case="wide", **options):
    *got, trainer = train_on_mesh(world, case, mesh, strategy, check=True, **options)
    assert_close(got, from_rank_0(world, reference, case), 1e-12)
    trainer.close()


@EACH
def test_equals_one_process(world, strategy):
    """AdamW with clipping in float64; the last batch has 3 samples, so some ranks have none."""
    check(world, None, strategy, "gpt")


def test_statistics_over_the_batch_equal_one_process(world):
    """A layer that speaks over the data axis by itself."""
    check(world, None, "fsdp", "norms")


def by_themselves(comm):
    local = fsdpx.LocalSGD(sync_every=2, fragments=2, delay=1, mix=0.5)
    losses, parameters, trainer = train(comm, "mlp", local, sizes=(11,) * 5, check=True)
    trainer.close()
    return losses, parameters


@needs("asynchronous")
def test_replicas_by_themselves(world):
    """Local training, fragments under way from step to step, as on thread ranks."""
    assert_close(by_themselves(world), from_rank_0(world, spawn, by_themselves, world.size)[world.rank], 1e-12)


def in_chunks(comm, how):
    options = {"reproducible_chunks": 8, "clip_norm": 0.2, "precision": "float32"}
    losses, _, trainer = train(comm, "gpt", how, sizes=(8, 8), **options)
    with trainer:
        return losses, bits(trainer)


@EACH
def test_one_hash(world, strategy):
    """MPI ranks end with the bits of thread ranks."""
    assert [in_chunks(world, strategy)] == from_rank_0(world, spawn, in_chunks, 1, "ddp")


@EACH
def test_counted_equals_predicted(world, strategy):
    trainer = make(world, "mlp", strategy, microbatches=2)
    report = report_a_second_step(trainer, n=10)
    assert {k: c for k, c in report.traffic.items() if k[0] != "world"} == report.predicted
    trainer.close()


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_half_precision_is_the_same_on_all_ranks(world, precision):
    losses, _, trainer = train(world, "mlp", "zero2", precision=precision)
    everyone = world.all_gather_object((losses, bits(trainer)))
    assert everyone == everyone[:1] * world.size
    trainer.close()


def test_bad_batch_on_one_rank_is_an_error_on_all(world):
    trainer = make(world, "mlp")
    with pytest.raises((DataError, ValueError)) as caught:
        trainer.step(np.ones((2, 13 if world.rank == world.size - 1 else 12)), np.ones((2, 5)))
    assert len(set(world.all_gather_object(str(caught.value)))) == 1
    trainer.close()


def test_ranks_that_call_different_things_are_named(world):
    if world.size == 1:
        pytest.skip("one rank cannot disagree with itself")
    trainer = make(world, "mlp", check=True)
    axis = trainer.inspect.placement.axes.data
    with pytest.raises(DesyncError) as caught:  # noqa: PT012
        if world.rank == 0:
            axis.barrier(what="the odd one").wait()
        else:
            axis.all_reduce(np.zeros(3), what="REDUCE3 blocks.0").wait()
    assert "did not arrive" not in str(caught.value)  # as it would be said of ranks that were waited for
    for word in ("rank 0", "barrier", "the odd one", "all_reduce", "REDUCE3 blocks.0"):
        assert word in str(caught.value), str(caught.value)


MESHES = [
    Mesh(shard=1, pipe=5),  # fewer: test_every_schedule_equals_one_process
    *(Mesh(shard=1, tensor=n) for n in (2, 3, 4, 5)),
    Mesh(shard=1, pipe=2, tensor=2),
    Mesh(shard=2, pipe=2),
    Mesh(shard=2, tensor=2),
]


@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_every_mesh_equals_one_process(world, mesh):
    if mesh.size != world.size:
        pytest.skip(f"{mesh} needs {mesh.size} ranks")
    check(world, mesh, "fsdp" if mesh.shard > 1 else "ddp", microbatches=3)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "interleaved", "zb-h1", "zb-h2", "zbv"])
def test_every_schedule_equals_one_process(world, schedule):
    if world.size not in (2, 3, 4) or (world.size > 2 and schedule in ("interleaved", "zbv")):
        pytest.skip("the model has four layers")
    if world.size == 4 and schedule in ("gpipe", "zb-h1"):
        pytest.skip("two and three ranks show it")
    check(world, Mesh(shard=1, pipe=world.size), "zero1", schedule=schedule)


@pytest.mark.parametrize("sequence", ["parallel", "ulysses", "ring"])
def test_sequences_equal_one_process(world, sequence):
    if world.size not in (2, 3, 4):
        pytest.skip("five heads")
    check(world, Mesh(shard=1, tensor=world.size), "ddp", "uneven", sequence=sequence, recompute="all")
    if world.size == 4:  # a pipe's messages of no bytes
        check(world, Mesh(shard=1, pipe=2, tensor=2), "ddp", "uneven", sequence=sequence, microbatches=3)


def hashed(comm, mesh):
    options = {"sizes": (8, 4), "reproducible_chunks": 4, "precision": "float32"}
    with train_on_mesh(comm, "wide", mesh, "ddp", **options)[2] as trainer:
        return bits(trainer)


def test_one_hash_on_axes(world):
    """A pipe of MPI ranks ends with the bits of one thread rank."""
    if world.size > 4:
        pytest.skip("the model has four layers")
    assert [hashed(world, Mesh(shard=1, pipe=world.size))] == from_rank_0(world, spawn, hashed, 1, Mesh(shard=1))


def frozen(comm, mesh):
    x = np.random.default_rng(0).integers(0, 31, (3, 12))
    with train_on_mesh(comm, "wide", mesh, "ddp", sizes=(6, 6), frozen=["embed.*"], microbatches=2)[2] as trainer:
        trainer.evaluate(x, x)
        trainer.step(x, x)
        return trainer.parameters()


def test_ranks_with_and_without_frozen_parameters_bind_alike(world):
    """What a step leaves differs between stages; the memory that they share is made together all the same."""
    if world.size > 4:
        pytest.skip("the model has four layers")
    want = from_rank_0(world, spawn, frozen, 1, Mesh(shard=1))
    assert_close([frozen(world, Mesh(shard=1, pipe=world.size))], want, 1e-12)
