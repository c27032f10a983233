"""Thread ranks that die: the others hear of it wherever they wait, come together and go on."""

import pickle
import random
import threading
from collections.abc import Callable
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from threads import on_ranks

from fsdpx import FakeCommunicator, ReduceOp, spawn
from fsdpx.core.base import environment
from fsdpx.core.comm import COMPLETED, CheckedCommunicator, local, make_single_rank_communicator
from fsdpx.core.comm.communicator import SurvivorCommunicator, can_survive, drain_transfers
from fsdpx.core.comm.init import open_fault_tolerant_communicator
from fsdpx.core.comm.local import RankDied
from fsdpx.errors import CommError, ConfigError, DesyncError, RankLost
from fsdpx.testing.chaos import InjectedFault

N = 3
survivors = on_ranks(N, timeout=20, survive=True)


def x() -> np.ndarray:
    return np.ones(N)


ISSUED: dict[str, Callable[[SurvivorCommunicator, int], Any]] = {
    "all_gather": lambda c, dead: c.all_gather(np.ones(1), x()),
    "reduce_scatter": lambda c, dead: c.reduce_scatter(x(), np.ones(1)),
    "all_reduce": lambda c, dead: c.all_reduce(x(), what="the loss"),
    "all_reduce in a ring": lambda c, dead: c.all_reduce(x(), algorithm="ring"),
    "broadcast": lambda c, dead: c.broadcast(x(), 0),
    "reduce": lambda c, dead: c.reduce(x(), x(), ReduceOp.SUM, 0),
    "gather": lambda c, dead: c.gather(np.ones(1), x(), 0),
    "scatter": lambda c, dead: c.scatter(x(), np.ones(1), 0),
    "all_to_all": lambda c, dead: c.all_to_all(x(), x()),
    "barrier": lambda c, dead: c.barrier(),
    "send": lambda c, dead: c.send(x(), dead if c.rank != dead else (dead + 1) % N),
    "recv": lambda c, dead: c.recv(x(), dead if c.rank != dead else (dead + 1) % N),
}
CALLS = ISSUED | {
    "split": lambda c, dead: c.split(0),
    "subgroup": lambda c, dead: c.subgroup(range(N)),
    "all_gather_object": lambda c, dead: c.all_gather_object("x"),
}


def until(ready: Callable[[], Any]) -> None:
    while not ready():
        pass


def recovered(comm: SurvivorCommunicator) -> SurvivorCommunicator:
    comm.revoke()
    assert comm.agree_on_flags(3) == 0
    return comm.shrink()


def total(comm: SurvivorCommunicator) -> int:
    one = np.ones(1)
    comm.all_reduce(one).wait()
    return int(one[0])


@pytest.mark.parametrize("dead", range(N))
@pytest.mark.parametrize("verb", CALLS)
def test_who_needs_a_rank_that_dies_hears_of_it(verb: str, dead: int) -> None:
    def body(comm: SurvivorCommunicator) -> Any:
        if comm.rank == dead:
            raise RankDied
        name = {"all_reduce in a ring": "(send|recv)", "subgroup": "split"}.get(verb, verb)
        with pytest.raises(RankLost, match=f"^{name}.* on rank {comm.rank} of 3: rank {dead} has died") as caught:
            until(CALLS[verb](comm, dead).test)
        assert caught.value.ranks == comm.get_failed_ranks() == (dead,)
        rest = recovered(comm)
        assert rest.get_failed_ranks() == ()
        return rest.rank, rest.size, total(rest), rest.agree_on_flags(6 + rest.rank)

    results = spawn(body, N, timeout=20, survive=True, delays=dead)
    assert [result for result in results if result] == [(0, 2, 2, 6), (1, 2, 2, 6)]
    assert results[dead] is None


@pytest.mark.parametrize("first", [True, False], ids=["the dead called first", "the dead never called"])
@pytest.mark.parametrize("verb", ISSUED)
def test_what_was_issued_before_the_death(verb: str, first: bool) -> None:
    dead, issued, gone = 1, threading.Barrier(N), threading.Event()

    def body(comm: SurvivorCommunicator) -> None:
        if comm.rank == dead:
            if first:
                ISSUED[verb](comm, dead)
            else:
                issued.wait(20)
            gone.set()
            raise RankDied
        if first:
            gone.wait(20)
            until(comm.get_failed_ranks)

        def call() -> None:
            handle = ISSUED[verb](comm, dead)
            if not first:
                issued.wait(20)
            until(handle.test)

        with pytest.raises(RankLost, match="rank 1 has died"):
            call()

    spawn(body, N, timeout=20, survive=True)


@survivors
def test_what_all_have_come_to_succeeds_though_one_dies_then(comm: SurvivorCommunicator) -> None:
    array = np.ones(2)
    handle = comm.all_reduce(array)
    if comm.rank == 0:
        until(handle.test)
        raise RankDied
    handle.wait()
    until(comm.get_failed_ranks)
    handle.wait()
    assert handle.test()
    assert array.tolist() == [3, 3]


def test_nobody_is_told_of_a_loss_while_his_arrays_are_written(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 2 comes last and moves; rank 0 revokes in the middle of it."""
    inside, revoked, heard = threading.Event(), threading.Event(), []
    fold = local.reduce_in_rank_order_into

    def slow(*args: Any) -> None:
        inside.set()
        assert revoked.wait(20)
        heard.append("moved")
        fold(*args)

    def body(comm: SurvivorCommunicator) -> float:
        monkeypatch.setattr(local, "reduce_in_rank_order_into", slow)
        array = np.ones(2)
        for other in (0, 1) if comm.rank == 2 else ():
            comm.recv(np.ones(1), other).wait()
        handle = comm.all_reduce(array)
        if comm.rank < 2:
            comm.send(np.ones(1), 2).wait()
        if comm.rank == 0:
            assert inside.wait(20)
            comm.revoke()
            assert not handle.test()
            revoked.set()
        handle.wait()
        heard.append("done")
        return float(array[0])

    assert spawn(body, N, timeout=20, survive=True) == [3, 3, 3]
    assert heard[0] == "moved"


def test_a_rank_that_dies_while_it_moves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local, "reduce_in_rank_order_into", Mock(side_effect=RankDied))

    def body(comm: SurvivorCommunicator) -> int:
        with pytest.raises(RankLost, match="has died"):
            comm.all_reduce(np.ones(2)).wait()
        monkeypatch.undo()
        return recovered(comm).size

    assert sorted(spawn(body, N, timeout=20, survive=True), key=str) == [2, 2, None]


@survivors
def test_revoke_wakes_who_waits_in_groups(comm: SurvivorCommunicator) -> None:
    """Ranks 0 and 1 have a group and a group of it; rank 1 hears of the death of rank 2 and gives all up."""
    pair = comm.subgroup([0, 1] if comm.rank < 2 else [2])
    inner = pair.subgroup(range(pair.size))
    del pair
    if comm.rank == 2:
        raise RankDied
    if comm.rank == 1:
        del inner
        with pytest.raises(RankLost, match="rank 2 has died"):
            comm.barrier().wait()
        assert recovered(comm).size == 2
        return
    revoked = "another rank has revoked this communicator because a rank has died"
    with pytest.raises(RankLost, match=f"^recv of ACT3 from rank 1, tag 0 on rank 0 of 2: {revoked}$"):
        inner.recv(np.ones(3), 1, what="ACT3").wait()
    assert recovered(comm).size == 2
    with pytest.raises(RankLost, match="revoked"):
        inner.split(0)


@pytest.mark.parametrize("verb", CALLS)
@survivors
def test_nothing_begins_on_what_was_revoked(comm: SurvivorCommunicator, verb: str) -> None:
    group = comm.subgroup(range(N))
    if comm.rank == 0:
        group.revoke()
    comm.barrier().wait()
    with pytest.raises(RankLost, match="has revoked this communicator"):
        CALLS[verb](group, (group.rank + 1) % N)
    assert group.agree_on_flags(6 + comm.rank % 2) == 6
    assert (group.shrink().size, total(comm)) == (N, N)


@survivors
def test_agreement_waits_for_what_others_wait_for(comm: SurvivorCommunicator) -> None:
    """Ranks of a ring need steps of ranks that are in `agree` already."""
    array = np.arange(5.0)
    handle = comm.all_reduce(array, algorithm="ring")
    if comm.rank > 0:
        handle.wait()
    assert comm.agree_on_flags(1) == 1
    handle.wait()
    assert array.tolist() == [0, 3, 6, 9, 12]


def test_a_broken_transfer_does_not_follow_into_the_new_communicator() -> None:
    issued = threading.Barrier(N)

    def body(comm: SurvivorCommunicator) -> int:
        group = comm.subgroup(range(N))
        if comm.rank == 0:
            issued.wait(20)
            raise RankDied
        handles = [group.all_reduce(np.ones(9), algorithm="ring") for _ in range(20)]
        issued.wait(20)
        comm.revoke()
        rest = comm.shrink()
        assert total(rest) == 2
        assert drain_transfers([*handles, COMPLETED], 10) == []
        return total(rest)

    assert spawn(body, N, timeout=20, survive=True) == [None, 2, 2]


@on_ranks(2, timeout=20, survive=True)
def test_settle_returns_what_is_neither_complete_nor_broken(comm: SurvivorCommunicator) -> None:
    handle = comm.recv(np.ones(1), 1 - comm.rank)
    assert drain_transfers([COMPLETED, handle], 0.01) == [handle]
    comm.barrier().wait()
    comm.revoke()
    assert drain_transfers([handle], 10) == []


def test_settle_waits_for_the_other_requests_of_a_handle() -> None:
    class Broken:
        tests, active = 0, True

        def test(self) -> bool:
            self.tests += 1
            self.active = self.tests < 3
            raise CommError

    handle = Broken()
    assert drain_transfers([handle]) == []
    assert handle.tests == 3


def test_ranks_that_vote_on_different_things() -> None:
    with pytest.raises(DesyncError, match=r"called (agree|shrink); ranks \[.*\] called (agree|shrink)"):
        spawn(lambda comm: comm.agree_on_flags(1) if comm.rank else comm.shrink(), 2, timeout=20, survive=True)


@given(size=st.integers(2, 5), seed=st.integers(0, 2**32))
def test_whoever_dies_and_when_all_others_agree(size: int, seed: int) -> None:
    """Deaths before several agreements, a shrink after each that fails: one outcome, and each death noticed at once."""
    draw = random.Random(seed)
    last = {rank: draw.randrange(8) for rank in draw.sample(range(size), draw.randrange(size))}
    flags = [[draw.randrange(1, 8) for _ in range(size)] for _ in range(8)]

    def body(comm: SurvivorCommunicator) -> list[tuple[int, int]]:
        born, history = comm.rank, []
        for turn in range(8):
            if last.get(born) == turn:
                raise RankDied
            said = comm.agree_on_flags(flags[turn][born] | 8)
            history.append((comm.size, said))
            if said == 0:
                comm = comm.shrink()
        return history

    delays = draw.randrange(100) if draw.random() < 0.3 else None
    (history, *others) = filter(None, spawn(body, size, timeout=20, survive=True, delays=delays))
    assert others == [history] * (size - len(last) - 1)
    assert {turn for turn, (_, said) in enumerate(history) if said == 0} == set(last.values())


@given(size=st.integers(2, 6), seed=st.integers(0, 2**32), delays=st.sampled_from([None, None, None, 5]))
def test_survivors_have_one_history(size: int, seed: int, delays: int | None) -> None:
    """Steps of several collectives in several groups, an agreement after each; deaths anywhere, also in recovery."""
    draw = random.Random(seed)
    deaths = {rank: draw.randrange(45) for rank in draw.sample(range(size), draw.randint(1, size - 1))}

    def body(comm: SurvivorCommunicator) -> list[tuple[int, float]]:
        born, done = comm.rank, 0

        def act() -> None:
            nonlocal done
            if deaths.get(born) == done:
                raise InjectedFault(f"rank {born} at {done}")
            done += 1

        def step(comm: SurvivorCommunicator, groups: list[SurvivorCommunicator]) -> float:
            array = np.ones(1)
            ring = comm.all_reduce(many := np.ones(7), algorithm="ring")
            for group in groups:
                act()
                group.all_reduce(array).wait()
            act()
            other = groups[0].rank ^ 1
            if other < groups[0].size:
                for handle in [groups[0].send(array, other), groups[0].recv(np.ones(1), other)]:
                    handle.wait()
            act()
            ring.wait()
            return float(array[0] * many[0])

        def connect(comm: SurvivorCommunicator) -> list[SurvivorCommunicator]:
            act()
            pairs = comm.split(comm.rank // 2)
            act()
            return [pairs, comm.split(comm.rank % 2), comm]

        history, groups = [], None
        while len(history) < 6:
            flag, got = 1, 0.0
            try:
                groups = groups or connect(comm)
                got = step(comm, groups)
            except RankLost:
                comm.revoke()
                flag = 0
            act()
            if comm.agree_on_flags(flag):
                history.append((comm.size, got))
            else:
                comm.revoke()
                comm, groups = comm.shrink(), None
        return history

    results = spawn(body, size, timeout=30, delays=delays, survive=True)
    left = [result for result in results if result is not None]
    assert len(left) >= size - len(deaths) >= 1
    assert left == [left[0]] * len(left)
    assert len(left[0]) == 6
    assert left[0][-1][0] >= len(left)


def test_deaths_end_all_ranks_where_nobody_asked_to_survive() -> None:
    def body(comm: SurvivorCommunicator) -> None:
        assert isinstance(comm, SurvivorCommunicator)
        assert not can_survive(comm)
        if comm.rank == 1:
            raise InjectedFault("kill")
        comm.barrier().wait()

    with pytest.raises(InjectedFault, match="kill") as caught:
        spawn(body, N, timeout=20)
    assert caught.value.__notes__ == ["[rank 1] of 3 thread ranks"]


def test_all_ranks_die() -> None:
    def body(comm: SurvivorCommunicator) -> None:
        assert can_survive(comm)
        raise RankDied(comm.rank)

    with pytest.raises(RankDied) as caught:
        spawn(body, 2, timeout=20, survive=True)
    assert caught.value.__notes__[0].endswith("the first of 2 thread ranks, all of which died")


def test_an_error_is_no_death() -> None:
    def body(comm: SurvivorCommunicator) -> None:
        if comm.rank == 1:
            raise RankDied
        if comm.rank == 0:
            raise KeyError("a bug")
        comm.agree_on_flags(1)

    with pytest.raises(KeyError, match="a bug"):
        spawn(body, N, timeout=20, survive=True)


def test_what_survives() -> None:
    assert not can_survive(FakeCommunicator(0, 2))
    assert not can_survive(make_single_rank_communicator())
    assert environment.read_environment({"OMPI_MCA_mpi_ft_enable": "1"}).ulfm
    assert not environment.read_environment({"OMPI_MCA_mpi_ft_enable": "0"}).ulfm


@survivors
def test_resilient_communicators(comm: SurvivorCommunicator) -> None:
    mine, second = open_fault_tolerant_communicator(CheckedCommunicator(comm)), open_fault_tolerant_communicator()
    assert can_survive(mine)
    assert can_survive(second)
    if comm.rank == 0:
        mine.revoke()
    assert total(comm) == total(second) == N


def test_what_cannot_be_resilient() -> None:
    alone = open_fault_tolerant_communicator(make_single_rank_communicator())
    assert (alone.agree_on_flags(5), alone.shrink().size, alone.get_failed_ranks()) == (5, 1, ())
    assert not can_survive(alone)
    with pytest.raises(ConfigError, match=r"ranks of FakeCommunicator\(rank=0, size=2\) cannot die or come back: use"):
        open_fault_tolerant_communicator(FakeCommunicator(0, 2))
    with pytest.raises(ConfigError, match="neither an mpi4py communicator nor an fsdpx Communicator"):
        open_fault_tolerant_communicator(7)


def test_a_loss_can_be_sent() -> None:
    error = pickle.loads(pickle.dumps(RankLost("barrier: ranks 1, 2 have died", (1, 2))))
    assert (str(error), error.ranks) == ("barrier: ranks 1, 2 have died", (1, 2))
