"""Planned calls do what unplanned ones do, meet them, and notice when arrays are others than before."""

import functools
import gc

import ml_dtypes  # noqa: F401  numpy knows bfloat16 by name from here on
import numpy as np
import pytest
from ranks import carrier, on_every_rank, together
from windows import open_node
from windows import room as room
from windows import world as world

from fsdpx.core.comm import ReduceOp, split_evenly
from fsdpx.core.comm.communicator import make_balanced_partition
from fsdpx.errors import CommTimeout, ShapeError

pytest.importorskip("numba")
pytestmark = [pytest.mark.world, pytest.mark.mpi]


@pytest.fixture(scope="module")
def common(world):
    memory = world.allocate_node_buffer(1 << 16)
    yield memory
    world.free_shared(memory)


def _terms(comm, n, dtype, seed=0):
    return [np.random.default_rng([seed, r]).standard_normal(n).astype(dtype) for r in range(comm.size)]


def _own(comm, whole):
    """The piece of this rank."""
    return make_balanced_partition(whole.size, comm.size).get_piece(whole, comm.rank)


def _total(terms, op=ReduceOp.SUM, wire=None):
    terms = terms if wire is None else [term.astype(wire).astype(term.dtype) for term in terms]
    total = sum(terms)
    return total / len(terms) if op is ReduceOp.AVG else total


def where_ranks_share(test):
    """On every rank, if there are several on a host."""

    @functools.wraps(test)
    def run(comm, **given):
        if comm.is_sharing_useful:
            test(comm, **given)

    return on_every_rank(run)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("op", [ReduceOp.SUM, ReduceOp.AVG])
@where_ranks_share
def test_repeated_sums_have_the_bits_of_sums_in_rank_order(comm, room, dtype, op):
    for n in (1, 7, 1000, 4099):
        buf = room[64 : 64 + n * np.dtype(dtype).itemsize].view(dtype)
        cut = split_evenly(n, comm.size)
        piece = np.empty(cut[comm.rank], dtype)
        for call in range(4):
            terms = _terms(comm, n, dtype, call)
            want = _total(terms, op)
            buf[:] = terms[comm.rank]
            comm.reduce_scatter(buf, piece, op, cut if call % 2 else None).wait()
            assert piece.tobytes() == _own(comm, want).tobytes()
            assert buf.tobytes() == terms[comm.rank].tobytes()
            comm.all_reduce(buf, op).wait()
            assert buf.tobytes() == want.tobytes()


@where_ranks_share
def test_repeated_sums_of_rounded_summands_read_them_where_they_lie(comm, room):
    """Nothing travels: the array is as it was. Sums of what is not rounded are others, of the same arrays."""
    wire = np.dtype("bfloat16")
    buf = room[64 : 64 + 4 * 4099].view(np.float32)
    piece = np.empty_like(_own(comm, buf))
    for call in range(4):
        terms, through = _terms(comm, 4099, np.float32, call), wire if call % 2 else None
        want = _total(terms, wire=through)
        buf[:] = terms[comm.rank]
        comm.reduce_scatter(buf, piece, wire=through).wait()
        assert piece.tobytes() == _own(comm, want).tobytes()
        assert buf.tobytes() == terms[comm.rank].tobytes()
        comm.all_reduce(buf, wire=through).wait()
        assert buf.tobytes() == (want if through is None else want.astype(wire).astype(np.float32)).tobytes()


@where_ranks_share
def test_streamed_results_are_the_same(comm, room, monkeypatch):
    monkeypatch.setattr("fsdpx.core.comm.node.persistent.MIN_STREAMED_BYTES", 0)
    buf, terms = room[: 4 * 70_001].view(np.float32), _terms(comm, 70_001, np.float32)
    buf[:] = terms[comm.rank]
    want = _own(comm, _total(terms))
    piece = np.empty(want.size + 3, np.float32)[3:]
    for _ in range(3):
        comm.reduce_scatter(buf, piece).wait()
        assert piece.tobytes() == want.tobytes()


def test_ranks_with_plans_meet_ranks_without(world, room, common):
    group = world.split(0, world.rank)
    if world.rank % 2:
        group.compiles = False

    def body(comm):
        if not comm.is_sharing_useful:
            return
        buf, full = room[:40_000].view(np.float32), common[: 8 * comm.size].view(np.int64)
        own, piece = np.empty(1, np.int64), np.empty(split_evenly(10_000, comm.size)[comm.rank], np.float32)
        for i in range(40):
            buf[:] = comm.rank + i
            own[0] = i * comm.size + comm.rank
            comm.reduce_scatter(buf, piece).wait()
            handles = [comm.all_reduce(buf), comm.all_gather(own, full), comm.barrier()]
            for handle in handles[:: 1 if i % 3 else -1]:
                handle.wait()
            assert (buf == sum(range(comm.size)) + i * comm.size).all(), i
            assert (piece == buf[0]).all(), i
            assert full.tolist() == list(range(i * comm.size, (i + 1) * comm.size)), i
            comm.barrier().wait()

    together(world, group, body)
    group.close()


@where_ranks_share
def test_arrays_that_move_are_found_again(comm, room):
    """Every rank uses its buffers in an order of its own; views are made anew and take the numbers of old ones."""
    fixed = [room[i * 4096 : i * 4096 + 800].view(np.float64) for i in range(3)]
    for i in range(60):
        buf = fixed[(i * (comm.rank + 1)) % 3] if i % 2 else room[i * 800 : (i + 1) * 800].view(np.float64)
        buf[:] = i + comm.rank
        comm.all_reduce(buf).wait()
        assert (buf == sum(range(comm.size)) + i * comm.size).all(), i
        del buf
        gc.collect(0)


@where_ranks_share
def test_a_plan_is_not_taken_for_another_array_of_the_same_id(comm, room):
    buf = room[:800].view(np.float64)
    piece = np.empty_like(_own(comm, buf))
    other = np.empty(piece.size + 1)
    comm.reduce_scatter(buf, piece).wait()
    verb, rest, calls = "reduce_scatter", (ReduceOp.SUM, (None,), "library", None), comm._persistent_calls
    calls[verb, id(buf), id(other), *rest] = calls[verb, id(buf), id(piece), *rest]
    with pytest.raises(ShapeError, match=r"reduce_scatter of page 0 on rank \d+: recv has \d+ elements"):
        comm.reduce_scatter(buf, other, what="page 0")


def test_who_does_not_come_to_a_planned_call_is_named():
    comm, everyone = open_node(), carrier()
    room, common = comm.allocate_shared(4096), comm.allocate_node_buffer(4096)

    if comm.is_sharing_useful:
        buf, full = room[:800].view(np.float64), common[:8].view(np.uint8)
        comm.all_reduce(buf).wait()
        comm.all_gather(full[comm.rank : comm.rank + 1], full[: comm.size]).wait()
        everyone.barrier().wait()
        comm.set_timeout(0.3)
        if comm.rank == 0:
            with pytest.raises(CommTimeout, match=r"all_reduce of 'w' on rank 0 of \d+ .* ranks \[1\b.*window"):
                comm.all_reduce(buf, what="'w'").wait()
            with pytest.raises(CommTimeout, match=r"barrier of the end on rank 0 .* ranks \[1\b"):
                comm.barrier(what="the end").wait()

    everyone.barrier().wait()
    everyone.close()
