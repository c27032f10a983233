"""Dropout in one pass makes the numbers of `array.random` itself, bit for bit, at any place of a stream."""

import numpy as np
import pytest
from amount import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from fsdpx.array import kernels
from fsdpx.array.kernels.activation import threshold
from fsdpx.array.random import Random, Stretch

SETTINGS = settings(derandomize=True, database=None, deadline=None, max_examples=examples(80))
SHARES = st.sampled_from([0.0, 1e-9, 0.1, 0.25, 0.3, 0.5, 0.9, 1.0 - 2.0**-24, 1.0])


@SETTINGS
@given(st.integers(0, 2**60), st.integers(0, 70), SHARES, st.sampled_from(["float32", "float64"]), st.integers(0, 5))
def test_compiled_and_plain_drop_the_same(start, size, p, kind, seed):
    x = np.random.default_rng(seed).normal(size=size).astype(kind)
    x[: size // 9] = -0.0
    numbers = Stretch(seed, "blocks.0@3", start, start + size)
    with kernels.use("plain"):
        y, keep = kernels.drop(np, x, numbers, p)
    with kernels.use("numba"):
        y2, keep2 = kernels.drop(np, x, numbers, p)
        backward = kernels.drop_backward(np, x, keep2, p)
    np.testing.assert_array_equal(keep2, keep, strict=True)
    assert y.tobytes() == y2.tobytes() == backward.tobytes()


@SETTINGS
@given(st.one_of(SHARES, st.floats(0.0, 1.0)))
def test_the_threshold_is_the_comparison_in_float32(p):
    least = threshold(p)
    for number in range(max(least - 2, 0), min(least + 2, 2**24)):
        assert (np.float32(number) * np.float32(2.0**-24) >= np.float32(p)) == (number >= least)


def test_many_pieces_of_the_nearest_cache():
    numbers = Stretch(1, "a", 5, 5 + 20_001)
    y, keep = kernels.drop(np, np.ones(20_001), numbers, 0.3)
    np.testing.assert_array_equal(keep, numbers.fractions(np) >= np.float32(0.3))
    np.testing.assert_array_equal(y, keep / 0.7)


def test_what_is_kept_depends_on_the_global_row(mode):
    x = np.ones((6, 5, 2), np.float32)
    _, whole = kernels.drop(np, x, Random(3, "d", step=2).stretch(x.shape), 0.5)
    for row in range(0, 6, 2):
        _, part = kernels.drop(np, x[:2], Random(3, "d", step=2, row=row).stretch((2, 5, 2)), 0.5)
        np.testing.assert_array_equal(part, whole[row : row + 2])


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_nan_is_seen_where_kept(mode, bad):
    x = np.full(64, bad, np.float32)
    with np.errstate(invalid="ignore"):
        y, keep = kernels.drop(np, x, Stretch(0, "a", 0, 64), 0.5)
    assert not np.isfinite(y[keep]).any()
