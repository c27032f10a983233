"""1-bit Adam: AdamW in the warm-up, then steps of given means over what v has become."""

from typing import Any

import numpy as np
import pytest

from fsdpx import optim
from fsdpx.errors import ConfigError
from fsdpx.optim import kernels
from fsdpx.optim.segments import Segment, Segments

N, WARMUP = 50, 4


def trained(optimizer: Any, given: list[np.ndarray]) -> np.ndarray:
    p, slots = np.ones(N), {name: np.zeros(N) for name in optimizer.slots}
    segments = Segments((Segment("w", 0, N, 0, N),))
    for step, g in enumerate(given, 1):
        optimizer.update(np, p, g, slots, lr=optimizer.lr, step=step, segments=segments, scale=0.5)
    return p


def test_the_update_is_that_of_the_paper() -> None:
    rng, beta, lr = np.random.default_rng(0), (0.8, 0.9), 0.01
    gradients = [rng.standard_normal(N) for _ in range(9)]
    p, m, v, given = np.ones(N), np.zeros(N), np.zeros(N), []
    for t, g in enumerate(gradients, 1):
        m = beta[0] * m + (1 - beta[0]) * g
        if t <= WARMUP:
            v = beta[1] * v + (1 - beta[1]) * g**2
            unbiased = v / (1 - beta[1] ** t)
        p = p - lr * 0.1 * p - lr * m / (1 - beta[0] ** t) / (np.sqrt(unbiased) + 1e-8)
        given.append(2 * (g if t <= WARMUP else m))
    made = optim.OneBitAdam(lr=lr, warmup_steps=WARMUP, betas=beta, weight_decay=0.1, bound=np.inf)
    np.testing.assert_allclose(trained(made, given), p, rtol=1e-12)


def test_the_warm_up_is_adamw() -> None:
    given = [np.random.default_rng(t).standard_normal(N) for t in range(WARMUP)]
    adamw, mine = optim.AdamW(lr=0.01), optim.OneBitAdam(lr=0.01, warmup_steps=WARMUP)
    np.testing.assert_array_equal(trained(mine, given), trained(adamw, given))


def test_what_had_no_gradient_in_the_warm_up_stays() -> None:
    given = [np.where(np.arange(N) < 10, 0.0, 1.0)] * WARMUP + [np.ones(N)]
    p = trained(optim.OneBitAdam(lr=0.01, warmup_steps=WARMUP, weight_decay=0), given)
    assert np.all(p[:10] == 1)
    assert np.all(p[10:] < 0.96)


@pytest.mark.parametrize("version", ["plain", "numba"])
def test_no_element_is_thrown_far_after_the_warm_up(version: Any) -> None:
    """Signs are as large where v is small: there a step is lr, as Adam's is."""
    small = np.where(np.arange(N) < 10, 1e-6, 1.0)
    given = [small] * WARMUP + [np.ones(N), -np.ones(N)]
    with kernels.use(version):
        p = [trained(optim.OneBitAdam(lr=0.01, warmup_steps=WARMUP, weight_decay=0), given[:n]) for n in (4, 5, 6)]
    np.testing.assert_allclose(p[1][:10] - p[0][:10], -0.01, rtol=1e-9)
    np.testing.assert_allclose(p[2][:10], p[0][:10], rtol=1e-12)
    thrown = trained(optim.OneBitAdam(lr=0.01, warmup_steps=WARMUP, weight_decay=0, bound=np.inf), given[:5])
    assert np.abs(thrown[:10] - p[0][:10]).min() > 100


def test_a_bad_bound_is_named() -> None:
    with pytest.raises(ConfigError, match=r"OneBitAdam\(bound=0\): a positive number, or inf"):
        optim.OneBitAdam(bound=0)


@pytest.mark.parametrize("steps", [0, -1, 2.5, True])
def test_bad_warm_ups_are_named(steps: Any) -> None:
    with pytest.raises(ConfigError, match=rf"OneBitAdam\(warmup_steps={steps}\): a number of steps, 1 or more"):
        optim.OneBitAdam(warmup_steps=steps)
