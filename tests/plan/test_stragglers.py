"""Steps that wait for the slowest rank: means against what is known of the largest of lognormal numbers."""

from math import exp, sqrt
from statistics import NormalDist
from typing import Any

import numpy as np
import pytest

import fsdpx
from fsdpx import nn
from fsdpx.__main__ import main
from fsdpx.errors import ConfigError
from fsdpx.plan import Compute, Level, Machine, Stragglers, predict

FLAT = Machine("flat", (Level("host", 0.0, 1e30),), Compute({"float32": 1e9}, 1e30))
"""A GFLOP/s, and nothing else takes time."""
WIDTH = 32


def step(ranks: int, layers: int = 2, samples: int | None = None, **options: Any) -> fsdpx.plan.Prediction:
    x = ((samples or ranks, WIDTH), "float32")
    model = nn.Chain(*[nn.Linear(WIDTH, WIDTH) for _ in range(layers)])
    return predict(model, (x, x), ranks=ranks, machine=FLAT, **options)


def expected(ranks: int, spread: float) -> float:
    """The mean of the largest of as many lognormal numbers with mean 1, by integrating its density."""
    z = np.linspace(-9, 9, 200_001)
    below = np.array([NormalDist().cdf(v) for v in z[::100]])
    below = np.interp(z, z[::100], below)
    density = ranks * np.exp(-z * z / 2) / sqrt(2 * np.pi) * below ** (ranks - 1)
    return float(np.sum(np.exp(spread * z - spread**2 / 2) * density) * (z[1] - z[0]))


def test_the_largest_of_two_is_known() -> None:
    assert expected(2, 0.3) == pytest.approx(2 * NormalDist().cdf(0.3 / sqrt(2)), rel=1e-4)


@pytest.mark.parametrize("ranks", [1, 2, 64, 4096])
@pytest.mark.parametrize("spread", [0.05, 0.3])
def test_a_step_of_equal_ranks_takes_as_long_as_the_slowest(ranks: int, spread: float) -> None:
    even = step(ranks)
    found = step(ranks, stragglers=spread)
    assert found.seconds / even.seconds == pytest.approx(expected(ranks, spread), rel=2e-3)
    assert found.parts["stragglers"] == pytest.approx(found.seconds - even.seconds)
    assert sum(found.parts.values()) == pytest.approx(found.seconds)


def test_a_million_numbers_are_one() -> None:
    largest = Stragglers(0.1, draws=400).slowest(1_000_000, 1)[0]
    assert largest.mean() == pytest.approx(expected(1_000_000, 0.1), rel=2e-3)


def test_draws_are_those_of_a_seed() -> None:
    one, two = Stragglers(0.1, seed=3), Stragglers(0.1, seed=4)
    assert np.array_equal(one.slowest(8, 2), Stragglers(0.1, seed=3).slowest(8, 2))
    assert not np.array_equal(one.slowest(8, 2), two.slowest(8, 2))
    assert abs(np.corrcoef(one.slowest(8, 2))[0, 1]) < 0.25  # groups are drawn for themselves


def test_stages_of_a_pipe_wait_for_the_slower_one() -> None:
    """m microbatches of two stages: m times the slower one, and the other once. The first of 16 layers needs no
    gradient of its input: its stage is 23 products long, the other 24."""
    m, spread = 32, 0.3
    options: dict[str, Any] = {"mesh": fsdpx.Mesh(pipe=2, shard=1, replica=1), "microbatches": m, "layers": 16}
    even, found = (step(2, samples=m, **options, **more) for more in ({}, {"stragglers": spread}))
    one, two = np.exp(spread * np.random.default_rng(5).standard_normal((2, 1_000_000)) - spread**2 / 2)
    slower, quicker = np.maximum(23 * one, 24 * two).mean(), np.minimum(23 * one, 24 * two).mean()
    assert found.seconds / even.seconds == pytest.approx((m * slower + quicker) / (m * 24 + 23), rel=0.01)


def test_a_spread_that_is_none() -> None:
    with pytest.raises(ConfigError, match=r"stragglers=-1: a spread between 0 and 2 is needed, 0.05 for about 5 %"):
        step(2, stragglers=-1)
    for numbers, says in (((0.1, 0), "draws=0: a whole number is needed, 1 or more"), ((0, 9, -1), "seed=-1: a ")):
        with pytest.raises(ConfigError, match=f"^stragglers: {says}"):
            Stragglers(*numbers)
    assert step(2, stragglers=0.0).seconds == pytest.approx(step(2).seconds)


def test_plans_wait_too(capsys: pytest.CaptureFixture[str]) -> None:
    assert main("plan mlp --ranks 4 --machine laptop --batch 64 --most 3 --stragglers 0.2".split()) == 0
    assert ", stragglers 0.0" in capsys.readouterr().out


def test_what_is_told_of_lognormal_numbers() -> None:
    """Their mean is 1, whatever the spread."""
    for spread in (0.05, 0.5):
        drawn = Stragglers(spread, draws=2000).slowest(1, 1)
        assert drawn.mean() == pytest.approx(1.0, rel=3e-3)
        assert np.median(drawn) == pytest.approx(exp(-(spread**2) / 2), rel=3e-3)
