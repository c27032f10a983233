"""Ranks that step at their own speed: asynchronous SGD, gossip and elastic averaging, on thread ranks."""

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from bits import Bits, bits
from models import part
from threads import on_ranks

import fsdpx
from fsdpx import AsyncSGD, GossipSGD, Mesh, nn, optim, spawn
from fsdpx.core.comm import Communicator, FakeCommunicator, RankDied
from fsdpx.core.comm.communicator import CommunicatorWrapper
from fsdpx.errors import ConfigError, DataError
from fsdpx.testing import VirtualTime

ROWS = 24
X, Y = (np.random.default_rng(7).standard_normal((ROWS, n)).astype(np.float32) for n in (6, 3))


def make(comm: Communicator, strategy: Any, **options: Any) -> fsdpx.Trainer:
    model = nn.Sequential(nn.Linear(6, 20), nn.GELU(), nn.Linear(20, 13), nn.GELU(), nn.Linear(13, 3))
    options = {"optimizer": optim.AdamW(lr=1e-2), "group_bytes": 256, "loss": nn.MSELoss(), **options}
    return model.as_distributed(comm=comm, strategy=strategy, **options)


def take_own_part(trainer: fsdpx.Trainer) -> tuple[np.ndarray, np.ndarray]:
    mine = part(trainer.data_group, ROWS)
    return X[mine], Y[mine]


def train(trainer: fsdpx.Trainer, steps: int) -> Bits:
    for _ in range(steps):
        trainer.step(*take_own_part(trainer))
    trainer.call_runner.wait_for_last_step()
    return bits(trainer)


@pytest.mark.parametrize("optimizer", [optim.SGD(lr=0.05), optim.SGD(lr=0.05, momentum=0.9), optim.AdamW(lr=1e-2)])
@pytest.mark.parametrize("size", [1, 3])
def test_staleness_0_is_synchronous_training_bit_for_bit(size: int, optimizer: Any) -> None:
    seen = [
        spawn(lambda c, s=s: train(make(c, s, optimizer=optimizer, microbatches=2), 4), size, delays=delays)
        for s, delays in (("zero1", None), (AsyncSGD(staleness=0), 3))
    ]
    assert len({one for ranks in seen for one in ranks}) == 1


def replay(strategy: Any, seconds: tuple[float, ...], seed: int = 0, steps: int = 6) -> tuple[set[str], VirtualTime]:
    virtual = VirtualTime(seconds, seed, jitter=0.5)
    found = spawn(lambda c: train(make(virtual.wrap_communicator(c), strategy), steps), len(seconds), timeout=30)
    return set(found), virtual


@pytest.mark.parametrize("strategy", ["async", AsyncSGD(staleness=2, by_staleness=True), "gossip"])
def test_virtual_time_gives_one_exact_trajectory(strategy: Any) -> None:
    (one,), first = replay(strategy, (1, 1.3, 2), seed=5)
    (two,), second = replay(strategy, (1, 1.3, 2), seed=5)
    (other,), _ = replay(strategy, (1, 1.3, 2), seed=6)
    assert one == two != other
    assert first.events == second.events == sorted(first.events, key=lambda event: event[0])


@pytest.mark.parametrize("strategy", ["async", "gossip"])
def test_a_slow_rank_does_not_slow_the_others(strategy: str) -> None:
    """Steps of each rank when rank 2, five times as slow, has made 3; and the largest staleness found there."""
    virtual = VirtualTime((1, 1, 5))

    def run(comm: Communicator) -> tuple[int, int]:
        trainer = make(virtual.wrap_communicator(comm), strategy)
        while virtual.get_time_of_rank(comm.rank) < 15:
            trainer.step(*take_own_part(trainer))
        trainer.call_runner.wait_for_last_step()
        return trainer.global_step, max(trainer.inspect.placement.sync_policy.staleness_counts, default=0)

    (first, _), (second, _), (slow, stale) = spawn(run, 3, timeout=30)
    assert slow in (3, 4)
    assert min(first, second) >= 14
    assert stale >= 8 or strategy != "async"


def test_staleness_bounds_how_far_a_rank_is_ahead() -> None:
    virtual, strategy = VirtualTime((1, 5)), AsyncSGD(staleness=2)
    spawn(lambda c: train(make(virtual.wrap_communicator(c), strategy, group_bytes=1 << 20), 8), 2, timeout=30)
    done, ahead = [0.0, 0.0], list[float]()
    for _, rank, kind in virtual.events:
        if kind == "pull":  # it begins a step
            ahead.append(done[rank] - done[1 - rank])
        done[rank] += 0.5 * (kind == "push")  # to two holders
    assert max(ahead) == 2


def test_the_rate_falls_with_staleness() -> None:
    """One element, and a loss whose gradient does not depend on it: what is missing is what staleness took."""

    def run(comm: Communicator, strategy: AsyncSGD) -> float:
        model, options = nn.Sequential(nn.Linear(1, 1, bias=False)), {"strategy": strategy, "precision": "float64"}
        trainer = model.as_distributed(comm=comm, loss=nn.L1Loss(), optimizer=optim.SGD(lr=1.0), **options)
        before = float(trainer.parameters()["0.weight"][0, 0])
        trainer.call_runner.wait_for_last_step()
        trainer.step(np.ones((1, 1)), np.full((1, 1), -100.0))
        trainer.call_runner.wait_for_last_step()
        return before - float(trainer.parameters()["0.weight"][0, 0])

    for by_staleness, expected in ((False, 3.0), (True, 1 + 1 / 2 + 1 / 3)):
        virtual, strategy = VirtualTime((1, 2, 3), jitter=0), AsyncSGD(by_staleness=by_staleness)
        found = spawn(lambda c, v=virtual, s=strategy: run(v.wrap_communicator(c), s), 3)
        assert found == pytest.approx([expected] * 3)


def test_gossip_keeps_the_mean_of_all_models() -> None:
    """With a rate of 0 nothing but averaging moves them; the last rank to start from something else is drawn near."""

    def run(comm: Communicator) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        trainer = make(comm, GossipSGD(), optimizer=optim.SGD(lr=0.0), precision="float64", group_bytes=1 << 20)
        own = trainer.inspect.engine.state.ledger.get_array("master", 0)
        own += comm.rank
        trainer.call_runner.wait_for_last_step()
        before, mean = own.copy(), trainer.parameters()["0.weight"]
        trainer.call_runner.wait_for_last_step()
        train(trainer, 30)
        return mean, trainer.parameters()["0.weight"], abs(own - before)

    found = spawn(run, 4)
    for before, after, moved in found:
        np.testing.assert_allclose(after, before, rtol=1e-14)
        assert moved.min() > 0.4


def test_parameters_evaluate_save_and_load_speak_of_what_ranks_have_in_common(tmp_path: Any) -> None:
    def run(comm: Communicator, name: str) -> None:
        trainer = make(comm, name)
        before = train(trainer, 5)
        whole, batch = trainer.parameters(), take_own_part(trainer)
        loss = trainer.evaluate(*batch)
        own = trainer.inspect.engine.state.ledger.get_array("master", 0).copy()
        trainer.save(tmp_path / name)
        assert (trainer.inspect.engine.state.ledger.get_array("master", 0) == own).all()
        trainer.call_runner.wait_for_last_step()  # from here on others change it
        train(trainer, 2)
        trainer.load(tmp_path / name)
        assert trainer.global_step == 5
        assert bits(trainer) == before
        assert trainer.evaluate(*batch) == loss
        train(trainer, 1)
        plain = make(comm, "fsdp")
        plain.load(tmp_path / name)  # any strategy goes on from it
        assert bits(plain) == before
        assert plain.evaluate(*batch) == pytest.approx(loss)
        trainer.load_parameters(whole)
        assert bits(trainer) == before
        for one in (plain, trainer):
            one.close()

    for name in ("async", "gossip"):
        spawn(run, 2, name)


def test_fit_lets_ranks_have_different_numbers_of_batches() -> None:
    """Without validation they meet at the end alone; at the best weights, where they were asked for."""

    def run(comm: Communicator) -> tuple[int, float, float]:
        trainer = make(comm, "async")
        batch = take_own_part(trainer)
        before = trainer.evaluate(*batch)
        history = trainer.fit([batch] * (4 + 3 * comm.rank), epochs=3, progress=False)
        trainer.fit([batch] * 4, epochs=2, validation=[batch], every=4, patience=9, progress=False)
        return history.steps, before, trainer.evaluate(*batch)

    found = spawn(run, 2)
    assert [steps for steps, _, _ in found] == [12, 21]
    assert found[0][1:] == found[1][1:]
    assert found[0][2] < found[0][1]


@pytest.mark.parametrize("strategy", ["async", AsyncSGD(staleness=2), "gossip"])
def test_a_rank_that_dies_costs_the_others_nothing(strategy: Any) -> None:
    """They make all of their steps, and have one model in the end; what the dead one held is still there."""

    def run(comm: Communicator) -> tuple[int, Bits]:
        trainer = make(comm, strategy)
        for step in range(12):
            if comm.rank == 1 and step == 3:
                raise RankDied
            trainer.step(*take_own_part(trainer))
        trainer.call_runner.wait_for_last_step()
        return trainer.global_step, bits(trainer)

    first, dead, last = spawn(run, 3, survive=True, timeout=30)
    assert dead is None
    assert first == last
    assert first[0] == 12


def test_staleness_0_needs_all_ranks() -> None:
    with pytest.raises(DataError, match="rank 0 takes no more steps, and staleness=0 needs all ranks in each"):
        spawn(lambda comm: train(make(comm, AsyncSGD(staleness=0)), 2 + comm.rank), 2)


def test_a_rank_that_adds_its_gradient_and_then_stops_is_not_missed() -> None:
    """The second rank looks whose turn it is, the first adds its gradient, takes its last step and stops, and only then
    does the second see that it has stopped."""

    def run(comm: Communicator) -> Bits:
        trainer = make(comm, AsyncSGD(staleness=0))
        policy = trainer.inspect.placement.sync_policy
        look = policy.memory.read_page_counter

        def look_and_sleep_until_the_other_stops(rank: int, page: int, index: int) -> int:
            found = look(rank, page, index)
            while found == 0 and policy.window.read_word(0, 0) < 1 << 62:
                pass
            return found

        if comm.rank == 1:
            policy.memory.read_page_counter = look_and_sleep_until_the_other_stops
        return train(trainer, 1)

    assert len(set(spawn(run, 2, timeout=30))) == 1


def test_a_rank_that_acts_and_returns_is_not_missed() -> None:
    """A rank finds the other missing; the other acts and returns; only then does the first look who returned."""

    def run(comm: Communicator) -> None:
        window = comm.window(8)
        comm.barrier()
        if comm.rank == 1:
            window.write_word(0, 1)
            return
        looks = [[1], []]

        def missing() -> list[int]:
            while len(looks) == 2 and 1 not in comm._group.world.returned:
                pass
            return looks.pop(0) if looks else []

        window.wait_until_none_missing(missing, "the word of rank 1")

    spawn(run, 2, timeout=30)


@pytest.mark.parametrize(
    ("options", "wrong"),
    [
        ({"mesh": Mesh(pipe=2)}, "the pipe axis of 2 ranks needs ranks that step together; leave it out"),
        ({"mesh": Mesh(tensor=2), "tensor_plan": {"0": nn.sharding.ColumnParallel, "2": nn.sharding.RowParallel}},
         "the tensor axis of 2 ranks needs ranks that step together; leave it out"),
        ({"mesh": Mesh(replica=2)}, "there is no replica axis, but the mesh is pipe=1 x replica=2"),
        ({"reproducible_chunks": 4},
         "reproducible_chunks=4 adds the gradients of all ranks in each step; leave reproducible_chunks out"),
        ({"compression": "int8"},
         "compression='int8' compresses sums over ranks, which are not computed here; leave compression out"),
        ({"clip_norm": 1.0}, "clip_norm=1.0: no rank knows the norm of the sum before it updates"),
        ({"precision": "fp16"}, "loss_scale='dynamic' needs all ranks to step together; use a number"),
        ({"precision": "bf16-true"}, "16-bit masters: parameters that several ranks update are float32"),
        ({"precision": fsdpx.Precision(reduce="bf16")}, "reduce='bf16' sets a message format"),
        ({"elastic": True}, "elastic ranks take every step together; leave elastic out"),
    ],
)  # fmt: skip
@on_ranks(2)
def test_what_ranks_apart_cannot_serve_is_named_on_all_ranks(comm: Any, options: Any, wrong: str) -> None:
    with pytest.raises(ConfigError, match=r"strategy=AsyncSGD\(staleness=0, by_staleness=False\): " + wrong):
        make(comm, AsyncSGD(staleness=0), **options)


@on_ranks(2)
def test_no_strategy_of_ranks_apart_serves_a_pipe(comm: Communicator) -> None:
    for strategy, said in (("async", r"AsyncSGD\(staleness=None, .*\)"), ("gossip", r"GossipSGD\(sync_every=1\)")):
        words = rf"strategy={said}: the pipe axis of 2 ranks needs ranks that step together"
        with pytest.raises(ConfigError, match=words):
            make(comm, strategy, mesh=Mesh(pipe=2))


class Without(CommunicatorWrapper):
    """Of a backend without one-sided operations."""

    window = Communicator.window


@pytest.mark.parametrize("strategy", ["async", "gossip"])
@on_ranks(2)
def test_ranks_without_one_sided_operations_are_told_on_all_ranks(comm: Communicator, strategy: str) -> None:
    with pytest.raises(ConfigError, match=r"a window on .*, which has no one-sided operations: use "):
        make(Without(comm), strategy)


@pytest.mark.parametrize(
    ("wrong", "text"),
    [
        (lambda: AsyncSGD(staleness=-1),
         "AsyncSGD(staleness=-1): a number of steps, 0 or more, or None for any number"),
        (lambda: AsyncSGD(by_staleness=1), "AsyncSGD(by_staleness=1): choose True or False"),
        (lambda: GossipSGD(sync_every=0), "GossipSGD(sync_every=0): a number of steps, 1 or more"),
        (lambda: make(FakeCommunicator(0, 2), "async"), "a window on FakeCommunicator(rank=0, size=2), which has no"),
    ],
)  # fmt: skip
def test_bad_choices_are_named(wrong: Callable[[], Any], text: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(text)):
        wrong()


@on_ranks(2)
def test_what_is_no_whole_step_is_refused(comm: Communicator) -> None:
    trainer = make(comm, "async", optimizer=optim.LAMB())
    with pytest.raises(ConfigError, match="accumulate: ranks that step at their own speed train in complete steps"):
        trainer.accumulate(X, Y)
    words = "needs norms of full parameters, of which asynchronous ranks have only shards"
    with pytest.raises(ConfigError, match=words):
        trainer.step(X, Y)


# -- processes: through the memory of a machine, and through windows of MPI


@pytest.mark.world
@pytest.mark.mpi
def test_staleness_0_among_processes(world: Communicator) -> None:
    found = []
    for strategy in ("zero1", AsyncSGD(staleness=0)):
        with make(world, strategy) as trainer:
            found.append(train(trainer, 3))
    if world.size <= 2:  # of more, MPI libraries add in another order
        assert found[0] == found[1]
    assert len(set(world.all_gather_object(found[1]))) == 1


@pytest.mark.world
@pytest.mark.mpi
@pytest.mark.parametrize("strategy", ["async", AsyncSGD(staleness=1), GossipSGD()])
def test_ranks_make_different_numbers_of_steps_and_have_one_model(world: Communicator, strategy: Any) -> None:
    with make(world, strategy) as trainer:
        batch = take_own_part(trainer)
        first = trainer.evaluate(*batch)
        found = train(trainer, 6 + 2 * world.rank)
        assert len(set(world.all_gather_object(found))) == 1
        assert -np.inf < trainer.evaluate(*batch) < first
