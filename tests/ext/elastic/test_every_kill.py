"""A rank dies at each action that speaks with others, and each rank at some: the others end with the bits of an
undisturbed run. Where parameters are not sharded, of the actions of all pages those of the first and the last.
`make thorough`: each rank at each action."""

from __future__ import annotations

from functools import lru_cache

import pytest
from amount import CHECK, THOROUGH, examples, few, in_full, pairs
from hypothesis import given, settings
from hypothesis import strategies as st
from jobs_threads import STEPS, Kill, train

from fsdpx import ElasticConfig
from fsdpx.core.program import VERBS, Action
from fsdpx.core.program import parse_actions as actions_of

RANKS = {"fsdp": 3, "zero1": 3, "ddp": 3, "hybrid": 4}


@lru_cache
def calm(strategy: str, ranks: int, elastic: ElasticConfig | None = None) -> list:
    return train(ranks, (), strategy, **({"elastic": elastic} if elastic else {}))


def of_outer_pages(actions: list[str]) -> list[str]:
    """Of each verb the actions of its first and its last page, and those of no page."""
    pages: dict[str, list[str]] = {}
    for action in actions:
        pages.setdefault(action.rstrip("0123456789"), []).append(action)
    return [action for found in pages.values() for action in dict.fromkeys((found[0], found[-1]))]


def speaks(action: Action) -> bool:
    return bool(VERBS[action.op].moves) or action.op in ("COMMIT", "NORM", "SETTLE")


@in_full
@pytest.mark.parametrize("strategy", few(RANKS, 6))
def test_every_rank_at_every_action(strategy: str) -> None:
    wanted = calm(strategy, RANKS[strategy])
    each = [a for a in dict.fromkeys(wanted[0].actions) if speaks(actions_of(a)[0])]
    assert {"COMMIT", "NORM", "REDUCE0"} <= set(each)
    assert all(wanted[0].actions.count(a) >= STEPS for a in each)
    outer = each if THOROUGH else of_outer_pages(each)
    kills = pairs(few(each if strategy == "fsdp" else outer, 4), range(RANKS[strategy]))
    leading = [(action, 0) for action in outer] if strategy == "fsdp" and not CHECK else []  # the others are the same
    for action, rank in dict.fromkeys(kills + leading):
        got = train(RANKS[strategy], [Kill(rank, action, before=2)], strategy)
        where = f"rank {rank} died after {action} of step 3"
        assert len(got) == RANKS[strategy] - 1, where
        assert {one.bits for one in got} == {wanted[0].bits}, where
        assert all(one.losses == wanted[0].losses for one in got), where
        assert [r.lost for r in got[0].recoveries] == [(rank,)], where


@in_full
def test_replicas_are_copies_enough() -> None:
    """No step is made again, and nothing is copied: each rank of DDP has all there is."""
    got = train(3, [Kill(1, "NORM", before=3)], "ddp")
    assert [(r.step, r.replayed) for r in got[0].recoveries] == [(3, 0)]
    got = train(3, [Kill(1, "UPDATE0", before=3)], "ddp")
    assert [(r.step, r.replayed) for r in got[0].recoveries] == [(4, 0)]


@in_full
def test_steps_since_the_last_copies_are_made_again() -> None:
    options = {"elastic": ElasticConfig(every=1)}
    got = train(3, [Kill(1, "GATHER0", before=7)], "fsdp", **options)
    (happened,) = got[0].recoveries
    assert happened.replayed <= 2
    assert got[0].bits == calm("fsdp", 3)[0].bits


POINTS = [
    "recovery: the others are found", "recovery: all ranks have said what they hold",
    "recovery: the new trainer is there", "recovery: state has moved",
]  # fmt: skip


@in_full
@pytest.mark.parametrize("point", few(POINTS, 3))
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_a_rank_dies_during_a_recovery(strategy: str, point: str) -> None:
    options = {"elastic": ElasticConfig(every=1, copies=2)}
    wanted, turn = calm(strategy, 4, options["elastic"]), POINTS.index(point) % 3
    who = ((0, 1), (3, 0), (2, 3))  # the leading rank dies first, dies second, or survives
    for first, second in few(who if strategy == "fsdp" else who[turn : turn + 1], 3):
        got = train(4, [Kill(first, "REDUCE0", before=2), Kill(second, point)], strategy, **options)
        assert len(got) == 2
        assert {one.bits for one in got} == {wanted[0].bits}
        assert sum(len(r.lost) for r in got[0].recoveries) == 2


@in_full
@settings(max_examples=examples(15))
@given(
    ranks=st.integers(2, 5), strategy=st.sampled_from(list(RANKS)), every=st.integers(1, 3), data=st.data(),
)  # fmt: skip
def test_any_kills_as_long_as_one_rank_lives(ranks: int, strategy: str, every: int, data: st.DataObject) -> None:
    options = {"elastic": ElasticConfig(every=every, copies=ranks - 1)}
    wanted = train(ranks, (), strategy, **options)
    actions = sorted(set(wanted[0].actions)) + POINTS
    kills = [
        Kill(rank, data.draw(st.sampled_from(actions)), data.draw(st.integers(0, STEPS - 1)))
        for rank in data.draw(st.permutations(range(ranks)))[1:]
    ]
    got = train(ranks, kills, strategy, **options)
    assert {one.bits for one in got} == {wanted[0].bits}
    assert all(one.losses == wanted[0].losses for one in got)
