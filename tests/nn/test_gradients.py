"""Blank gradients are zero when they are read, and are not zeroed when they are written in full."""

import numpy as np
import pytest

from fsdpx.nn.gradients import Entries, Gradients, destination
from fsdpx.nn.layer import branches


def blank(*names: str) -> Gradients:
    entries = Entries({name: np.full(3, np.nan) for name in names})
    entries.blank()
    return Gradients(entries)


def test_adding_in_place_begins_at_zero() -> None:
    g = blank("weight")
    g["weight"] += 1
    g["weight"] += 1
    np.testing.assert_array_equal(g["weight"], [2, 2, 2])


@pytest.mark.parametrize(
    "look", [lambda g: g["a"], lambda g: g.get("a"), lambda g: dict(g)["a"], lambda g: next(iter(g.values()))]
)
def test_every_way_to_look_sees_zeros(look) -> None:
    np.testing.assert_array_equal(look(blank("a")), [0, 0, 0])


def test_asking_for_names_writes_nothing() -> None:
    g = blank("a", "b")
    assert "a" in g
    assert "c" not in g
    assert list(g) == ["a", "b"]
    assert len(g) == 2
    assert all(np.isnan(entry.array).all() for entry in g.entries.values())


def test_a_destination_is_written_first_and_added_to_later() -> None:
    g = blank("a")
    array, add = destination(g, "a") or pytest.fail("a is there")
    assert not add
    assert np.isnan(array).all(), "zeros that are written over at once"
    assert (destination(g, "a") or (None, None))[1]
    assert destination(g, "frozen") is None


def test_a_plain_dict_is_always_added_to() -> None:
    array = np.ones(3)
    assert destination({"a": array}, "a") == (array, True)
    assert destination({}, "a") is None


def test_branches_share_entries_and_ties_are_one() -> None:
    g = blank("one.weight", "one.deep.bias")
    parts = g.branches({"two.weight": "one.weight"})
    assert set(parts) == {"one", "two"}
    assert set(branches(parts["one"])) == {"weight", "deep"}
    parts["two"]["weight"] += 1
    parts["one"]["weight"] += 1
    np.testing.assert_array_equal(g["one.weight"], [2, 2, 2])
    assert g.entries["one.deep.bias"].blank


def test_what_was_not_written_is_zero_in_the_end() -> None:
    entries = Entries({"a": np.full(3, np.nan), "b": np.full(3, np.nan)})
    entries.blank()
    Gradients(entries)["a"] += 1
    entries.complete()
    np.testing.assert_array_equal(entries["a"].array, [1, 1, 1])
    np.testing.assert_array_equal(entries["b"].array, [0, 0, 0])
    entries["b"].array[...] = 2
    entries.complete()
    np.testing.assert_array_equal(entries["b"].array, [2, 2, 2])
