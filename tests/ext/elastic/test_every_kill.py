"""A rank dies at each action that speaks with others, and each rank at some: the others end with the bits of an
undisturbed run. Of the actions of all pages those of the first and the last.
`make thorough`: each rank at each action."""

import pytest
from amount import CHECK, THOROUGH, examples, few, pairs
from hypothesis import given, settings
from hypothesis import strategies as st
from jobs_threads import STEPS, Kill, calm, train
from trials_elastic import POINTS as ANNOUNCED

from fsdpx import ElasticConfig, optim
from fsdpx.core.program import VERBS
from fsdpx.core.program import parse_actions as actions_of

RANKS = {"fsdp": 3, "zero1": 3, "ddp": 3, "hybrid": 4}


def of_outer_pages(actions):
    """Of each verb the actions of its first and its last page, and those of no page."""
    pages = {}
    for action in actions:
        pages.setdefault(action.rstrip("0123456789"), []).append(action)
    return [action for found in pages.values() for action in dict.fromkeys((found[0], found[-1]))]


def speaks(action):
    return bool(VERBS[action.op].moves) or action.op in ("COMMIT", "NORM", "SETTLE")


@pytest.mark.parametrize("strategy", few(RANKS, 6))
def test_every_rank_at_every_action(strategy):
    wanted = calm(strategy, RANKS[strategy])
    each = [a for a in dict.fromkeys(wanted[0].actions) if speaks(actions_of(a)[0])]
    assert {"COMMIT", "NORM", "REDUCE0"} <= set(each)
    assert all(wanted[0].actions.count(a) >= STEPS for a in each)
    tried = each if THOROUGH else of_outer_pages(each)
    leading = [(action, 0) for action in tried] if strategy == "fsdp" and not CHECK else []  # the others are the same
    for action, rank in dict.fromkeys(pairs(few(tried, 4), range(RANKS[strategy])) + leading):
        got = train(RANKS[strategy], [Kill(rank, action, before=2)], strategy)
        where = f"rank {rank} died after {action} of step 3"
        assert len(got) == RANKS[strategy] - 1, where
        assert {one.bits for one in got} == {wanted[0].bits}, where
        assert all(one.losses == wanted[0].losses for one in got), where
        assert [r.lost for r in got[0].recoveries] == [(rank,)], where


def test_replicas_are_copies_enough():
    """No step is made again, and nothing is copied: each rank of DDP has all there is."""
    for action, step in (("NORM", 2), ("UPDATE0", 3)):
        got = train(3, [Kill(1, action, before=2)], "ddp")
        assert [(r.step, r.replayed) for r in got[0].recoveries] == [(step, 0)], action


def test_steps_since_the_last_copies_are_made_again():
    got = train(3, [Kill(1, "GATHER0", before=5)], "fsdp", elastic=ElasticConfig(every=1))
    (happened,) = got[0].recoveries
    assert happened.replayed <= 2
    assert got[0].bits == calm("fsdp", 3)[0].bits


def test_a_partly_updated_state_is_not_gone_on_with():
    """LAMB speaks in its updates: the rank that lives on has made the first when it meets the loss, and takes copies of
    the step before."""
    options = {"optimizer": optim.LAMB(lr=0.01), "elastic": ElasticConfig(every=1)}
    (got,) = train(2, [Kill(0, "UPDATE1", before=2)], **options)
    assert [r.step for r in got.recoveries] == [2]
    assert got.bits == train(2, **options)[0].bits


POINTS = list(ANNOUNCED[1:-1])  # of a recovery itself: neither its begin nor the copies that follow it


@pytest.mark.parametrize("point", few(POINTS, 3))
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_a_rank_dies_during_a_recovery(strategy, point):
    turn = POINTS.index(point)
    leads = (0, 1) if turn % 2 else (3, 0)  # the leading rank dies first, or second
    who = [leads, (2, 3)] if strategy == "fsdp" else [(leads, (2, 3))[turn // 2]]  # or survives
    for first, second in few(who, 3):
        kills = [Kill(first, "REDUCE0", before=2), Kill(second, point)]
        got = train(4, kills, strategy, elastic=ElasticConfig(every=1, copies=2))
        assert len(got) == 2
        assert {one.bits for one in got} == {calm(strategy, 4)[0].bits}
        assert sum(len(r.lost) for r in got[0].recoveries) == 2


@settings(max_examples=examples(15))
@given(
    ranks=st.integers(2, 5), strategy=st.sampled_from(list(RANKS)), every=st.integers(1, 3), data=st.data(),
)  # fmt: skip
def test_any_kills_as_long_as_one_rank_lives(ranks, strategy, every, data):
    wanted = calm(strategy, ranks)
    actions = sorted(set(wanted[0].actions)) + POINTS
    kills = [
        Kill(rank, data.draw(st.sampled_from(actions)), data.draw(st.integers(0, STEPS - 1)))
        for rank in data.draw(st.permutations(range(ranks)))[1:]
    ]
    got = train(ranks, kills, strategy, elastic=ElasticConfig(every=every, copies=ranks - 1))
    assert {one.bits for one in got} == {wanted[0].bits}
    assert all(one.losses == wanted[0].losses for one in got)
