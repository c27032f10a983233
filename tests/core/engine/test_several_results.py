"""Layers that return several arrays train like containers of layers that return one each."""

from functools import cache

import numpy as np
import pytest
from models import distributed, part

import fsdpx
from fsdpx import Mesh, nn, optim, spawn
from fsdpx.errors import ConfigError
from fsdpx.testing import LayerContract, assert_close

RNG = np.random.default_rng(0)
X, Y, Z = RNG.standard_normal((3, 8, 6))
VALUES = {f"{layer}.weight": RNG.standard_normal(6) for layer in "abc"}


class Times(nn.Layer):
    """Return x times a weight of each feature."""

    def specs(self):
        return {"weight": nn.ParameterSpec((6,), nn.init.ones)}

    def forward(self, env, p, x):
        return x * p["weight"], (x,)

    def backward_input(self, env, p, saved, dy):
        return dy * p["weight"], (dy, saved[0])

    def backward_params(self, env, g, kept):
        if "weight" in g:
            g["weight"] += (kept[0] * kept[1]).sum(axis=0)


class Both(Times):
    """Return the same, and its tanh."""

    n_outputs = 2

    def forward(self, env, p, x):
        y, _ = super().forward(env, p, x)
        return (y, env.xp.tanh(y)), (x, y)

    def backward_input(self, env, p, saved, dy):
        d = 0 if dy[0] is None else dy[0]
        if dy[1] is not None:
            d = d + dy[1] * (1 - env.xp.tanh(saved[1]) ** 2)
        return super().backward_input(env, p, saved, d)


class TestBoth(LayerContract):
    def make(self):
        return Both()

    def inputs(self):
        return self.draw_normal(4, 6)


def make(split):
    """The second Both has a result that nothing reads."""
    if not split:
        return nn.Graph({"a": (Both(), "x"), "b": (Both(), "a.1"), "c": (Times(), "b.1")}, outputs=("a.0", "c"))
    nodes = {"a": (Times(), "x"), "t": (nn.Tanh(), "a"), "b": (Times(), "t")}
    nodes |= {"s": (nn.Tanh(), "b"), "c": (Times(), "s")}
    return nn.Graph(nodes, outputs=("a", "c"))


def train(comm, split, **more):
    options = {"optimizer": optim.AdamW(lr=1e-2), "precision": "float64", **more}
    trainer = distributed(make(split), comm, loss=nn.MultiOutputLoss(nn.MSELoss(), nn.MSELoss()), **options)
    trainer.load_parameters(VALUES)
    rows = part(trainer.data_group, 8)
    losses = [trainer.step(X[rows], (Y[rows], Z[rows])) for _ in range(2)]
    return losses, trainer.parameters(), trainer.predict(X[rows]), rows


WAYS = {
    "alone": (1, {}),
    "checked": (1, {"check_finite": True, "microbatches": 2}),
    "fsdp": (2, {"strategy": "fsdp", "group_bytes": 0, "recompute": "all"}),
    "pipe": (2, {"mesh": Mesh(pipe=2), "microbatches": 4, "stages": ["a", "b"]}),
    "zero-bubble": (2, {"mesh": Mesh(pipe=2), "microbatches": 2, "stages": ["a", "b"], "schedule": "zb-h1"}),
}


@cache
def train_as_several_layers():
    return spawn(lambda comm: train(comm, True), 1)[0]


@pytest.mark.parametrize("way", WAYS)
def test_several_results_train_as_several_layers(way):
    losses, values, predicted, _ = train_as_several_layers()
    ranks, options = WAYS[way]
    for got, found, mine, rows in spawn(lambda comm: train(comm, False, **options), ranks):
        np.testing.assert_allclose(got, losses, rtol=1e-12)
        assert_close(found, values, 1e-12)
        for one, other in zip(mine, predicted, strict=True):
            np.testing.assert_allclose(one, other[rows], rtol=1e-12, atol=1e-13)


def test_the_number_of_results_is_declared():
    class Wrong(Both):
        n_outputs = 3

    with pytest.raises(ConfigError, match=r"layer 'a' Wrong\(\) returns 2 arrays, but declares n_outputs = 3"):
        nn.Graph({"a": (Wrong(), "x")}, outputs=("a.0", "a.1", "a.2")).as_distributed().predict(X)


def test_a_lone_layer_is_a_model_of_several_outputs():
    plain, tanh = fsdpx.distribute(Both(), precision="float64").predict(X)
    np.testing.assert_allclose(tanh, np.tanh(plain), rtol=1e-14)
