"""Ranks that mean different collectives raise, with names, on every rank."""

from __future__ import annotations

import threading

import numpy as np
import pytest

from fsdpx.comm import Guarded, ReduceOp, spawn
from fsdpx.errors import DesyncError
from fsdpx.testing.communicator import CommunicatorContract


class TestContract(CommunicatorContract):
    def run(self, body):
        for size in (1, 3):
            spawn(lambda comm: body(Guarded(comm)), size, timeout=60)


def on_each_rank(size, calls):
    """What each rank raises that calls `calls[rank](comm)`; the last of them is for all further ranks."""

    def body(comm):
        guarded = Guarded(comm, timeout=0.5)
        try:
            calls[min(comm.rank, len(calls) - 1)](guarded)
        except DesyncError as error:
            return str(error)
        return None

    return spawn(body, size, timeout=30)


@pytest.mark.parametrize(
    ("one", "other", "words"),
    [
        (lambda c: c.barrier(), lambda c: c.broadcast(np.zeros(2), 0), ("rank 0: barrier", "broadcast")),
        (lambda c: c.barrier(what="g0"), lambda c: c.barrier(what="g1"), ("g0", "g1")),
        (lambda c: c.all_reduce(np.zeros(2)), lambda c: c.all_reduce(np.zeros(2, "f4")), ("t64", "t32")),
        (lambda c: c.all_reduce(np.zeros(2)), lambda c: c.all_reduce(np.zeros(3)), ("s 2", "s 3")),
        (
            lambda c: c.reduce_scatter(np.zeros(3), np.zeros(1), ReduceOp.SUM),
            lambda c: c.reduce_scatter(np.zeros(3), np.zeros(1), ReduceOp.AVG),
            ("op SUM", "op AVG"),
        ),
        (lambda c: c.all_reduce(np.zeros(2)), lambda c: c.all_reduce(np.zeros(2), wire="f2"), ("wire float16",)),
        (lambda c: c.broadcast(np.zeros(2), 0), lambda c: c.broadcast(np.zeros(2), 1), ("root 0", "root 1")),
        (
            lambda c: c.all_gather(np.zeros(1), np.zeros(3)),
            lambda c: c.all_gather(np.zeros(1), np.zeros(3), [1, 1, 1]),
            ("counts even", "counts [1, 1, 1]"),
        ),
        (lambda c: c.barrier(what="x" * 300), lambda c: c.barrier(what="x" * 301), ("...",)),
    ],
)  # fmt: skip
def test_every_rank_hears_who_called_what(one, other, words):
    messages = on_each_rank(3, [one, other])
    assert len(set(messages)) == 1
    assert "ranks called different collectives (call 1): rank 0: " in messages[0]
    assert "; ranks 1, 2: " in messages[0]
    for word in words:
        assert word in messages[0]


def test_a_rank_that_does_not_come_is_named():
    told = threading.Barrier(4)

    def body(comm):
        error, guarded = None, Guarded(comm, timeout=0.5)
        if comm.rank != 1:
            with pytest.raises(DesyncError) as error:
                guarded.barrier(what="end")
        told.wait()
        return error and str(error.value)

    messages = spawn(body, 4)
    for rank in (0, 2, 3):
        assert "waited 0.5 s: ranks [1] did not arrive at barrier of end (call 1)" in messages[rank]
        assert "which ranks [0, 2, 3] called" in messages[rank]


def test_a_rank_that_has_returned_is_named_with_the_call_of_the_others():
    def body(comm):
        guarded = Guarded(comm)
        if comm.rank == 0:
            guarded.barrier(what="end")

    text = r"rank 1 has returned while ranks \[0\] wait in recv of the fingerprint of barrier of end from rank 1"
    with pytest.raises(DesyncError, match=text):
        spawn(body, 2)


def test_agreement_goes_on_for_ever_after():
    def body(comm):
        guarded = Guarded(comm)
        x = np.ones(4, np.float16)
        for call in range(20):
            guarded.all_reduce(x, what=f"x{call}").wait()
            x[:] = 1
        guarded.close()

    spawn(body, 3)


def test_a_guard_that_waits_moves_other_transfers_on():
    """Rank 0 comes to the barrier when its ring has ended, and that needs steps of the ranks in the guard."""

    def body(comm):
        guarded = Guarded(comm, timeout=5)
        x = np.ones(6)
        handle = guarded.all_reduce(x, algorithm="ring")
        if comm.rank == 0:
            handle.wait()
        guarded.barrier().wait()
        handle.wait()
        return x.tolist()

    assert spawn(body, 3, timeout=30) == [[3.0] * 6] * 3
