"""Layers made of layers: chains, graphs and composites."""

import numpy as np
import pytest
from layer_cases import contracts_of, rows
from models import distributed, part
from setting import env, normal, parameters, run_both

import fsdpx
from fsdpx import nn, optim
from fsdpx.errors import ConfigError, ShapeError


def run(layer, p, *x):
    return layer.forward(env(), p, x[0] if len(x) == 1 else x)[0]


def test_children_of_a_chain_are_numbered_or_named():
    chain = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2, bias=False))
    assert list(chain.children()) == ["0", "1", "2"]
    shapes = {"0.weight": (4, 3), "0.bias": (4,), "2.weight": (2, 4)}
    assert {name: spec.shape for name, spec in chain.specs().items()} == shapes
    chain = nn.Sequential({"body": nn.Sequential(nn.Linear(3, 4)), "head": nn.Linear(4, 2)})
    assert list(chain.specs()) == ["body.0.weight", "body.0.bias", "head.weight", "head.bias"]


def test_inputs_of_a_layer_have_the_names_that_it_declares():
    class Scaled(nn.Scale):
        input_names = ("pressure", "velocity")  # a name of the user's own, which says nothing of the arrays

    class Declared(Scaled):
        def get_declared_input_names(self):
            return ("state",)

    x = np.ones((2, 3), np.float32)
    for layer, name in ((Scaled(2.0), "x"), (Declared(2.0), "state")):
        trainer = layer.as_distributed()
        np.testing.assert_array_equal(trainer.predict({name: x}), 2 * x)
        np.testing.assert_array_equal(trainer.predict(x), 2 * x)


def test_a_tie_is_one_parameter_and_its_gradients_add_up():
    layers = nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3)
    free, tied = nn.Sequential(*layers), nn.Sequential(*layers, ties={"2.weight": "0.weight"})
    assert list(tied.specs()) == ["0.weight", "0.bias", "2.bias"]
    p, x, dy = parameters(tied), normal(4, 3), normal(4, 3, seed=1)
    y, _, g = run_both(tied, p, x, dy)
    y_free, _, g_free = run_both(free, p | {"2.weight": p["0.weight"]}, x, dy)
    np.testing.assert_array_equal(y, y_free)
    np.testing.assert_allclose(g["0.weight"], g_free["0.weight"] + g_free["2.weight"], rtol=1e-14)


def test_ties_of_ties_lead_to_one_parameter():
    layers = [nn.Linear(3, 3, bias=False) for _ in range(3)]
    chain = nn.Sequential(*layers, ties={"2.weight": "1.weight", "1.weight": "0.weight"})
    assert list(chain.specs()) == ["0.weight"]
    assert chain.ties == {"2.weight": "0.weight", "1.weight": "0.weight"}


def test_a_residual_around_ties():
    body = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3), ties={"1.weight": "0.weight"})
    layer = nn.Residual(body)
    assert list(layer.specs()) == ["body.0.weight", "body.0.bias", "body.1.bias"]
    p, x = parameters(layer), normal(2, 3)
    inner = {name.removeprefix("body."): array for name, array in p.items()}
    np.testing.assert_array_equal(run(layer, p, x), x + run(body, inner, x))


def test_frozen_parameters_are_not_trainable():
    specs = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm(4), nn.Linear(4, 2), frozen=["0.*", "*.bias"]).specs()
    assert [name for name, spec in specs.items() if spec.trainable] == ["1.weight", "2.weight"]
    assert [name for name, spec in specs.items() if spec.state] == ["1.running_mean", "1.running_var"]


def test_dropout_differs_between_layers_and_not_between_runs():
    chain = nn.Sequential(nn.Dropout(0.5), nn.Dropout(0.5))
    x = np.ones((50, 4))
    first, _ = chain.steps[0].layer.forward(env().child("0"), {}, x)
    second, _ = chain.steps[1].layer.forward(env().child("1"), {}, x)
    assert (first != second).any()
    np.testing.assert_array_equal(run(chain, {}, x), first * second)


def test_a_graph_is_what_it_says():
    nodes = {"sum": (nn.Add(), "up", "down", "x"), "up": (nn.Linear(3, 3), "x")}
    nodes |= {"both": (nn.Concat(), "sum", "z"), "down": (nn.Tanh(), "z")}
    graph = nn.Graph(nodes, inputs=("x", "z"), outputs=("both", "up"))
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


LAYERS = [nn.Linear(3, 4), nn.Linear(4, 3), nn.Linear(3, 4)]
NODE = (nn.Tanh(), "x")
TWO_OUTPUTS = nn.Graph({"a": NODE}, outputs=("a", "x"))
CYCLE = {"a": (nn.Add(), "x", "c"), "b": (nn.Tanh(), "a"), "c": (nn.Tanh(), "b")}


def make_graph(nodes=None, inputs=("x",), outputs="a"):
    return nn.Graph(nodes or {"a": NODE}, inputs, outputs)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: nn.Sequential(), "Sequential: there must be at least one layer"),
        (lambda: nn.Sequential({"a.b": nn.Tanh()}),
         "Sequential: 'a.b' is no name for a layer; use text that is not empty and has no dot"),
        (lambda: nn.Sequential({"": nn.Tanh()}), "Sequential: '' is no name for a layer"),
        (lambda: nn.Sequential({3: nn.Tanh()}), "Sequential: 3 is no name for a layer"),
        (lambda: nn.Sequential({"1": nn.Tanh()}, nn.Tanh()), "Sequential: duplicate layer names '1'"),
        (lambda: nn.Sequential(nn.GELU), r"Sequential: '0' is the class GELU; write GELU\(...\)"),
        (lambda: nn.Sequential(nn.Tanh(), np.tanh), "Sequential: '1' must be a Layer, got ufunc"),
        (lambda: nn.Sequential(nn.Add(), nn.Tanh()), r"Add\(\) takes any number of inputs; put it in a Graph"),
        (lambda: nn.Sequential(TWO_OUTPUTS, nn.Tanh()), r"Sequential: layer '1' Tanh\(\) takes 1 inputs, but gets 2"),
        (lambda: nn.Sequential(*LAYERS, ties={"1.weight": "0.weight"}),
         r"cannot tie '1.weight' \(3, 4\) to '0.weight' \(4, 3\): tied parameters must have the same shape"),
        (lambda: nn.Sequential(*LAYERS, ties={"7.weight": "0.weight"}),
         "Sequential: tie names '7.weight', which is no parameter; there are 0.weight, 0.bias, 1.weight"),
        (lambda: nn.Sequential(*LAYERS, ties={"0.weight": "2.weight", "2.weight": "0.weight"}),
         "ties lead in a circle: 0.weight -> 2.weight -> 0.weight"),
        (lambda: nn.Sequential(*LAYERS, frozen=["9.*"]),
         r"Sequential\(frozen=\): '9.\*' matches no parameter; there are '0.weight'"),
        (lambda: nn.Residual(nn.Add()), r"Residual: the body must take one input and give one output, got Add\(\)"),
        (lambda: nn.Residual(nn.Tanh), r"Residual: 'body' is the class Tanh; write Tanh\(...\)"),
        (lambda: make_graph(outputs=()), "Graph: outputs must name at least one value"),
        (lambda: make_graph(inputs=()), "Graph: inputs must name at least one value"),
        (lambda: make_graph(inputs=("x", "x")), "Graph: duplicate inputs 'x'"),
        (lambda: make_graph(outputs=("a", "a")), "Graph: duplicate outputs 'a'"),
        (lambda: make_graph({"x": NODE}, outputs=("x",)), "Graph: duplicate names 'x': nodes and inputs share one set"),
        (lambda: make_graph({"a": (nn.Tanh(), "y")}), "Graph: node 'a' reads 'y', which is unknown; there are x, a"),
        (lambda: make_graph(outputs=("b",)), "Graph: outputs name 'b', which is unknown; there are x, a"),
        (lambda: make_graph({"a": nn.Tanh()}), r"Graph: node 'a' must be \(layer, 'source', ...\), got Tanh\(\)"),
        (lambda: make_graph({"a": (nn.Tanh(), "x", "x")}), r"Graph: node 'a' Tanh\(\) takes 1 inputs, but gets 2"),
        (lambda: make_graph({"a.b": NODE}), "Graph: 'a.b' is no name"),
        (lambda: make_graph(inputs=("x", "y.z")), "Graph: 'y.z' is no name"),
        (lambda: make_graph({"a": (nn.Tanh(),)}), "Graph: node 'a' must be"),
        (lambda: make_graph(CYCLE, outputs="c"), "Graph: the nodes 'b' -> 'c' -> 'a' -> 'b' form a cycle"),
    ],
)  # fmt: skip
def test_wiring_that_cannot_work(make, message):
    with pytest.raises(ConfigError, match=message):
        make()


def test_inputs_that_do_not_fit_together():
    with pytest.raises(ShapeError, match=r"Add\(\) wants inputs of one shape, got \(2, 3\), \(2, 4\)"):
        nn.Add().forward(env(), {}, (normal(2, 3), normal(2, 4)))
    with pytest.raises(ShapeError, match=r"Concat\(\) wants inputs that differ in dim -1 only, got \(2, 3\), \(3, 3\)"):
        nn.Concat().forward(env(), {}, (normal(2, 3), normal(3, 3)))


@pytest.mark.parametrize(("layer", "x"), [(nn.Concat(-2), (normal(2, 3),) * 2), (nn.Softmax(-2), normal(2, 3))])
def test_a_negative_dim_is_not_samples(layer, x):
    with pytest.raises(ShapeError, match=r"dim=-2\): dim -2 of 2 dims is samples; choose a dim within one sample"):
        layer.forward(env(), {}, x)
    context = nn.sharding.ShardingContext("layer", [nn.sharding.ShardedSequence()], 1)
    with pytest.raises(ConfigError, match="reads a part of the sequence, but acts on each sample as a whole"):
        layer.shard_over_ranks(context)  # of (samples, time, features) it is time


@pytest.mark.parametrize(
    ("layer", "text"),
    [
        (nn.Linear(64, 128), "Linear(64, 128)"),
        (nn.Linear(64, 128, bias=False), "Linear(64, 128, bias=False)"),
        (nn.Dropout(0.1), "Dropout(p=0.1)"),
        (nn.Attention(4, 2, 3, window=3), "Attention(4, 2, 3, window=3)"),
        (nn.TransformerBlock(8, 2, dropout=0.1), "TransformerBlock(8, 2, dropout=0.1)"),
        (nn.GPT(11, 8, 2, 2, 6), "GPT(11, 8, 2, 2, 6)"),
        (nn.Residual(nn.Tanh()), "Residual(Tanh())"),
        (nn.Sequential(nn.Linear(2, 3), nn.GELU("tanh")), "Sequential(Linear(2, 3), GELU(approximate='tanh'))"),
        (nn.Sequential({"a": nn.Tanh(), "b": nn.ReLU()}), "Sequential(a=Tanh(), b=ReLU())"),
        (nn.Graph({"a": NODE}, outputs="a"), "Graph(x -> a = Tanh()(x) -> a)"),
    ],
)
def test_repr(layer, text):
    assert repr(layer) == text


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


CASES = {
    "GatedMLP": (lambda: GatedMLP(6, 4), lambda: rows(4, 3, 6)),
    "Highway": (lambda: Highway(4), lambda: (rows(4, 4), rows(4, 4) + 1.0)),
    "Twice": (Twice, lambda: rows(4, 5)),
}
globals().update(contracts_of(CASES))


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
    free = nn.Sequential(nn.Linear(5, 5), nn.Tanh(), nn.Linear(5, 5))
    p, x, dy = parameters(layer), normal(4, 5), normal(4, 5, seed=1)
    q = {f"{i}.{name}": p[f"shared.{name}"] for i in (0, 2) for name in ("weight", "bias")}
    (*_, g), (*_, h) = run_both(layer, p, x, dy), run_both(free, q, x, dy)
    for name in ("weight", "bias"):
        np.testing.assert_allclose(g[f"shared.{name}"], h[f"0.{name}"] + h[f"2.{name}"], rtol=1e-13)


def train(comm, strategy="fsdp", **options):
    model = nn.Sequential({"a": nn.Linear(6, 5), "b": Twice(), "c": GatedMLP(5, 8), "d": nn.Linear(5, 3)})
    options = {"optimizer": optim.AdamW(lr=1e-2, eps=1e-5), "precision": "float64", "group_bytes": 0, **options}
    trainer = distributed(model, comm, strategy=strategy, **options)
    x, y, mine = normal(12, 6), normal(12, 3, seed=1), part(trainer.data_group, 12)
    nodes = trainer.inspect.placement.model.nodes
    return [trainer.step(x[mine], y[mine]) for _ in range(5)], [node.path for node in nodes]


COLUMN, ROW = nn.sharding.ColumnParallel, nn.sharding.RowParallel


@pytest.mark.parametrize(
    ("size", "options"),
    [
        (2, {"strategy": "ddp"}),
        (3, {"strategy": "fsdp"}),
        (2, {"mesh": fsdpx.Mesh(pipe=2), "stages": ["a", "b.shared_2"]}),
        (2, {"mesh": fsdpx.Mesh(tensor=2), "tensor_plan": {"c.gate": COLUMN, "c.up": COLUMN, "c.down": ROW}}),
    ],
    ids=["ddp", "fsdp", "pipe", "tensor"],
)
def test_it_trains_alike_under_every_strategy(size, options):
    want, paths = fsdpx.spawn(train, 1)[0]
    assert paths[2:9] == ["b.tanh", "b.shared_2", "c.gate", "c.silu", "c.up", "c.multiply", "c.down"]
    for losses, _ in fsdpx.spawn(lambda comm: train(comm, **options), size):
        np.testing.assert_allclose(losses, want, rtol=1e-11)


def composed(compose, **layers):
    """A composite of these attributes whose `compose` is that."""

    return type("Wrong", (nn.Composite,), {"__init__": lambda self: vars(self).update(layers), "compose": compose})()


@pytest.mark.parametrize(
    ("compose", "layers", "message"),
    [
        (lambda self, x: nn.Linear(2, 2)(x), {}, r"Wrong: Linear\(2, 2\) has parameters, but no name: make it an attr"),
        (lambda self, x: self.ls[0](x), {"ls": [nn.Linear(2, 2)]},
         r"but no name: .* of a list each by setattr\(self, f'name_\{i\}', \.\.\.\), or as one nn\.Sequential"),
        (lambda self, x: x, {"a": nn.Tanh()}, r"Wrong: compose never calls self.a, Tanh\(\): call it, or leave it out"),
        (lambda self, x: self.a(x, x), {"a": nn.Tanh()}, r"Wrong: Tanh\(\) takes 1 inputs, but gets 2"),
        (lambda self, x: 3, {}, "Wrong: compose returns 3; compose works on its arguments"),
        (lambda self, *x: x[0], {}, "Wrong: compose takes one argument by name for each input"),
        (lambda self: 3, {}, "Wrong: compose takes one argument by name for each input"),
        (lambda self, x: self.a(self.a(x)), {"a": nn.BatchNorm(2)}, "has running statistics, so compose can call it "),
        (lambda self, x: x, {"steps": 3}, "'steps' is an attribute that every container has; choose another name"),
        (lambda self, x: self.a(np.ones(3)), {"a": nn.Tanh()}, r"Tanh\(\) is called on ndarray: layers are"),
        (lambda self, x: x + 2.0, {}, r"Wrong: Add\(\) gets 2\.0; compose works on its arguments .* use nn\.Lambda"),
        (lambda self, x: 3 * x, {}, r"Wrong: Multiply\(\) gets 3; compose works on its arguments"),
        (lambda self, x: x - x, {}, r"Wrong: the value 'x' has no -; compose works on .* \+ and \*: .* use nn\.Lambda"),
        (lambda self, x: 1.0 / x, {}, "Wrong: the value 'x' has no /; compose works on its arguments"),
        (lambda self, x: x**2, {}, r"Wrong: the value 'x' has no \*\*; compose works"),
        (lambda self, x: x[0], {}, r"Wrong: the value 'x' has no \[\]; compose works"),
        (lambda self, x: [*x], {}, "Wrong: the value 'x' has no parts; compose works"),
        (lambda _, x: np.tanh(x), {}, r"Wrong: the value 'x' is given to np\.tanh; compose works on .* use nn\.Lambda"),
        (lambda self, x: np.float64(2) * x, {}, r"Wrong: the value 'x' is given to np\.multiply; compose"),
        (lambda self, x: np.concatenate([x, x]), {}, r"Wrong: the value 'x' is given to np\.concatenate; compose"),
        (lambda _, x: x.sum(), {}, "Wrong: the value 'x' has no sum; compose .* other shapes, sums and parts a layer"),
        (lambda self, x: x.reshape(-1), {}, "Wrong: the value 'x' has no reshape; compose works"),
        (lambda self, x: nn.Add()(x, np.ones(2)), {}, r"Wrong: Add\(\) gets array\(\[1\., 1\.\]\); compose works on"),
    ],
)  # fmt: skip
def test_what_cannot_be_composed(compose, layers, message):
    with pytest.raises(ConfigError, match=message):
        composed(compose, **layers)


def test_values_of_another_layer_are_refused():
    seen = []

    def compose(self, x):
        seen.append(x)
        return nn.Add()(x, seen[0])

    composed(compose)
    with pytest.raises(ConfigError, match=r"Wrong: Add\(\) gets the value 'x' of Wrong; compose works on its arg"):
        composed(compose)
