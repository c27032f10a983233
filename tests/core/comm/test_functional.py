"""The functional API: any shape in, new arrays out, on the default communicator."""

import numpy as np
import pytest
from programs import run_program
from ranks import OVER_GLOO, carrier
from threads import on_ranks

import fsdpx
from fsdpx.core.base import environment
from fsdpx.core.comm import CheckedCommunicator, FakeCommunicator, ReduceOp, make_single_rank_communicator, spawn
from fsdpx.core.trainer.initialize import default_communicator
from fsdpx.errors import ConfigError, DataError, DesyncError, ShapeError


@pytest.fixture(autouse=True)
def _nothing_is_left_open():
    fsdpx.finalize()
    yield
    fsdpx.finalize()


SEVERAL = (environment.read_environment().expected_size or 1) > 1


def on_several_ranks(test):
    """The test gets its rank and the number of ranks, over messages alone, and in windows too; one rank runs none."""

    @pytest.mark.world
    @pytest.mark.mpi
    @pytest.mark.parametrize("backend", ["node", "messages"])
    def run(backend):
        if SEVERAL:
            fsdpx.init(comm=carrier()) if backend == "messages" else fsdpx.init("gloo" if OVER_GLOO else "node")
            test(fsdpx.rank(), fsdpx.world_size())

    return run


def test_ranks_of_spawn_have_their_own_default():
    def body():
        assert fsdpx.is_initialized()
        assert fsdpx.local_rank() == fsdpx.rank()
        fsdpx.barrier()
        fsdpx.finalize()
        return fsdpx.rank(), fsdpx.world_size(), fsdpx.init().rank

    assert spawn(lambda comm: body(), 3) == [(rank, 3, rank) for rank in range(3)]
    assert not fsdpx.is_initialized()


@on_ranks(3)
def test_all_reduce_keeps_the_shape_and_the_argument(comm):
    x = np.full((2, 3), fsdpx.rank() + 1.0)
    total = fsdpx.all_reduce(x)
    assert x[0, 0] == fsdpx.rank() + 1
    assert total.shape == (2, 3)
    assert np.all(total == 6)
    assert fsdpx.all_reduce(x, out=x) is x
    future = fsdpx.all_reduce(x.T, "max", async_op=True)
    assert np.all(future.wait() == 6)
    assert future.test()
    assert fsdpx.all_reduce(2, ReduceOp.PROD) == 8
    assert fsdpx.all_reduce(np.float32(1.5)).dtype == np.float32


@on_ranks(2)
def test_every_other_verb(comm):
    rank, size = fsdpx.rank(), fsdpx.world_size()
    x = np.arange(6.0).reshape(3, 2) + 10 * rank
    every = np.stack([np.arange(6.0).reshape(3, 2) + 10 * r for r in range(size)])
    np.testing.assert_array_equal(fsdpx.all_gather(x), every)
    rows = [3 * r // size for r in range(size + 1)]
    mine = slice(rows[rank], rows[rank + 1])
    np.testing.assert_array_equal(fsdpx.reduce_scatter(x.copy(order="F")), every.sum(0)[mine])
    np.testing.assert_array_equal(fsdpx.reduce_scatter(x, "avg"), every.mean(0)[mine])
    np.testing.assert_array_equal(fsdpx.broadcast(x, root=1), every[1])
    assert (fsdpx.reduce(x, root=1) is None) == (rank != 1)
    gathered = fsdpx.gather(x, root=1)
    if rank == 1:
        np.testing.assert_array_equal(gathered, every)
    np.testing.assert_array_equal(fsdpx.scatter(x if rank == 1 else None, root=1), every[1][mine])
    y = np.arange(2 * size).reshape(2 * size, 1) + 100 * rank
    want = [[100 * r + 2 * rank + i] for r in range(size) for i in range(2)]
    np.testing.assert_array_equal(fsdpx.all_to_all(y), want)
    if rank == 0:
        fsdpx.send(x, 1, tag=3)
    if rank == 1:
        np.testing.assert_array_equal(fsdpx.recv(np.empty((3, 2)), 0, tag=3), every[0])


X, FIXED = np.zeros(2), np.frombuffer(bytes(16))
UNEVEN = r"first dimension of shape \(3,\) is not a multiple of 2 ranks"


@pytest.mark.parametrize(
    ("call", "kind", "words"),
    [
        (lambda: fsdpx.recv(np.zeros((2, 4))[:, ::2], 0), ShapeError, "out is not contiguous"),
        (lambda: fsdpx.recv(FIXED, 0), ConfigError, "out is read-only: pass an array that can be written"),
        (lambda: fsdpx.all_reduce(X, out=FIXED), ConfigError, "out is read-only: pass an array that can be written"),
        (lambda: fsdpx.all_reduce(X, out=np.zeros(3)), ShapeError, r"out is float64\[3\], but x is float64\[2\]"),
        (lambda: fsdpx.reduce_scatter(1.0), ShapeError, "reduce_scatter: x has no dimension to split"),
        (lambda: fsdpx.scatter(1.0), ShapeError, "scatter: x has no dimension to split"),
        (lambda: fsdpx.all_to_all(np.zeros(3)), ShapeError, UNEVEN),
    ],
)
@on_ranks(2)
def test_bad_arrays_are_named(comm, call, kind, words):
    with pytest.raises(kind, match=words):
        call()


def test_without_a_launcher_there_is_one_rank():
    assert not fsdpx.is_initialized()
    assert (fsdpx.rank(), fsdpx.world_size(), fsdpx.local_rank()) == (0, 1, 0)
    assert not fsdpx.is_initialized()  # asking opens nothing
    assert fsdpx.init() is default_communicator()
    with pytest.raises(ConfigError, match=r"initialized already: call finalize\(\)"):
        fsdpx.init("local")
    fsdpx.finalize()
    assert fsdpx.init("local").size == 1


def test_a_communicator_of_the_user_is_taken_as_it_is():
    comm = make_single_rank_communicator()
    assert fsdpx.init(comm=comm) is comm
    assert default_communicator() is comm


def test_fake_is_any_rank_of_any_size():
    fsdpx.init("fake", rank=5, size=1000)
    assert (fsdpx.rank(), fsdpx.world_size()) == (5, 1000)
    assert fsdpx.all_gather(np.zeros((2, 2))).shape == (1000, 2, 2)
    assert isinstance(default_communicator(), FakeCommunicator)


def test_the_environment_puts_a_guard_in_front(monkeypatch):
    monkeypatch.setenv("FSDPX_CHECK", "1")
    fsdpx.init("fake", rank=0, size=2)
    assert isinstance(default_communicator(), CheckedCommunicator)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"backend": "smoke"}, "unknown backend 'smoke': use one of node, mpi, nccl, gloo, local, fake"),
        ({"backend": "local", "size": 2}, "rank and size belong to backend='fake'"),
        ({"comm": 3}, "comm=3 is neither an mpi4py communicator nor an fsdpx Communicator"),
        ({"backend": "fake", "rank": 4, "size": 4}, "rank 4 of 4 does not exist: 0 <= rank < size"),
    ],
)
def test_bad_choices_are_named(arguments, words):
    with pytest.raises(ConfigError, match=words):
        fsdpx.init(**arguments)


@on_ranks(2)
def test_a_rank_of_spawn_cannot_open_another_world(comm):
    with pytest.raises(ConfigError, match="a rank of spawn has its communicator already"):
        fsdpx.init("local")


def test_importing_and_running_on_threads_loads_no_mpi_and_no_torch():
    run_program(
        "import sys, numpy as np, fsdpx.core.comm as c, fsdpx.core.trainer.array_collectives as f\n"
        "import fsdpx.testing.communicator\n"
        "c.spawn(lambda comm: f.all_reduce(np.ones(3)), 2); f.all_reduce(1.0)\n"
        "assert not {'mpi4py', 'cupy', 'numba', 'torch'} & set(sys.modules), sys.modules"
    )


@pytest.mark.parametrize("name", ["mean", "average", "AVG", "Avg"])
def test_an_average_has_the_names_that_others_give_it(name: str) -> None:
    assert ReduceOp.from_name(name) is ReduceOp.AVERAGE is ReduceOp.AVG
    assert spawn(lambda comm: fsdpx.all_reduce(float(comm.rank), name), 2) == [0.5, 0.5]


DIFFERENT = [
    (lambda: fsdpx.all_reduce(np.ones(3)), lambda: fsdpx.all_reduce(np.ones(4)), r"shape \[3\].*shape \[4\]"),
    (lambda: fsdpx.all_gather(np.ones((2, 3))), lambda: fsdpx.all_gather(np.ones((3, 2))), r"shape \[2, 3\]"),
    (lambda: fsdpx.gather(np.ones(2)), lambda: fsdpx.gather(np.ones(2, "f4")), "float64.*float32"),
    (lambda: fsdpx.reduce(1.0), lambda: fsdpx.reduce(1.0, "max"), "op SUM.*op MAX"),
    (lambda: fsdpx.broadcast(1.0, 0), lambda: fsdpx.broadcast(1.0, 1), "root 0.*root 1"),
    (lambda: fsdpx.scatter(np.ones(4), 0), lambda: fsdpx.scatter(np.ones(4), 1), "scatter.*root"),
    (fsdpx.barrier, lambda: fsdpx.all_to_all(np.ones(6)), "barrier.*all_to_all"),
    (
        lambda: fsdpx.all_reduce(np.ones(3), async_op=True).wait(),
        lambda: fsdpx.all_reduce(np.ones(5), async_op=True).wait(), r"shape \[3\].*shape \[5\]",
    ),
]  # fmt: skip


@on_several_ranks
def test_ranks_that_call_it_differently_are_named_and_go_on(rank, size):
    """The same calls have been made alike before: what was agreed on once is no reason to believe it again."""
    for k, (one, other, words) in enumerate(DIFFERENT):
        most = 4 if k else 70  # once more of them than there are places for them
        fsdpx.all_reduce(np.ones(3)), fsdpx.all_reduce(np.ones(4))
        with pytest.raises(DesyncError, match=rf"ranks called different collectives \(call \d+\): rank.*{words}"):
            (other if rank == size - 1 else one)()
        under_way = [fsdpx.all_reduce(np.full(n, 1.0), async_op=True) for n in range(1, most)]
        assert fsdpx.all_gather(np.ones(2)).sum() == 2 * size
        assert [future.wait().sum() for future in under_way] == [n * size for n in range(1, most)]


@pytest.mark.world
@pytest.mark.mpi
def test_columns_and_foreign_numbers_travel_like_others():
    def body():
        size, rank = fsdpx.world_size(), fsdpx.rank()
        x = np.arange(8 * size, dtype=">i2").reshape(2 * size, 4)[:, ::2]
        mine = slice(2 * rank, 2 * rank + 2)
        np.testing.assert_array_equal(fsdpx.all_gather(x), np.stack([x] * size))
        np.testing.assert_array_equal(fsdpx.reduce_scatter(x), size * x[mine])
        np.testing.assert_array_equal(fsdpx.scatter(x), x[mine])
        np.testing.assert_array_equal(fsdpx.all_reduce(x * 1j), size * x * 1j)
        if (gathered := fsdpx.gather(x)) is not None:
            np.testing.assert_array_equal(gathered, np.stack([x] * size))
        with pytest.raises(ConfigError, match="byte order of other machines"):
            fsdpx.recv(np.zeros(3, ">f8"), rank)

    body() if SEVERAL else spawn(lambda comm: body(), 3)


@on_several_ranks
def test_messages_of_other_sizes_nan_and_waits_in_any_order(rank, size):
    """What ranks of MPI and Gloo did otherwise than ranks that are threads."""
    for n in (1, 3, 3000):
        for owner in {0, size // 2, size - 1}:
            for op, dtype in (("max", "f4"), ("min", "f8")):
                x = np.full(n, np.nan if rank == owner else rank, dtype)
                assert np.isnan(fsdpx.all_reduce(x, op)).all(), (n, owner, op)
                assert np.isnan(fsdpx.reduce_scatter(np.stack([x] * size), op)).all(), (n, owner, op)
    for order in (1, -1 if rank else 1):
        some = [fsdpx.all_reduce(np.full(3, float(n)), async_op=True) for n in range(20)]
        assert [future.wait()[0] for future in some[::order]] == [size * n for n in range(20)][::order]
    dropped = fsdpx.all_reduce(np.ones(2), async_op=True)
    last = fsdpx.all_reduce(np.ones(3), async_op=True)
    while not last.test():
        pass
    assert dropped.wait()[0] == size
    if rank == 0:
        for _ in range(2):
            fsdpx.send(np.array([1.0, 2.0]), 1, 3)
    if rank == 1:
        with pytest.raises(DesyncError, match=r"recv from rank 0, tag 3: it sends float64\[2\], out is float32\[4\]"):
            fsdpx.recv(np.zeros(4, "f4"), 0, 3)
        assert fsdpx.recv(np.zeros(2), 0, 3).tolist() == [1, 2]
    with pytest.raises(ConfigError, match=r"broadcast\(root=0.0\): the number of a rank is needed"):
        fsdpx.broadcast(np.ones(2), 0.0)
    with pytest.raises(DesyncError, match=r"root 0\.0"):
        fsdpx.broadcast(np.ones(2), 0.0 if rank else 0)
    assert fsdpx.broadcast(np.full(2, rank), np.int64(0)).tolist() == [0, 0]


@on_several_ranks
def test_sums_of_few_bytes_are_those_of_many(rank, size):
    """Few bytes go along with what ranks say of a call inside a machine: more often than there are places for them."""
    for dtype in ("f8", "f4", "c16", "i8", "u1", "f2", "?"):
        for op in ("sum", "max", "prod", "avg"):
            if (dtype == "c16" and op == "max") or (op == "avg" and dtype in ("i8", "u1", "?")):
                with pytest.raises(ConfigError):
                    fsdpx.all_reduce(np.ones(2, dtype), op)
                continue
            for n in (0, 5):
                small = (np.arange(n) % 2 + rank).astype(dtype).reshape(n, 1)
                large = np.resize(small, (200 * n, 1))
                found = fsdpx.all_reduce(small, op)
                assert (found.shape, found.dtype) == (small.shape, small.dtype)
                np.testing.assert_array_equal(found, fsdpx.all_reduce(large, op)[:n], f"{dtype} {op} {n}")
    for n in range(70):
        assert fsdpx.all_reduce(np.float64(n + rank)) == n * size + size * (size - 1) / 2
    out = np.zeros(2)
    assert fsdpx.all_reduce(np.ones(2), out=out) is out
    assert out.tolist() == [size, size]


def test_masked_elements_are_no_numbers():
    with pytest.raises(DataError, match=r"^1 of 2 elements are masked: give them values"):
        fsdpx.all_reduce(np.ma.masked_equal([1.0, 2.0], 2.0))
    assert type(fsdpx.all_reduce(np.ma.masked_array([1.0]))) is np.ndarray
