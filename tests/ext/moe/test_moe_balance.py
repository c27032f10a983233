"""Experts are used evenly: the loss that balances them."""

import numpy as np
import pytest
from setting import env, gradients, normal, parameters

from fsdpx import nn
from fsdpx.errors import ConfigError
from fsdpx.nn import init


def test_the_load_is_balanced_in_backward() -> None:
    """With no gradient from above what is left is that of the balancing loss, whose shares of choices are fixed."""
    layer = nn.MoE(4, 3, 5, 2, balance=0.3, init=init.normal(0.7))
    p, x, direction = parameters(layer), normal(3, 2, 4), normal(3, 2, 4, seed=1)
    g = gradients(layer, p)
    y, saved = layer.forward(env(), p, x)
    dx = layer.backward(env(), p, g, saved, np.zeros_like(y))
    shares = np.bincount(saved[1].experts.reshape(-1), minlength=5) / 6

    def loss(x: np.ndarray, router: np.ndarray) -> float:
        odds = np.exp(x.reshape(6, 4) @ router.T)
        odds /= odds.sum(1, keepdims=True)
        return float(0.3 * 6 * 5 * (shares * odds.mean(0)).sum())

    turn = normal(5, 4, seed=2)
    slopes = [loss(x + s * direction, p["router"]) / 2e-6 for s in (1e-6, -1e-6)]
    assert (dx * direction).sum() == pytest.approx(slopes[0] - slopes[1], rel=1e-6)
    slopes = [loss(x, p["router"] + s * turn) / 2e-6 for s in (1e-6, -1e-6)]
    assert (g["router"] * turn).sum() == pytest.approx(slopes[0] - slopes[1], rel=1e-6)
    assert not g["up"].any()
    with pytest.raises(ConfigError, match="balance does not know by how much float16 scales the loss: use bf16"):
        layer.forward(env(), parameters(layer, np.float16), x.astype(np.float16))


def test_more_active_experts_than_there_are_are_refused() -> None:
    with pytest.raises(ConfigError, match="active 3 is more than the 2 experts"):
        nn.MoE(4, 3, 2, 3)
