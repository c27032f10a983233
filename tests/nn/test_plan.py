"""Models rewritten for a tensor axis, by their own plan and by the user's; what cannot be cut is named."""

import re
from dataclasses import replace

import numpy as np
import pytest
from tensor_ranks import compare, compare_mse, environment, full, in_all_ways, local, on_axis

from fsdpx import nn
from fsdpx.errors import ConfigError, DataError, ShapeError
from fsdpx.nn.sharding import ColumnParallel, LayerDefault, RowParallel, ShardSpec, VocabParallel
from fsdpx.nn.tensor_plan import parallelize

rng = np.random.default_rng(0)
BLOCK = nn.TransformerBlock(8, 4)


def tokens(vocab, *shape):
    return rng.integers(0, vocab, shape), rng.integers(0, vocab, shape)


@in_all_ways
def test_gpt(width, sequence, split):
    """Heads and vocabulary that do not divide evenly, dropout everywhere, positions that do not count, smoothing."""
    x, target = tokens(23, 3, 12)
    target[0, :5] = -100
    loss = nn.CrossEntropyLoss(label_smoothing=0.1)
    planned, runs = compare(nn.GPT(23, 20, 2, 5, 12, dropout=0.2), loss, x, target, width, split, sequence=sequence)
    assert planned.output_dim == -1
    assert runs[0].y.shape == (3, 12, 23 // width)
    assert isinstance(planned.loss, nn.sharding.VocabParallelCrossEntropyLoss)
    partial = {n for n in planned.model.specs() if "norm" in n or n.endswith(("out.bias", "down.bias", "position"))}
    assert planned.partial == (partial if sequence else set())


@pytest.mark.parametrize(
    ("width", "sequence", "split"),
    [(2, None, False), (3, None, True), (3, "parallel", False), (2, "ring", False), (3, "ulysses", True)],
)
def test_llama(width, sequence, split):
    """Heads of keys that do not divide evenly, norms of heads, positions of a part of the sequence."""
    x, target = tokens(23, 3, 11)
    model = nn.Llama(23, 20, 2, 10, 12, kv_heads=5, d_head=4, qk_norm=True, qkv_bias=True, tie=True)
    planned, runs = compare(model, nn.CrossEntropyLoss(), x, target, width, split, sequence=sequence)
    if sequence is None:
        assert runs[0].y.shape == (3, 11, 23 // width)
        assert planned.partial == {n for n in planned.model.specs() if n.endswith(("q_norm.weight", "k_norm.weight"))}


def test_heads_stay_whole_and_a_window_stays_in_one_sequence():
    model, loss = nn.Llama(23, 20, 1, 4, 12, kv_heads=2, d_head=4, window=3), nn.CrossEntropyLoss()
    with pytest.raises(ConfigError, match=r"'blocks.0.attn.q' has 2 runs of 8 results, fewer than the 3 ranks"):
        parallelize(model, loss, 3)
    with pytest.raises(ConfigError, match=r"'blocks.0.attn.attend': attention within a window of 3 works on whole"):
        parallelize(model, loss, 2, sequence="ring")
    fine, plain = (
        {f"*attn.{name}": column for name in "qkv"} | {"*attn.out": RowParallel}
        for column in (ColumnParallel(grain=2), ColumnParallel)
    )
    said = r"heads of 4 features that stay together: give the ColumnParallel layers a grain, .*Parallel\(grain=4\)"
    with pytest.raises(ConfigError, match=said):
        parallelize(model, loss, 2, fine)
    assert parallelize(model, loss, 2, plain).model.specs()["blocks.0.attn.q.weight"].cut.grain == 8


@pytest.mark.parametrize("sequence", [None, "parallel"])
def test_gpt_without_ties_frozen_in_part_and_shorter_than_its_positions(sequence):
    x, target = tokens(11, 2, 6)
    model = nn.GPT(11, 12, 1, 3, 10, tie=False, bias=False, frozen=["embed.*", "*norm1*"])
    planned, runs = compare(model, nn.CrossEntropyLoss(), x, target, 3, sequence=sequence)
    assert "embed.weight" not in runs[0].g
    assert not any("norm1" in name or "embed" in name for name in planned.partial)


def test_one_rank_gets_the_model_itself():
    model, loss = nn.GPT(11, 12, 1, 3, 6), nn.CrossEntropyLoss()
    whole = nn.sharding.TensorParallelModel(model, loss, None, frozenset())
    assert parallelize(model, loss, 1, sequence="parallel") == whole


@pytest.mark.parametrize("sequence", [None, "parallel"])
@pytest.mark.parametrize("width", [2, 3])
def test_another_loss_gets_whole_logits(width, sequence):
    x, target = rng.integers(0, 11, (2, 6)), rng.standard_normal((2, 6, 11))
    planned, runs = compare(nn.GPT(11, 12, 1, 3, 6), nn.MSELoss(), x, target, width, sequence=sequence)
    assert planned.output_dim is None
    assert runs[0].y.shape == (2, 6, 11)
    compare(nn.Linear(5, 7), nn.MSELoss(), rng.standard_normal((2, 6, 5)), rng.standard_normal((2, 6, 7)), width,
            plan={"": VocabParallel}, sequence=sequence)  # fmt: skip


def encoder():
    """Attention and an MLP inside a user's own containers, a tie, and a branch."""
    body = nn.Graph(
        {
            "norm": (nn.RMSNorm(12), "x"),
            "left": (nn.MultiHeadAttention(12, 3, causal=False, dropout=0.2), "norm"),
            "up": (nn.Linear(12, 10), "norm"),
            "gate": (nn.Linear(12, 10), "norm"),
            "act": (nn.SiLU(), "gate"),
            "sum": (nn.Add(), "up", "act"),
            "drop": (nn.Dropout(0.3), "sum"),
            "right": (nn.Linear(10, 12), "drop"),
            "y": (nn.Add(), "x", "left", "right"),
        },
        outputs=("y",),
    )
    ends = {"embed": nn.Embedding(9, 12), "body": nn.Residual(body), "norm": nn.LayerNorm(12), "head": nn.Linear(12, 9)}
    return nn.Sequential(ends, ties={"head.weight": "embed.weight"})


@in_all_ways
def test_a_plan_of_the_user(width, sequence, split):
    plan = {"embed": VocabParallel, "head": VocabParallel, "*.left": LayerDefault, "*.right": RowParallel}
    plan |= {"*.up": ColumnParallel, "*.gate": ColumnParallel()}
    x, target = tokens(9, 2, 6)
    planned, _ = compare(encoder(), nn.CrossEntropyLoss(), x, target, width, split, plan=plan, sequence=sequence)
    cut = {name for name, spec in planned.model.specs().items() if spec.cut}
    assert {"embed.weight", "head.bias", "body.body.gate.bias", "body.body.right.weight"} <= cut
    if sequence:
        assert planned.partial == {"body.body.norm.weight", "body.body.left.out.bias", "body.body.right.bias",
                                   "norm.weight", "norm.bias"}  # fmt: skip


@pytest.mark.parametrize("sequence", [None, "parallel"])
def test_only_what_is_named_is_cut(sequence):
    x, target = tokens(9, 2, 6)
    plan = {"body.body.left": LayerDefault}
    planned, runs = compare(encoder(), nn.CrossEntropyLoss(), x, target, 3, plan=plan, sequence=sequence)
    assert {n for n, s in planned.model.specs().items() if s.cut} == {
        f"body.body.left.{n}" for n in ("qkv.weight", "qkv.bias", "out.weight")
    }
    if sequence:  # the head is whole: the loss sees a part of the sequence
        assert planned.output_dim == 1
        assert planned.loss.partial
        assert "embed.weight" in planned.partial
        assert runs[0].weight == 2 * 6 / 3


def test_parts_named_one_by_one():
    plan = {"0.attn.qkv": ColumnParallel, "0.attn.out": RowParallel, "*.up": ColumnParallel, "*.down": RowParallel}
    model = nn.Sequential(nn.TransformerBlock(8, 2))
    planned, own = (compare_mse(model, (2, 4, 8), 2, plan=parts)[0] for parts in (plan, None))
    assert planned.model.specs() == own.model.specs()


@pytest.mark.parametrize("loss", [nn.MSELoss(), nn.BCEWithLogitsLoss()])
def test_losses_of_a_part_of_the_sequence(loss):
    x, target = rng.standard_normal((2, 6, 8)), rng.random((2, 6, 8))
    planned, _ = compare(BLOCK, loss, x, target, 3, sequence="parallel")
    assert isinstance(planned.loss, nn.sharding.ShardedSequenceLoss)
    planned.loss.validate((2, 2, 8), target)
    with pytest.raises(DataError, match=r"wants a target of the output's shape: \(2, 9, 8\), got \(2, 6, 8\)"):
        planned.loss.validate((2, 3, 8), target)


class Squares:
    """(y - target)^2, summed; a loss of a user that is no nn.Loss."""

    def forward(self, env, y, target):
        return float(((y - target) ** 2).sum()), float(y.size), (y, target)

    def backward(self, env, saved, seed):
        return 2 * seed * (saved[0] - saved[1])

    def validate(self, shape, target):
        pass


class Trend(Squares):
    """The squared difference of the means over the time: looks across the sequence."""

    def forward(self, env, y, target):
        d = y.mean(1) - target.mean(1)
        return float((d * d).sum()), float(d.size), (d, y.shape)

    def backward(self, env, saved, seed):
        d, shape = saved
        return np.broadcast_to(2 * seed * d[:, None] / shape[1], shape)


SAMPLE = (
    r"(Trend|Subclass): it compares each sample as a whole \(acts_on = \"sample\"\), but the model's output is cut "
    r"along dim 1.*declare acts_on = \"position\" in its class.*sequence=None"
)


@pytest.mark.parametrize("sequence", ["parallel", "ulysses", "ring"])
def test_a_loss_that_looks_across_the_sequence_is_not_given_a_part_of_it(sequence):
    for loss in (Trend(), type("Subclass", (Trend, nn.Loss), {})()):
        with pytest.raises(ConfigError, match=SAMPLE):
            parallelize(BLOCK, loss, 2, sequence=sequence)
    x, target = rng.standard_normal((2, 2, 6, 8))
    compare(BLOCK, Trend(), x, target, 2)
    ends = nn.Sequential(nn.MLP(8), nn.Linear(8, 5))
    plan = {"0": LayerDefault, "1": ColumnParallel(gather_output=True)}
    if sequence == "parallel":  # the output is put together before the loss
        compare(ends, Trend(), x, target[..., :5], 2, plan=plan, sequence=sequence)


def test_a_loss_of_a_user_can_say_that_it_adds_up_over_positions():
    loss = type("Each", (Squares,), {"acts_on": "position"})()
    compare(BLOCK, loss, *rng.standard_normal((2, 2, 6, 8)), 2, sequence="ring")


@pytest.mark.parametrize("shape", [(2,), (2, 1, 8), (2, 4, 8)])
def test_a_target_that_is_not_as_long_as_the_output_is_not_cut_with_it(shape):
    planned = parallelize(BLOCK, nn.MSELoss(), 2, sequence="ring")
    message = rf"the target with it: dim 1 of the target must be 6, got a target of shape {re.escape(str(shape))}"

    def body(axes):
        with pytest.raises(DataError, match=message):
            planned.loss.forward(environment(axes), np.zeros((2, 3, 8)), np.zeros(shape))

    on_axis(2, body)


class Gain(nn.Layer):
    """y = gain * x."""

    def __init__(self, shape, acts_on):
        self.shape, self.acts_on = shape, acts_on

    def specs(self):
        return {"gain": nn.ParameterSpec(self.shape, nn.init.ones)}

    def forward(self, env, p, x):
        return x * p["gain"], (x,)

    def backward_input(self, env, p, saved, dy):
        return dy * p["gain"], (*saved, dy)

    def backward_params(self, env, g, kept):
        if "gain" in g:
            x, dy = kept
            g["gain"] += (x * dy).reshape(-1, *g["gain"].shape).sum(axis=0)


def test_parameters_between_a_column_and_its_row_are_refused():
    """Each rank would add up a part of their gradient, and nothing would sum the parts."""
    gain = Gain((1,), "element")
    model = nn.Sequential(nn.Linear(4, 6), gain, nn.Linear(6, 4))
    message = (
        r"'1' Gain.* reads features that '0' cut, but has parameters \(1\.gain\).*"
        r"close them before it, with a RowParallel or ColumnParallel\(gather_output=True\)"
    )
    with pytest.raises(ConfigError, match=message):
        parallelize(model, nn.MSELoss(), 2, {"0": ColumnParallel, "2": RowParallel})
    compare_mse(model, (2, 3, 4), 2, plan={"0": ColumnParallel(gather_output=True)})
    mlp = nn.Sequential(nn.MLP(4, activation=gain), nn.Linear(4, 4))
    for options in ({}, {"plan": {"0.up": ColumnParallel, "0.down": RowParallel}}, {"sequence": "parallel"}):
        with pytest.raises(ConfigError, match=r"'0.activation' Gain.* has parameters \(0\.activation\.gain\).*whole"):
            parallelize(mlp, nn.MSELoss(), 2, **options)
    compare_mse(mlp, (2, 3, 4), 3, plan={"1": ColumnParallel(gather_output=True)})
    compare_mse(mlp, (2, 6, 4), 3, sequence="ring")


def test_models_of_a_user_can_say_what_they_act_on():
    planned, _ = compare_mse(nn.Sequential(Gain((8,), "position"), nn.MLP(8)), (2, 6, 8), 2, sequence="parallel")
    assert "0.gain" in planned.partial
    with pytest.raises(ConfigError, match=r"'0' Gain\(.*\) reads a part of the sequence, but acts on each sample"):
        parallelize(nn.Sequential(Gain((8,), "sample"), nn.MLP(8)), nn.MSELoss(), 2, sequence="parallel")


class CutGain(Gain):
    """A `Gain` of one factor per feature that may stand between a ColumnParallel and its RowParallel: it is cut like
    the features."""

    def __init__(self, features, lies=None):
        super().__init__((features,), "position")
        self.features, self.lies = features, lies

    def specs(self):
        return {name: replace(spec, cut=self.lies) for name, spec in super().specs().items()}

    def shard_over_ranks(self, request):
        kind = request.kinds[0]
        if request.mark is None and isinstance(kind, nn.sharding.ShardedFeatures):
            return nn.sharding.ShardedLayer(CutGain(self.features, ShardSpec(0, kind.blocks, kind.grain)), kind)
        return super().shard_over_ranks(request)


@pytest.mark.parametrize("sequence", [None, "parallel"])
@pytest.mark.parametrize("width", [2, 3])
def test_a_layer_of_a_user_says_itself_how_it_is_cut(width, sequence):
    """Between a ColumnParallel and its RowParallel, where layers with parameters are refused otherwise, in an MLP and
    by a plan."""
    model = nn.Sequential(CutGain(4), nn.Linear(4, 6), CutGain(6), nn.Linear(6, 4), nn.MLP(4, 7, activation=CutGain(7)))
    plan = {"1": ColumnParallel(grain=2), "3": RowParallel, "4": LayerDefault}
    planned, _ = compare_mse(model, (2, 6, 4), width, plan=plan, sequence=sequence)
    cuts = {name: spec.cut for name, spec in planned.model.specs().items() if name.endswith("gain")}
    assert cuts == {"0.gain": None, "2.gain": ShardSpec(0, 1, 2), "4.activation.gain": ShardSpec(0)}
    assert ("0.gain" in planned.partial) == (sequence is not None)
    with pytest.raises(ConfigError, match=r"'2' CutGain.* cannot be sharded as RowParallel"):
        parallelize(model, nn.MSELoss(), width, plan | {"2": RowParallel}, sequence)


def linears(*sizes):
    return nn.Sequential(*map(nn.Linear, sizes, sizes[1:]))


GPT = nn.GPT(11, 12, 1, 3, 6)
PLANS = {
    "nothing to cut": (linears(4, 5, 6), None,
        r"nothing to cut in Sequential.*tensor_plan=\{\"0\": nn.sharding.ColumnParallel"),
    "no such layer": (linears(4, 5), {"7*": RowParallel}, r"'7\*' matches no layer; there are '', '0'"),
    "no such mark": (linears(4, 5), {"0": "column"},
        r"tensor_plan\['0'\] = 'column': choose nn.sharding.ColumnParallel"),
    "a plan that is a list": (linears(4, 5), ["0"], r"tensor_plan=\['0'\]: give a dict of path patterns"),
    "a pattern that is a number": (linears(4, 5), {0: RowParallel}, r"tensor_plan: the pattern 0 must be text"),
    "not closed": (linears(4, 5, 6), {"1": ColumnParallel}, r"'1' is a ColumnParallel that no RowParallel closes"),
    "read whole": (linears(4, 5, 6), {"0": ColumnParallel}, r"'1' Linear\(5, 6\) reads features that '0' cut"),
    "read by a ColumnParallel": (linears(4, 5, 6), {"*[01]": ColumnParallel},
        r"'1' Linear\(5, 6\) reads features that '0' cut: close them with a RowParallel"),
    "read by a norm": (nn.Sequential(nn.Linear(4, 6), nn.LayerNorm(6), nn.Linear(6, 4)),
        {"0": ColumnParallel, "2": RowParallel},
        r"'1' LayerNorm\(6\) reads features that '0' cut, but acts on each position as a whole"),
    "a RowParallel alone": (linears(4, 5, 6), {"1": RowParallel},
        r"'1' Linear\(5, 6\) is a RowParallel, but reads a whole input"),
    "a RowParallel of blocks": (linears(4, 12, 6), {"0": ColumnParallel(blocks=3), "1": RowParallel},
        r"'1' Linear\(12, 6\) cannot close features that '0' cut: they are 12 in 3 blocks"),
    "half of a sum": (nn.Residual(nn.Linear(4, 4)), {"body": ColumnParallel},
        r"'add' Add\(\) reads a whole input, features that 'body' cut together"),
    "uneven blocks": (linears(4, 16), {"0": ColumnParallel(blocks=3)},
        r"'0' Linear\(4, 16\): its 16 results are not 3 blocks of multiples of 1"),
    "too few features": (linears(4, 3, 4), {"0": ColumnParallel, "1": RowParallel},
        r"'0' has 3 results, fewer than the 4 ranks of the tensor axis: use Mesh\(tensor=3\) or less"),
    "too few heads": (GPT, None, r"'blocks.0.attn.qkv' has 3 runs of 4 results, fewer .* use Mesh\(tensor=3\)"),
    "too few words": (nn.GPT(3, 12, 1, 4, 6), None, r"'embed' has 3 tokens in its vocabulary, fewer than the 4"),
    "not a Linear": (nn.Sequential(nn.Tanh()), {"0": ColumnParallel},
        r"'0' Tanh\(\) cannot be sharded as ColumnParallel"),
    "Own of a leaf": (linears(4, 5), {"0": LayerDefault}, r"'0' Linear\(4, 5\) has no plan of its own"),
    "a block as a ColumnParallel": (nn.Sequential(BLOCK), {"0": ColumnParallel},
        r"'0' is a TransformerBlock, which cannot be a ColumnParallel: name the Linear layers inside, or give it "
        r"nn.sharding.LayerDefault"),
    "half of attention": (nn.Sequential(nn.MultiHeadAttention(8, 4)), {"0.qkv": ColumnParallel},
        r"'0.out' Linear\(.*\) reads features that '0.qkv' cut, but acts on each position as a whole"),
    "a tie cut in half": (encoder(), {"embed": VocabParallel, "*.left": LayerDefault},
        r"'head.weight' is tied to 'embed.weight', but one is sharded as None and the other as ShardSpec\(dim=0"),
}  # fmt: skip
"""Name -> model, plan and error."""
SEQUENCES = {
    "too few heads for ulysses": (GPT, None, "ulysses", r"'blocks.0.attn' has 3 heads.*or sequence=\"ring\""),
    "a plan with context": (GPT, {"*": LayerDefault}, "ring", "whole but for experts: it takes no"),
    "no such sequence": (GPT, None, "cut", r"sequence='cut': choose one of None, 'parallel', 'ul"),
    "attention to a part": (nn.Sequential(nn.MultiHeadAttention(8, 4), nn.MLP(8)), {"1": LayerDefault}, "parallel",
        r"'0': attention needs the whole sequence.*cut it by heads, with nn.sharding.LayerDefault for the layer "
        r"around it"),
    "batch statistics of a part": (nn.Sequential(nn.BatchNorm(8), nn.MLP(8)), None, "parallel",
        r"'0' BatchNorm\(8\) reads a part of the sequence, but acts on each sample as a whole"),
    "several outputs": (nn.Graph({"a": (nn.MLP(8), "x"), "b": (nn.MLP(8), "x")}, outputs=("a", "b")), None, "parallel",
        "a model with several outputs must give them whole"),
}  # fmt: skip
"""Name -> model, plan, way to cut sequences, and error."""


@pytest.mark.parametrize("name", [*PLANS, *SEQUENCES])
def test_what_cannot_be_cut_is_named(name):
    model, plan, *sequence, message = PLANS.get(name) or SEQUENCES[name]
    with pytest.raises(ConfigError, match=message):
        parallelize(model, nn.CrossEntropyLoss(), 3 if name == "a tie cut in half" else 4, plan, *sequence)


NO_TIME = {
    "features alone": (BLOCK, None, np.zeros(8), "3 dims or more"),
    "samples of features": (BLOCK, None, np.zeros((4, 8)), "3 dims or more"),
    "tokens alone": (nn.Sequential(nn.Embedding(9, 8), BLOCK), None, np.zeros(6, int), "2 dims or more"),
    "tokens looked up in a part of the rows": (nn.Sequential(nn.Embedding(9, 8), nn.MLP(8)),
        {"0": VocabParallel, "1": LayerDefault}, np.zeros(6, int), "2 dims or more"),
}  # fmt: skip


@pytest.mark.parametrize("name", NO_TIME)
def test_an_input_without_a_time_is_not_cut(name):
    model, plan, x, wanted = NO_TIME[name]
    said = rf"sequence=... cuts dim 1, the time; the input has shape {re.escape(str(x.shape))}.*{wanted}"
    demand_refusal(model, plan, x, said)


def test_a_sequence_of_which_no_rank_knows_the_length_must_divide():
    message = r"embed embedding: dim 1 .* is 5, which is not a multiple of the 2 ranks"
    demand_refusal(GPT, None, np.zeros((2, 5), int), message)


def demand_refusal(model, plan, x, message):
    """Of two ranks neither takes this input, before they communicate."""
    planned = parallelize(model, nn.CrossEntropyLoss(), 2, plan, "parallel")

    def body(axes):
        p = local(planned.model, full(model), axes.tensor.rank, 2)
        with pytest.raises(ShapeError, match=message):
            planned.model.forward(environment(axes), p, x)
        return axes.counters.sum_counts("tensor").calls

    assert on_axis(2, body) == [0, 0]
