"""Where ranks stand on a mesh, whom they speak with, and how many bytes they say."""

from functools import partial

import numpy as np
import pytest
from amount import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from threads import on_ranks

from fsdpx import FakeCommunicator, Mesh, ReduceOp, spawn
from fsdpx.core.comm import CheckedCommunicator, CountingCommunicator, TrafficCounters, make_single_rank_communicator
from fsdpx.core.comm.communicator import CallCount
from fsdpx.core.comm.mesh import AXES, connect_axes, make_single_rank_axes
from fsdpx.errors import DesyncError, MeshError
from fsdpx.testing.communicator import CommunicatorContract

widths = st.integers(1, 3)


def test_rank_order_is_pipe_replica_shard_tensor():
    mesh = Mesh(pipe=2, replica=2, shard=2, tensor=2)
    assert [tuple(mesh.coordinates_of(rank)) for rank in range(16)] == [
        (p, r, s, t) for p in (0, 1) for r in (0, 1) for s in (0, 1) for t in (0, 1)
    ]
    assert mesh.width_of("data") == 4
    assert mesh.width_of("world") == mesh.size == 16


@given(st.builds(Mesh, replica=widths, shard=widths, pipe=widths, tensor=widths))
@settings(derandomize=True, database=None, deadline=None, max_examples=examples(30))
def test_coordinates_and_ranks_are_inverse(mesh):
    for rank in range(mesh.size):
        assert mesh.rank_of(mesh.coordinates_of(rank)) == rank
    for axis in AXES:
        lines = {tuple(mesh.ranks_along(mesh.coordinates_of(rank), (axis,))) for rank in range(mesh.size)}
        assert sorted(rank for line in lines for rank in line) == list(range(mesh.size))


@pytest.mark.parametrize(
    ("mesh", "world", "want"),
    [
        (Mesh(), 6, Mesh(shard=6)),
        (Mesh(replica=2), 6, Mesh(replica=2, shard=3)),
        (Mesh(shard=1, replica=None), 6, Mesh(shard=1, replica=6)),
        (Mesh(shard=2, pipe=3), 6, Mesh(shard=2, pipe=3)),
    ],
)
def test_the_open_axis_fills_the_world(mesh, world, want):
    assert mesh.resolve_open_axis(world) == want


@pytest.mark.parametrize(
    ("mesh", "world", "words"),
    [
        (Mesh(shard=4), 6, "^mesh shard=4 needs 4 ranks, but the world has 6: change the mesh or the number of ranks$"),
        (Mesh(replica=4), 6, "^mesh replica=4 needs a multiple of 4 ranks, but the world has 6: "),
        (Mesh(shard=8), 4, "needs 8 ranks, but the world has 4"),
        (Mesh(replica=8), 4, "needs a multiple of 8 ranks, but the world has 4"),
    ],
)
def test_a_mesh_that_does_not_fill_the_world_says_the_numbers(mesh, world, words):
    with pytest.raises(MeshError, match=words):
        mesh.resolve_open_axis(world)


TOO_NARROW = "mesh axis tensor=.* must be an integer of at least 1"


@pytest.mark.parametrize(
    ("call", "words"),
    [
        *((partial(Mesh, tensor=width), TOO_NARROW) for width in (0, -1, 1.5, True)),
        (partial(Mesh, replica=None), "only one axis can fill the world"),
        (lambda: Mesh(shard=4).coordinates_of(4), "rank 4 is not on mesh"),
        (lambda: Mesh().size, r"call resolve\(world_size\) first"),
    ],
)
def test_what_no_mesh_has_is_named(call, words):
    with pytest.raises(MeshError, match=words):
        call()


@pytest.mark.parametrize("check", [False, True])
@on_ranks(8)
def test_axes_join_the_right_ranks(comm, check):
    mesh = Mesh(pipe=2, replica=2, shard=1, tensor=2)
    axes = connect_axes(Mesh(pipe=2, replica=None, shard=1, tensor=2), comm, check=check)
    place = mesh.coordinates_of(comm.rank)
    joined = {name: getattr(axes, name).all_gather_object(comm.rank) for name in ("world", "data", *AXES)}
    assert joined["world"] == list(range(8))
    assert joined["data"] == joined["replica"] == mesh.ranks_along(place, ("replica", "shard"))
    for axis in AXES:
        assert joined[axis] == mesh.ranks_along(place, (axis,))


@on_ranks(4)
def test_calls_are_counted_by_axis(comm):
    axes = connect_axes(Mesh(replica=2), comm)
    for along in (axes.data, axes.shard, axes.tensor):
        along.all_reduce(np.ones(8)).wait()
    assert list(axes.counters) == [("data", "all_reduce", 1, 2 * 6 * 8), ("shard", "all_reduce", 1, 2 * 4 * 8)]


def test_check_guards_every_axis():
    def body(comm):
        axes = connect_axes(Mesh(replica=2), comm, check=True)
        assert isinstance(axes.shard.comm, CheckedCommunicator)
        axes.shard.all_reduce(np.ones(2), ReduceOp.SUM if axes.shard.rank else ReduceOp.MAX)

    with pytest.raises(DesyncError, match=r"rank 0: all_reduce, .* op MAX.*; rank 1: all_reduce, .* op SUM"):
        spawn(body, 4)


def test_a_fake_rank_of_a_large_world():
    axes = connect_axes(Mesh(replica=4, pipe=2, tensor=8), FakeCommunicator(777, 1024))
    assert axes.mesh.shape == (2, 4, 16, 8)
    assert axes.coordinates == (1, 2, 1, 1)
    assert (axes.data.size, axes.data.rank, axes.shard.rank) == (64, 33, 1)
    axes.data.all_reduce(np.ones(64)).wait()
    assert axes.counters.sum_counts("data", "all_reduce").bytes == 2 * 63 * 8
    axes.close()


def test_alone():
    axes = make_single_rank_axes()
    assert (axes.mesh.shape, axes.coordinates) == ((1, 1, 1, 1), (0, 0, 0, 0))
    x = np.arange(3.0)
    axes.data.all_reduce(x).wait()
    assert x.tolist() == [0, 1, 2]
    assert list(axes.counters) == []


CALLS = {
    "all_gather": (lambda c, x, own: c.all_gather(own, x), (64, 56, 64, 56)),
    "reduce_scatter": (lambda c, x, own: c.reduce_scatter(x, own), (64, 56, 64, 56)),
    "all_reduce": (lambda c, x, own: c.all_reduce(x), (128, 112, 128, 112)),
    "broadcast": (lambda c, x, own: c.broadcast(x, 1), (80, 80, 80, 80)),
    "reduce": (lambda c, x, own: c.reduce(x, x if c.rank == 1 else None, ReduceOp.SUM, 1), (80, 80, 80, 80)),
    "gather": (lambda c, x, own: c.gather(own, x if c.rank == 1 else None, 1), (16, 56, 16, 24)),
    "scatter": (lambda c, x, own: c.scatter(x if c.rank == 1 else None, own, 1), (16, 56, 16, 24)),
    "all_to_all": (lambda c, x, own: c.all_to_all(np.ones(8), np.ones(8)), (48, 48, 48, 48)),
    "send": (lambda c, x, own: c.send(x, 0), (80, 80, 80, 80)),
    "barrier": (lambda c, x, own: c.barrier(), (0, 0, 0, 0)),
}
"""Calls, and the bytes that ranks 0 to 3 send with pieces of 2, 3, 2 and 3 of 10 float64 elements."""


def counted(comm, axis="shard"):
    return CountingCommunicator(comm, axis, TrafficCounters())


class TestCounted(CommunicatorContract):
    dtypes = "float32", "float16", "bool"

    def run(self, body):
        spawn(lambda comm: body(counted(comm)), 3, timeout=30)


@pytest.mark.parametrize("verb", CALLS)
@pytest.mark.parametrize("rank", range(4))
def test_bytes(verb, rank):
    comm, x, (call, nbytes) = counted(FakeCommunicator(rank, 4)), np.ones(10), CALLS[verb]
    call(comm, x, x[: (2, 3, 2, 3)[rank]].copy()).wait()
    assert list(comm.counters) == [("shard", verb, 1, nbytes[rank])]


def test_a_call_that_is_refused_is_not_counted():
    comm = counted(FakeCommunicator(0, 4))
    with pytest.raises(ValueError, match="root=4"):
        comm.broadcast(np.ones(3), 4)
    assert list(comm.counters) == []


def test_one_rank_counts_nothing():
    comm = counted(FakeCommunicator(0, 1))
    comm.all_gather(np.ones(3), np.ones(3)).wait()
    comm.barrier().wait()
    assert list(comm.counters) == []


def test_groups_of_a_counted_communicator_count_on():
    comm = counted(FakeCommunicator(2, 4), "data")
    comm.subgroup([0, 2]).broadcast(np.ones(3), 0)
    assert list(comm.counters) == [("data", "broadcast", 1, 24)]


def test_sums_and_differences():
    counters = TrafficCounters()
    counters.add_calls("shard", "all_gather", 100)
    counters.add_tally("0.moe", [3, 1])
    before = counters.copy()
    counters.add_calls("shard", "all_gather", 20)
    counters.add_tally("0.moe", [1, 1])
    counters.add_calls("data", "all_reduce", 5)
    assert counters.sum_counts("shard") == CallCount(2, 120)
    assert counters.sum_counts(verb="all_reduce") == CallCount(1, 5)
    assert counters.sum_counts() == CallCount(3, 125)
    assert list(counters.get_counts_since(before)) == [("data", "all_reduce", 1, 5), ("shard", "all_gather", 1, 20)]
    counters.clear()
    assert (list(counters), counters.table, counters.total, counters.tallies) == ([], {}, 0, {})
    assert (list(before), before.total) == ([("shard", "all_gather", 1, 100)], 100)
    assert before.tallies == {"0.moe": [3, 1]}


def test_ranks_that_do_not_exist_are_no_peers_also_inside_wrappers() -> None:
    fake = counted(FakeCommunicator(1, 4))
    assert [comm.has_peers for comm in (fake, fake.subgroup([1, 2]), make_single_rank_communicator())] == [False] * 3
    assert spawn(lambda comm: (counted(comm).has_peers, comm.split(comm.rank).has_peers), 2) == [(True, False)] * 2
