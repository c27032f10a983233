"""Means and deviations of channels: one pass, merged over ranks, without cancellation."""

import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from models import alike
from setting import env

from fsdpx import nn, spawn
from fsdpx.data import gather_channel_statistics
from fsdpx.errors import ConfigError, ShapeError


def test_nothing_cancels():
    """300 +- 0.01 in float32, in one pass over many batches."""
    x = (300 + 0.01 * np.random.default_rng(0).standard_normal((20, 2, 50, 40))).astype(np.float32)
    mean, std = gather_channel_statistics(iter(x), dim=0)
    wide = x.astype(np.float64)
    np.testing.assert_allclose(mean, wide.mean((0, 2, 3)), rtol=1e-14)
    np.testing.assert_allclose(std, wide.std((0, 2, 3)), rtol=1e-9)
    y, _ = nn.Standardize(mean, std).forward(env(), {}, x)
    assert y.dtype == np.float32
    np.testing.assert_allclose(y.std((0, 2, 3)), 1.0, rtol=1e-5)
    np.testing.assert_allclose(y.mean((0, 2, 3)), 0.0, atol=1e-5)
    back, _ = nn.Destandardize(mean, std).forward(env(), {}, y)
    np.testing.assert_allclose(back, x, rtol=1e-7)


@given(st.integers(1, 4), st.integers(1, 12), st.booleans(), st.integers(0, 100))
def test_ranks_with_any_parts_find_the_same(ranks, steps, skipna, seed):
    """Numbers of batches that differ, empty parts, NaN on land; the same bits on every rank."""
    rng = np.random.default_rng(seed)
    data = rng.standard_normal((steps, 7, 3)) * [1.0, 10.0, 0.0] + 5
    if skipna:
        data[:, rng.random(7) < 0.4] = np.nan
        data[:, 0] = 5.0
    cuts = [0, *sorted(rng.integers(0, 8, ranks - 1)), 7]

    def run(comm):
        mine = [step[cuts[comm.rank] : cuts[comm.rank + 1]] for step in data]
        return gather_channel_statistics(mine if comm.rank else iter(mine), dim=-1, comm=comm, skipna=skipna)

    found = spawn(run, ranks)
    assert all(one == found[0] for one in found)
    np.testing.assert_allclose(found[0].mean, np.nanmean(data, axis=(0, 1)), rtol=1e-12)
    std = np.nanstd(data, axis=(0, 1))
    np.testing.assert_allclose(found[0].std, np.where(std > 1e-12, std, 1.0), rtol=1e-9)
    assert found[0].std[2] == 1.0, "a channel that never changes"


VALUES = st.floats(allow_nan=False, allow_infinity=False, width=32) | st.sampled_from([0.1, 1 / 3, 1e-30, 1e17, -7e5])


@given(VALUES, st.sampled_from(["float32", "float64"]), st.integers(1, 4), st.data())
def test_a_channel_that_never_changes_has_std_1(value, dtype, ranks, choose):
    """However many elements it has and however these come together, also where one channel beside it changes."""
    sizes = choose.draw(st.lists(st.lists(st.integers(0, 40), max_size=4), min_size=ranks, max_size=ranks))
    land = choose.draw(st.booleans())
    if not sum(map(sum, sizes)):
        sizes[0] = [10]

    def batch(size):
        data = np.full((2, size + land), value, dtype)
        data[1] = np.arange(size + land)
        if land:
            data[:, 0] = np.nan
        return data

    def run(comm):
        return gather_channel_statistics(map(batch, sizes[comm.rank]), dim=0, comm=comm, skipna=land)

    for mean, std in spawn(run, ranks):
        assert (mean[0], std[0]) == (float(np.dtype(dtype).type(value)), 1.0)


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        (lambda rank: [], "some channel has no data on any rank"),
        (lambda rank: [np.ones((2, 3 + rank))], "rank 1 has 4 channels, ranks before it 3"),
        (lambda rank: [np.ones((2, 3)), np.ones((2, 4))], "rank 0: a batch has 4 channels, those before it 3"),
        (lambda rank: [np.full((2, 3), np.nan if rank else 0.0)], "rank 1: channel 0 has values that are not finite"),
        (lambda rank: [np.ones(3)], "rank 0: "),
    ],
)
def test_what_cannot_be_counted(arrays, message):
    found = alike(2, lambda comm: gather_channel_statistics(arrays(comm.rank), comm=comm))
    assert re.match(f"DataError: .*{re.escape(message)}", found)


@pytest.mark.parametrize(
    ("mean", "std", "message"),
    [
        ([0.0], [1.0, 2.0], "Standardize: 1 means and 2 deviations: give both of each channel"),
        ([0.0, 1.0], [1.0, 0.0], "Standardize: channel 1 has mean 1.0 and std 0.0: finite, and std above 0"),
        ([float("nan")], [1.0], "channel 0 has mean nan and std 1.0"),
        ([0.1], [np.full(10, 0.1).std() or 1.4e-17],
         "which is rounding of its mean 0.1: give a channel that never changes std 1"),
    ],
)  # fmt: skip
def test_statistics_that_do_not_fit(mean, std, message):
    with pytest.raises(ConfigError, match=re.escape(message)):
        nn.Standardize(mean, std)


def test_channels_that_do_not_fit():
    with pytest.raises(ShapeError, match=r"Standardize\(\(0.0,\), \(1.0,\)\) wants \(samples, 1, ...\), got \(2, 3\)"):
        nn.Standardize([0.0], [1.0]).forward(env(), {}, np.ones((2, 3)))
