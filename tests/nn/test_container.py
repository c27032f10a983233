"""Chain, Residual and Graph: wiring, names, ties and frozen parameters."""

import numpy as np
import pytest

from fsdpx import nn
from fsdpx.errors import ConfigError, ShapeError

from .setting import env, gradients, normal, parameters


def run(layer, p, *x):
    return layer.forward(env(), p, x[0] if len(x) == 1 else x)[0]


def test_children_of_a_chain_are_numbered():
    chain = nn.Chain(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2, bias=False))
    assert list(chain.children()) == ["0", "1", "2"]
    assert {name: spec.shape for name, spec in chain.specs().items()} == {
        "0.weight": (4, 3),
        "0.bias": (4,),
        "2.weight": (2, 4),
    }


def test_children_of_a_chain_can_be_named():
    chain = nn.Chain({"body": nn.Chain(nn.Linear(3, 4)), "head": nn.Linear(4, 2)})
    assert list(chain.specs()) == ["body.0.weight", "body.0.bias", "head.weight", "head.bias"]


def test_a_tie_is_one_parameter_and_its_gradients_add_up():
    free, tied = (
        nn.Chain(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3), ties=t) for t in (None, {"2.weight": "0.weight"})
    )
    assert list(tied.specs()) == ["0.weight", "0.bias", "2.bias"]
    p = parameters(tied)
    p_free = p | {"2.weight": p["0.weight"]}
    g, g_free = gradients(tied, p), gradients(free, p_free)
    x, dy = normal(4, 3), normal(4, 3, seed=1)
    for model, params, grads in ((tied, p, g), (free, p_free, g_free)):
        y, saved = model.forward(env(), params, x)
        model.backward(env(), params, grads, saved, dy)
    np.testing.assert_array_equal(y, run(tied, p, x))
    np.testing.assert_allclose(g["0.weight"], g_free["0.weight"] + g_free["2.weight"], rtol=1e-14)


def test_ties_of_ties_lead_to_one_parameter():
    layers = [nn.Linear(3, 3, bias=False) for _ in range(3)]
    chain = nn.Chain(*layers, ties={"2.weight": "1.weight", "1.weight": "0.weight"})
    assert list(chain.specs()) == ["0.weight"]
    assert chain.ties == {"2.weight": "0.weight", "1.weight": "0.weight"}


def test_a_residual_around_ties():
    body = nn.Chain(nn.Linear(3, 3), nn.Linear(3, 3), ties={"1.weight": "0.weight"})
    layer = nn.Residual(body)
    assert list(layer.specs()) == ["body.0.weight", "body.0.bias", "body.1.bias"]
    p, x = parameters(layer), normal(2, 3)
    inner = {name.removeprefix("body."): array for name, array in p.items()}
    np.testing.assert_array_equal(run(layer, p, x), x + run(body, inner, x))


def test_frozen_parameters_are_not_trainable():
    chain = nn.Chain(nn.Linear(3, 4), nn.BatchNorm(4), nn.Linear(4, 2), frozen=["0.*", "*.bias"])
    specs = chain.specs()
    assert [name for name, spec in specs.items() if spec.trainable] == ["1.weight", "2.weight"]
    assert [name for name, spec in specs.items() if spec.state] == ["1.running_mean", "1.running_var"]


def test_dropout_differs_between_layers_and_not_between_runs():
    chain = nn.Chain(nn.Dropout(0.5), nn.Dropout(0.5))
    x = np.ones((50, 4))
    first, _ = chain.steps[0].layer.forward(env().at("0"), {}, x)
    second, _ = chain.steps[1].layer.forward(env().at("1"), {}, x)
    assert (first != second).any()
    np.testing.assert_array_equal(run(chain, {}, x), first * second)


def test_a_graph_is_what_it_says():
    graph = nn.Graph(
        {
            "sum": (nn.Add(), "up", "down", "x"),
            "up": (nn.Linear(3, 3), "x"),
            "both": (nn.Concat(), "sum", "z"),
            "down": (nn.Tanh(), "z"),
        },
        inputs=("x", "z"),
        outputs=("both", "up"),
    )
    assert list(graph.children()) == ["up", "down", "sum", "both"]
    p, x, z = parameters(graph), normal(4, 3), normal(4, 3, seed=1)
    both, up = run(graph, p, x, z)
    want = x @ p["up.weight"].T + p["up.bias"]
    np.testing.assert_allclose(up, want, rtol=1e-14)
    np.testing.assert_allclose(both, np.concatenate([want + np.tanh(z) + x, z], axis=1), rtol=1e-13)


def test_a_graph_in_a_graph_gives_its_outputs_by_name():
    inner = nn.Graph({"a": (nn.Tanh(), "x"), "b": (nn.Sigmoid(), "x")}, outputs=("a", "b"))
    outer = nn.Graph({"two": (inner, "x"), "sum": (nn.Add(), "two.a", "two.b")}, outputs="sum")
    x = normal(2, 3)
    np.testing.assert_allclose(run(outer, {}, x), np.tanh(x) + 1 / (1 + np.exp(-x)), rtol=1e-14)


def test_a_graph_may_pass_an_input_through():
    graph = nn.Graph({"a": (nn.Tanh(), "x")}, outputs=("a", "x"))
    x, dy = normal(2, 3), (normal(2, 3, seed=1), normal(2, 3, seed=2))
    (y, same), saved = graph.forward(env(), {}, x)
    assert same is x
    np.testing.assert_allclose(graph.backward(env(), {}, {}, saved, dy), dy[1] + dy[0] * (1 - y * y))


TIED = [nn.Linear(3, 4), nn.Linear(4, 3), nn.Linear(3, 4)]
NODE = (nn.Tanh(), "x")


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: nn.Chain(), "Chain: there must be at least one layer"),
        (
            lambda: nn.Chain({"a.b": nn.Tanh()}),
            "Chain: 'a.b' is no name for a layer; use text that is not empty and has no dot",
        ),
        (lambda: nn.Chain({"": nn.Tanh()}), "Chain: '' is no name for a layer"),
        (lambda: nn.Chain({3: nn.Tanh()}), "Chain: 3 is no name for a layer"),
        (lambda: nn.Chain({"1": nn.Tanh()}, nn.Tanh()), "Chain: duplicate layer names '1'"),
        (lambda: nn.Chain(nn.GELU), r"Chain: '0' is the class GELU; write GELU\(...\)"),
        (lambda: nn.Chain(nn.Tanh(), np.tanh), "Chain: '1' must be a Layer, got ufunc"),
        (lambda: nn.Chain(nn.Add(), nn.Tanh()), r"Add\(\) takes any number of inputs; put it in a Graph"),
        (
            lambda: nn.Chain(nn.Graph({"a": NODE}, outputs=("a", "x")), nn.Tanh()),
            r"Chain: layer '1' Tanh\(\) takes 1 inputs, but gets 2",
        ),
        (
            lambda: nn.Chain(*TIED, ties={"1.weight": "0.weight"}),
            r"cannot tie '1.weight' \(3, 4\) to '0.weight' \(4, 3\): tied parameters must have the same "
            r"shape",
        ),
        (
            lambda: nn.Chain(*TIED, ties={"7.weight": "0.weight"}),
            "Chain: tie names '7.weight', which is no parameter; there are 0.weight, 0.bias, 1.weight",
        ),
        (
            lambda: nn.Chain(*TIED, ties={"0.weight": "2.weight", "2.weight": "0.weight"}),
            "ties lead in a circle: 0.weight -> 2.weight -> 0.weight",
        ),
        (
            lambda: nn.Chain(*TIED, frozen=["9.*"]),
            r"Chain\(frozen=\): '9.\*' matches no parameter; there are '0.weight'",
        ),
        (
            lambda: nn.Residual(nn.Add()),
            r"Residual: the body must take one input and give one output, got Add\(\)",
        ),
        (lambda: nn.Residual(nn.Tanh), r"Residual: 'body' is the class Tanh; write Tanh\(...\)"),
        (lambda: nn.Graph({"a": NODE}, outputs=()), "Graph: outputs must name at least one value"),
        (lambda: nn.Graph({"a": NODE}, inputs=(), outputs="a"), "Graph: inputs must name at least one value"),
        (lambda: nn.Graph({"a": NODE}, inputs=("x", "x"), outputs="a"), "Graph: duplicate inputs 'x'"),
        (lambda: nn.Graph({"a": NODE}, outputs=("a", "a")), "Graph: duplicate outputs 'a'"),
        (
            lambda: nn.Graph({"x": NODE}, outputs=("x",)),
            "Graph: duplicate names 'x': nodes and inputs share one set",
        ),
        (
            lambda: nn.Graph({"a": (nn.Tanh(), "y")}, outputs="a"),
            "Graph: node 'a' reads 'y', which is unknown; there are x, a",
        ),
        (
            lambda: nn.Graph({"a": NODE}, outputs=("b",)),
            "Graph: outputs name 'b', which is unknown; there are x, a",
        ),
        (
            lambda: nn.Graph({"a": nn.Tanh()}, outputs="a"),
            r"Graph: node 'a' must be \(layer, 'source', ...\), got Tanh\(\)",
        ),
        (
            lambda: nn.Graph({"a": (nn.Tanh(), "x", "x")}, outputs="a"),
            r"Graph: node 'a' Tanh\(\) takes 1 inputs, but gets 2",
        ),
        (lambda: nn.Graph({"a.b": NODE}, outputs="a"), "Graph: 'a.b' is no name"),
        (lambda: nn.Graph({"a": NODE}, inputs=("x", "y.z"), outputs="a"), "Graph: 'y.z' is no name"),
        (lambda: nn.Graph({"a": (nn.Tanh(),)}, outputs="a"), "Graph: node 'a' must be"),
        (
            lambda: nn.Graph({"a": (nn.Add(), "x", "c"), "b": (nn.Tanh(), "a"), "c": (nn.Tanh(), "b")}, outputs="c"),
            "Graph: the nodes 'b' -> 'c' -> 'a' -> 'b' form a cycle",
        ),
    ],
)
def test_wiring_that_cannot_work(make, message):
    with pytest.raises(ConfigError, match=message):
        make()


def test_inputs_that_do_not_fit_together():
    with pytest.raises(ShapeError, match=r"Add\(\) wants inputs of one shape, got \(2, 3\), \(2, 4\)"):
        nn.Add().forward(env(), {}, (normal(2, 3), normal(2, 4)))
    with pytest.raises(ShapeError, match=r"Concat\(\) wants inputs that differ in dim -1 only, got \(2, 3\), \(3, 3\)"):
        nn.Concat().forward(env(), {}, (normal(2, 3), normal(3, 3)))


@pytest.mark.parametrize(
    ("layer", "text"),
    [
        (nn.Linear(64, 128), "Linear(64, 128)"),
        (nn.Linear(64, 128, bias=False), "Linear(64, 128, bias=False)"),
        (nn.Dropout(0.1), "Dropout(p=0.1)"),
        (nn.Conv2d(3, 8, 3, padding=1), "Conv2d(3, 8, 3, padding=1)"),
        (nn.TransformerBlock(8, 2, dropout=0.1), "TransformerBlock(8, 2, dropout=0.1)"),
        (nn.GPT(11, 8, 2, 2, 6), "GPT(11, 8, 2, 2, 6)"),
        (nn.Residual(nn.Tanh()), "Residual(Tanh())"),
        (nn.Chain(nn.Linear(2, 3), nn.GELU("tanh")), "Chain(Linear(2, 3), GELU(approximate='tanh'))"),
        (nn.Chain({"a": nn.Tanh(), "b": nn.ReLU()}), "Chain(a=Tanh(), b=ReLU())"),
        (nn.Graph({"a": NODE}, outputs="a"), "Graph(x -> a = Tanh()(x) -> a)"),
    ],
)
def test_repr(layer, text):
    assert repr(layer) == text
