"""Bytes and calls are those of an optimal algorithm, whoever moves them."""

from __future__ import annotations

import numpy as np
import pytest

from fsdpx.comm import Counted, Counters, FakeCommunicator, ReduceOp, spawn
from fsdpx.comm.communicator import Count
from fsdpx.testing.communicator import CommunicatorContract

N = 10
EACH = {
    "all_gather": lambda c, x, own: c.all_gather(own, x),
    "reduce_scatter": lambda c, x, own: c.reduce_scatter(x, own),
    "all_reduce": lambda c, x, own: c.all_reduce(x),
    "broadcast": lambda c, x, own: c.broadcast(x, 1),
    "reduce": lambda c, x, own: c.reduce(x, x if c.rank == 1 else None, ReduceOp.SUM, 1),
    "gather": lambda c, x, own: c.gather(own, x if c.rank == 1 else None, 1),
    "scatter": lambda c, x, own: c.scatter(x if c.rank == 1 else None, own, 1),
    "all_to_all": lambda c, x, own: c.all_to_all(np.ones(8), np.ones(8)),
    "send": lambda c, x, own: c.send(x, 0),
    "barrier": lambda c, x, own: c.barrier(),
}
BYTES = {  # of the ranks 0 to 3 with pieces of 2, 3, 2, 3 of 10 float64 elements
    "all_gather": (64, 56, 64, 56),
    "reduce_scatter": (64, 56, 64, 56),
    "all_reduce": (128, 112, 128, 112),
    "broadcast": (80, 80, 80, 80),
    "reduce": (80, 80, 80, 80),
    "gather": (16, 56, 16, 24),
    "scatter": (16, 56, 16, 24),
    "all_to_all": (48, 48, 48, 48),
    "send": (80, 80, 80, 80),
    "barrier": (0, 0, 0, 0),
}


class TestContract(CommunicatorContract):
    def run(self, body):
        for size in (1, 3):
            spawn(lambda comm: body(Counted(comm, "world", Counters())), size, timeout=30)


@pytest.mark.parametrize("verb", EACH)
@pytest.mark.parametrize("rank", range(4))
def test_bytes(verb, rank):
    counters = Counters()
    comm = Counted(FakeCommunicator(rank, 4), "shard", counters)
    x = np.ones(N)
    EACH[verb](comm, x, x[: (2, 3, 2, 3)[rank]].copy()).wait()
    assert list(counters) == [("shard", verb, 1, BYTES[verb][rank])]


def test_a_call_that_is_refused_is_not_counted():
    counters = Counters()
    with pytest.raises(ValueError, match="root=4"):
        Counted(FakeCommunicator(0, 4), "shard", counters).broadcast(np.ones(3), 4)
    assert list(counters) == []


def test_one_rank_counts_nothing():
    counters = Counters()
    comm = Counted(FakeCommunicator(0, 1), "shard", counters)
    comm.all_gather(np.ones(3), np.ones(3)).wait()
    comm.barrier().wait()
    assert list(counters) == []


def test_groups_of_a_counted_communicator_count_on():
    counters = Counters()
    Counted(FakeCommunicator(2, 4), "data", counters).subgroup([0, 2]).broadcast(np.ones(3), 0)
    assert list(counters) == [("data", "broadcast", 1, 24)]


def test_sums_and_differences():
    counters = Counters()
    counters.add("shard", "all_gather", 100)
    before = counters.copy()
    counters.add("shard", "all_gather", 20)
    counters.add("data", "all_reduce", 5)
    assert counters.of("shard") == Count(2, 120)
    assert counters.of(verb="all_reduce") == Count(1, 5)
    assert counters.of() == Count(3, 125)
    assert list(counters.since(before)) == [("data", "all_reduce", 1, 5), ("shard", "all_gather", 1, 20)]
    assert list(before) == [("shard", "all_gather", 1, 100)]
    counters.clear()
    assert list(counters) == []
