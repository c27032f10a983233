"""Moves come in adjoint pairs: <F x, y> = <x, F* y>, a replicated value counted once and the others summed."""

import numpy as np
import pytest
from amount import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from fsdpx import FakeCommunicator, shapes, spawn
from fsdpx.errors import ShapeError
from fsdpx.nn import moves
from fsdpx.nn.cut import share

steady = settings(derandomize=True, database=None, deadline=None, max_examples=examples(30))


def normal(*key, shape):
    return np.random.default_rng([*map(ord, "".join(map(str, key)))]).standard_normal(shape)


def value(kind, name, shape, dim, comm):
    """This rank's side of a value that is replicated, cut along dim, or each rank's own."""
    if kind == "each":
        return normal(name, comm.rank, shape=shape)
    whole = normal(name, shape=shape)
    return whole if kind == "replicated" else moves.part(whole, dim, *share(shape[dim], comm.rank, comm.size))


def inner(kind, pairs):
    """pairs: one (a, b) per rank."""
    pairs = pairs[:1] if kind == "replicated" else pairs
    return sum(float(np.sum(a * b)) for a, b in pairs)


PAIRS = {
    "copy": ("replicated", "each", "sum"),
    "sum": ("each", "replicated", "copy"),
    "gather": ("cut", "each", "scatter_sum"),
    "scatter_sum": ("each", "cut", "gather"),
    "cut": ("replicated", "cut", "join"),
    "join": ("cut", "replicated", "cut"),
}


def run(name, comm, x, dim, total):
    move = getattr(moves, name)
    extra = {"copy": (), "sum": (), "gather": (dim, total), "join": (dim, total)}.get(name, (dim,))
    return move(np, comm, x, *extra)


shape_and_dim = st.lists(st.integers(0, 6), min_size=1, max_size=3).flatmap(
    lambda shape: st.tuples(st.just(tuple(shape)), st.integers(0, len(shape) - 1))
)


@pytest.mark.parametrize("name", PAIRS)
@steady
@given(width=st.integers(1, 4), where=shape_and_dim)
def test_the_adjoint(name, width, where):
    (shape, dim), (before, after, adjoint) = where, PAIRS[name]

    def body(comm):
        x, y = value(before, "x", shape, dim, comm), value(after, "y", shape, dim, comm)
        x_before = x.copy()
        there, back = run(name, comm, x, dim, shape[dim]), run(adjoint, comm, y, dim, shape[dim])
        np.testing.assert_array_equal(x, x_before, err_msg="the move changed its input")
        assert there.shape == y.shape
        assert back.shape == x.shape
        return (there, y), (x, back)

    both = spawn(body, width)
    left, right = inner(after, [pair[0] for pair in both]), inner(before, [pair[1] for pair in both])
    assert left == pytest.approx(right, rel=1e-12, abs=1e-12)


@steady
@given(
    width=st.integers(1, 4),
    sizes=st.tuples(st.integers(0, 2), st.integers(1, 7), st.integers(1, 7)),
    dims=st.permutations([0, 1, 2]),
)
def test_exchange_is_undone_by_its_adjoint(width, sizes, dims):
    split, merge, _ = dims
    whole = normal("x", shape=sizes)

    def body(comm):
        x = value("cut", "x", sizes, merge, comm)
        y = moves.exchange(np, comm, x, split, merge, sizes[merge])
        np.testing.assert_array_equal(y, moves.part(whole, split, *share(sizes[split], comm.rank, width)))
        np.testing.assert_array_equal(moves.exchange(np, comm, y, merge, split, sizes[split]), x)

    spawn(body, width)


@steady
@given(width=st.integers(1, 4), seed=st.integers(0, 9), shape=st.sampled_from([(), (3,), (2, 2)]))
def test_the_adjoint_of_dispatch(width, seed, shape):
    """Any numbers of rows, also none."""
    table = np.random.default_rng(seed).integers(0, 4, (width, width))

    def body(comm):
        leaving, arriving = table[comm.rank].tolist(), table[:, comm.rank].tolist()
        x = normal("x", comm.rank, shape=(sum(leaving), *shape))
        y = normal("y", comm.rank, shape=(sum(arriving), *shape))
        there = moves.dispatch(np, comm, x, leaving, arriving)
        np.testing.assert_array_equal(moves.dispatch(np, comm, there, arriving, leaving), x)
        return (there, y), (x, moves.dispatch(np, comm, y, arriving, leaving))

    both = spawn(body, width)
    left, right = inner("each", [pair[0] for pair in both]), inner("each", [pair[1] for pair in both])
    assert left == pytest.approx(right, rel=1e-12, abs=1e-12)


def test_what_is_moved():
    def body(comm):
        x = np.arange(6.0).reshape(2, 3) + comm.rank
        mine = moves.scatter_sum(np, comm, x, 1)
        return moves.sum(np, comm, x), mine, moves.gather(np, comm, mine, 1, 3)

    for rank, (total, mine, whole) in enumerate(spawn(body, 2)):
        want = [[1, 3, 5], [7, 9, 11]]
        np.testing.assert_array_equal(total, want)
        np.testing.assert_array_equal(mine, np.asarray(want)[:, [slice(0, 1), slice(1, 3)][rank]])
        np.testing.assert_array_equal(whole, want)


def test_one_rank_copies_nothing():
    def body(comm):
        x = np.ones((2, 4))
        for move in (moves.copy, moves.sum):
            assert move(np, comm, x) is x
        for move in (moves.gather, moves.scatter_sum, moves.join):
            assert move(np, comm, x, 1) is x
        assert np.shares_memory(moves.cut(np, comm, x, 1), x)
        assert moves.exchange(np, comm, x, 0, 1) is x
        assert moves.dispatch(np, comm, x, [2], [2]) is x

    spawn(body, 1)


def test_shapes_without_data():
    comm, x = FakeCommunicator(1, 3), shapes.ShapeArray((2, 7, 5), np.float32)
    assert moves.sum(shapes, comm, x).shape == (2, 7, 5)
    assert moves.scatter_sum(shapes, comm, x, 1).shape == (2, 2, 5)
    assert moves.cut(shapes, comm, x, 1).shape == (2, 2, 5)
    assert moves.gather(shapes, comm, moves.cut(shapes, comm, x, 1), 1, 7).shape == (2, 7, 5)
    assert moves.exchange(shapes, comm, x, 1, 2).shape == (2, 2, 15)


def test_a_sequence_that_must_divide_evenly():
    with pytest.raises(
        ShapeError, match=r"h.0 input: dim 1 of an array .* is 7, which is not a multiple of the 3 ranks"
    ):
        moves.want_even((2, 7, 5), 1, 3, "h.0 input")
