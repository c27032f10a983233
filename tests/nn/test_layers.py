"""Layers and functions keep the contract and have the right gradients."""

import subprocess
import sys
from itertools import pairwise

import numpy as np
import pytest
from layer_cases import check_16_bits, check_refusal
from models import Same
from setting import env, normal, parameters, run_both

from fsdpx import nn
from fsdpx.core.comm.init import spawn
from fsdpx.core.comm.mesh import Mesh, connect_axes
from fsdpx.errors import ConfigError, DataError, ShapeError
from fsdpx.nn.gradient_accumulation import GradientEntries, Gradients, get_gradient_and_whether_to_add
from fsdpx.nn.layer import group_arrays_by_child


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: nn.Linear(0, 3), "Linear: in_features must be a whole number >= 1, got 0"),
        (lambda: nn.Linear(3, 2.5), "Linear: out_features must be a whole number >= 1, got 2.5"),
        (lambda: nn.Embedding(-1, 3), "Embedding: num_embeddings must be a whole number >= 1, got -1"),
        (lambda: nn.Dropout(1.5), "Dropout: p must be between 0 and 1, got 1.5"),
        (lambda: nn.GELU("fast"), "GELU: approximate must be 'none' or 'tanh', got 'fast'"),
        (lambda: nn.Softmax(0), "Softmax: dim 0 is samples"),
        (lambda: nn.Concat(0), "Concat: dim 0 is samples"),
        (lambda: nn.Flatten(0), "Flatten: start_dim must be a whole number >= 1, got 0"),
        (lambda: nn.LayerNorm(()), "LayerNorm: normalized_shape must be a whole number >= 1, got 0"),
        (lambda: nn.RMSNorm((3, 0)), "RMSNorm: normalized_shape must be a whole number >= 1, got 0"),
        (lambda: nn.BatchNorm(3, momentum=2), "BatchNorm: momentum must be between 0 and 1, got 2"),
        (lambda: nn.MultiHeadAttention(6, 4), "MultiHeadAttention: d_model 6 is not a multiple of n_heads 4"),
        (lambda: nn.MLP(4, dropout=-1), "Dropout: p must be between 0 and 1, got -1"),
        (lambda: nn.GPT(11, 8, 0, 2, 6), "GPT: n_layers must be a whole number >= 1, got 0"),
        (lambda: nn.GPT(9, 8, 1, 2, 4, activation="swish"), "activation must be one of gelu, .*, got 'swish'"),
        (lambda: nn.Attention(3, 2, 4), "n_heads 3 is not a multiple of kv_heads 2"),
        (lambda: nn.Attention(2, 2, 4, causal=False, window=3), "a window needs causal=True"),
        (lambda: nn.Rotary(5), "d_head must be even, got 5"),
        (lambda: nn.Rotary(2, rope_scaling={"rope_type": "dynamic", "factor": 2.0}), "'dynamic' needs d_head >= 4"),
        (lambda: nn.Rotary(4, rope_scaling={"rope_type": "su"}), "rope_type must be one of default, linear, .* 'su'"),
        (lambda: nn.Rotary(4, rope_scaling={"type": "yarn"}), "'yarn' needs factor, original_max_position_embeddings"),
        (lambda: nn.GatedActivation("tanh"), "GatedActivation: activation must be one of silu, .*, got 'tanh'"),
        (lambda: nn.Llama(9, 8, 1, 2, 4, experts=2, bias=True), "experts have activation='silu' and no bias"),
        (lambda: nn.ViT(9, 4, 8, 1, 2, 3), "PatchEmbedding: images of 9 pixels are not a multiple of patches of 4"),
        (lambda: nn.Bert(9, 8, 1, 2, 4, dropout=0.1), r"dropout is that of the head for classes: give classes="),
        (lambda: nn.Bert(9, 8, 1, 2, 4, classes=0), "Bert: classes must be a whole number >= 1, got 0"),
    ],
)
def test_options_that_cannot_work(make, message):
    with pytest.raises(ConfigError, match=message):
        make()


@pytest.mark.parametrize("layer", [nn.Embedding(5, 2), nn.TokenEmbedding(5, 2, 4)])
@pytest.mark.parametrize("wrong", [-1, 5])
def test_an_index_out_of_range(layer, wrong):
    with pytest.raises(DataError, match=rf"index {wrong} is out of range: it must be from 0 to 4"):
        layer.forward(env(), parameters(layer), np.array([[0, wrong, 3]]))


def test_a_layer_that_forgets_its_gradients_is_told():
    class Forgets(Same):
        def specs(self):
            return {"weight": nn.ParameterSpec((3,))}

    layer = Forgets()
    with pytest.raises(ConfigError, match=r"Forgets\(\) has parameters \(weight\) but does not define backward_params"):
        layer.backward(env(), {}, {"weight": np.zeros(3)}, (), np.ones((2, 3)))


def test_the_shape_of_a_parameter_is_a_tuple():
    with pytest.raises(ConfigError, match=r"ParameterSpec\(3\): the shape must be a tuple: \(3,\)"):
        nn.ParameterSpec(3)
    assert nn.ParameterSpec([3, 2]).shape == (3, 2)


HALVES = {
    "linear": (nn.Linear(6, 4), lambda: normal(3, 5, 6)),
    "batch norm": (nn.BatchNorm(3), lambda: normal(6, 3)),
    "block": (nn.TransformerBlock(8, 2), lambda: normal(3, 4, 8)),
    "block with dropout": (nn.TransformerBlock(8, 2, dropout=0.2), lambda: normal(3, 4, 8)),
    "rms": (nn.Sequential(nn.RMSNorm(6), nn.SiLU(), nn.Sigmoid()), lambda: normal(3, 6)),
    "functions": (nn.Sequential(nn.ReLU(), nn.GELU("tanh"), nn.Tanh(), nn.Softmax()), lambda: normal(3, 6)),
    "gpt": (nn.GPT(11, 8, 1, 2, 6), lambda: np.arange(10).reshape(2, 5)),
}


@pytest.mark.parametrize("name", HALVES)
@pytest.mark.parametrize("half", ["float16", "bf16"])
@pytest.mark.parametrize("wide_gradients", [True, False])
def test_16_bits(name, half, wide_gradients):
    layer, make = HALVES[name]
    check_16_bits(layer, make(), half, wide_gradients)


@pytest.mark.parametrize("counts", [(4, 3), (0, 5, 2), (7,), (1, 0, 0, 1)])
@pytest.mark.parametrize("offset", [0.0, 1e6])
def test_batch_norm_is_over_the_global_batch(counts, offset):
    """Uneven and empty parts give what one rank gives; a large mean loses no digits of the variance."""
    layer = nn.BatchNorm(3)
    x, dy = normal(sum(counts), 3, 2) + offset, normal(sum(counts), 3, 2, seed=1)

    def work(mesh, rows):
        p = parameters(layer) | {"weight": np.array([1.0, 2.0, -1.0])}
        return *run_both(layer, p, x[rows], dy[rows], env(mesh=mesh)), p

    whole = work(None, slice(None))
    rows = [slice(*pair) for pair in pairwise(np.cumsum([0, *counts]))]
    parts = spawn(lambda comm: work(connect_axes(Mesh(), comm), rows[comm.rank]), len(counts))
    for i in (0, 1):
        np.testing.assert_allclose(np.concatenate([part[i] for part in parts]), whole[i], rtol=1e-9, atol=1e-9)
    for name in ("weight", "bias"):
        np.testing.assert_allclose(sum(part[2][name] for part in parts), whole[2][name], rtol=1e-9, atol=1e-9)
    for part in parts:
        for name in ("running_mean", "running_var"):
            np.testing.assert_array_equal(part[3][name], parts[0][3][name])
            np.testing.assert_allclose(part[3][name], whole[3][name], rtol=1e-12)
    np.testing.assert_allclose(whole[3]["running_mean"], 0.1 * x.mean(axis=(0, 2)), rtol=1e-12)
    np.testing.assert_allclose(whole[3]["running_var"], 0.9 + 0.1 * x.var(axis=(0, 2), ddof=1), rtol=1e-9)


def test_batch_norm_of_no_samples_at_all_keeps_its_state():
    layer = nn.BatchNorm(3)
    p, nothing = parameters(layer), np.zeros((0, 3))
    y, dx, _ = run_both(layer, p, nothing, nothing)
    assert y.shape == dx.shape == (0, 3)
    np.testing.assert_array_equal(p["running_mean"], 0.0)
    np.testing.assert_array_equal(p["running_var"], 1.0)


@pytest.mark.parametrize("shapes", [[(1, 3)], [(1, 3, 1)], [(1, 3), (0, 3)]])
def test_batch_norm_of_one_value_is_refused_in_training(shapes):
    """As in PyTorch, counted over all ranks."""
    layer = nn.BatchNorm(3)
    p = parameters(layer)

    def train(comm):
        return layer.forward(env(mesh=connect_axes(Mesh(), comm)), p, np.ones(shapes[comm.rank]))

    with pytest.raises(DataError, match=r"BatchNorm.*more than 1 value per channel is needed in training"):
        spawn(train, len(shapes))
    layer.forward(env(training=False), p, np.ones(shapes[0]))
    shapes = [shapes[0]] * 2
    spawn(train, 2)


@pytest.mark.parametrize("shape", [(1, 3), (2, 3), (1, 3, 2)])
@pytest.mark.parametrize("training", [True, False])
def test_batch_norm_of_one_value_is_refused_where_pytorch_refuses_it(shape, training):
    check_refusal(nn.BatchNorm(3), pytest.importorskip("torch").nn.BatchNorm1d(3), np.ones(shape), training)


def test_only_batch_norm_is_collective_and_says_so():
    assert nn.Sequential(nn.Residual(nn.Sequential(nn.BatchNorm(3)))).collective
    assert not nn.GPT(11, 8, 1, 2, 6).collective


def test_dropout_keeps_the_mean_and_is_the_identity_when_evaluating():
    layer, x = nn.Dropout(0.25), np.ones((400, 50))
    y, _ = layer.forward(env(), {}, x)
    assert abs(float((y == 0).mean()) - 0.25) < 0.01
    assert abs(float(y.mean()) - 1.0) < 0.02
    assert layer.forward(env(training=False), {}, x)[0] is x
    assert nn.Dropout(0.0).forward(env(), {}, x)[0] is x


@pytest.mark.parametrize("imported", ["from fsdpx import nn", "import fsdpx.nn.linear; from fsdpx import nn"])
def test_as_distributed_is_there_however_layers_are_imported(imported):
    """`fsdpx.nn` does not import what trains its layers: the package hands it in."""
    code = f"""
{imported}
import fsdpx, sys
fsdpx.distribute = lambda model, **options: (model is layer, options)
print((layer := nn.Linear(2, 3)).as_distributed(strategy="ddp"), "mpi4py" in sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "(True, {'strategy': 'ddp'}) False\n"


def test_it_is_the_function_and_its_derivative():
    layer, x, dy = nn.Lambda(np.sin, np.cos), normal(4, 3), normal(4, 3, seed=1)
    y, dx, _ = run_both(layer, {}, x, dy)
    np.testing.assert_array_equal(y, np.sin(x))
    np.testing.assert_array_equal(dx, dy * np.cos(x))
    assert repr(layer) == "Lambda(sin, cos)"
    hypot = nn.Lambda(np.hypot, (lambda a, b: a / np.hypot(a, b), lambda a, b: b / np.hypot(a, b)))
    assert repr(hypot) == "Lambda(hypot, (<lambda>, <lambda>))"


@pytest.mark.parametrize(
    ("function", "derivative", "message"),
    [
        (np.sin, lambda x: -np.cos(x), r"Lambda\(sin, <lambda>\): at 0\.12\S* the derivative gives -0\.99\S*, but the"),
        (np.exp, lambda x: np.exp(x) * 1.001, "the derivative gives"),
        (np.multiply, (lambda a, b: b, lambda a, b: b), "the derivative by input 1 gives"),
        (lambda x: x - x.mean(), lambda x: 1.0 + 0 * x, "does not act on each element by itself"),
        (lambda x: x.sum(), np.ones_like, "does not act on each element by itself"),
        (lambda x: x * np.float64(2), lambda x: 2.0 + 0 * x, "the function turns float32 into float64"),
        (lambda x: x * 2.0, lambda x: np.full(x.shape, 2.0), "the derivative turns float32 into float64"),
        (lambda x: np.log(x - 100), lambda x: 1 / (x - 100), "no finite value between -2 and 2"),
        (lambda a, b: a * b, lambda a, b: b,
         r"the function does not take 1 inputs, .*: two inputs need a tuple of two derivatives, nn\.Lambda\(f, \(by"),
        (np.multiply, (lambda a, b: b, lambda b: b), "the derivative does not take 2 inputs, .* each of both inputs"),
        (np.sin, (np.cos, np.cos), "the function does not take 2 inputs, which is the number of derivatives"),
        (np.sin, None, "a function and its derivative are needed"),
        (np.sin, (), "a function and its derivative are needed"),
    ],
)  # fmt: skip
def test_what_is_no_function_with_its_derivative_is_refused(function, derivative, message):
    with pytest.raises(ConfigError, match=message):
        nn.Lambda(function, derivative)


def test_where_the_function_is_not_finite_nothing_is_compared():
    layer, x = nn.Lambda(np.log, lambda x: 1.0 / x), np.abs(normal(4, 3))
    np.testing.assert_array_equal(layer.forward(env(), {}, x)[0], np.log(x))


def test_a_derivative_may_be_a_number():
    layer, x = nn.Lambda(lambda x: 3.0 * x, lambda x: 3.0), normal(4, 3).astype(np.float32)
    np.testing.assert_array_equal(run_both(layer, {}, x, x)[1], 3 * x, strict=True)


def test_inputs_have_one_shape():
    with pytest.raises(ShapeError, match=r"wants inputs of one shape, got \(4, 3\), \(4, 1\)"):
        nn.Lambda(np.add, (lambda a, b: 1.0, lambda a, b: 1.0)).forward(env(), {}, (normal(4, 3), normal(4, 1)))


def blank(*names):
    entries = GradientEntries({name: np.full(3, np.nan) for name in names})
    entries.mark_all_blank()
    return Gradients(entries)


def test_adding_in_place_begins_at_zero():
    g = blank("weight")
    g["weight"] += 1
    g["weight"] += 1
    np.testing.assert_array_equal(g["weight"], [2, 2, 2])


@pytest.mark.parametrize(
    "look", [lambda g: g["a"], lambda g: g.get("a"), lambda g: dict(g)["a"], lambda g: next(iter(g.values()))]
)
def test_every_way_to_look_sees_zeros(look):
    np.testing.assert_array_equal(look(blank("a")), [0, 0, 0])


def test_asking_for_names_writes_nothing():
    g = blank("a", "b")
    assert "a" in g
    assert "c" not in g
    assert list(g) == ["a", "b"]
    assert len(g) == 2
    assert all(np.isnan(entry.array).all() for entry in g.entries.values())


def test_a_destination_is_written_first_and_added_to_later():
    g = blank("a")
    array, add = get_gradient_and_whether_to_add(g, "a") or pytest.fail("a is there")
    assert not add
    assert np.isnan(array).all(), "zeros that are written over at once"
    assert (get_gradient_and_whether_to_add(g, "a") or (None, None))[1]
    assert get_gradient_and_whether_to_add(g, "frozen") is None


def test_a_plain_dict_is_always_added_to():
    array = np.ones(3)
    assert get_gradient_and_whether_to_add({"a": array}, "a") == (array, True)
    assert get_gradient_and_whether_to_add({}, "a") is None


def test_branches_share_entries_and_ties_are_one():
    g = blank("one.weight", "one.deep.bias")
    parts = g.group_arrays_by_child({"two.weight": "one.weight"})
    assert set(parts) == {"one", "two"}
    assert set(group_arrays_by_child(parts["one"])) == {"weight", "deep"}
    parts["two"]["weight"] += 1
    parts["one"]["weight"] += 1
    np.testing.assert_array_equal(g["one.weight"], [2, 2, 2])
    assert g.entries["one.deep.bias"].is_blank


def test_what_was_not_written_is_zero_in_the_end():
    g = blank("a", "b")
    g["a"] += 1
    entries = g.entries
    entries.zero_unwritten()
    np.testing.assert_array_equal(entries["a"].array, [1, 1, 1])
    np.testing.assert_array_equal(entries["b"].array, [0, 0, 0])
    entries["b"].array[...] = 2
    entries.zero_unwritten()
    np.testing.assert_array_equal(entries["b"].array, [2, 2, 2])
