"""Modules of PyTorch that are cut: layouts of memory that their views rely on, and parameters of the whole module."""

from functools import cache
from types import SimpleNamespace

import numpy as np
import pytest
from torch_training import train_in_torch, train_on_ranks

torch = pytest.importorskip("torch")

import fsdpx  # noqa: E402
from fsdpx import optim  # noqa: E402
from fsdpx.errors import ConfigError  # noqa: E402
from fsdpx.ext.interop.torch import from_torch  # noqa: E402

tnn = torch.nn
VOCAB, TIME, WIDTH = 20, 6, 8
TOKENS = np.random.default_rng(0).integers(0, VOCAB, (4, TIME))


class Encoder(tnn.Module):
    """PyTorch's encoder layers. kinds: for each layer, whether norms come first, and how it is masked: by an argument,
    or by a mask and is_causal."""

    def __init__(self, drop, *kinds):
        super().__init__()
        self.kinds, self.embed = kinds, tnn.Embedding(VOCAB, WIDTH)
        self.blocks = tnn.ModuleList(
            tnn.TransformerEncoderLayer(WIDTH, 2, 16, dropout=drop, batch_first=True, norm_first=first)
            for first, _ in kinds
        )
        self.head = tnn.Linear(WIDTH, VOCAB)

    def forward(self, tokens):
        x, mask = self.embed(tokens), torch.full((tokens.shape[1], tokens.shape[1]), -torch.inf).triu(1)
        for block, (_, masked) in zip(self.blocks, self.kinds, strict=True):
            x = block(x, src_mask=mask, is_causal=masked == "causal") if masked else block(x)
        return self.head(x)


class Positions(tnn.Module):
    """A token in front and positions, both parameters of the whole module; a scale that two operations read."""

    def __init__(self):
        super().__init__()
        self.embed, self.first = tnn.Embedding(VOCAB, WIDTH), tnn.Parameter(torch.randn(1, 1, WIDTH))
        self.pos, self.scale = tnn.Parameter(torch.randn(1, TIME + 3, WIDTH)), tnn.Parameter(torch.rand(WIDTH))
        self.blocks = tnn.ModuleList(tnn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.head = tnn.Linear(WIDTH, VOCAB)

    def forward(self, tokens):
        x = torch.cat([self.first.expand(tokens.shape[0], -1, -1), self.embed(tokens)], 1)
        x = (x + self.pos[:, : x.shape[1]]) * self.scale
        for block in self.blocks:
            x = x + block(x).tanh()
        return self.head((x * self.scale)[:, 1:])


def plain(net, steps):
    """Plain PyTorch: losses, the result afterwards, and parameters."""
    losses, net = train_in_torch(net, TOKENS, TOKENS, steps, "SGD", lr=0.1)
    with torch.no_grad():
        return losses, net(torch.tensor(TOKENS)).numpy(), {n: p.detach().numpy() for n, p in net.named_parameters()}


def train(model, steps, ranks=1, **options):
    """(losses, parameters, predictions) of thread ranks."""
    return train_on_ranks(model, TOKENS, TOKENS, optim.SGD(lr=0.1), ranks, steps, **{"precision": "float32", **options})


@pytest.mark.parametrize(("kinds", "evaluation"), [
    ([(False, ""), (True, ""), (False, "mask"), (True, "causal")], False), ([(False, "causal"), (False, "")], True),
], ids=["training", "evaluation"])  # fmt: skip
def test_encoder_layers_without_dropout_train_as_in_pytorch(kinds, evaluation):
    """All kinds are in one module, in both formats, because PyTorch's exporter takes seconds to split a module."""
    torch.manual_seed(1)
    net = Encoder(0.5 if evaluation else 0.0, *kinds)
    net = net.eval() if evaluation else net
    losses, result, _ = plain(net, 3)
    model = from_torch(net, TOKENS)
    for precision, rtol, atol in (("float32", 2e-5, 2e-5), ("bf16", 3e-2, 1e-1)):
        found, _, predicted = train(model, 3, precision=precision)
        np.testing.assert_allclose(found, losses, rtol, atol, err_msg=precision)
        np.testing.assert_allclose(np.asarray(predicted, np.float32), result, rtol, atol, err_msg=precision)


def test_dropout_in_training_leaves_views_valid_in_evaluation():
    torch.manual_seed(1)
    net = Encoder(0.5, (False, ""), (False, ""))
    result = plain(net.eval(), 0)[1]
    np.testing.assert_allclose(train(from_torch(net.train(), TOKENS), 0)[2], result, rtol=1e-5, atol=1e-5)


@cache
def positions():
    """The module cut into units, what plain PyTorch ends with, and what the first values are read from."""
    torch.manual_seed(2)
    net = Positions().double()
    return from_torch(net, TOKENS), plain(net, 3), net


@pytest.mark.parametrize(("ranks", "options"), [
    (1, {}), (2, {"strategy": "fsdp", "group_bytes": 0}),
    (2, {"data": 1, "mesh": fsdpx.Mesh(pipe=2), "schedule": "zb-h1", "microbatches": 2}),
], ids=["one", "fsdp", "pipe"])  # fmt: skip
def test_parameters_of_the_whole_module_are_layers_of_their_own(ranks, options):
    model, (losses, result, end), _ = positions()
    assert [name for name in model.children() if not name.startswith("mul")] == [
        "embed", "first", "pos", "scale", "blocks.0", "blocks.1", "head"
    ]  # fmt: skip
    found, parameters, predicted = train(model, 3, ranks, precision="float64", **options)
    np.testing.assert_allclose(found, losses, rtol=1e-10)
    np.testing.assert_allclose(predicted, result[: len(predicted)], rtol=1e-8, atol=1e-10)
    assert parameters.keys() == end.keys()
    for name, array in end.items():
        np.testing.assert_allclose(parameters[name], array, rtol=1e-8, atol=1e-10)


class Both(tnn.Module):
    """One operation that reads two parameters of the whole module."""

    def __init__(self):
        super().__init__()
        self.weight, self.bias = tnn.Parameter(torch.ones(3, 4)), tnn.Parameter(torch.ones(3))

    def forward(self, x):
        return tnn.functional.linear(x, self.weight, self.bias)


def test_what_stays_uncut_is_named_with_what_to_do():
    said = r"'bias' is of no unit but of a module around several.*module of its own, such as torch\.nn\.Embedding"
    with pytest.raises(ConfigError, match=said):
        from_torch(Both(), np.ones((2, 4), np.float32))


@pytest.mark.parametrize("rank", [0, 1])
def test_an_export_that_takes_long_is_named_by_the_first_rank(rank, monkeypatch, capsys):
    made = []

    def make_timer(seconds, function):
        """A timer whose time is over when it starts."""
        return SimpleNamespace(start=function, cancel=lambda: made.append(seconds))

    monkeypatch.setattr("threading.Timer", make_timer)
    monkeypatch.setenv("PMI_RANK", str(rank))
    monkeypatch.setenv("PMI_SIZE", "2")
    from_torch(tnn.Sequential(tnn.Linear(4, 4)), np.ones((2, 4), np.float32))
    assert len(made) == 1 - rank
    assert capsys.readouterr().err.count("fsdpx: PyTorch exports Sequential to split it into units") == 2 * len(made)
