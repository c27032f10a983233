"""How a model is sorted into units, and what moves between ranks inside layers."""

import numpy as np
import pytest
from amount import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from models import Same
from setting import env, parameters
from threads import on_ranks

from fsdpx import FakeCommunicator, nn, spawn
from fsdpx.core.array import shapes
from fsdpx.core.array.shapes import ShapeArray
from fsdpx.errors import ShapeError
from fsdpx.nn import collectives
from fsdpx.nn.layer_list import AsNumbers
from fsdpx.nn.shard_specs import shard_bounds


def flow(model):
    return [(node.path, node.inputs, *node.outputs) for node in nn.sharding.linearize(model).nodes]


def specs_of(model):
    return nn.sharding.parameter_specs(nn.sharding.linearize(model))


def outputs_of(model, *inputs, **options):
    return nn.sharding.output_shapes(nn.sharding.linearize(model), inputs, **options)


def test_a_lone_layer_is_one_node():
    model = nn.sharding.linearize(nn.Linear(3, 4))
    assert flow(nn.Linear(3, 4)) == [("", (0,), 1)]
    assert (model.inputs, model.outputs, model.ties) == (("x",), (1,), {})
    assert list(nn.sharding.parameter_specs(model)) == ["weight", "bias"]


def test_casts_do_not_copy_arrays_that_have_the_wanted_dtype():
    x = np.ones(3, np.float32)
    for wanted in ("float32", None):
        assert AsNumbers(wanted, "exact").forward(env(), {}, x)[0] is x
    assert AsNumbers("float16", "exact").forward(env(), {}, x)[0].dtype == np.float16


def test_chains_are_opened_and_units_are_not():
    chain = nn.Sequential(nn.Tanh(), nn.Residual(nn.Sequential(nn.Linear(4, 4))))
    model = nn.Sequential(nn.Linear(4, 4), chain, nn.MLP(4))
    assert flow(model) == [("0", (0,), 1), ("1.0", (1,), 2), ("1.1", (2,), 3), ("2", (3,), 4)]
    weights = [name for name in specs_of(model) if "weight" in name]
    assert weights == ["0.weight", "1.1.body.0.weight", "2.up.weight", "2.down.weight"]


def test_graphs_are_opened():
    inner = nn.Graph({"a": (nn.Tanh(), "x"), "b": (nn.Add(), "a", "x")}, outputs=("b", "a"))
    model = nn.Graph({"top": (nn.Add(), "in.a", "z"), "in": (inner, "x")}, inputs=("x", "z"), outputs=("top", "in.b"))
    assert flow(model) == [("in.a", (0,), 2), ("in.b", (2, 0), 3), ("top", (2, 1), 4)]
    assert nn.sharding.linearize(model).inputs == ("x", "z")
    assert nn.sharding.linearize(model).outputs == (4, 3)


def test_gpt():
    model = nn.sharding.linearize(nn.GPT(11, 8, 2, 2, 6))
    assert [node.path for node in model.nodes] == ["embed", "blocks.0", "blocks.1", "norm", "head"]
    assert model.ties == {"head.weight": "embed.weight"}
    names = list(nn.sharding.parameter_specs(model))
    assert names[:3] == ["embed.weight", "embed.position", "blocks.0.norm1.weight"]
    assert "blocks.1.attn.qkv.weight" in names
    assert "head.weight" not in names
    free = specs_of(nn.GPT(11, 8, 2, 2, 6, tie=False))
    assert "head.weight" in free
    assert len(free) == len(names) + 1


def test_gpt_begins_as_gpt_2():
    for name, array in parameters(nn.GPT(50, 40, 8, 2, 30)).items():
        if name.endswith("bias"):
            assert not array.any(), name
        elif "norm" in name:
            assert (array == 1).all(), name
        else:
            std = 0.02 / 4 if name.endswith(("attn.out.weight", "mlp.down.weight")) else 0.02
            std = 0.04 if name == "embed.position" else std
            np.testing.assert_allclose(np.sqrt((array**2).mean()), std, rtol=0.15, err_msg=name)


def test_gpt_positions_begin_as_sinusoids():
    """Vaswani et al. 2017, section 3.5: the inner product of two rows depends on their distance only."""
    p = parameters(nn.GPT(50, 40, 1, 2, 30))["embed.position"]
    row = 0.04 * np.sqrt(2) * np.array([f(3 / 10000 ** (c / 40)) for c in range(0, 40, 2) for f in (np.sin, np.cos)])
    np.testing.assert_allclose(p[3], row, atol=1e-15)
    np.testing.assert_allclose((p[1:] * p[:-1]).sum(1), (p[1] * p[0]).sum(), rtol=1e-12)


def test_ties_reach_through_containers():
    inner = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3), ties={"1.weight": "0.weight"})
    model = nn.sharding.linearize(nn.Sequential(nn.Linear(3, 3), inner, ties={"1.0.weight": "0.weight"}))
    assert model.ties == {"1.0.weight": "0.weight", "1.1.weight": "0.weight"}
    assert list(nn.sharding.parameter_specs(model)) == ["0.weight", "0.bias", "1.0.bias", "1.1.bias"]


def test_frozen_reaches_the_leaves():
    inner = nn.Sequential(nn.Linear(3, 3), nn.MLP(3), frozen=["0.weight"])
    specs = specs_of(nn.Sequential(inner, nn.Linear(3, 3), frozen="0.1.up.*"))
    frozen = [name for name, spec in specs.items() if not spec.trainable]
    assert frozen == ["0.0.weight", "0.1.up.weight", "0.1.up.bias"]


def test_specs_are_those_of_the_model():
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm(4), nn.Sequential(nn.Linear(4, 2), frozen="*"))
    assert specs_of(model) == model.specs()


def test_infer_holds_no_data():
    (logits,) = outputs_of(nn.GPT(50_000, 12_288, 3, 8, 2048), ShapeArray((8, 2048), np.int64), dtype="bf16")
    assert logits.shape == (8, 2048, 50_000)
    assert logits.dtype.name == "bfloat16"


def test_infer_without_axes_is_of_one_rank():
    """Also with layers that sum over ranks: their sums are their own."""
    (y,) = outputs_of(nn.Sequential(nn.Linear(3, 4), nn.BatchNorm(4)), ShapeArray((7, 3), np.float32))
    assert y.shape == (7, 4)


def test_infer_of_several_inputs_and_outputs():
    nodes = {"a": (nn.Linear(3, 4), "x"), "b": (nn.Concat(), "a", "z"), "c": (nn.Linear(9, 2), "b")}
    model = nn.Graph(nodes, inputs=("x", "z"), outputs=("c", "a"))
    x, z = (ShapeArray((7, n), np.float32) for n in (3, 5))
    assert [array.shape for array in outputs_of(model, x, z)] == [(7, 2), (7, 4)]
    with pytest.raises(ShapeError, match=r"the model takes 2 inputs \(x, z\), got 1"):
        outputs_of(model, x)


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (nn.Sequential(nn.Linear(64, 32), nn.GELU(), nn.Linear(128, 10)),
         r"layer '2' Linear\(128, 10\) does not fit: Linear\(128, 10\) wants an input of shape "
         r"\(samples, ..., 128\), got \(8, 32\). It got \(8, 32\) float32 from layer '1' GELU\(\)"),
        (nn.Linear(128, 10), r"It got \(8, 64\) float32 from the model's input 'x'"),
        (nn.LayerNorm(63), r"LayerNorm\(63\) wants an input of shape \(samples, ..., 63\), got \(8, 64\)"),
        (nn.BatchNorm(63), r"BatchNorm\(63\) wants an input of shape \(samples, 63, ...\), got \(8, 64\)"),
        (nn.MultiHeadAttention(64, 2), r"wants an input of shape \(samples, time, 64\), got \(8, 64\)"),
        (nn.GPT(9, 8, 1, 2, 63), r"wants tokens of shape \(samples, time <= 63\), got \(8, 64\)"),
        (nn.Embedding(9, 8), r"Embedding\(9, 8\) wants whole numbers, got float32"),
        (nn.Graph({"up": (nn.Linear(64, 3), "x"), "sum": (nn.Add(), "up", "x")}, outputs="sum"),
         r"layer 'sum' Add\(\) does not fit: .* one shape, got \(8, 3\), \(8, 64\). "
         r"It got \(8, 3\) float32 from layer 'up' Linear\(64, 3\); \(8, 64\) float32 from the model's input 'x'"),
    ],
)  # fmt: skip
def test_a_layer_that_does_not_fit_is_named(model, message):
    with pytest.raises(ShapeError, match=message):
        outputs_of(model, ShapeArray((8, 64), np.int64 if isinstance(model, nn.GPT) else np.float32))


def test_a_layer_of_a_user_that_does_not_fit_is_named():
    class Cut(Same):
        def forward(self, env, p, x):
            samples, time, features = x.shape
            return x, (samples, time, features)

    with pytest.raises(ShapeError, match=r"layer '0' Cut\(\) does not fit: not enough values to unpack"):
        outputs_of(nn.Sequential(Cut()), ShapeArray((8, 64), np.float32))


steady = settings(derandomize=True, database=None, deadline=None, max_examples=examples(30))


def normal(*key, shape):
    return np.random.default_rng([*map(ord, "".join(map(str, key)))]).standard_normal(shape)


def value(kind, name, shape, dim, comm):
    """This rank's side of a value that is replicated, cut along dim, or each rank's own."""
    if kind == "each":
        return normal(name, comm.rank, shape=shape)
    whole = normal(name, shape=shape)
    bounds = shard_bounds(shape[dim], comm.rank, comm.size)
    return whole if kind == "replicated" else collectives.slice_dim(whole, dim, *bounds)


def inner(kind, pairs):
    """pairs: one (a, b) per rank."""
    pairs = pairs[:1] if kind == "replicated" else pairs
    return sum(float(np.sum(a * b)) for a, b in pairs)


PAIRS = {
    "mark_separate": ("replicated", "each", "all_reduce_sum"),
    "all_reduce_sum": ("each", "replicated", "mark_separate"),
    "all_gather_dim": ("cut", "each", "reduce_scatter_dim"),
    "reduce_scatter_dim": ("each", "cut", "all_gather_dim"),
    "take_shard": ("replicated", "cut", "all_gather_replicated"),
    "all_gather_replicated": ("cut", "replicated", "take_shard"),
}


def run(name, comm, x, dim, total):
    extra = [] if name in ("mark_separate", "all_reduce_sum") else [dim, total] if "gather" in name else [dim]
    return getattr(collectives, name)(np, comm, x, *extra)


shape_and_dim = st.lists(st.integers(0, 6), min_size=1, max_size=3).flatmap(
    lambda shape: st.tuples(st.just(tuple(shape)), st.integers(0, len(shape) - 1))
)


@pytest.mark.parametrize("name", PAIRS)
@steady
@given(width=st.integers(1, 4), where=shape_and_dim)
def test_the_adjoint(name, width, where):
    (shape, dim), (before, after, adjoint) = where, PAIRS[name]

    def body(comm):
        x, y = value(before, "x", shape, dim, comm), value(after, "y", shape, dim, comm)
        x_before = x.copy()
        there, back = run(name, comm, x, dim, shape[dim]), run(adjoint, comm, y, dim, shape[dim])
        np.testing.assert_array_equal(x, x_before, err_msg="the move changed its input")
        assert there.shape == y.shape
        assert back.shape == x.shape
        return (there, y), (x, back)

    both = spawn(body, width)
    left, right = inner(after, [pair[0] for pair in both]), inner(before, [pair[1] for pair in both])
    assert left == pytest.approx(right, rel=1e-12, abs=1e-12)


@steady
@given(st.integers(1, 4), st.tuples(st.integers(0, 2), st.integers(1, 7), st.integers(1, 7)), st.permutations(range(3)))
def test_exchange_is_undone_by_its_adjoint(width, sizes, dims):
    split, merge, _ = dims

    def body(comm):
        x = value("cut", "x", sizes, merge, comm)
        y = collectives.all_to_all_dims(np, comm, x, split, merge, sizes[merge])
        np.testing.assert_array_equal(y, value("cut", "x", sizes, split, comm))
        np.testing.assert_array_equal(collectives.all_to_all_dims(np, comm, y, merge, split, sizes[split]), x)

    spawn(body, width)


@steady
@given(width=st.integers(1, 4), seed=st.integers(0, 9), shape=st.sampled_from([(), (3,), (2, 2)]))
def test_the_adjoint_of_dispatch(width, seed, shape):
    """Any numbers of rows, also none."""
    table = np.random.default_rng(seed).integers(0, 4, (width, width))

    def body(comm):
        leaving, arriving = table[comm.rank].tolist(), table[:, comm.rank].tolist()
        x = normal("x", comm.rank, shape=(sum(leaving), *shape))
        y = normal("y", comm.rank, shape=(sum(arriving), *shape))
        there = collectives.all_to_all_rows(np, comm, x, leaving, arriving)
        np.testing.assert_array_equal(collectives.all_to_all_rows(np, comm, there, arriving, leaving), x)
        return (there, y), (x, collectives.all_to_all_rows(np, comm, y, arriving, leaving))

    both = spawn(body, width)
    left, right = inner("each", [pair[0] for pair in both]), inner("each", [pair[1] for pair in both])
    assert left == pytest.approx(right, rel=1e-12, abs=1e-12)


def test_what_is_moved():
    def body(comm):
        x = np.arange(6.0).reshape(2, 3) + comm.rank
        mine = collectives.reduce_scatter_dim(np, comm, x, 1)
        return collectives.all_reduce_sum(np, comm, x), mine, collectives.all_gather_dim(np, comm, mine, 1, 3)

    for rank, (total, mine, whole) in enumerate(spawn(body, 2)):
        want = [[1, 3, 5], [7, 9, 11]]
        np.testing.assert_array_equal(total, want)
        np.testing.assert_array_equal(mine, np.asarray(want)[:, [slice(0, 1), slice(1, 3)][rank]])
        np.testing.assert_array_equal(whole, want)


@on_ranks(1)
def test_one_rank_copies_nothing(comm):
    x = np.ones((2, 4))
    for move in (collectives.mark_separate, collectives.all_reduce_sum):
        assert move(np, comm, x) is x
    for move in (collectives.all_gather_dim, collectives.reduce_scatter_dim, collectives.all_gather_replicated):
        assert move(np, comm, x, 1) is x
    assert np.shares_memory(collectives.take_shard(np, comm, x, 1), x)
    assert collectives.all_to_all_dims(np, comm, x, 0, 1) is x
    assert collectives.all_to_all_rows(np, comm, x, [2], [2]) is x


def test_shapes_without_data():
    comm, x = FakeCommunicator(1, 3), shapes.ShapeArray((2, 7, 5), np.float32)
    assert collectives.all_reduce_sum(shapes, comm, x).shape == (2, 7, 5)
    assert collectives.reduce_scatter_dim(shapes, comm, x, 1).shape == (2, 2, 5)
    assert collectives.take_shard(shapes, comm, x, 1).shape == (2, 2, 5)
    assert collectives.all_gather_dim(shapes, comm, collectives.take_shard(shapes, comm, x, 1), 1, 7).shape == (2, 7, 5)
    assert collectives.all_to_all_dims(shapes, comm, x, 1, 2).shape == (2, 2, 15)


def test_a_sequence_that_must_divide_evenly():
    said = r"h.0 input: dim 1 of an array .* is 7, which is not a multiple of the 3 ranks"
    with pytest.raises(ShapeError, match=said):
        collectives.require_divisible_dim((2, 7, 5), 1, 3, "h.0 input")
