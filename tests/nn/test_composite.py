"""Composite: forward is written once as a function of other layers, backward follows from theirs."""

from typing import Any

import numpy as np
import pytest

import fsdpx
from fsdpx import nn, optim
from fsdpx.errors import ConfigError
from fsdpx.testing import LayerContract

from .setting import env, gradients, normal, parameters


class GatedMLP(nn.Composite):
    """down(silu(gate(x)) up(x)) (Shazeer 2020)."""

    def __init__(self, d_model, d_hidden):
        self.d_model, self.d_hidden = d_model, d_hidden
        self.gate = nn.Linear(d_model, d_hidden)
        self.up = nn.Linear(d_model, d_hidden)
        self.down = nn.Linear(d_hidden, d_model)

    def compose(self, x):
        return self.down(nn.SiLU()(self.gate(x)) * self.up(x))


class Highway(GatedMLP):
    """A composite with another one inside, two inputs and two outputs."""

    def __init__(self, d_model):
        super().__init__(d_model, 2 * d_model)
        self.inner = GatedMLP(d_model, 3)
        self.both = nn.Concat()

    def compose(self, x, z):
        y = super().compose(x) + self.inner(z)
        return y, self.both(y, x, z)


class Twice(nn.Composite):
    """A layer that is called twice is one set of parameters."""

    def __init__(self):
        self.shared = nn.Linear(5, 5)

    def compose(self, x):
        return self.shared(nn.Tanh()(self.shared(x)))


class TestGatedMLP(LayerContract):
    def make(self):
        return GatedMLP(6, 4)

    def inputs(self):
        return self.normal(4, 3, 6)


class TestHighway(LayerContract):
    def make(self):
        return Highway(4)

    def inputs(self):
        return self.normal(4, 4), self.normal(4, 4) + 1.0


class TestTwice(LayerContract):
    def make(self):
        return Twice()

    def inputs(self):
        return self.normal(4, 5)


def test_it_is_what_it_says():
    layer = GatedMLP(6, 4)
    assert repr(layer) == "GatedMLP(6, 4)"
    assert {name: spec.shape for name, spec in layer.specs().items()} == {
        "gate.weight": (4, 6), "gate.bias": (4,), "up.weight": (4, 6), "up.bias": (4,),
        "down.weight": (6, 4), "down.bias": (6,),
    }  # fmt: skip
    p, x = parameters(layer), normal(3, 6)
    gate, up = (x @ p[f"{name}.weight"].T + p[f"{name}.bias"] for name in ("gate", "up"))
    want = (gate / (1 + np.exp(-gate)) * up) @ p["down.weight"].T + p["down.bias"]
    np.testing.assert_allclose(layer.forward(env(), p, x)[0], want, rtol=1e-12)


def test_a_layer_called_twice_has_one_set_of_parameters():
    layer = Twice()
    assert list(layer.specs()) == ["shared.weight", "shared.bias"]
    free = nn.Chain(nn.Linear(5, 5), nn.Tanh(), nn.Linear(5, 5))
    p, x, dy = parameters(layer), normal(4, 5), normal(4, 5, seed=1)
    q = {f"{i}.{name}": p[f"shared.{name}"] for i in (0, 2) for name in ("weight", "bias")}
    g, h = gradients(layer, p), gradients(free, q)
    for model, params, grads in ((layer, p, g), (free, q, h)):
        _, saved = model.forward(env(), params, x)
        model.backward(env(), params, grads, saved, dy)
    for name in ("weight", "bias"):
        np.testing.assert_allclose(g[f"shared.{name}"], h[f"0.{name}"] + h[f"2.{name}"], rtol=1e-13)


def train(comm, strategy="fsdp", **options):
    model = nn.Chain({"a": nn.Linear(6, 5), "b": Twice(), "c": GatedMLP(5, 8), "d": nn.Linear(5, 3)})
    trainer = model.as_distributed(
        loss=nn.MSE(), optimizer=optim.AdamW(lr=1e-2, eps=1e-5), strategy=strategy, comm=comm, precision="float64",
        group_bytes=0, **options,
    )  # fmt: skip
    x, y, data = normal(12, 6), normal(12, 3, seed=1), trainer.data
    mine = slice(12 * data.rank // data.size, 12 * (data.rank + 1) // data.size)
    nodes = trainer.inspect.placement.model.nodes
    return [trainer.step(x[mine], y[mine]) for _ in range(5)], [node.path for node in nodes]


@pytest.mark.parametrize(
    ("size", "options"),
    [
        (2, {"strategy": "ddp"}),
        (3, {"strategy": "fsdp"}),
        (2, {"mesh": fsdpx.Mesh(pipe=2), "stages": ["a", "b.shared_2"]}),
        (
            2,
            {
                "mesh": fsdpx.Mesh(tensor=2),
                "tensor_plan": {"c.gate": nn.Column, "c.up": nn.Column, "c.down": nn.Row},
            },
        ),
    ],
    ids=["ddp", "fsdp", "pipe", "tensor"],
)
def test_it_trains_alike_under_every_strategy(size: int, options: dict[str, Any]):
    want, paths = fsdpx.spawn(train, 1)[0]
    assert paths[2:9] == ["b.tanh", "b.shared_2", "c.gate", "c.silu", "c.up", "c.multiply", "c.down"]
    for losses, _ in fsdpx.spawn(lambda comm: train(comm, **options), size):
        np.testing.assert_allclose(losses, want, rtol=1e-11)


def composed(compose, **layers):
    """A composite of these attributes whose `compose` is that."""

    class Wrong(nn.Composite):
        def __init__(self):
            vars(self).update(layers)

    Wrong.compose = compose
    Wrong.__abstractmethods__ = frozenset()
    return Wrong()


@pytest.mark.parametrize(
    ("compose", "layers", "message"),
    [
        (lambda self, x: nn.Linear(2, 2)(x), {}, r"Wrong: Linear\(2, 2\) has parameters, but no name: make it an attr"),
        (
            lambda self, x: self.ls[0](x),
            {"ls": [nn.Linear(2, 2)]},
            r"but no name: .* of a list each by setattr\(self, f'name_\{i\}', \.\.\.\), or as one nn\.Chain",
        ),
        (lambda self, x: x, {"a": nn.Tanh()}, r"Wrong: compose never calls self.a, Tanh\(\): call it, or leave it out"),
        (lambda self, x: self.a(x, x), {"a": nn.Tanh()}, r"Wrong: Tanh\(\) takes 1 inputs, but gets 2"),
        (lambda self, x: 3, {}, "Wrong: compose returns 3; compose works on its arguments"),
        (lambda self, *x: x[0], {}, "Wrong: compose takes one argument by name for each input"),
        (lambda self: 3, {}, "Wrong: compose takes one argument by name for each input"),
        (lambda self, x: self.a(self.a(x)), {"a": nn.BatchNorm(2)}, "has running statistics, so compose can call it "),
        (lambda self, x: x, {"steps": 3}, "'steps' is an attribute that every container has; choose another name"),
        (
            lambda self, x: self.a(np.ones(3)),
            {"a": nn.Tanh()},
            r"Tanh\(\) is called on ndarray: layers are",
        ),
    ],
)
def test_what_cannot_be_composed(compose, layers, message):
    with pytest.raises(ConfigError, match=message):
        composed(compose, **layers)


@pytest.mark.parametrize(
    ("compose", "message"),
    [
        (lambda self, x: x + 2.0, r"Wrong: Add\(\) gets 2\.0; compose works on its arguments .* use nn\.Lambda"),
        (lambda self, x: 3 * x, r"Wrong: Multiply\(\) gets 3; compose works on its arguments"),
        (lambda self, x: x - x, r"Wrong: the value 'x' has no -; compose works on .* \+ and \*: .* use nn\.Lambda"),
        (lambda self, x: 1.0 / x, "Wrong: the value 'x' has no /; compose works on its arguments"),
        (lambda self, x: x**2, r"Wrong: the value 'x' has no \*\*; compose works"),
        (lambda self, x: x[0], r"Wrong: the value 'x' has no \[\]; compose works"),
        (lambda self, x: [*x], "Wrong: the value 'x' has no parts; compose works"),
        (lambda self, x: np.tanh(x), r"Wrong: the value 'x' is given to np\.tanh; compose works on .* use nn\.Lambda"),
        (lambda self, x: np.float64(2) * x, r"Wrong: the value 'x' is given to np\.multiply; compose"),
        (lambda self, x: np.concatenate([x, x]), r"Wrong: the value 'x' is given to np\.concatenate; compose"),
        (lambda self, x: x.sum(), "Wrong: the value 'x' has no sum; compose .* other shapes, sums and parts a layer"),
        (lambda self, x: x.reshape(-1), "Wrong: the value 'x' has no reshape; compose works"),
        (lambda self, x: nn.Add()(x, np.ones(2)), r"Wrong: Add\(\) gets array\(\[1\., 1\.\]\); compose works on"),
    ],
)
def test_numbers_and_arrays_are_refused(compose, message):
    with pytest.raises(ConfigError, match=message):
        composed(compose)


def test_values_of_another_layer_are_refused():
    seen = []

    def compose(self, x):
        seen.append(x)
        return nn.Add()(x, seen[0])

    composed(compose)
    with pytest.raises(ConfigError, match=r"Wrong: Add\(\) gets the value 'x' of Wrong; compose works on its arg"):
        composed(compose)
