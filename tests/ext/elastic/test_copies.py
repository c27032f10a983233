"""Copies in the memory of other ranks: from what is left of a run, any other mesh goes on with the same bits."""

from collections import Counter
from dataclasses import replace
from functools import lru_cache
from itertools import combinations, product
from math import comb, isclose
from types import SimpleNamespace

import numpy as np
import pytest
from amount import few
from assembled import assembled, bits, demand_equal, elements, missing
from hypothesis import given
from hypothesis import strategies as st
from models import distributed, make
from savers import steps as train
from threads import on_ranks

import fsdpx
from fsdpx import Mesh, nn
from fsdpx.core.checkpoint.local_shards import LocalShard, iterate_local_state_shards
from fsdpx.core.checkpoint.scalars import collect_checkpoint_scalars
from fsdpx.core.comm import RankDied
from fsdpx.core.state.ledger import list_checkpoint_tensors
from fsdpx.errors import RankLost
from fsdpx.ext.elastic.copies import StateCopies, assign_copy_holders_to_each_rank, form_state_backup_groups
from fsdpx.ext.elastic.reshard import describe_shard, iterate_up_to_date_shards, reshard_arrays

FROM = {
    "fsdp 2": (Mesh(), "fsdp", 2),
    "fsdp 4": (Mesh(), "fsdp", 4),
    "zero1 3": (Mesh(), "zero1", 3),
    "zero2 5": (Mesh(), "zero2", 5),
    "pipe 2 shard 2": (Mesh(shard=2, pipe=2), "fsdp", 4),
    "tensor 2 shard 2": (Mesh(shard=2, tensor=2), "fsdp", 4),
    "pipe 2 tensor 2": (Mesh(shard=1, pipe=2, tensor=2), "ddp", 4),
}
"""Mesh, strategy, ranks: where replicas are not copies enough."""
REPLICATED = {
    "ddp 3": (Mesh(), "ddp", 3),
    "hybrid 4": (Mesh(replica=2, shard=2), "hybrid", 4),
    "replicas of pipes": (Mesh(replica=2, shard=1, pipe=2), "ddp", 4),
}
ALL = FROM | REPLICATED
TO = {
    "one": (Mesh(), "ddp", 1),
    "fsdp 3": (Mesh(), "fsdp", 3),
    "ddp 2": (Mesh(), "ddp", 2),
    "tensor 3": (Mesh(shard=1, tensor=3), "ddp", 3),
    "3D": (Mesh(shard=2, pipe=2, tensor=2), "fsdp", 8),
}


def build(comm, setting, case, seed=3):
    mesh, strategy, _ = setting
    return make(comm, case, strategy, mesh=mesh, group_bytes=600, seed=seed)


def allocated(trainer):
    return int(trainer.report().memory.get("copies for recovery", 0))


def copies_of(comm, trainer, copies=1):
    return StateCopies(comm.subgroup(range(comm.size)), trainer.inspect.engine.state, copies)


def arrive(copies, comm):
    while not all(comm.all_gather_object(copies.progress_and_test_transfers())):
        pass


def copied(parts):
    return [replace(one, array=np.array(one.array)) for one in parts]


def generation(copies, comm, trainer):
    copies.start_copying_to_buddies(collect_checkpoint_scalars(trainer.inspect.engine.state, None, None))
    arrive(copies, comm)
    copies.promote_generation()


@lru_cache
def left_by(name, case, copies=1):
    """What a run leaves: the state at its snapshot, and what each rank has of it in copies. It makes a step, a snapshot
    that travels during another one, which changes all that it was taken of."""

    def body(comm):
        trainer = build(comm, ALL[name], case)
        train(trainer, case, 0, 1)
        kept = copies_of(comm, trainer, copies)
        kept.start_copying_to_buddies(collect_checkpoint_scalars(trainer.inspect.engine.state, None, None))
        then = copied(iterate_up_to_date_shards(trainer.inspect.engine.state))
        train(trainer, case, 1, 2)
        arrive(kept, comm)
        kept.promote_generation()
        (found,) = kept.list_complete_snapshots()
        assert (found.step, found.scalars.steps) == (1, 1)
        return then, found.parts, list_checkpoint_tensors(trainer.inspect.placement)

    ranks = fsdpx.spawn(body, ALL[name][2], timeout=60)
    state = assembled(one for then, _, _ in ranks for one in then)
    return SimpleNamespace(state=state, wanted=ranks[0][2], parts=[parts for _, parts, _ in ranks])


@lru_cache
def wanted_by(to, case):
    """What each rank of a new trainer holds."""

    def body(comm):
        return copied(iterate_local_state_shards(build(comm, TO[to], case, seed=99).inspect.engine.state))

    return fsdpx.spawn(body, TO[to][2], timeout=60)


def move(parts, to, case):
    """The state of a new trainer on other ranks is what is left; ranks that it does not use only give."""
    want = [copied(some) for some in wanted_by(to, case)]
    have, takes = (some + [[] for _ in range(len(other) - len(some))] for some, other in ((parts, want), (want, parts)))
    fsdpx.spawn(lambda comm: reshard_arrays(comm, have[comm.rank], takes[comm.rank]), len(have), timeout=60)
    return want


def demand_whole(name, case, dead, to, copies=1):
    left = left_by(name, case, copies)
    survivors = [parts for rank, parts in enumerate(left.parts) if rank not in dead]
    assert missing(survivors, left.wanted) == []
    for want in move(survivors, to, case):
        demand_equal(want, left.state)


@pytest.mark.parametrize("name", few(FROM, 4))
def test_any_rank_may_be_lost_and_any_mesh_goes_on(name):
    for dead, to in zip(range(FROM[name][2]), [*TO] * 2, strict=False):
        demand_whole(name, "wide", (dead,), to)


@pytest.mark.parametrize("to", few(TO, 3))
def test_nobody_lost(to):
    demand_whole("fsdp 4", "wide", (), to)
    demand_whole("pipe 2 tensor 2", "wide", (), to)


@pytest.mark.parametrize("name", ["fsdp 4", "pipe 2 shard 2"])
def test_one_rank_of_every_pair_may_be_lost(name):
    for dead in product(*form_state_backup_groups(["here"] * 4, 1)):
        demand_whole(name, "gpt", dead, "fsdp 3")


def test_two_copies_outlast_any_two_losses():
    for first in range(5):
        for second in range(first):
            demand_whole("zero2 5", "mlp", (first, second), "ddp 2", copies=2)


def test_replicas_and_copies_together():
    """hybrid, two replicas: enough for one copy, not for two."""
    for dead in ((0, 1), (0, 2), (1, 3)):
        demand_whole("hybrid 4", "norms", dead, "fsdp 3", copies=2)


@pytest.mark.parametrize("name", ["fsdp 2", "pipe 2 shard 2"])
def test_running_statistics_are_those_of_the_stage_that_moves_them(name):
    demand_whole(name, "norms", (0,), "one")
    assert np.abs(left_by(name, "norms").state["1.running_mean"]).max() > 0


@on_ranks(2)
def test_each_stage_has_the_running_statistics_of_its_own_layers(comm):
    model = nn.Sequential(nn.BatchNorm(3), nn.Linear(3, 3), nn.Linear(3, 3), nn.BatchNorm(3))
    trainer = distributed(model, comm, mesh=Mesh(pipe=2), microbatches=1, tune=False)
    names = [part.name for part in iterate_up_to_date_shards(trainer.inspect.engine.state)]
    assert [name for name in names if name.endswith("running_mean")] == [f"{[0, 3][comm.rank]}.running_mean"]


@pytest.mark.parametrize("name", ["fsdp 4", "tensor 2 shard 2", "pipe 2 tensor 2"])
def test_what_is_gone_with_a_rank_and_its_buddy_is_named(name):
    left, count = left_by(name, "wide"), FROM[name][2]
    (buddy,) = assign_copy_holders_to_each_rank(["here"] * count, 1)[0]
    survivors = [parts for rank, parts in enumerate(left.parts) if rank not in (0, buddy)]
    known = {key: np.zeros(spec.size, bool) for key, spec in left.wanted.items()}
    for one in (one for parts in survivors for one in parts):
        known[one.name][elements(one)] = True
    said = missing(survivors, left.wanted)
    assert said
    assert [text.partition(":")[0] for text in said] == [key for key, there in known.items() if not there.all()]


@pytest.mark.parametrize("name", REPLICATED)
def test_replicas_are_the_copies(name):
    def body(comm):
        trainer = build(comm, REPLICATED[name], "mlp")
        kept = copies_of(comm, trainer)
        train(trainer, "mlp", 0, 1)
        generation(kept, comm, trainer)
        assert (kept.needed, kept.list_complete_snapshots(), kept.nbytes, allocated(trainer)) == (False, [], 0, 0)
        return list(iterate_up_to_date_shards(trainer.inspect.engine.state))

    ranks = fsdpx.spawn(body, REPLICATED[name][2], timeout=60)
    state = assembled(one for parts in ranks for one in parts)
    for dead in range(len(ranks)):
        for want in move(ranks[:dead] + ranks[dead + 1 :], "fsdp 3", "mlp"):
            demand_equal(want, state)


@pytest.mark.parametrize("name", ["fsdp 2", "zero1 3", "zero2 5"])
@pytest.mark.parametrize("copies", [1, 2])
def test_memory_is_that_of_the_formula(name, copies):
    def body(comm):
        trainer = build(comm, FROM[name], "mlp")
        kept = copies_of(comm, trainer, copies)
        found = [allocated(trainer)]
        for _ in range(4):
            generation(kept, comm, trainer)
            found.append(allocated(trainer))
        assert found == [0, kept.nbytes // 2, kept.nbytes, kept.nbytes, kept.nbytes]
        return kept.nbytes, [one.array.nbytes for one in iterate_up_to_date_shards(trainer.inspect.engine.state)]

    ranks = fsdpx.spawn(body, FROM[name][2], timeout=60)
    payloads = [nbytes for _, parts in ranks for nbytes in parts]
    held_by_all = 2 * (1 + min(copies, len(ranks) - 1)) * sum(payloads)
    padding = 2 * (1 + copies) * 64 * len(payloads)
    assert held_by_all <= sum(nbytes for nbytes, _ in ranks) < held_by_all + padding


@on_ranks(4, timeout=60, delays=1)
def test_a_snapshot_under_way_harms_no_complete_one(comm):
    trainer = build(comm, FROM["fsdp 4"], "mlp")
    kept, then = copies_of(comm, trainer), {}

    def demand(*steps):
        found = kept.list_complete_snapshots()
        assert [one.step for one in found] == list(steps)
        for have, want in (pair for one in found for pair in zip(one.parts, then[one.step], strict=True)):
            assert describe_shard(have) == describe_shard(want)
            assert np.array_equal(bits(have.array), bits(want.array))

    def step(number):
        train(trainer, "mlp", number, number + 1)
        kept.start_copying_to_buddies(collect_checkpoint_scalars(trainer.inspect.engine.state, None, None))

    def complete():
        arrive(kept, comm)
        kept.promote_generation()
        newest = kept.list_complete_snapshots()[0]
        then[newest.step] = copied(newest.parts)

    demand()
    step(0)
    demand()
    complete()
    demand(1)
    step(1)
    demand(1)  # 2 is under way
    comm.barrier().wait()
    arrive(kept, comm)
    demand(1)  # 2 has arrived, and not all know
    kept.promote_generation()
    then[2] = copied(kept.list_complete_snapshots()[0].parts)
    demand(2, 1)
    step(2)
    demand(2)  # 3 took the place of 1
    arrive(kept, comm)
    kept.abandon_generation()
    demand(2)
    kept.abandon_generation()
    step(3)
    demand(2)
    complete()
    demand(4, 2)
    assert kept.copy_seconds > 0
    assert kept.transfer_seconds >= kept.copy_seconds


@on_ranks(2, timeout=60)
def test_calls_out_of_order_are_refused(comm):
    trainer = build(comm, FROM["fsdp 2"], "mlp")
    kept, state = copies_of(comm, trainer), collect_checkpoint_scalars(trainer.inspect.engine.state, None, None)
    assert kept.progress_and_test_transfers()
    with pytest.raises(AssertionError, match="promote without take"):
        kept.promote_generation()
    kept.start_copying_to_buddies(state, step=7)
    with pytest.raises(AssertionError, match="have not been promoted or abandoned"):
        kept.start_copying_to_buddies(state)
    arrive(kept, comm)
    kept.promote_generation()
    assert [one.step for one in kept.list_complete_snapshots()] == [7]


@pytest.mark.parametrize("dead", [0, 3])
def test_a_rank_that_dies_while_copies_travel(dead):
    """The others hear of it, and go on from the generation before, in new hands."""

    def body(comm):
        trainer = build(comm, FROM["fsdp 4"], "mlp")
        kept = copies_of(comm, trainer)
        train(trainer, "mlp", 0, 1)
        generation(kept, comm, trainer)
        then = copied(iterate_up_to_date_shards(trainer.inspect.engine.state))
        train(trainer, "mlp", 1, 2)
        comm.barrier().wait()
        if comm.rank == dead:
            raise RankDied("in the middle of a snapshot")
        with pytest.raises(RankLost):
            snapshot(kept, trainer, comm)
        kept._comm.revoke()
        comm.revoke()
        kept.abandon_generation()
        left = comm.shrink()
        new = build(left, TO["fsdp 3"], "mlp", seed=99)
        (found,) = kept.list_complete_snapshots()
        want = list(iterate_local_state_shards(new.inspect.engine.state))
        reshard_arrays(left, found.parts, want)
        return then + want

    def snapshot(kept, trainer, comm):
        kept.start_copying_to_buddies(collect_checkpoint_scalars(trainer.inspect.engine.state, None, None))
        while not kept.progress_and_test_transfers():
            pass
        comm.barrier().wait()

    ranks = fsdpx.spawn(body, 4, timeout=60, survive=True)
    assert ranks.pop(dead) is None
    for parts in ranks:
        demand_equal(parts, left_by("fsdp 4", "mlp").state)


def test_a_rank_that_dies_while_state_moves():
    """RankLost on all the others, and the next attempt without it succeeds from the same parts."""
    left = left_by("fsdp 4", "wide")

    def body(comm):
        have = left.parts[comm.rank]
        if comm.rank == 2:
            comm.all_gather_value(([describe_shard(one) for one in have], []))
            raise RankDied("in the middle of recovery")
        values = {key: np.zeros(spec.size) for key, spec in left.wanted.items()}
        want = [LocalShard(key, values[key], 0, spec, 0, 1) for key, spec in left.wanted.items()]
        with pytest.raises(RankLost):
            reshard_arrays(comm, have, want)
        reshard_arrays(comm.shrink(), have, want)
        demand_equal(want, left.state)

    fsdpx.spawn(body, 4, timeout=60, survive=True)


HOSTS = st.lists(st.sampled_from("abcdefg"), min_size=1, max_size=24)


def outlasts(placed, lost):
    """Whether everything is still somewhere."""
    return all(rank not in lost or any(keeper not in lost for keeper in placed[rank]) for rank in range(len(placed)))


def chance(placed, losses):
    every = list(combinations(range(len(placed)), losses))
    return sum(outlasts(placed, lost) for lost in every) / len(every)


@given(hosts=HOSTS, copies=st.integers(0, 6))
def test_copies_are_spread_evenly_over_the_other_ranks_of_small_closed_groups(hosts, copies):
    placed, wanted = assign_copy_holders_to_each_rank(hosts, copies), min(copies, len(hosts) - 1)
    assert len(placed) == len(hosts)
    for rank, holders in enumerate(placed):
        assert len(set(holders)) == wanted
        assert rank not in holders
        assert sum(rank in kept for kept in placed) == wanted
    found = form_state_backup_groups(hosts, copies)
    assert sorted(rank for group in found for rank in group) == list(range(len(hosts)))
    assert all(len(group) == copies + 1 for group in found[:-1])
    assert len(found) == 1 or len(found[-1]) <= 2 * copies + 1
    assert all(set(placed[rank]) < set(group) for group in found for rank in group)


@given(hosts=HOSTS, copies=st.integers(1, 4))
def test_a_group_has_two_ranks_of_a_host_only_if_there_is_no_other_way(hosts, copies):
    count = len(hosts) // (copies + 1)
    hosts = hosts[: count * (copies + 1)]
    many = Counter(hosts)
    for group in form_state_backup_groups(hosts, copies) if count else []:
        assert all(n <= -(-many[host] // count) for host, n in Counter(hosts[rank] for rank in group).items())


@given(hosts=st.integers(2, 6), each=st.integers(1, 5), copies=st.integers(1, 4))
def test_a_host_may_be_lost_whole(hosts, each, copies):
    names = [str(k) for k in range(hosts) for _ in range(each)]
    placed = assign_copy_holders_to_each_rank(names, copies)
    if len(names) % (copies + 1) == 0 and each <= len(names) // (copies + 1):
        for host in set(names):
            assert outlasts(placed, tuple(rank for rank, name in enumerate(names) if name == host))


@pytest.mark.parametrize(("ranks", "losses"), [(8, 2), (8, 3), (8, 4), (16, 2), (16, 3), (16, 4)])
def test_pairs_survive_as_the_formula_says(ranks, losses):
    formula = comb(ranks // 2, losses) * 2**losses / comb(ranks, losses)
    assert isclose(chance(assign_copy_holders_to_each_rank(["one"] * ranks, 1), losses), formula)


@pytest.mark.parametrize(("ranks", "copies", "losses"), [(8, 1, 2), (16, 1, 3), (9, 2, 3), (15, 2, 4), (12, 3, 4)])
def test_groups_survive_more_than_a_ring_of_all(ranks, copies, losses):
    ring = [tuple((rank + k) % ranks for k in range(1, copies + 1)) for rank in range(ranks)]
    placed = assign_copy_holders_to_each_rank(["one"] * ranks, copies)
    assert chance(placed, losses) > chance(ring, losses)
    assert chance(placed, copies) == 1.0
