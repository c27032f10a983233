"""Random numbers that depend on seed and place alone, and dropout that uses them."""

import math
from unittest import mock

import numpy as np
import pytest
from amount import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from fsdpx.core.array import kernels, random, shapes
from fsdpx.core.array.kernels.dropout import dropout_threshold
from fsdpx.core.array.random import NumberRange, Random

SETTINGS = settings(derandomize=True, database=None, deadline=None, max_examples=examples(60))
SIZE, MADE = 700, [random.generate_raw_numbers, random.uniform, random.normal]


@SETTINGS
@given(st.sampled_from(MADE), st.integers(0, SIZE), st.integers(0, SIZE), st.integers(0, 40))
def test_any_range_is_that_slice_of_the_whole(make, a, b, piece):
    start, stop = sorted((a, b))
    whole = make(7, "blocks.0.weight", 0, SIZE)
    with mock.patch.object(random, "PIECE_ELEMENTS", piece + 1):  # the inner cut must not show either
        part = make(7, "blocks.0.weight", start, stop)
    np.testing.assert_array_equal(part, whole[start:stop], strict=True)


def test_far_ranges_need_no_memory():
    far = 10**15
    assert random.normal(0, "w", far, far + 3).shape == (3,)
    np.testing.assert_array_equal(random.uniform(0, "w", far, far + 8)[3:], random.uniform(0, "w", far + 3, far + 8))


def test_these_numbers_never_change():
    # A seed is a promise: checkpoints and papers name it.
    assert random.generate_raw_numbers(0, "a", 0, 2).tolist() == [11458861309023750, 10265110574541474299]
    assert random.random_permutation(3, "epoch 0", 8).tolist() == [1, 0, 4, 5, 2, 6, 3, 7]


def test_streams_differ():
    streams = [random.uniform(s, n, 0, 50) for s, n in ((0, "a"), (1, "a"), (0, "b"), (10, ""), (1, "0"))]
    assert all(not np.any(p == q) for i, p in enumerate(streams) for q in streams[:i])


def test_distributions():
    n = 200_000
    u, z = random.uniform(1, "u", 0, n), random.normal(1, "z", 0, n)
    assert 0.0 <= u.min() <= u.max() < 1.0
    np.testing.assert_allclose([u.mean(), u.var()], [1 / 2, 1 / 12], atol=3e-3)
    np.testing.assert_allclose([z.mean(), z.var(), (z**3).mean(), (z**4).mean()], [0, 1, 0, 3], atol=4e-2)
    assert abs(np.corrcoef(z[:-1], z[1:])[0, 1]) < 1e-2
    assert np.isfinite(z).all()


def test_compiled_and_plain_normal_numbers_agree():
    with kernels.use_mode("plain"):
        plain = random.normal(2, "w", 3, 100_003)
    compiled = random.normal(2, "w", 3, 100_003)
    np.testing.assert_allclose(compiled, plain, rtol=0, atol=1e-14)
    assert (compiled.astype(np.float32) != plain.astype(np.float32)).sum() <= 1


def test_ends_of_the_compiled_transform():
    from fsdpx.core.array.kernels.compiled.normal import _box_muller_into

    top = 2**64 - 1
    fractions = [0, 1 << 11, top, 1 << 63, 1 << 62, 3 << 62, (1 << 61) - 1, 1 << 61, 7 << 61]
    raws = np.array([(u, v) for u in fractions for v in fractions], np.uint64)
    u, v = (raws >> np.uint64(11)).astype(np.float64).T * 2.0**-53
    want = [math.sqrt(-2.0 * math.log(1.0 - a)) * math.cos(2.0 * math.pi * b) for a, b in zip(u, v, strict=True)]
    got = np.empty(len(raws))
    _box_muller_into(raws.reshape(-1), got)
    np.testing.assert_allclose(got, want, rtol=1e-14, atol=1e-14)


def test_permutation():
    order = random.random_permutation(5, "epoch 0", 1000)
    assert sorted(order.tolist()) == list(range(1000))
    assert not np.array_equal(order, random.random_permutation(5, "epoch 1", 1000))
    assert random.random_permutation(5, "empty", 0).size == 0


@pytest.mark.parametrize("make", MADE)
def test_bad_range(make):
    with pytest.raises(ValueError, match=r"must be 0 <= start <= stop"):
        make(0, "w", 5, 3)


def test_layer_numbers_differ_by_path_and_step():
    first = Random(3).child("a").child("b")
    assert first.path == "a.b"
    assert Random(3).child("").path == ""
    others = [Random(3, "a.b", step=1), Random(3, "a"), Random(4, "a.b")]
    assert all(not np.any(first.uniform(np, (9,)) == other.uniform(np, (9,))) for other in others)


def test_shape_only():
    made = Random(0).uniform(shapes, (10**6, 10**6))
    assert (made.shape, made.dtype) == ((10**6, 10**6), np.float32)
    assert Random(0).uniform(np, (0, 4)).shape == (0, 4)


DROPOUT_SETTINGS = settings(derandomize=True, database=None, deadline=None, max_examples=examples(80))
SHARES = st.sampled_from([0.0, 1e-9, 0.1, 0.25, 0.3, 0.5, 0.9, 1.0 - 2.0**-24, 1.0])


@DROPOUT_SETTINGS
@given(st.integers(0, 2**60), st.integers(0, 70), SHARES, st.sampled_from(["float32", "float64"]), st.integers(0, 5))
def test_compiled_and_plain_drop_the_same(start, size, p, kind, seed):
    x = np.random.default_rng(seed).normal(size=size).astype(kind)
    x[: size // 9] = -0.0
    numbers = NumberRange(seed, "blocks.0@3", start, start + size)
    with kernels.use_mode("plain"):
        y, keep = kernels.drop(np, x, numbers, p)
    with kernels.use_mode("numba"):
        y2, keep2 = kernels.drop(np, x, numbers, p)
        backward = kernels.drop_backward(np, x, keep2, p)
    np.testing.assert_array_equal(keep2, keep, strict=True)
    assert y.tobytes() == y2.tobytes() == backward.tobytes()


@DROPOUT_SETTINGS
@given(st.one_of(SHARES, st.floats(0.0, 1.0)))
def test_the_threshold_is_the_comparison_in_float32(p):
    least = dropout_threshold(p)
    for number in range(max(least - 2, 0), min(least + 2, 2**24)):
        assert (np.float32(number) * np.float32(2.0**-24) >= np.float32(p)) == (number >= least)


def test_many_pieces_of_the_nearest_cache():
    numbers = NumberRange(1, "a", 5, 5 + 20_001)
    y, keep = kernels.drop(np, np.ones(20_001), numbers, 0.3)
    np.testing.assert_array_equal(keep, numbers.make_fractions(np) >= np.float32(0.3))
    np.testing.assert_array_equal(y, keep / 0.7)


def test_what_is_kept_depends_on_the_global_row(mode):
    x = np.ones((6, 5, 2), np.float32)
    _, whole = kernels.drop(np, x, Random(3, "d", step=2).get_number_range(x.shape), 0.5)
    for row in range(0, 6, 2):
        _, part = kernels.drop(np, x[:2], Random(3, "d", step=2, row=row).get_number_range((2, 5, 2)), 0.5)
        np.testing.assert_array_equal(part, whole[row : row + 2])


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_nan_is_seen_where_kept(mode, bad):
    x = np.full(64, bad, np.float32)
    with np.errstate(invalid="ignore"):
        y, keep = kernels.drop(np, x, NumberRange(0, "a", 0, 64), 0.5)
    assert not np.isfinite(y[keep]).any()
