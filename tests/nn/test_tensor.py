"""Layers that are cut over the tensor axis: parameters, sequences and attention."""

import math

import numpy as np
import pytest
from amount import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from setting import list_leaves
from tensor_ranks import assembled, check, compare, compare_mse, environment, full, in_all_ways, local, on_axis, once

from fsdpx import FakeCommunicator, nn
from fsdpx.core.array import shapes
from fsdpx.core.array.namespace import parse_dtype
from fsdpx.core.array.random import Random
from fsdpx.core.comm import Mesh, connect_axes
from fsdpx.core.comm.init import open_world as open_world
from fsdpx.errors import ConfigError, DataError, ShapeError
from fsdpx.nn.layer import LayerContext
from fsdpx.nn.sharding import ColumnParallel, RowParallel, ShardSpec, VocabParallel
from fsdpx.testing import assert_close

steady = settings(derandomize=True, database=None, deadline=None, max_examples=examples(60))
rng = np.random.default_rng(0)


@st.composite
def cuts(draw):
    shape = draw(st.lists(st.integers(1, 4), min_size=1, max_size=3))
    dim, blocks, grain = draw(st.integers(0, len(shape) - 1)), draw(st.integers(1, 3)), draw(st.integers(1, 3))
    shape[dim] *= blocks * grain
    return ShardSpec(dim, blocks, grain), tuple(shape)


@steady
@given(where=cuts(), width=st.integers(1, 5))
def test_the_pieces_of_a_cut_make_the_whole(where, width):
    cut, shape = where
    array = np.arange(math.prod(shape)).reshape(shape)
    restored = np.full(shape, -1)
    for rank in range(width):
        piece = cut.take_shard(array, rank, width)
        assert piece.shape == cut.local_shape(shape, rank, width)
        cut.put_shard(restored, piece, rank, width)
    np.testing.assert_array_equal(restored, array)


@steady
@given(where=cuts(), width=st.integers(1, 4), rank=st.integers(0, 3), ends=st.tuples(st.floats(0, 1), st.floats(0, 1)))
def test_runs_are_where_the_elements_come_from(where, width, rank, ends):
    (cut, shape), rank = where, min(rank, width - 1)
    flat = cut.take_shard(np.arange(math.prod(shape)).reshape(shape), rank, width).reshape(-1)
    start, stop = sorted(int(e * flat.size) for e in ends)
    runs = list(cut.iterate_full_intervals(shape, rank, width, start, stop))
    np.testing.assert_array_equal([i for a, b in runs for i in range(a, b)], flat[start:stop])
    assert all(a < b for a, b in runs)
    assert all(before[1] != after[0] for before, after in zip(runs, runs[1:], strict=False)), "runs that touch"


def test_a_cut_of_heads():
    cut = ShardSpec(0, blocks=3, grain=4)
    assert cut.ranges_of_rank_along_dim((36, 5), 0, 2) == [(0, 4), (12, 16), (24, 28)]
    assert cut.ranges_of_rank_along_dim((36, 5), 1, 2) == [(4, 12), (16, 24), (28, 36)]
    assert cut.local_shape((36, 5), 1, 2) == (24, 5)
    with pytest.raises(ConfigError, match="35 is not 3 blocks of multiples of 4"):
        cut.local_shape((35, 5), 0, 2)


@steady
@given(st.tuples(*[st.integers(1, 5)] * 4), st.integers(0, 3), st.sets(st.integers(1, 3), min_size=1), st.data())
def test_random_numbers_of_a_part_are_those_of_the_whole(shape, row, dims, data):
    whole = Random(7, "layer", step=3).uniform(np, (row + shape[0], *shape[1:]))
    places, index = {}, [slice(row, None), slice(None), slice(None), slice(None)]
    for dim in dims:
        start = data.draw(st.integers(0, shape[dim] - 1))
        places[dim], index[dim] = (start, shape[dim]), slice(start, data.draw(st.integers(start, shape[dim])))
    want = whole[tuple(index)]
    got = Random(7, "layer", step=3, row=row).get_number_subarray(want.shape, places).make_fractions(np)
    np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("cuts", [{1: (3, 9)}, {2: (1000, 3000)}, {1: (2, 6), 2: (1000, 3000)}])
def test_random_numbers_of_long_parts(cuts):
    shape = [2, 4, 1500]
    totals, index = list(shape), [slice(None)] * 3
    for dim, (start, total) in cuts.items():
        totals[dim], index[dim] = total, slice(start, start + shape[dim])
    random = Random(7, "layer", row=2)
    want = random.uniform(np, tuple(totals))[tuple(index)]
    np.testing.assert_array_equal(random.get_number_subarray(tuple(shape), cuts).make_fractions(np), want)
    assert random.get_number_subarray(tuple(shape), cuts).make_fractions(shapes).shape == tuple(shape)


PAIR = {"0": ColumnParallel, "2": RowParallel}


@in_all_ways
def test_a_column_and_a_row(width, sequence, split):
    x, target = rng.standard_normal((2, 12, 5)), rng.standard_normal((2, 12, 6))
    model = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 6))
    planned, runs = compare(model, nn.MSELoss(), x, target, width, split, plan=PAIR, sequence=sequence)
    assert planned.output_dim == (1 if sequence else None)
    assert planned.partial == ({"2.bias"} if sequence else set())
    assert runs[0].g["0.weight"].shape == (7 // width, 5)
    model = nn.Sequential(nn.Linear(5, 7, bias=False), nn.Dropout(0.3), nn.Linear(7, 6, bias=False))
    compare(model, nn.MSELoss(), x, target, width, split, plan=PAIR, sequence=sequence)


def test_layers_of_two_dims():
    x, target = rng.standard_normal((5, 4)), rng.standard_normal((5, 3))
    model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.ReLU(), nn.Linear(8, 3))
    column, row = ColumnParallel, RowParallel
    for plan in ({"0": column(grain=2), "3": row}, {"0": column(gather_output=True)}, {"0": column, "3": row}):
        samples = 0 if plan.get("0") is column else 5
        compare(model, nn.MSELoss(), x[:samples], target[:samples], 3, plan=plan)


@pytest.mark.parametrize("frozen", [["0.weight"], ["0.*"], ["2.weight"], ["2.*"], ["0.bias", "2.bias"]])
@pytest.mark.parametrize(("sequence", "split"), [(None, True), ("parallel", False)])
def test_frozen_parameters(frozen, sequence, split):
    x, target = rng.standard_normal((2, 4, 5)), rng.standard_normal((2, 4, 6))
    model = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 6), frozen=frozen)
    planned, runs = compare(model, nn.MSELoss(), x, target, 2, split, plan=PAIR, sequence=sequence)
    assert not any(name in runs[0].g for name, spec in model.specs().items() if not spec.trainable)
    assert all(planned.model.specs()[name].trainable for name in planned.partial)


LAYERS = {
    "attention": nn.MultiHeadAttention(12, 3),
    "attention to all, with dropout": nn.MultiHeadAttention(12, 4, causal=False, dropout=0.4, bias=False),
    "mlp": nn.MLP(12, 7, dropout=0.3),
    "mlp with another activation": nn.MLP(12, 9, dropout=0.3, activation=nn.SiLU()),
    "block": nn.TransformerBlock(12, 6, 10),
    "block with dropout": nn.TransformerBlock(12, 4, dropout=0.2, causal=False),
    "residual": nn.Residual(nn.Sequential(nn.RMSNorm(12), nn.MLP(12, 5))),
}


@in_all_ways
@pytest.mark.parametrize("name", LAYERS)
def test_layers_that_know_their_plan(name, width, sequence, split):
    compare_mse(LAYERS[name], (2, 12, 12), width, split, sequence=sequence)


def test_the_two_forms_of_backward_give_the_same_bits():
    """Over ranks, too; and the sum of the input's gradient overlaps with the weight's."""
    block = LAYERS["block with dropout"]
    for sequence in (None, "parallel"):
        both = [compare_mse(block, (2, 4, 12), 2, split, sequence=sequence)[1] for split in (False, True)]
        for fused, halves in zip(*both, strict=True):
            assert_close((fused.dx, fused.g), (halves.dx, halves.g))


def test_evaluation_drops_nothing():
    compare_mse(LAYERS["block with dropout"], (2, 4, 12), 2, sequence="parallel", options={"training": False})


@pytest.mark.parametrize(("smoothing", "dtype"), [(0.0, np.float32), (0.2, np.float64)])
@pytest.mark.parametrize(("width", "classes"), [(1, 5), (2, 8), (3, 8), (5, 5)])
def test_cross_entropy_of_cut_logits(width, dtype, smoothing, classes):
    y, target = (50 * rng.standard_normal((3, 4, classes))).astype(dtype), rng.integers(0, classes, (3, 4))
    target[0, 1:3] = 7 + classes
    y[0, 3, 0], target[0, 3] = -np.inf, 1  # all that a rank of five has
    whole = nn.CrossEntropyLoss(7 + classes, smoothing)
    cut = nn.sharding.VocabParallelCrossEntropyLoss(classes, 7 + classes, smoothing)
    total, weight, held = whole.forward(environment(), y, target)
    dy = whole.backward(environment(), held, 0.3)
    lies, tolerance = ShardSpec(2), 1e-12 if dtype is np.float64 else 1e-5

    def body(axes):
        env, mine = environment(axes), lies.take_shard(y, axes.tensor.rank, width)
        total, weight, held = cut.forward(env, mine, target)
        before = axes.counters.copy()
        gradient = cut.backward(env, held, 0.3)
        assert not axes.counters.get_counts_since(before).table, "backward communicated"
        return total, weight, gradient

    totals, weights, gradients = zip(*on_axis(width, body), strict=True)
    assert set(weights) == {weight}
    assert len(set(totals)) == 1
    assert totals[0] == pytest.approx(total, rel=tolerance)
    np.testing.assert_allclose(np.concatenate(gradients, 2), dy, rtol=tolerance, atol=tolerance)
    assert gradients[0].dtype == dtype


def test_cut_logits_are_checked_against_all_classes():
    loss = nn.sharding.VocabParallelCrossEntropyLoss(9)
    loss.validate((2, 3, 4), np.full((2, 3), 8))
    with pytest.raises(DataError, match=r"label 9 at position \(0, 1\) is out of range: it must be from 0 to 8"):
        loss.validate((2, 3, 4), np.array([[0, 9, 1], [0, 0, 0]]))


@in_all_ways
def test_embeddings_cut_by_rows(width, sequence, split):
    x, target = rng.integers(0, 7, (3, 6)), rng.standard_normal((3, 6, 4))
    for layer in (nn.Embedding(7, 4), nn.TokenEmbedding(7, 4, 8)):
        planned, _ = compare(layer, nn.MSELoss(), x, target, width, split, plan={"": VocabParallel}, sequence=sequence)
    assert planned.partial == ({"position"} if sequence else set())


def test_an_index_beyond_the_whole_table_is_refused():
    layer = nn.sharding.VocabParallelEmbedding(7, 4)
    with pytest.raises(DataError, match=r"index 7 is out of range: it must be from 0 to 6"):
        layer.forward(environment(), full(layer), np.array([[1, 7]]))


def run_in_16_bits(model, loss, x, target, width, sequence):
    """The planned model, what one process gets in float64, and what ranks get with bfloat16."""
    bf16, p = parse_dtype("bf16"), full(model)
    planned = nn.sharding.parallelize(model, loss, width, sequence=sequence)

    def body(axes):
        mine = {n: a.astype(bf16) for n, a in local(planned.model, p, axes.tensor.rank, width).items()}
        narrow = x.astype(bf16) if x.dtype.kind == "f" else x
        return once(planned.model, planned.loss, mine, narrow, target, environment(axes))

    runs = on_axis(width, body)
    assert runs[0].y.dtype == bf16
    return planned, once(model, loss, p, x, target, environment()), runs


@pytest.mark.parametrize("sequence", [None, "parallel"])
def test_sixteen_bits(sequence):
    """Partial results are rounded before they are added: near, and of the right dtype."""
    x, target = rng.integers(0, 11, (2, 2, 6))
    planned, want, runs = run_in_16_bits(nn.GPT(11, 8, 1, 2, 6), nn.CrossEntropyLoss(), x, target, 2, sequence)
    assert runs[0].total == pytest.approx(want.total, rel=0.02)
    for run in runs:
        run.g = {name: array.astype(np.float32) for name, array in run.g.items()}
    for name, array in want.g.items():
        atol = 0.05 * np.abs(array).max() + 1e-3
        np.testing.assert_allclose(assembled(planned, runs, name), array, atol=atol, err_msg=name)


def elements(counters, verb):
    return counters.sum_counts("tensor", verb).bytes // 8


def test_bytes_of_a_block():
    """Shoeybi et al. 2019: two all-reduces of b s h forward and two backward; Korthikanti et al. 2022: an all-gather
    and a reduce-scatter in place of each, and the inputs gathered once more in backward instead of being kept."""
    b, s, h, width = 2, 12, 12, 3
    one = b * s * h * (width - 1) // width  # what one all-gather or reduce-scatter of (b, s, h) moves
    _, runs = compare_mse(nn.TransformerBlock(h, 6), (b, s, h), width)
    for run in runs:
        for counted in (run.forward, run.backward):
            assert {verb: calls for _, verb, calls, _ in counted} == {"all_reduce": 2}
            assert elements(counted, "all_reduce") == 2 * 2 * one
    # alone, the block also cuts its input, whose gradient is joined: one more all-gather in backward
    _, runs = compare_mse(nn.TransformerBlock(h, 6), (b, s, h), width, sequence="parallel")
    for run in runs:
        assert {verb: calls for _, verb, calls, _ in run.forward} == {"all_gather": 2, "reduce_scatter": 2}
        assert elements(run.forward, "all_gather") == elements(run.forward, "reduce_scatter") == 2 * one
        assert {verb: calls for _, verb, calls, _ in run.backward} == {"all_gather": 2 + 2 + 1, "reduce_scatter": 2}
        assert elements(run.backward, "reduce_scatter") == 2 * one
        assert elements(run.backward, "all_gather") == (2 + 2 + 1) * one


@pytest.mark.parametrize("sequence", [None, "parallel", "ulysses", "ring"])
def test_any_rank_of_any_axis_without_data(sequence):
    """Shapes alone, parameters included, on an axis that does not exist."""
    width, rank = 8, 5
    gpt = nn.GPT(1003, 144, 2, 9, 64, dropout=0.1)
    planned = nn.sharding.parallelize(gpt, nn.CrossEntropyLoss(), width, sequence=sequence)
    axes = connect_axes(Mesh(shard=1, tensor=width), FakeCommunicator(rank, width))
    model, x = nn.sharding.linearize(planned.model), shapes.ShapeArray((2, 64), np.int64)
    (y,) = nn.sharding.output_shapes(model, [x], "bf16", axes=axes)
    classes = 1003 * 6 // 8 - 1003 * 5 // 8
    assert y.shape == ((2, 8, 1003) if sequence in ("ulysses", "ring") else (2, 64, classes))
    env = LayerContext(shapes, axes, Random(0))
    p = {
        name: shapes.ShapeArray(spec.cut.local_shape(spec.shape, rank, width) if spec.cut else spec.shape, np.float32)
        for name, spec in nn.sharding.parameter_specs(model).items()
    }
    y, saved = planned.model.forward(env, p, x)
    _, _, held = planned.loss.forward(env, y, x)
    assert planned.model.backward(env, p, dict(p), saved, planned.loss.backward(env, held, 1.0)) is None


def test_parameters_begin_as_those_of_the_whole_layer():
    model = nn.GPT(11, 12, 2, 3, 6)
    for sequence in (None, "parallel", "ring"):
        planned = nn.sharding.parallelize(model, nn.CrossEntropyLoss(), 3, sequence=sequence)
        for (name, spec), (same, other) in zip(model.specs().items(), planned.model.specs().items(), strict=True):
            assert (name, spec.shape, spec.init, spec.trainable) == (same, other.shape, other.init, other.trainable)


BOTH = pytest.mark.parametrize("sequence", ["ulysses", "ring"])


@BOTH
@pytest.mark.parametrize(("width", "dropout", "split"), [(2, 0.3, False), (3, 0.0, True), (4, 0.3, True)])
def test_gpt(width, dropout, split, sequence):
    x, target = rng.integers(0, 11, (2, 2, 12))
    target[0, :5] = -100  # one rank may have nothing that counts
    loss = nn.CrossEntropyLoss(label_smoothing=0.1)
    model = nn.GPT(11, 20, 2, 5, 16, dropout=dropout)
    planned, runs = compare(model, loss, x, target, width, split, sequence=sequence)
    assert planned.output_dim == 1
    assert planned.loss.partial
    assert planned.partial == set(model.specs())
    assert runs[0].y.shape == (2, 12 // width, 11)


@pytest.mark.parametrize(("width", "time"), [(2, 1), (3, 2), (3, 5), (2, 11)])
@pytest.mark.parametrize("sequence", ["parallel", "ulysses", "ring"])
def test_sequences_that_do_not_divide(sequence, width, time):
    """A rank of a sequence that is shorter than the axis has no positions at all."""
    x, target = rng.integers(0, 11, (2, 2, time))
    loss, recompute = nn.CrossEntropyLoss(label_smoothing=0.1), frozenset(["attention"])
    for dropout, split, options in ((0.0, False, {}), (0.3, True, {}), (0.3, False, {"recompute": recompute})):
        model = nn.GPT(11, 10, 1, 5, 11, dropout=dropout)
        _, runs = compare(model, loss, x, target, width, split, options, sequence=sequence)
    if sequence != "parallel":
        assert [run.y.shape[1] for run in runs] == np.diff([time * r // width for r in range(width + 1)]).tolist()
    for dropout in (0.0, 0.3):
        compare_mse(nn.TransformerBlock(12, 3, causal=False, dropout=dropout), (2, time, 12), width, sequence=sequence)


class Drop(nn.Layer):
    """As a user writes it: dropout by the global place of an element, wherever it stands."""

    acts_on = "position"

    def forward(self, env, p, x):
        numbers = env.random.get_number_subarray(x.shape, {1: env.sequence_offset(x.shape[1])})
        keep = numbers.make_fractions(env.xp) >= 0.5
        return x * keep, (keep,)

    def backward_input(self, env, p, saved, dy):
        return dy * saved[0], ()


@pytest.mark.parametrize("time", [1, 5, 6])
@pytest.mark.parametrize("sequence", [None, "parallel", "ring"])
def test_a_layer_of_ones_own_finds_its_place(sequence, time):
    compare_mse(nn.Sequential(nn.TransformerBlock(8, 4), Drop()), (3, time, 8), 3, sequence=sequence)


@BOTH
@pytest.mark.parametrize(("causal", "dropout"), [(False, 0.4), (True, 0.0), (True, 0.4)])
def test_blocks(causal, dropout, sequence):
    """More than one tile of the compiled kernel per rank, and the gradient of an input that is given whole."""
    for time in (210, 194):  # 194: parts of 64, 65 and 65, which end before, and just behind, a tile's end
        compare_mse(nn.TransformerBlock(8, 4, causal=causal, dropout=dropout), (1, time, 8), 3, sequence=sequence)


@BOTH
def test_attention_by_itself_and_no_samples(sequence):
    x, target = rng.standard_normal((2, 2, 8, 12))
    for layer in (nn.MultiHeadAttention(12, 3, causal=False), nn.MultiHeadAttention(12, 3, dropout=0.5, bias=False)):
        compare(layer, nn.BCEWithLogitsLoss(), x, target, 2, sequence=sequence)
        compare_mse(layer, (0, 8, 12), 2, sequence=sequence)
    compare_mse(
        nn.MultiHeadAttention(12, 3, dropout=0.5), (2, 8, 12), 2, sequence=sequence, options={"training": False}
    )


@BOTH
def test_recomputed_attention_gives_the_same_bits(sequence):
    model = nn.TransformerBlock(12, 3, dropout=0.3)
    kept, recomputed = (
        compare_mse(model, (2, 8, 12), 2, sequence=sequence, options={"recompute": frozenset(names)})[1]
        for names in ((), ("attention",))
    )
    for one, other in zip(kept, recomputed, strict=True):
        assert_close((one.dx, one.g), (other.dx, other.g))
        moved = other.backward.sum_counts("tensor").bytes - one.backward.sum_counts("tensor").bytes
        assert moved == one.forward.sum_counts("tensor").bytes > 0, "the forward of attention moves data once more"


def test_bytes_of_ulysses():
    """Jacobs et al. 2023: four all-to-alls of b s h / N elements, here q, k and v in one message."""
    b, s, h, width = 2, 12, 24, 3
    _, runs = compare_mse(nn.MultiHeadAttention(h, 12), (b, s, h), width, sequence="ulysses")
    for run in runs:
        for counted in (run.forward, run.backward):
            count = counted.sum_counts("tensor", "all_to_all")
            assert (count.calls, count.bytes // 8) == (2, 4 * (b * s * h // width) * (width - 1) // width)
        assert {verb for _, verb, _, _ in run.forward} == {"all_to_all"}


@pytest.mark.parametrize("time", [1, 5, 12])
def test_bytes_of_a_ring(time):
    """Liu et al. 2023: keys and values go to N - 1 others, and in backward their gradients N times, to their rank.
    Each block makes the same journey, whatever its size: with uneven parts, ranks together send what even ones do."""
    b, h, width = 2, 12, 3
    _, runs = compare_mse(nn.MultiHeadAttention(h, 3), (b, time, h), width, sequence="ring")
    for counters, journeys in (("forward", width - 1), ("backward", 2 * width - 1)):
        sent = [getattr(run, counters).sum_counts("tensor", "send") for run in runs]
        assert [count.calls for count in sent] == [journeys] * width
        assert sum(count.bytes // 8 for count in sent) == journeys * 2 * b * time * h
        assert time % width or {count.bytes for count in sent} == {8 * journeys * 2 * b * time * h // width}
    assert {verb for run in runs for _, verb, _, _ in run.forward} == {"send", "recv"}


@BOTH
def test_no_rank_keeps_more_than_its_part(sequence):
    """Without dropout nothing that is kept is larger than queries, keys and values of 1/N of the time."""
    b, s, h, width = 1, 64, 8, 4
    model = nn.MultiHeadAttention(h, 4)
    planned = nn.sharding.parallelize(nn.Sequential(model), nn.MSELoss(), width, sequence=sequence)
    x = rng.standard_normal((b, s, h))

    def body(axes):
        _, saved = planned.model.forward(environment(axes), local(planned.model, full(planned.model), 0, 1), x)
        return max(kept.nbytes for kept in list_leaves(saved) if isinstance(kept, np.ndarray))

    assert max(on_axis(width, body)) == 3 * b * s * h * 8 // width


def test_a_ring_of_sixteen_bits_adds_in_float32():
    x, target = rng.standard_normal((2, 2, 12, 8))
    _, want, runs = run_in_16_bits(nn.MultiHeadAttention(8, 2, dropout=0.2), nn.MSELoss(), x, target, 3, "ring")
    assert runs[0].dx.dtype == runs[0].y.dtype
    np.testing.assert_allclose(np.concatenate([r.y for r in runs], 1).astype(float), want.y, atol=0.03)


def test_sequences_that_do_not_fit():
    model = nn.GPT(11, 8, 1, 2, 8)  # and nobody says how long they are
    planned = nn.sharding.parallelize(model, nn.CrossEntropyLoss(), 2, sequence="ring")

    def body(axes):
        p = full(model)
        with pytest.raises(ShapeError, match=r"sequence: dim 1 .* is 5, which is not a multiple of the 2 ranks"):
            planned.model.forward(environment(axes), p, np.zeros((2, 5), int))
        wrong = r"wants a part of tokens of shape \(samples, time <= 8\), got a part of \(2, 5\)"
        with pytest.raises(ShapeError, match=wrong):
            planned.model.forward(environment(axes), p, np.zeros((2, 10), int))

    on_axis(2, body)


@pytest.mark.world
@pytest.mark.mpi
@pytest.mark.parametrize("backend", ["node", "mpi"])
@pytest.mark.parametrize("sequence", [None, "parallel", "ulysses", "ring"])
def test_under_mpi(sequence, backend):
    """The world is one tensor axis; two heads per rank and one more."""
    comm = open_world(backend)
    heads, time = 2 * comm.size + 1, 3 * comm.size + 1
    model, loss = nn.GPT(29, 2 * heads, 1, heads, time, dropout=0.1), nn.CrossEntropyLoss()
    p = full(model)
    planned = nn.sharding.parallelize(model, loss, comm.size, sequence=sequence)
    axes = connect_axes(Mesh(shard=1, tensor=comm.size), comm)
    mine = local(planned.model, p, comm.rank, comm.size)
    for length in (time, 1):  # 1: all ranks but the last have no positions
        x, target = np.random.default_rng(3).integers(0, 29, (2, 2, length))
        want = once(model, loss, p, x, target, environment())
        env = environment(axes, time=length)
        check(planned, want, comm.all_gather_object(once(planned.model, planned.loss, mine, x, target, env)))
    axes.close()
    comm.close()
