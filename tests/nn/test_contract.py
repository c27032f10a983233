"""Every layer keeps the contract that `fsdpx.testing.LayerContract` tests."""

import numpy as np
import pytest
from layer_cases import contract_tests, ids, rows

from fsdpx import nn
from fsdpx.nn import sharding
from fsdpx.nn.init import normal
from fsdpx.testing import LayerContract


def pair():
    return rows(3, 5), rows(3, 5) + 1.0


def two_ways():
    nodes = {"up": (nn.Linear(5, 4), "a"), "side": (nn.Linear(5, 4), "b")}
    nodes |= {"sum": (nn.Add(), "up", "side"), "gate": (nn.Tanh(), "sum")}
    return nn.Graph(nodes, inputs=("a", "b"), outputs=("gate", "sum"))


def tied():
    return nn.Sequential(nn.Linear(5, 5), nn.Tanh(), nn.Linear(5, 5), ties={"2.weight": "0.weight"})


POWER = np.power, (lambda a, b: b * np.power(a, b - 1.0), lambda a, b: np.power(a, b) * np.log(a))
"""a^b, and its derivatives by a and by b."""

CASES = {
    "Linear": (lambda: nn.Linear(5, 3), lambda: rows(4, 5)),
    "LinearOfSequences": (lambda: nn.Linear(5, 3, bias=False), lambda: rows(4, 2, 5)),
    "Embedding": (lambda: nn.Embedding(7, 4), lambda: ids(7, 3, 5)),
    "LayerNorm": (lambda: nn.LayerNorm(6), lambda: rows(3, 2, 6)),
    "LayerNormOfTwoDims": (lambda: nn.LayerNorm((2, 6), bias=False), lambda: rows(3, 2, 6)),
    "LayerNormPlain": (lambda: nn.LayerNorm(6, elementwise_affine=False), lambda: rows(3, 6)),
    "RMSNorm": (lambda: nn.RMSNorm(6), lambda: rows(3, 2, 6)),
    "RMSNormPlain": (lambda: nn.RMSNorm((2, 6), eps=1e-3, elementwise_affine=False), lambda: rows(3, 2, 6)),
    "ReLU": (nn.ReLU, lambda: rows(4, 6)),
    "GELU": (nn.GELU, lambda: rows(4, 3, 2)),
    "GELUTanh": (lambda: nn.GELU("tanh"), lambda: rows(4, 6)),
    "SiLU": (nn.SiLU, lambda: rows(4, 6)),
    "Tanh": (nn.Tanh, lambda: rows(4, 6)),
    "LeakyReLU": (lambda: nn.LeakyReLU(0.2), lambda: rows(4, 6)),
    "ELU": (lambda: nn.ELU(1.5), lambda: rows(4, 6)),
    "Softplus": (lambda: nn.Softplus(2.0, 3.0), lambda: rows(4, 6)),
    "Sigmoid": (nn.Sigmoid, lambda: 20 * rows(4, 6)),
    "Softmax": (nn.Softmax, lambda: rows(4, 6)),
    "SoftmaxOfDim1": (lambda: nn.Softmax(dim=1), lambda: rows(4, 6, 3)),
    "BatchNorm": (lambda: nn.BatchNorm(3), lambda: rows(5, 3), {"samples_are_independent": False}),
    "BatchNormOfImages": (lambda: nn.BatchNorm(3), lambda: rows(4, 3, 2, 5), {"samples_are_independent": False}),
    "BatchNormEvaluating": (lambda: nn.BatchNorm(3, affine=False), lambda: rows(5, 3, 2), {"training": False}),
    "DropoutEvaluating": (lambda: nn.Dropout(0.5), lambda: rows(4, 3), {"training": False}),
    "Dropout": (lambda: nn.Dropout(0.3), lambda: rows(4, 6)),
    "DropoutOfAll": (lambda: nn.Dropout(1.0), lambda: rows(4, 6)),
    "Flatten": (nn.Flatten, lambda: rows(3, 2, 5)),
    "FlattenFrom2": (lambda: nn.Flatten(2), lambda: rows(3, 2, 5, 2)),
    "Add": (nn.Add, pair),
    "Multiply": (nn.Multiply, pair),
    "MultiplyOfThree": (nn.Multiply, lambda: (*pair(), rows(3, 5) - 0.5)),
    "Lambda": (lambda: nn.Lambda(np.sin, np.cos), lambda: rows(4, 6)),
    "LambdaOfTwo": (lambda: nn.Lambda(*POWER), lambda: (np.abs(rows(3, 5)) + 1.0, rows(3, 5))),
    "Concat": (nn.Concat, lambda: (rows(3, 2), rows(3, 4), rows(3, 1))),
    "ConcatOfDim1": (lambda: nn.Concat(dim=1), lambda: (rows(3, 2, 2), rows(3, 4, 2))),
    "Scale": (lambda: nn.Scale(1.5), lambda: rows(4, 6)),
    "Rotary": (lambda: nn.Rotary(4), lambda: rows(3, 5, 8)),
    "HeadNorm": (lambda: nn.HeadNorm(3, 1e-5), lambda: rows(3, 4, 6)),
    "Attention": (lambda: nn.Attention(4, 2, 3, window=3), lambda: (rows(3, 5, 12), rows(3, 5, 6), rows(3, 5, 6) + 1)),
    "Gate": (nn.GatedActivation, pair),
    "GateGELU": (lambda: nn.GatedActivation("gelu_new"), pair),
    "GatedMLP": (lambda: nn.GatedMLP(4, 6, bias=True), lambda: rows(3, 2, 4)),
    "RMSNormUnitOffset": (lambda: nn.RMSNorm(6, unit_offset=True), lambda: rows(3, 2, 6)),
    "GroupedQueryAttention": (
        lambda: nn.GroupedQueryAttention(6, 4, 2, nn.Rotary(4), qk_norm=1e-5, qkv_bias=True), lambda: rows(3, 4, 6)),
    "AttentionBlock": (
        lambda: nn.AttentionBlock(
            nn.GroupedQueryAttention(6, 2, 1, None, causal=False, segments=True), nn.MLP(6, 5), nn.LayerNorm(6), True),
        lambda: (rows(3, 4, 6), ids(2, 3, 4))),
    "Llama": (lambda: nn.Llama(11, 8, 1, 2, 6, kv_heads=1, scale_embedding=True), lambda: ids(11, 3, 5)),
    "LlamaSegments": (lambda: nn.Llama(11, 8, 1, 2, 6, segments=True), lambda: (ids(11, 3, 5), ids(2, 3, 5))),
    "First": (nn.FirstToken, lambda: rows(3, 4, 6)),
    "BertEmbedding": (lambda: nn.BertEmbedding(11, 6, 5), lambda: (ids(11, 3, 4), ids(2, 3, 4))),
    "Bert": (lambda: nn.Bert(11, 6, 1, 2, 5), lambda: (ids(11, 3, 4), ids(2, 3, 4), ids(2, 3, 4))),
    "Patches": (lambda: nn.PatchEmbedding(4, 2, 3, 5), lambda: rows(3, 3, 4, 4)),
    "ViT": (lambda: nn.ViT(4, 2, 6, 1, 2, 3, channels=1), lambda: rows(3, 1, 4, 4)),
    "MultiHeadAttention": (lambda: nn.MultiHeadAttention(6, 2), lambda: rows(3, 4, 6)),
    "MultiHeadAttentionToAll": (lambda: nn.MultiHeadAttention(6, 3, causal=False), lambda: rows(3, 4, 6)),
    "MultiHeadAttentionDropout": (lambda: nn.MultiHeadAttention(6, 2, dropout=0.4, bias=False), lambda: rows(3, 4, 6)),
    "MLP": (lambda: nn.MLP(4, dropout=0.2), lambda: rows(3, 2, 4)),
    "TransformerBlock": (lambda: nn.TransformerBlock(6, 2), lambda: rows(3, 4, 6)),
    "TransformerBlockDropout": (lambda: nn.TransformerBlock(6, 2, 8, dropout=0.3), lambda: rows(3, 4, 6)),
    "Residual": (lambda: nn.Residual(nn.Sequential(nn.Linear(5, 5), nn.Tanh())), lambda: rows(3, 5)),
    "Sequential": (lambda: nn.Sequential(nn.Linear(5, 4), nn.GELU(), nn.Linear(4, 2)), lambda: rows(3, 5)),
    "ChainTied": (tied, lambda: rows(3, 5)),
    "ChainFrozen": (lambda: nn.Sequential(nn.Linear(5, 4), nn.Linear(4, 2), frozen="0.*"), lambda: rows(3, 5)),
    "ChainAfterGraph": (lambda: nn.Sequential(two_ways(), nn.Add(), nn.Linear(4, 2)), pair),
    "Graph": (two_ways, pair),
    "TokenEmbedding": (lambda: nn.TokenEmbedding(7, 4, 6, init=normal(1.0)), lambda: ids(7, 3, 5)),
    "GPT": (lambda: nn.GPT(11, 8, 1, 2, 6, dropout=0.1), lambda: ids(11, 3, 5)),
    # on an axis of one rank, where they move nothing; `test_tensor.py` has more
    "ColumnParallelLinear": (lambda: sharding.ColumnParallelLinear(5, 6, blocks=3, grain=2), lambda: rows(4, 5)),
    "ColumnLinearGathered": (
        lambda: sharding.ColumnParallelLinear(5, 6, gather_output=True, sequence=True), lambda: rows(4, 2, 5)),
    "RowParallelLinear": (lambda: sharding.RowParallelLinear(5, 3), lambda: rows(4, 5)),
    "RowLinearOfSequences": (lambda: sharding.RowParallelLinear(5, 3, sequence=True), lambda: rows(4, 2, 5)),
    "VocabParallelEmbedding": (lambda: sharding.VocabParallelEmbedding(7, 4), lambda: ids(7, 3, 5)),
    "VocabParallelTokenEmbedding": (
        lambda: sharding.VocabParallelTokenEmbedding(7, 4, 6, sequence=True), lambda: ids(7, 3, 5)),
    "SequenceParallelTokenEmbedding": (lambda: sharding.SequenceParallelTokenEmbedding(7, 4, 6), lambda: ids(7, 3, 5)),
    "ShardedDropout": (lambda: sharding.ShardedDropout(0.3, dim=-1, total=6), lambda: rows(4, 6)),
    "SplitSequence": (sharding.SplitSequence, lambda: rows(4, 6, 2)),
    "AllGatherFeatures": (lambda: sharding.AllGatherFeatures(6), lambda: rows(4, 6)),
    "WithInputOutput": (
        lambda: sharding.WithInputOutput(nn.MLP(4), sharding.SplitSequence(), sharding.AllGatherFeatures(4)),
        lambda: rows(4, 3, 4)),
}  # fmt: skip

globals().update(contract_tests(CASES, "fsdpx.nn"))


def test_of_a_container_of_ones_own_the_text_shows_what_its_arguments_decided_on():
    class Block(nn.Composite):
        def __init__(self, p, slope=1.0):
            self.drop, self.slope = nn.Dropout(p), slope

        def compose(self, x):
            return self.drop(x)

    assert repr(Block(0.25)) == "Block(drop=Dropout(p=0.25))"
    assert "window=3" in repr(nn.Llama(11, 8, 1, 2, 6, window=3).children()["blocks"])


class Wrong(nn.Layer):
    """y = 3 w x with one thing wrong."""

    def __init__(self, wrong):
        self.wrong = wrong

    def specs(self):
        return {"weight": nn.ParameterSpec((4,), normal(1.0)), "bias": nn.ParameterSpec((4,))}

    def forward(self, env, p, x):
        y = x * p["weight"] * 3 + p["bias"]
        if self.wrong == "changes its input":
            x *= 2
        if self.wrong == "widens":
            y = y * np.float64(1.0)
        if self.wrong == "sees other samples":
            y = y + x.sum(axis=0) - x
        return y, (x,)

    def backward_input(self, env, p, saved, dy):
        return dy * p["weight"] * (2 if self.wrong == "dx" else 3), (*saved, dy)

    def backward_params(self, env, g, kept):
        x, dy = kept
        gw = 3 * (x * dy).sum(axis=0)
        if self.wrong == "dw":
            gw = gw + 1
        if self.wrong == "overwrites":
            g["weight"][...] = gw
        elif self.wrong == "frozen" or "weight" in g:
            g["weight"] += gw
        if "bias" in g:
            g["bias"] += dy.sum(axis=0)


@pytest.mark.parametrize(
    ("wrong", "test", "message"),
    [
        ("dx", "test_the_gradient_of_the_input_is_the_derivative", "d input along a random direction: backward gives"),
        ("dw", "test_the_gradient_of_each_parameter_is_the_derivative",
         "d weight along a random direction: backward gives"),
        ("dw", "test_empty_batch_gives_empty_results", "no samples, but a gradient of weight"),
        ("overwrites", "test_backward_adds_to_the_gradients", "weight"),
        ("frozen", "test_freezing_one_parameter_leaves_other_gradients", "weight"),
        ("changes its input", "test_arguments_are_not_modified", "changed its input"),
        ("widens", "test_float32_stays_float32", "float64"),
        ("sees other samples", "test_samples_are_computed_independently", "Not equal"),
    ],
)  # fmt: skip
def test_the_contract_finds_what_is_wrong(wrong, test, message):
    contract = LayerContract()
    contract.inputs, contract.make = lambda: rows(3, 4), lambda: Wrong("nothing")
    getattr(contract, test)()
    contract.make = lambda: Wrong(wrong)
    with pytest.raises((AssertionError, KeyError), match=message):
        getattr(contract, test)()


def test_the_contract_asks_for_a_layer_and_its_inputs():
    with pytest.raises(TypeError, match="must define make"):
        LayerContract().make()
    with pytest.raises(TypeError, match="must define inputs"):
        LayerContract().inputs()
