"""State in shared memory and on disk under real MPI, at whatever number of ranks the tests are run with."""

import time
import warnings

import numpy as np
import pytest
from bits import bits
from meshes import reference
from models import HYBRID, STRATEGIES, make, own_part, train
from ranks import OVER_GLOO, carrier, from_rank_0

import fsdpx
from fsdpx import spawn
from fsdpx.core.comm.init import find_node_communicator
from fsdpx.core.comm.init import open_world as open_world
from fsdpx.core.state.allocate import find_shared_memory_allocator
from fsdpx.errors import ConfigError
from fsdpx.testing import assert_close

pytestmark = [pytest.mark.world, pytest.mark.mpi]


@pytest.fixture(scope="module")
def world():
    with open_world("gloo" if OVER_GLOO else "node") as comm:
        yield comm


@pytest.fixture(scope="module")
def cluster():
    """Machines of two ranks where that comes out even, else of different sizes; neighbors on different machines."""
    from fsdpx.core.comm.node.node import NodeCommunicator

    messages = carrier(60)
    size = messages.size
    with NodeCommunicator(messages, [r % (size // 2) if size % 2 == 0 else r // 2 for r in range(size)]) as comm:
        yield comm


@pytest.fixture(params=[*STRATEGIES, "hybrid"])
def strategy(request, cluster):
    """See test_parity.py."""
    if request.param == "hybrid" and cluster.size not in HYBRID:
        pytest.skip("hybrid is fsdp on so many ranks")
    if request.param != "fsdp" and cluster.size == 1:
        pytest.skip("on one rank all strategies are one")
    return str(request.param)


def test_several_machines_equal_one_process(cluster, strategy):
    *got, trainer = train(cluster, "gpt", strategy, clip_norm=0.3, check=True)
    assert_close(got, from_rank_0(cluster, reference, "gpt"), 1e-12)
    trainer.close()


def hashed(comm, strategy):
    options = {"reproducible_chunks": 8, "clip_norm": 0.2, "precision": "float32"}
    with train(comm, "mlp", strategy, sizes=(8, 8), **options)[2] as trainer:
        return bits(trainer)


def test_one_hash_over_machines(cluster, strategy):
    assert [hashed(cluster, strategy)] == from_rank_0(cluster, spawn, hashed, 1, "ddp")


def test_hybrid_shards_inside_machines_and_joins_between_them(cluster):
    if cluster.size != 4:
        pytest.skip("four ranks make two machines of two")
    for replicas in (2, 4, 1):
        _, got, trainer = train(cluster, "mlp", fsdpx.Sharding(replica=replicas, shard=4 // replicas), clip_norm=0.3)
        assert_close(got, from_rank_0(cluster, reference, "mlp")[1], 1e-12)
        trainer.close()


def test_ranks_out_of_step_do_not_see_half_updated_parameters(world):
    """Shards lie in memory that all read: a rank that updates early must not change what others still compute with."""

    def run(delay):
        with make(world, "mlp", "fsdp", group_bytes=0, clip_norm=None) as trainer:
            for step in range(5):
                x, y = own_part(world, "mlp", 4 * world.size, step)
                if world.rank == step % world.size:
                    time.sleep(delay)
                trainer.step(x, y)
                if step % 2:
                    trainer.predict(x)
                if step == 1:
                    trainer.load_parameters(trainer.parameters())
            return bits(trainer)

    assert run(0.0) == run(0.02)


def test_full_parameters_are_there_once_per_machine(world):
    trainer = make(world, "mlp", "fsdp")
    sizes = world.all_gather_object(trainer.report().memory["parameters"])
    itemsize = trainer.inspect.placement.formats.gradients.itemsize
    if world.size > 1:
        assert sum(sizes) <= trainer.inspect.placement.layout.size * itemsize
        seen = trainer.inspect
        assert all(seen.engine.state.ledger.get_array("full", p) is not None for p in seen.placement.pages)
    trainer.close()


def test_no_room_means_messages_and_one_warning(world, monkeypatch):
    from fsdpx.core.comm.node import shared_windows

    _, want, first = train(world, "mlp", "zero2", precision="float32")
    monkeypatch.setattr(shared_windows, "count_free_shared_bytes", lambda: 0)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        _, got, trainer = train(world, "mlp", "zero2", precision="float32")
    assert not trainer.inspect.engine.state.arena.slab_shared
    assert_close(got, want, 1e-5)
    texts = [str(w.message) for w in said if "shared memory" in str(w.message)]
    if world.size > 1:
        assert len(texts) == (1 if world.rank == 0 else 0)
        assert all("/dev/shm" in text and "--shm-size" in text and "same results" in text for text in texts)
    first.close()
    trainer.close()


@pytest.mark.skipif(OVER_GLOO, reason="about communicators of mpi4py")
def test_messages_on_request(monkeypatch):
    monkeypatch.setenv("FSDPX_NODE", "0")
    from mpi4py import MPI

    comm = open_world(comm=MPI.COMM_WORLD)
    assert find_node_communicator(comm) is None
    assert find_shared_memory_allocator(comm, np) is None
    monkeypatch.setenv("FSDPX_NODE", "1")
    other = open_world(comm=MPI.COMM_WORLD)
    assert (find_node_communicator(other) is not None) == (MPI.COMM_WORLD.size > 1)
    comm.close()
    other.close()


def test_ranks_that_measure_differently_choose_the_same(world, monkeypatch, tmp_path):
    """What each rank found by itself would send some of them into a collective call and others not."""
    from fsdpx.core.state import tuning

    monkeypatch.setenv("FSDPX_CACHE", world.all_gather_object(str(tmp_path))[0])
    rates = dict.fromkeys(tuning.blas.list_available_blas_libraries(), 50.0 + world.rank)
    monkeypatch.setattr(tuning.blas, "measure_gflops_of_each_library", lambda count: rates)
    found = tuning.agree_on_tuning(world, True, np)
    assert len(set(map(str, world.all_gather_object(found)))) == 1
    world.barrier().wait()
    kept = tuning.load_blas_measurement().value
    assert (kept["library"], set(kept["rates"].values())) == (found.blas, {50.0})
    assert found.group_bytes == (1 << 20 if world.size == 1 else 4 << 20)
    world.barrier().wait()


def test_a_closed_trainer_gives_its_memory_back(world):
    node = find_node_communicator(world)
    if node is None:
        pytest.skip("one rank shares nothing")
    before = len(node.memory.windows)
    trainer = make(world, "mlp", "zero1")
    batch = own_part(world, "mlp", 8)
    trainer.step(*batch)
    assert len(node.memory.windows) > before
    trainer.close()
    trainer.close()
    assert len(node.memory.windows) == before
    for method in (trainer.parameters, lambda: trainer.step(*batch), lambda: trainer.load_parameters({})):
        with pytest.raises(ConfigError, match=r"this trainer is closed"):
            method()
