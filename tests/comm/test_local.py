"""Thread ranks keep the contract, wherever they are in time."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from amount import in_full

import fsdpx.comm as comms
from fsdpx.comm import Communicator, ReduceOp, opening, spawn
from fsdpx.errors import Aborted, CommTimeout, ConfigError, DesyncError
from fsdpx.testing.communicator import CommunicatorContract

X = np.zeros(4)


class TestContract(CommunicatorContract):
    def run(self, body: Callable[[Communicator], Any]) -> Any:
        for size in (1, 2, 3, 5):
            spawn(body, size, timeout=30)


@in_full
class TestContractInOtherOrdersOfArrival(CommunicatorContract):
    def run(self, body: Callable[[Communicator], Any]) -> Any:
        spawn(body, 3, timeout=60, delays=7)


def test_spawn_returns_results_by_rank():
    assert spawn(lambda comm, a, b: (comm.rank, comm.size, a + b), 3, 1, 2) == [
        (0, 3, 3),
        (1, 3, 3),
        (2, 3, 3),
    ]


def test_spawn_needs_a_rank():
    with pytest.raises(ConfigError, match="at least 1 rank, not 0"):
        spawn(lambda comm: None, 0)


def test_the_first_exception_wakes_the_others_and_comes_back_with_its_rank():
    woken = []

    def body(comm):
        if comm.rank == 1:
            raise KeyError("lost")
        try:
            comm.barrier().wait()
        except Aborted as error:
            woken.append((comm.rank, str(error)))
            raise

    with pytest.raises(KeyError, match="lost") as caught:
        spawn(body, 3, timeout=20)
    assert caught.value.__notes__ == ["[rank 1] of 3 thread ranks"]
    assert sorted(woken) == [(rank, "another rank failed first: KeyError: 'lost'") for rank in (0, 2)]


def test_a_rank_that_never_calls_is_named():
    def body(comm):
        if comm.rank != 1:
            comm.all_reduce(np.zeros(3), what="the loss").wait()

    with pytest.raises(DesyncError, match=r"^rank 1 has returned while ranks .* wait in all_reduce of the loss: all"):
        spawn(body, 3)


def test_a_message_nobody_receives_is_named():
    def body(comm):
        if comm.rank == 0:
            comm.send(np.zeros(3), 1, 4, what="ACT2").wait()

    with pytest.raises(DesyncError, match=r"ranks \[0\] wait in send of ACT2 to rank 1, tag 4: all ranks make"):
        spawn(body, 2)


@pytest.mark.parametrize(
    ("calls", "ends"),
    [
        (lambda c: c.barrier().wait(), "wait in barrier"),
        (lambda c: c.recv(np.zeros(2), 1).wait(), "wait in recv from rank 1, tag 0"),
        (lambda c: c.all_gather_object(1), "wait in all_gather_object"),
        (lambda c: comms.resilient(c), "wait in split"),
    ],
)
def test_a_rank_that_has_returned_is_named_whatever_the_others_wait_for(calls, ends):
    def body(comm):
        if comm.rank == 0:
            calls(comm)

    with pytest.raises(DesyncError, match=r"^rank 1 has returned while ranks \[0\] " + ends):
        spawn(body, 2)


def test_a_vote_that_a_rank_has_returned_without_is_named():
    def body(comm):
        survivor = comms.resilient(comm)
        if comm.rank != 1:
            survivor.agree(1)

    with pytest.raises(DesyncError, match=r"^rank 1 has returned while ranks .* wait in agree"):
        spawn(body, 3, survive=True)


def test_a_group_names_ranks_as_the_world_does():
    def body(comm):
        part = comm.subgroup([0, 2]) if comm.rank != 1 else comm.subgroup([1])
        if comm.rank == 0:
            part.barrier().wait()

    with pytest.raises(DesyncError, match=r"^rank 2 has returned while ranks \[0\] wait in barrier"):
        spawn(body, 3)


def test_what_a_rank_has_sent_before_it_returned_still_comes():
    def body(comm):
        x = np.full(2, 7.0)
        if comm.rank == 1:
            comm.send(x, 0)  # nobody waits for it
            return None
        while comm._group.world.returned != {1}:
            time.sleep(0.001)
        comm.recv(x := np.zeros(2), 1).wait()
        return x.tolist()

    assert spawn(body, 2) == [[7.0, 7.0], None]


def test_the_environment_says_how_long_a_wait_may_last_and_a_note_where_the_late_rank_stands(monkeypatch):
    monkeypatch.setattr(opening, "_GRACE", 0.01)
    monkeypatch.setenv("FSDPX_TIMEOUT", "0.1")
    told = threading.Event()

    def body(comm):
        if comm.rank == 1:
            told.wait()  # for as long as it takes: no limit on the whole
        else:
            comm.barrier().wait()

    with pytest.raises(CommTimeout, match=r"after 0.1 s: barrier: ranks \[1\] of 2 have not called it") as caught:
        spawn(body, 2)
    told.set()
    assert caught.value.__notes__[0] == "[rank 0] of 2 thread ranks"
    assert caught.value.__notes__[1].startswith("rank 1 at File")


@pytest.mark.parametrize(
    ("first", "second", "words"),
    [
        (lambda c: c.barrier(), lambda c: c.all_reduce(np.zeros(1)), "rank . called .* ranks .* called"),
        (lambda c: c.all_reduce(np.zeros(1)), lambda c: c.all_reduce(np.zeros(2)), "different collectives"),
        (lambda c: c.broadcast(np.zeros(2), 0), lambda c: c.broadcast(np.zeros(2), 1), "different"),
        (
            lambda c: c.all_reduce(np.zeros(2)),
            lambda c: c.all_reduce(np.zeros(2), ReduceOp.MAX),
            "'SUM'.*'MAX'|'MAX'.*'SUM'",
        ),
        (lambda c: c.send(np.zeros(2), 1), lambda c: c.recv(np.zeros(3), 0), "2 elements .* 3 elements"),
        (lambda c: c.gather(X[:2], X, 0), lambda c: c.gather(X[:3], None, 0), "piece of 3, rank 0 counts 2"),
    ],
)  # fmt: skip
def test_ranks_that_disagree_raise_instead_of_waiting(first, second, words):
    def body(comm):
        (second if comm.rank else first)(comm).wait()

    with pytest.raises(DesyncError, match=words):
        spawn(body, 2, timeout=10)


def test_abort_ends_all_ranks():
    def body(comm):
        if comm.rank == 2:
            comm.abort(3)
        comm.barrier().wait()

    with pytest.raises(Aborted, match="rank 2 aborted all ranks with code 3"):
        spawn(body, 3, timeout=20)


def test_width_one_moves_nothing_and_copies_only_what_must_be_copied():
    comm = comms.single()
    x, y = np.arange(4.0), np.zeros(4)
    comm.all_gather(x, y).wait()
    np.testing.assert_array_equal(y, x)
    comm.reduce_scatter(x, x, ReduceOp.AVG).wait()
    comm.all_reduce(x).wait()
    comm.reduce(x, x, ReduceOp.SUM, 0).wait()
    comm.all_to_all(x, y).wait()
    np.testing.assert_array_equal(x, np.arange(4.0))
    locked = np.arange(4.0)
    locked.flags.writeable = False
    comm.all_gather(locked, locked[:]).wait()  # the shard is the full buffer: not even written
    with pytest.raises(ValueError, match="read-only"):
        comm.all_gather(x, locked)
    handles = comm.recv(y, 0), comm.send(2 * x, 0)
    for handle in handles:
        handle.wait()
    np.testing.assert_array_equal(y, 2 * x)
