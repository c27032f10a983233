"""Segments: groups become runs, partial sums become sums over whole parameters."""

import math

import numpy as np
import pytest
from amount import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from fsdpx import optim
from fsdpx.array.sums import PARTS, expansion, padded
from fsdpx.errors import ConfigError
from fsdpx.optim import Run, Segment, Segments


def segments(*names, exchange=None):
    items = (Segment(n, 10 * i, 10 * i + 10, 0, 10, norm="norm" in n) for i, n in enumerate(names))
    return Segments(tuple(items), exchange)


def test_neighbours_with_equal_hyperparameters_are_one_run():
    held = segments("0.weight", "1.weight", "1.bias", "norm.weight", "2.weight")
    assert held.runs({}) == (Run(0, 50),)
    assert held.runs(optim.no_decay) == (Run(0, 20), Run(20, 40, weight_decay=0.0), Run(40, 50))
    assert Segments(()).runs(optim.no_decay) == ()


def test_the_first_pattern_that_matches_wins():
    groups = {"*.weight": {"lr_scale": 2.0}, "1.*": {"lr_scale": 3.0, "weight_decay": 0.5}}
    runs = segments("1.weight", "1.bias").runs(groups)
    assert runs == (Run(0, 10, lr_scale=2.0), Run(10, 20, lr_scale=3.0, weight_decay=0.5))


@pytest.mark.parametrize(
    ("name", "norm", "decays"),
    [("bn1.scale", True, False), ("0.bias", False, False), ("bias", False, False), ("normal.weight", False, True)],
)
def test_no_decay_knows_norms_by_what_they_are(name, norm, decays):
    held = Segments((Segment(name, 0, 10, 0, 10, norm=norm),))
    for part in (held, held.blocks(4)[1][1]):
        (run,) = part.runs(optim.no_decay)
        assert run.decay(0.1) == (0.1 if decays else 0.0)


def test_sums_go_over_all_shards_of_a_parameter():
    def exchange(mine, width):
        theirs = {"b": [*padded([5.0]), *padded([50.0])], "c": [*padded([7.0]), *padded([70.0])]}
        assert all(len(row) == width for row in (*mine.values(), *theirs.values()))
        return {name: [rows[name] for rows in (mine, theirs) if name in rows] for name in "abc"}

    held = segments("a", "b", exchange=exchange)
    assert held.square_sums([[1.0, 2.0], [3.0]], [[10.0], [20.0]]) == ([3.0, 8.0], [10.0, 70.0])


def test_an_empty_shard_takes_part_in_the_exchange():
    exchanged = []
    assert Segments((), lambda *told: exchanged.append(told) or {}).square_sums([], []) == ([], [])
    assert exchanged == [({}, 2 * PARTS)]


@settings(derandomize=True, database=None, deadline=None, max_examples=examples(60))
@given(values=st.lists(st.floats(0, 1e300), max_size=40), cut=st.integers(0, 40))
def test_sums_do_not_see_the_shards(values, cut):
    parts = [*expansion(values[:cut]), *expansion(values[cut:])]
    assert math.fsum(parts) == math.fsum(values)


def test_sums_that_are_not_finite_stay_so():
    assert expansion([1.0, math.inf]) == [math.inf]
    assert expansion([1e308, 1e308, 1e308]) == [math.inf]
    assert np.isnan(expansion([math.nan, 1.0])).all()
    assert segments("a").square_sums([[1e308, 1e308]]) == ([math.inf],)


def test_gaps_and_places_outside_are_refused():
    with pytest.raises(ConfigError, match="the first segment 'a' starts at 1, not at 0"):
        Segments((Segment("a", 1, 2, 0, 1),))
    with pytest.raises(ConfigError, match="segment 'b' starts at 3, but 'a' before it ends at 2"):
        Segments((Segment("a", 0, 2, 0, 2), Segment("b", 3, 4, 0, 1)))
    with pytest.raises(ConfigError, match="does not lie inside its shard and its parameter"):
        Segment("a", 0, 5, 2, 6)
