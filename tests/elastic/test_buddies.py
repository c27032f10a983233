"""Who keeps whose state: evenly, never one's own, on other hosts, and so that random losses are survived."""

from collections import Counter
from itertools import combinations
from math import comb, isclose

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fsdpx.elastic.copies import buddies, groups

HOSTS = st.lists(st.sampled_from("abcdefg"), min_size=1, max_size=24)


def outlasts(placed: list[tuple[int, ...]], lost: tuple[int, ...]) -> bool:
    """Whether everything is still somewhere."""
    return all(rank not in lost or any(keeper not in lost for keeper in placed[rank]) for rank in range(len(placed)))


def chance(placed: list[tuple[int, ...]], losses: int) -> float:
    every = list(combinations(range(len(placed)), losses))
    return sum(outlasts(placed, lost) for lost in every) / len(every)


@given(hosts=HOSTS, copies=st.integers(0, 6))
def test_copies_are_spread_evenly_over_other_ranks(hosts: list[str], copies: int) -> None:
    placed, ranks = buddies(hosts, copies), range(len(hosts))
    wanted = min(copies, len(hosts) - 1)
    for rank in ranks:
        assert len(set(placed[rank])) == wanted
        assert rank not in placed[rank]
        assert sum(rank in kept for kept in placed) == wanted


@given(hosts=HOSTS, copies=st.integers(0, 6))
def test_groups_are_closed_and_as_small_as_can_be(hosts: list[str], copies: int) -> None:
    found, placed = groups(hosts, copies), buddies(hosts, copies)
    assert sorted(rank for group in found for rank in group) == list(range(len(hosts)))
    assert all(len(group) == copies + 1 for group in found[:-1])
    assert len(found) == 1 or len(found[-1]) <= 2 * copies + 1
    assert all(set(placed[rank]) < set(group) for group in found for rank in group)


@given(hosts=HOSTS, copies=st.integers(1, 4))
def test_a_group_has_two_ranks_of_a_host_only_if_there_is_no_other_way(hosts: list[str], copies: int) -> None:
    count = len(hosts) // (copies + 1)
    hosts = hosts[: count * (copies + 1)]
    many = Counter(hosts)
    for group in groups(hosts, copies) if count else []:
        assert all(n <= -(-many[host] // count) for host, n in Counter(hosts[rank] for rank in group).items())


@given(hosts=st.integers(2, 6), each=st.integers(1, 5), copies=st.integers(1, 4))
def test_a_host_may_be_lost_whole(hosts: int, each: int, copies: int) -> None:
    names = [str(k) for k in range(hosts) for _ in range(each)]
    placed = buddies(names, copies)
    if len(names) % (copies + 1) == 0 and each <= len(names) // (copies + 1):
        for host in set(names):
            assert outlasts(placed, tuple(rank for rank, name in enumerate(names) if name == host))


@pytest.mark.parametrize(("ranks", "losses"), [(8, 2), (8, 3), (8, 4), (16, 2), (16, 3), (16, 4)])
def test_pairs_survive_as_the_formula_says(ranks: int, losses: int) -> None:
    formula = comb(ranks // 2, losses) * 2**losses / comb(ranks, losses)
    assert isclose(chance(buddies(["one"] * ranks, 1), losses), formula)


@pytest.mark.parametrize(("ranks", "copies", "losses"), [(8, 1, 2), (16, 1, 3), (9, 2, 3), (15, 2, 4), (12, 3, 4)])
def test_groups_survive_more_than_a_ring_of_all(ranks: int, copies: int, losses: int) -> None:
    ring = [tuple((rank + k) % ranks for k in range(1, copies + 1)) for rank in range(ranks)]
    placed = buddies(["one"] * ranks, copies)
    assert chance(placed, losses) > chance(ring, losses)
    assert chance(placed, copies) == 1.0
