"""Where ranks stand on a mesh, and whom they speak with."""

from __future__ import annotations

import numpy as np
import pytest
from amount import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from fsdpx.comm import Axes, Counters, FakeCommunicator, Guarded, Mesh, ReduceOp, alone, connect, spawn
from fsdpx.comm.mesh import AXES
from fsdpx.errors import DesyncError, MeshError

widths = st.integers(1, 3)


def test_rank_order_is_pipe_replica_shard_tensor():
    mesh = Mesh(pipe=2, replica=2, shard=2, tensor=2)
    assert [tuple(mesh.coordinates(rank)) for rank in range(16)] == [
        (p, r, s, t) for p in (0, 1) for r in (0, 1) for s in (0, 1) for t in (0, 1)
    ]
    assert mesh.width("data") == 4
    assert mesh.width("world") == mesh.size == 16


@given(st.builds(Mesh, replica=widths, shard=widths, pipe=widths, tensor=widths))
@settings(derandomize=True, database=None, deadline=None, max_examples=examples(30))
def test_coordinates_and_ranks_are_inverse(mesh):
    for rank in range(mesh.size):
        assert mesh.rank(mesh.coordinates(rank)) == rank
    for axis in AXES:
        lines = {tuple(mesh.line(mesh.coordinates(rank), (axis,))) for rank in range(mesh.size)}
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
    assert mesh.resolve(world) == want


@pytest.mark.parametrize(
    ("mesh", "world", "words"),
    [
        (Mesh(shard=4), 6, "pipe=1 x replica=1 x shard=4 x tensor=1 needs 4 ranks, but the world has 6"),
        (Mesh(replica=4), 6, "shard=None x tensor=1 needs a multiple of 4 ranks, but the world has 6"),
        (Mesh(shard=8), 4, "needs 8 ranks, but the world has 4"),
        (Mesh(replica=8), 4, "needs a multiple of 8 ranks, but the world has 4"),
    ],
)
def test_a_mesh_that_does_not_fill_the_world_says_the_numbers(mesh, world, words):
    with pytest.raises(MeshError, match=words):
        mesh.resolve(world)


def test_bad_widths_are_named():
    for width in (0, -1, 1.5, True):
        with pytest.raises(MeshError, match=r"mesh axis tensor=.* must be an integer of at least 1"):
            Mesh(tensor=width)
    with pytest.raises(MeshError, match="only one axis can fill the world"):
        Mesh(replica=None)
    with pytest.raises(MeshError, match="rank 4 is not on mesh"):
        Mesh(shard=4).coordinates(4)
    with pytest.raises(MeshError, match=r"call resolve\(world_size\) first"):
        _ = Mesh().size


def members(axes: Axes) -> dict[str, list[int]]:
    """The world ranks along each axis, found by speaking along it."""
    names = ("world", "data", *AXES)
    return {name: getattr(axes, name).all_gather_object(axes.world.rank) for name in names}


@pytest.mark.parametrize("check", [False, True])
def test_axes_join_the_right_ranks(check):
    mesh = Mesh(pipe=2, replica=2, shard=1, tensor=2)
    found = spawn(lambda comm: members(connect(mesh, comm, check=check)), 8)
    for rank, joined in enumerate(found):
        place = mesh.coordinates(rank)
        assert joined["world"] == list(range(8))
        assert joined["data"] == joined["replica"] == mesh.line(place, ("replica", "shard"))
        for axis in AXES:
            assert joined[axis] == mesh.line(place, (axis,))


def test_calls_are_counted_by_axis():
    def body(comm):
        counters = Counters()
        axes = connect(Mesh(replica=2), comm, counters)
        assert axes.counters is counters
        axes.data.all_reduce(np.ones(8)).wait()
        axes.shard.all_reduce(np.ones(8)).wait()
        axes.tensor.all_reduce(np.ones(8)).wait()
        return list(counters)

    assert spawn(body, 4) == [[("data", "all_reduce", 1, 2 * 6 * 8), ("shard", "all_reduce", 1, 2 * 4 * 8)]] * 4


def test_check_guards_every_axis():
    def body(comm):
        axes = connect(Mesh(replica=2), comm, check=True)
        assert isinstance(axes.shard.comm, Guarded)
        axes.shard.all_reduce(np.ones(2), ReduceOp.SUM if axes.shard.rank else ReduceOp.MAX)

    with pytest.raises(DesyncError, match=r"rank 0: all_reduce, .* op MAX.*; rank 1: all_reduce, .* op SUM"):
        spawn(body, 4)


def test_a_fake_rank_of_a_large_world():
    axes = connect(Mesh(replica=4, pipe=2, tensor=8), FakeCommunicator(777, 1024))
    assert axes.mesh.shape == (2, 4, 16, 8)
    assert axes.coordinates == (1, 2, 1, 1)
    assert (axes.data.size, axes.data.rank, axes.shard.rank) == (64, 33, 1)
    axes.data.all_reduce(np.ones(64)).wait()
    assert axes.counters.of("data", "all_reduce").bytes == 2 * 63 * 8
    axes.close()


def test_alone():
    axes = alone()
    assert (axes.mesh.shape, axes.coordinates) == ((1, 1, 1, 1), (0, 0, 0, 0))
    x = np.arange(3.0)
    axes.data.all_reduce(x).wait()
    assert x.tolist() == [0, 1, 2]
    assert list(axes.counters) == []
