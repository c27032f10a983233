"""Comparisons name the worst element: its tensor, place and two values."""

import numpy as np
import pytest
from bits import Bits, explained

from fsdpx.testing import assert_close, find_difference

WANT = {"a": np.arange(6.0).reshape(2, 3), "b": np.ones(4)}


def changed(name, index, value):
    got = {key: array.copy() for key, array in WANT.items()}
    got[name][index] = value
    return got


def test_the_worst_element_is_named():
    got = changed("a", (1, 2), 5.5)
    got["b"][3] = 1.01
    with pytest.raises(AssertionError) as error:
        assert_close(got, WANT, 1e-3, rank=1, step=7)
    assert str(error.value) == (
        "rank 1, step 7, a[1, 2] is 5.5 and should be 5.0: 0.1 of the tensor's largest element (1 of 6 elements "
        "differ, as in 1 more tensors); allowed is 0.001"
    )
    assert_close(got, WANT, 0.1)


@pytest.mark.parametrize("value", [np.nextafter(1.0, 2), np.nan, np.inf])
def test_without_a_tolerance_one_bit_is_a_difference(value):
    found = find_difference(changed("b", 2, value), WANT)
    assert (found.tensor, found.index, found.want, found.beyond) == ("b", (2,), 1.0, 1)
    assert_close(changed("b", 2, 1.0), WANT)


def test_the_sign_of_zero_is_a_bit():
    assert find_difference(changed("a", (0, 0), -0.0), WANT).index == (0, 0)
    assert_close(changed("a", (0, 0), -0.0), WANT, 1e-15)


def test_numbers_that_are_none_agree_with_each_other_alone():
    broken = changed("b", 0, np.nan)
    assert_close(broken, broken, 0.5)
    with pytest.raises(AssertionError, match=r"b\[0\] is nan and should be 1.0: inf"):
        assert_close(broken, WANT, 0.5)


def test_sequences_and_numbers_have_places_as_names():
    with pytest.raises(AssertionError, match=r"^1/b is 3.0 and should be 2.0"):
        assert_close([{"b": 1.0}, {"b": 3.0}], [{"b": 1.0}, {"b": 2.0}])


@pytest.mark.parametrize(
    ("got", "words"),
    [
        ({"a": WANT["a"]}, r"these are there: \['a'\]"),
        ({"a": WANT["a"].T, "b": WANT["b"]}, r"a has shape \(3, 2\)"),
        ({"a": WANT["a"].astype("f4"), "b": WANT["b"]}, "a has dtype float32"),
    ],
)
def test_what_cannot_be_compared_is_named(got, words):
    with pytest.raises(AssertionError, match=words):
        assert_close(got, WANT)


def test_tests_that_compare_bits_name_the_element(request):
    if request.config.getoption("assertmode") == "plain":
        pytest.skip("asserts show nothing here")
    want, got = Bits(WANT), Bits(changed("a", (0, 1), 2.0))
    assert want == Bits(WANT)
    for left, right in [((1, got), (1, want)), ({got}, {want}), ({"x": [got]}, {"x": [want]})]:
        (line,) = explained(left, right)
        assert line.startswith("a[0, 1] is 2.0 and should be 1.0")
    with pytest.raises(AssertionError, match=r"a\[0, 1\] is 2.0 and should be 1.0"):
        assert got == want
