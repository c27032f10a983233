"""Thread ranks keep the contract, guarded or not, wherever they are in time; the ring ends in the same bits on all."""

import queue
import threading
import time
from collections.abc import Callable
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
from amount import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from threads import on_ranks

import fsdpx.core.comm as comms
from fsdpx import Communicator, ReduceOp, spawn
from fsdpx.core.comm import CheckedCommunicator, CountingCommunicator, TrafficCounters, init
from fsdpx.core.comm.calls import Call, GeneratorHandle, Handle, get_progress
from fsdpx.core.comm.p2p_collectives import iterate_ring_all_reduce
from fsdpx.errors import Aborted, CommTimeout, ConfigError, DesyncError, ShapeError
from fsdpx.testing.communicator import CommunicatorContract

X = np.zeros(4)


def ring(comm: Communicator, buf: np.ndarray, op: ReduceOp = ReduceOp.SUM, tag: int = 0, what: str = "") -> Handle:
    """An all-reduce in place by the sends and receives of any communicator."""
    call = Call("all_reduce", (buf,), op, what=what, tag=tag)
    return GeneratorHandle(iterate_ring_all_reduce(comm.issue, comm.rank, comm.size, call), get_progress(comm))


class TestContract(CommunicatorContract):
    def run(self, body: Callable[[Communicator], Any]) -> Any:
        for size in (1, 2, 5):
            spawn(body, size, timeout=30)


class TestContractInOtherOrdersOfArrival(CommunicatorContract):
    dtypes = "float64", "bfloat16", "int16"

    def run(self, body: Callable[[Communicator], Any]) -> Any:
        spawn(body, 3, timeout=60, delays=7)


def test_spawn_returns_results_by_rank():
    assert spawn(lambda comm, a, b: (comm.rank, comm.size, a + b), 3, 1, 2) == [(rank, 3, 3) for rank in range(3)]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((print, 0), "at least 1 rank, not 0"),
        ((4, print), r"^spawn\(4, ...\): first the function, then the number of ranks, as in spawn\(train, 4\)$"),
    ],
    ids=["no rank", "the number first"],
)
def test_spawn_says_what_it_needs(arguments, words):
    with pytest.raises(ConfigError, match=words):
        spawn(*arguments)


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ([1.0], r"not list: use numpy.array\(\[...\]\)"),
        (3.0, r"not float: use numpy.array\(\[...\]\)"),
        (np.ones((2, 2)), r"not \(2, 2\): use array.reshape\(-1\)"),
    ],
)
def test_what_is_no_flat_array_is_refused_with_the_way_to_make_one(value, words):
    with pytest.raises(ShapeError, match=rf"^all_reduce on rank \d: buf must be a flat array \(1-D\), {words}\n"):
        spawn(lambda comm: comm.all_reduce(value), 2)


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


def test_ranks_of_a_spawn_that_ctrl_c_breaks_off_end_at_their_next_call(monkeypatch):
    woken = queue.SimpleQueue()

    def body(comm):
        try:
            while True:
                comm.barrier().wait()
        except Aborted as error:
            woken.put(str(error))
            raise

    monkeypatch.setattr(init, "_join_and_find_unfinished_threads", Mock(side_effect=KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        spawn(body, 2, timeout=20)
    assert [woken.get(timeout=20) for _ in range(2)] == ["another rank failed first: KeyboardInterrupt: "] * 2


@pytest.mark.parametrize(
    ("calls", "words"),
    [
        (lambda c: c.all_reduce(np.zeros(3), what="the loss").wait(), "all_reduce of the loss: all"),
        (lambda c: c.send(np.zeros(3), 1, 4, what="ACT2").wait(), "send of ACT2 to rank 1, tag 4: all ranks make"),
        (lambda c: c.barrier().wait(), "barrier"),
        (lambda c: c.recv(np.zeros(2), 1).wait(), "recv from rank 1, tag 0"),
        (lambda c: c.all_gather_object(1), "all_gather_object"),
        (comms.open_fault_tolerant_communicator, "split"),
    ],
)
def test_a_rank_that_has_returned_is_named_whatever_the_others_wait_for(calls, words):
    with pytest.raises(DesyncError, match=rf"^rank 1 has returned while ranks \[0\] wait in {words}"):
        spawn(lambda comm: None if comm.rank else calls(comm), 2)


def test_a_vote_that_a_rank_has_returned_without_is_named():
    def body(comm):
        survivor = comms.open_fault_tolerant_communicator(comm)
        if comm.rank != 1:
            survivor.agree_on_flags(1)

    with pytest.raises(DesyncError, match=r"^rank 1 has returned while ranks .* wait in agree"):
        spawn(body, 3, survive=True)


def test_a_group_names_ranks_as_the_world_does():
    def body(comm):
        part = comm.subgroup([1] if comm.rank == 1 else [0, 2])
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
    monkeypatch.setattr(init, "_GRACE_SECONDS", 0.01)
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
        (lambda c: c.all_reduce(X), lambda c: c.all_reduce(X, ReduceOp.MAX), "'SUM'.*'MAX'|'MAX'.*'SUM'"),
        (lambda c: c.send(np.zeros(2), 1), lambda c: c.recv(np.zeros(3), 0), "2 elements .* 3 elements"),
        (lambda c: c.gather(X[:2], X, 0), lambda c: c.gather(X[:3], None, 0), "piece of 3, rank 0 counts 2"),
    ],
)
def test_ranks_that_disagree_raise_instead_of_waiting(first, second, words):
    with pytest.raises(DesyncError, match=words):
        spawn(lambda comm: (second if comm.rank else first)(comm).wait(), 2, timeout=10)


def test_abort_ends_all_ranks():
    def body(comm):
        if comm.rank == 2:
            comm.abort(3)
        comm.barrier().wait()

    with pytest.raises(Aborted, match="rank 2 aborted all ranks with code 3"):
        spawn(body, 3, timeout=20)


def test_width_one_moves_nothing_and_copies_only_what_must_be_copied():
    comm = comms.make_single_rank_communicator()
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
    for handle in (comm.recv(y, 0), comm.send(2 * x, 0)):
        handle.wait()
    np.testing.assert_array_equal(y, 2 * x)


class TestGuarded(CommunicatorContract):
    dtypes = "float32", "float16", "bool"

    def run(self, body):
        spawn(lambda comm: body(CheckedCommunicator(comm)), 3, timeout=60)


@pytest.mark.parametrize(
    ("one", "other", "words"),
    [
        (lambda c: c.barrier(), lambda c: c.broadcast(np.zeros(2), 0), ("rank 0: barrier", "broadcast")),
        (lambda c: c.barrier(what="g0"), lambda c: c.barrier(what="g1"), ("g0", "g1")),
        (lambda c: c.all_reduce(np.zeros(2)), lambda c: c.all_reduce(np.zeros(2, "f4")), ("t64", "t32")),
        (lambda c: c.all_reduce(np.zeros(2)), lambda c: c.all_reduce(np.zeros(3)), ("s 2", "s 3")),
        (
            lambda c: c.reduce_scatter(X[:3], np.zeros(1)), lambda c: c.reduce_scatter(X[:3], np.zeros(1), "avg"),
            ("op SUM", "op AVG"),
        ),
        (lambda c: c.all_reduce(np.zeros(2)), lambda c: c.all_reduce(np.zeros(2), wire="f2"), ("wire float16",)),
        (lambda c: c.broadcast(np.zeros(2), 0), lambda c: c.broadcast(np.zeros(2), 1), ("root 0", "root 1")),
        (
            lambda c: c.all_gather(X[:1], np.zeros(3)), lambda c: c.all_gather(X[:1], np.zeros(3), [1, 1, 1]),
            ("counts even", "counts [1, 1, 1]"),
        ),
        (lambda c: c.barrier(what="x" * 300), lambda c: c.barrier(what="x" * 301), ("...",)),
    ],
)  # fmt: skip
def test_every_rank_hears_who_called_what(one, other, words):
    def body(comm):
        with pytest.raises(DesyncError) as caught:
            (other if comm.rank else one)(CheckedCommunicator(comm, timeout=0.5))
        return str(caught.value)

    message, *others = spawn(body, 3, timeout=30)
    assert others == [message] * 2
    for word in ("ranks called different collectives (call 1): rank 0: ", "; ranks 1, 2: ", *words):
        assert word in message


@on_ranks(4)
def test_a_rank_that_does_not_come_is_named(comm):
    text = r"waited 0.5 s: ranks \[1\] did not arrive at barrier of end \(call 1\).*which ranks \[0, 2, 3\] called"
    guarded = CheckedCommunicator(comm, timeout=0.5)
    if comm.rank != 1:
        with pytest.raises(DesyncError, match=text):
            guarded.barrier(what="end")
    comm.barrier().wait()


def test_a_rank_that_has_returned_is_named_with_the_call_of_the_others():
    def body(comm):
        guarded = CheckedCommunicator(comm)
        if comm.rank == 0:
            guarded.barrier(what="end")

    text = r"rank 1 has returned while ranks \[0\] wait in recv of the fingerprint of barrier of end from rank 1"
    with pytest.raises(DesyncError, match=text):
        spawn(body, 2)


@on_ranks(3)
def test_agreement_goes_on_for_ever_after(comm):
    guarded = CheckedCommunicator(comm)
    x = np.ones(4, np.float16)
    for call in range(20):
        guarded.all_reduce(x, what=f"x{call}").wait()
        x[:] = 1
    guarded.close()


@on_ranks(3, timeout=30)
def test_a_guard_that_waits_moves_other_transfers_on(comm):
    """Rank 0 comes to the barrier when its ring has ended, and that needs steps of the ranks in the guard."""
    guarded = CheckedCommunicator(comm, timeout=5)
    x = np.ones(6)
    handle = guarded.all_reduce(x, algorithm="ring")
    if comm.rank == 0:
        handle.wait()
    guarded.barrier().wait()
    handle.wait()
    assert x.tolist() == [3.0] * 6


REDUCED = {
    ReduceOp.SUM: np.sum, ReduceOp.AVG: np.mean, ReduceOp.MAX: np.max, ReduceOp.MIN: np.min, ReduceOp.PROD: np.prod,
}  # fmt: skip


@given(st.integers(1, 5), st.integers(0, 23), st.sampled_from(list(ReduceOp)))
@settings(derandomize=True, database=None, deadline=None, max_examples=examples(40))
def test_any_size_and_length(size, n, op):
    values = [np.random.default_rng(rank).uniform(0.5, 2, n) for rank in range(size)]

    def body(comm):
        buf = values[comm.rank].copy()
        ring(comm, buf, op).wait()
        return buf

    found = spawn(body, size)
    np.testing.assert_allclose(found[0], REDUCED[op](values, axis=0), rtol=1e-14)
    assert len({buf.tobytes() for buf in found}) == 1


@pytest.mark.parametrize("size", [2, 3, 4])
def test_bytes_and_messages(size):
    def body(comm):
        counters = TrafficCounters()
        ring(CountingCommunicator(comm, "x", counters), np.ones(12 * size)).wait()
        return counters.sum_counts("x", "send")

    messages = 2 * (size - 1)
    assert spawn(body, size) == [comms.CallCount(messages, messages * 12 * 8)] * size


@on_ranks(3, delays=3)
def test_rings_under_way_at_once_are_told_apart_by_tag(comm):
    bufs = [np.full(7, float(10**i * (comm.rank + 1))) for i in range(3)]
    handles = [ring(comm, buf, tag=i, what=f"buf {i}") for i, buf in enumerate(bufs)]
    for i in np.random.default_rng(comm.rank).permutation(3):
        handles[i].wait()
    assert [buf.tolist() for buf in bufs] == [[6.0] * 7, [60.0] * 7, [600.0] * 7]
