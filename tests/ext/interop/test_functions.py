"""Functions of JAX and autograd as layers: the numbers of fsdpx's own layers, wherever ranks are laid out."""

import re

import numpy as np
import pytest
from bits import bits, demand_same
from models import part

import fsdpx
from fsdpx import nn, optim
from fsdpx.errors import ConfigError, ShapeError

R = np.random.default_rng(0)
FIRST = [
    {"w": 0.3 * R.standard_normal((16, 8)), "b": np.zeros(16)},
    {"w": 0.3 * R.standard_normal((3, 16)), "b": np.zeros(3)},
]
X, Y = R.standard_normal((12, 8)), np.arange(12) % 3
OWN = {"0.weight": (0, "w"), "0.bias": (0, "b"), "2.weight": (1, "w"), "2.bias": (1, "b")}


def of_jax():
    jax = pytest.importorskip("jax")
    jax.config.update("jax_enable_x64", True)
    from fsdpx.ext.interop.jax import JaxFunction

    return JaxFunction, jax.numpy


def of_autograd():
    numpy = pytest.importorskip("autograd.numpy")
    from fsdpx.ext.interop.function_layer import AutogradFunction

    return AutogradFunction, numpy


BOTH = pytest.mark.parametrize("library", [of_jax, of_autograd])


def perceptron(xp):
    def apply(p, x):
        return xp.dot(xp.tanh(xp.dot(x, p[0]["w"].T) + p[0]["b"]), p[1]["w"].T) + p[1]["b"]

    return apply


def trained(comm, model, steps=5, **options):
    given = {"loss": nn.CrossEntropyLoss(), "optimizer": optim.AdamW(lr=1e-2), "precision": "float64", **options}
    trainer = fsdpx.distribute(model, comm=comm, **given)
    if "0.weight" in trainer.parameters():
        trainer.load_parameters({name: FIRST[n][key] for name, (n, key) in OWN.items()})
    mine = part(trainer.data_group, len(X))
    return [trainer.step(X[mine], Y[mine]) for _ in range(steps)], bits(trainer)


@BOTH
@pytest.mark.parametrize(
    ("ranks", "options"),
    [(1, {}), (3, {"strategy": "fsdp"}), (2, {"strategy": "ddp", "recompute": "all"}), (2, {"microbatches": 2})],
)
def test_losses_are_those_of_layers_of_fsdpx(library, ranks, options):
    kind, xp = library()
    model = nn.Sequential(kind(perceptron(xp), FIRST), nn.Lambda(lambda a: a, np.ones_like))
    own = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 3))
    wanted, _ = fsdpx.spawn(lambda comm: trained(comm, own), 1)[0]
    found, _ = fsdpx.spawn(lambda comm: trained(comm, model, **options), ranks)[0]
    np.testing.assert_allclose(found, wanted, rtol=1e-12)


@BOTH
def test_one_hash_with_chunks_and_stages_of_a_pipe(library):
    kind, xp = library()
    halves = (lambda p, x: xp.tanh(xp.dot(x, p["w"].T) + p["b"])), (lambda p, x: xp.dot(x, p["w"].T) + p["b"])

    def run(comm, mesh):
        model = nn.Sequential(*map(kind, halves, FIRST))
        return trained(comm, model, reproducible_chunks=6, mesh=mesh, precision="float32")[1]

    demand_same([*fsdpx.spawn(run, 1, None), *fsdpx.spawn(run, 3, None), *fsdpx.spawn(run, 2, fsdpx.Mesh(pipe=2))])


@BOTH
def test_several_inputs_and_integers(library):
    kind, _ = library()
    table = R.standard_normal((5, 4))
    layer = kind(lambda p, x, n: x * p["table"][n], {"table": table}, inputs=2)
    graph = nn.Graph({"y": (layer, "x", "n")}, inputs=("x", "n"), outputs=("y",))
    trainer = graph.as_distributed(loss=nn.MSELoss(), optimizer=optim.SGD(lr=1.0), precision="float64")
    x, n, y = R.standard_normal((6, 4)), np.array([0, 1, 1, 4, 0, 1]), R.standard_normal((6, 4))
    error = x * table[n] - y
    assert trainer.step({"x": x, "n": n}, y) == pytest.approx(np.mean(error**2), rel=1e-12)
    wanted = table.copy()
    np.add.at(wanted, n, -2 * error * x / error.size)
    np.testing.assert_allclose(trainer.parameters()["y.table"], wanted, rtol=1e-12)


@BOTH
@pytest.mark.parametrize(
    ("apply", "first", "error", "said"),
    [
        (lambda p, x: (x * p).sum(), np.ones(8), ShapeError, "gives an array of shape () for inputs of 6 samples"),
        (lambda p, x: x * p, np.ones(8, np.int64), ConfigError, "parameter 'value' is int64; parameters are floats"),
        (3, np.ones(8), ConfigError, "a function of (params, x) is needed"),
        (lambda p, x: (x * p, x), np.ones(8), ConfigError, "gives tuple; a layer gives one array"),
    ],
)
def test_what_is_no_layer_is_refused_before_training(library, apply, first, error, said):
    kind, _ = library()
    with pytest.raises(error, match=re.escape(said)):
        fsdpx.spawn(lambda comm: trained(comm, kind(apply, first)), 2)


def test_jax_without_float64_is_refused():
    kind, xp = of_jax()
    import jax

    layer = kind(perceptron(xp), FIRST)
    jax.config.update("jax_enable_x64", False)
    try:
        with pytest.raises(ConfigError, match="JAX would compute in float32"):
            trained(None, layer)
        assert np.isfinite(trained(None, layer, precision="float32")[0]).all()
    finally:
        jax.config.update("jax_enable_x64", True)


def test_jax_keeps_for_backward_neither_parameters_nor_inputs():
    kind, xp = of_jax()
    layer = kind(perceptron(xp), FIRST)
    p = [np.asarray(leaf) for leaf in (FIRST[0]["b"], FIRST[0]["w"], FIRST[1]["b"], FIRST[1]["w"])]
    kept = layer.evaluate_function(np, p, [X])[1]
    assert layer.names == ("0.b", "0.w", "1.b", "1.w")
    assert kept
    assert not any(np.shares_memory(a, b) or (a.shape == b.shape and (a == b).all()) for a in kept for b in (*p, X))


def test_what_jax_cannot_differentiate_is_said():
    kind, _ = of_jax()
    import jax

    def apply(p, x):
        return jax.pure_callback(lambda a: a, jax.ShapeDtypeStruct(x.shape, x.dtype), x * p)

    with pytest.raises(ConfigError, match=r"JaxFunction\(apply\)[^:]*: .*JVP"):
        trained(None, kind(apply, np.ones(8)))
