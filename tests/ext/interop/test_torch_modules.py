"""PyTorch's modules and losses in fsdpx: the same results as plain PyTorch, however ranks are laid out."""

import copy
import gc
import re
import warnings
from functools import cache
from types import SimpleNamespace

import numpy as np
import pytest
from torch_training import demand_training, train_in_torch, train_on_ranks

torch = pytest.importorskip("torch")

import fsdpx  # noqa: E402
from fsdpx import nn, optim  # noqa: E402
from fsdpx.core.comm import spawn  # noqa: E402
from fsdpx.errors import ConfigError, DataError  # noqa: E402
from fsdpx.ext.fields.over_parts import partition_model  # noqa: E402
from fsdpx.ext.half import matmul  # noqa: E402
from fsdpx.ext.interop.torch import TorchLoss, TorchModule, from_torch, to_array, to_tensor  # noqa: E402
from fsdpx.testing import LayerContract, assert_close  # noqa: E402

tnn = torch.nn
SAMPLES, VOCAB, TIME = 12, 20, 6
ONES = np.ones((3, 4), np.float32)


class Block(tnn.Module):
    """A transformer block as people write it: functional attention, dropout in two forms."""

    def __init__(self, width, drop):
        super().__init__()
        self.norm1, self.norm2 = tnn.LayerNorm(width), tnn.LayerNorm(width)
        self.qkv, self.out = tnn.Linear(width, 3 * width), tnn.Linear(width, width)
        up, down = tnn.Linear(width, 2 * width), tnn.Linear(2 * width, width)
        self.mlp = tnn.Sequential(up, tnn.GELU(), down, tnn.Dropout(drop))
        self.drop = drop

    def forward(self, x, mask):
        b, t, d = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(b, t, 3, 2, d // 2).permute(2, 0, 3, 1, 4)
        p = self.drop if self.training else 0.0
        a = tnn.functional.scaled_dot_product_attention(q, k, v, mask, p)
        x = x + self.out(a.transpose(1, 2).reshape(b, t, d))
        return x + self.mlp(self.norm2(x))


class Language(tnn.Module):
    """Tokens and how much of each counts; a mask that blocks share; tied embeddings; a list of blocks."""

    def __init__(self, blocks=2, drop=0.0):
        super().__init__()
        self.embed = tnn.Embedding(VOCAB, 8)
        self.blocks = tnn.ModuleList([Block(8, drop) for _ in range(blocks)])
        self.norm, self.head = tnn.LayerNorm(8), tnn.Linear(8, VOCAB, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens, scale):
        mask = torch.ones(tokens.shape[1], tokens.shape[1]).tril().bool()
        x = self.embed(tokens) * scale.unsqueeze(-1)
        for block in self.blocks:
            x = block(x, mask)
        return self.head(self.norm(x))


def image_net():
    return tnn.Sequential(
        tnn.Conv2d(2, 4, 3, padding=1), tnn.BatchNorm2d(4), tnn.ReLU(inplace=True), tnn.Flatten(), tnn.Linear(64, 5)
    )


R = np.random.default_rng(0)
IMAGES = R.standard_normal((SAMPLES, 2, 4, 4)), R.integers(0, 5, SAMPLES)
TOKENS, LABELS = R.integers(0, VOCAB, (2, SAMPLES, TIME))
TEXT = (TOKENS, R.standard_normal((SAMPLES, TIME))), LABELS
EXAMPLE = [a[:4] for a in TEXT[0]]


def from_text(net, **options):
    """A module that takes what `TEXT` has, in units."""
    return from_torch(net, *EXAMPLE, **options)


def distributed(net, **options):
    return fsdpx.distribute(net, **{"loss": nn.MSELoss(), "optimizer": optim.SGD(lr=0.1), **options})


def plain(net, x, y):
    """Plain PyTorch: losses, and parameters and buffers after the last step."""
    losses, net = train_in_torch(net, x, y, 3, lr=1e-2, weight_decay=0.01)
    return losses, {name: t.detach().numpy() for name, t in net.state_dict().items()}


def train(model, x, y, ranks=1, steps=3, **options):
    """(losses, parameters, predictions) of thread ranks that share the batch."""
    return train_on_ranks(model, x, y, optim.AdamW(lr=1e-2, weight_decay=0.01), ranks, steps, **options)


class Residual(tnn.Module):
    """As in ResNet: one ReLU, in place, after each batch norm and after the sum."""

    def __init__(self):
        super().__init__()
        self.conv1, self.norm1 = tnn.Conv2d(2, 4, 3, padding=1, bias=False), tnn.BatchNorm2d(4)
        self.conv2, self.norm2 = tnn.Conv2d(4, 4, 3, padding=1, bias=False), tnn.BatchNorm2d(4)
        self.relu, self.head = tnn.ReLU(inplace=True), tnn.Linear(4, 5)

    def forward(self, x):
        h = self.relu(self.norm1(self.conv1(x)))
        h = self.relu(self.norm2(self.conv2(h)) + h)
        return self.head(h.mean((2, 3)))


class TestModule(LayerContract):
    def make(self):
        torch.manual_seed(0)
        return TorchModule(tnn.Sequential(tnn.Linear(5, 4), tnn.Tanh(), tnn.LayerNorm(4), tnn.Linear(4, 3)))

    def inputs(self):
        return self.draw_normal(4, 5)


class TestModuleOfTwoInputsThatDrops(LayerContract):
    def make(self):
        torch.manual_seed(0)
        return TorchModule(Language(1, drop=0.3))

    def inputs(self):
        return self.draw_integers(VOCAB, 3, TIME), self.draw_normal(3, TIME)


@pytest.mark.parametrize("cut", [False, True], ids=["sequential", "residual units"])
def test_batch_norms_see_the_whole_batch_as_in_pytorch(cut):
    torch.manual_seed(1)
    net, (x, y) = (Residual() if cut else image_net()).double(), IMAGES
    losses, end = plain(net, x, y)
    model = from_torch(net, x[:4]) if cut else net
    for ranks in (1, 3):
        found = train(model, x, y, ranks, loss=tnn.CrossEntropyLoss())
        demand_training(found, (losses, end))
        assert all(name.endswith("num_batches_tracked") for name in end.keys() - found[1].keys())


WAYS = {
    "one": (1, {}),
    "fsdp": (2, {}),
    "ddp": (3, {"strategy": "ddp"}),
    "zero2": (4, {"strategy": "zero2"}),
    "pipe": (2, {"mesh": fsdpx.Mesh(pipe=2), "schedule": "zb-h1", "data": 1}),
    "recompute": (2, {"recompute": "all"}),
}


@cache
def cut_and_trained(kind):
    """A module, itself in units, and what PyTorch gives: once, for the exporter takes seconds."""
    torch.manual_seed(2)
    net = kind().double()
    return net, from_text(net), plain(net, *TEXT)


class Shared(tnn.Module):
    """Its result is a product with the table of an embedding, outside of any module."""

    def __init__(self):
        super().__init__()
        self.embed, self.blocks = tnn.Embedding(VOCAB, 8), tnn.ModuleList([Block(8, 0.0) for _ in range(3)])

    def forward(self, tokens, scale):
        x = self.embed(tokens) * scale.unsqueeze(-1)
        for block in self.blocks:
            x = block(x, None)
        return tnn.functional.linear(x, self.embed.weight)


@pytest.mark.parametrize(("kind", "way"), [*((Language, way) for way in WAYS), (Shared, "fsdp"), (Shared, "pipe")])
def test_units_of_a_module_train_as_in_pytorch(kind, way):
    """Of Shared, an operation outside of units reads a parameter of one."""
    net, model, wanted = cut_and_trained(kind)
    ranks, options = WAYS[way]
    found = train(model, *TEXT, ranks, **options)
    demand_training(found, wanted)
    assert found[1].keys() == {name for name, _ in net.named_parameters()}
    assert len(model.children()) == 5


class Gated(tnn.Module):
    """An argument by name, a frozen parameter, and buffers that are saved and that are not."""

    def __init__(self):
        super().__init__()
        self.lin, self.gate = tnn.Linear(4, 5), tnn.Linear(4, 5)
        self.gate.weight.requires_grad_(False)
        self.register_buffer("shift", torch.linspace(0, 1, 5))
        self.register_buffer("factor", torch.full((1,), 1.5), persistent=False)

    def forward(self, x, mask=None, *, scale):
        assert mask is None
        return self.lin(x) * torch.sigmoid(self.gate(x)) * scale * self.factor + self.shift


class Inside(tnn.Module):
    """As Sequential, whose children are not layers by themselves."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return self.inner(x)


class ByPlace(Inside):
    def forward(self, x, scale):
        return self.inner(x, scale=scale)


@pytest.mark.parametrize("cut", [False, True], ids=["one layer", "units"])
def test_arguments_by_name_frozen_parameters_and_buffers_are_as_in_pytorch(cut):
    torch.manual_seed(6)
    net, r = ByPlace(Gated()).double(), np.random.default_rng(3)
    x, y = (r.standard_normal((SAMPLES, 4)), r.standard_normal((SAMPLES, 1))), r.integers(0, 5, SAMPLES)
    losses, end = plain(net, x, y)
    example = [a[:4] for a in x]
    model = from_torch(net, *example, units=["Gated"]) if cut else TorchModule(net.inner, inputs=("x", "scale"))
    found, parameters, _ = train(model, x, y, 3, strategy="zero2")
    parameters = parameters if cut else {f"inner.{name}": value for name, value in parameters.items()}
    demand_training((found, parameters), (losses, end))
    np.testing.assert_array_equal(parameters["inner.gate.weight"], net.inner.gate.weight.numpy())


def test_units_are_the_elements_of_module_lists_and_modules_with_parameters():
    _, cut, _ = cut_and_trained(Language)
    assert list(cut.children()) == ["embed", "blocks.0", "blocks.1", "norm", "head"]
    assert list(from_text(Language(), units=["Block"]).children()) == list(cut.children())
    assert "blocks.0.mlp.0" in from_text(Language(1), units=lambda path, module: False).children()


@cache
def dropping():
    """Return a module with dropout, whole and split into units."""
    torch.manual_seed(3)
    net = Language(drop=0.4).double()
    return net, from_text(net)


@pytest.mark.parametrize("cut", [False, True], ids=["one layer", "units"])
def test_dropout_is_the_same_however_ranks_are_laid_out(cut):
    (net, units), (x, y) = dropping(), TEXT
    model = units if cut else from_torch(net)
    alone, _, still = train(model, x, y)
    for ranks, options in ((2, {}), (3, {"strategy": "ddp"}), (2, {"recompute": "all"})):
        losses, _, predicted = train(model, x, y, ranks, **options)
        np.testing.assert_allclose(losses, alone, rtol=1e-12)
        np.testing.assert_allclose(predicted, still[: len(predicted)], rtol=1e-9)
    whole = copy.deepcopy(net)
    for block in whole.blocks:
        block.drop, block.mlp[3].p = 0.0, 0.0
    without, _, _ = train(from_torch(whole), x, y, steps=1)
    assert abs(without[0] - alone[0]) > 1e-4, "nothing was dropped"


def test_chunks_give_the_same_bits_on_any_number_of_ranks():
    (_, model), (x, y) = dropping(), TEXT
    first, *others = (
        train(model, x, y, ranks, reproducible_chunks=6, **options)
        for ranks, options in ((1, {}), (3, {"strategy": "ddp"}), (2, {}), (2, {"mesh": fsdpx.Mesh(pipe=2), "data": 1}))
    )
    for other in others:
        assert_close(other[:2], first[:2])


def test_first_values_are_those_of_rank_0():
    modules = [tnn.Linear(3, 2) for _ in range(2)]  # here: thread ranks share PyTorch's generator
    first, other = (module.weight.detach().numpy().copy() for module in modules)
    assert (first != other).any()

    def run(comm):
        return distributed(modules[comm.rank], comm=comm).parameters()["weight"]

    for found in spawn(run, 2):
        np.testing.assert_array_equal(found, first)


@pytest.mark.parametrize("cut", [False, True], ids=["one layer", "units"])
def test_layers_keep_no_first_values_that_were_handed_on(cut):
    net, (x, y) = Language(1), TEXT
    model = from_torch(net, *EXAMPLE * cut)
    first, again = (train(model, x, y, 2, steps=1, precision="float32")[0] for _ in range(2))
    assert first == again
    del net
    gc.collect()
    with pytest.raises(ConfigError, match="first values of this layer were released, and their module was deleted"):
        train(model, x, y, 2)
    alone = from_torch(Language(1), *EXAMPLE * cut)
    fsdpx.dry_run(alone, x, y, ranks=2, loss=nn.CrossEntropyLoss(), optimizer=optim.SGD(lr=0.1))
    assert np.isfinite(train(alone, x, y, 2)[0]).all(), "a dry run has no ranks that take them"


def test_a_dry_run_predicts_what_a_module_keeps_for_backward():
    (_, model, _), ((tokens, scale), y) = cut_and_trained(Language), TEXT
    # the exporter knows the shapes of float64
    options = {"loss": nn.CrossEntropyLoss(), "optimizer": optim.SGD(lr=0.1), "group_bytes": 0, "precision": "float64"}
    some = fsdpx.dry_run(model, (tokens[:4], scale[:4]), y[:4], ranks=2, **options).activations
    assert 2.5 * some < fsdpx.dry_run(model, (tokens, scale), y, ranks=2, **options).activations < 3.5 * some


def test_the_saved_file_is_a_state_dict(tmp_path):
    from safetensors.torch import load_file

    net, (x, y) = image_net(), IMAGES
    trainer = distributed(net, loss=nn.CrossEntropyLoss())
    trainer.step(x.astype(np.float32), y)
    trainer.save(tmp_path / "net")
    net.load_state_dict(load_file(tmp_path / "net" / "model.safetensors"), strict=False)
    net.eval()
    with torch.no_grad():
        wanted = net(torch.tensor(x, dtype=torch.float32)).numpy()
    np.testing.assert_allclose(trainer.predict(x.astype(np.float32)), wanted, rtol=1e-4, atol=1e-5)


CRITERIA = {
    "ignored and weighted": (tnn.CrossEntropyLoss(torch.rand(5).double() + 0.5, ignore_index=2), None),
    "smoothed": (tnn.CrossEntropyLoss(label_smoothing=0.1), None),
    "squares": (tnn.MSELoss(), (SAMPLES, 5)),
    "huber": (tnn.HuberLoss(), (SAMPLES, 5)),
    "function": (lambda y, t: ((y - t) ** 2).sum(1).mean(), (SAMPLES, 5)),
}


@pytest.mark.parametrize("name", CRITERIA)
def test_losses_divide_as_pytorch_divides_the_whole_batch(name):
    torch.manual_seed(5)
    loss, shape = CRITERIA[name]
    net, (x, y) = image_net().double(), IMAGES
    y = y if shape is None else np.random.default_rng(7).standard_normal(shape)
    wanted = loss(copy.deepcopy(net)(torch.tensor(x)), torch.tensor(y)).item()
    (found,), _, _ = train(net, x, y, 3, steps=1, loss=TorchLoss(loss))
    np.testing.assert_allclose(found, wanted, rtol=1e-12)


FLOAT, EACH = np.float32, (6, 4)
TARGETS = {
    "squares": (tnn.MSELoss(), np.zeros(6, FLOAT), (6, 1), r"a target of the output's shape \(6, 1\), got \(6,\)"),
    "absolute": (tnn.L1Loss(), np.zeros((6, 1), FLOAT), EACH, r"shape \(6, 4\), got \(6, 1\)"),
    "function": (tnn.functional.mse_loss, np.zeros(6, FLOAT), (6, 1), r"got \(6,\): PyTorch would repeat one"),
    "divergence": (tnn.KLDivLoss(), np.zeros((6, 1), FLOAT), EACH, r"shape \(6, 4\), got \(6, 1\)"),
    "labels": (tnn.CrossEntropyLoss(), np.zeros((6, 1), int), EACH, r"labels for .* the shape \(6,\), got \(6, 1\)"),
    "classes": (tnn.CrossEntropyLoss(), np.zeros((6, 2), int), (6, 2, 4), "the last dim, use fsdpx.nn.CrossEntropy"),
    "flags": (tnn.CrossEntropyLoss(), np.zeros(6, bool), EACH, r"probabilities for .* got \(6,\) of bool"),
    "range": (tnn.NLLLoss(), np.full(6, 4), EACH, "label 4 is out of range: it must be from 0 to 3, or ignore_index"),
}  # fmt: skip


@pytest.mark.parametrize("name", TARGETS)
def test_targets_that_do_not_fit_a_loss_are_refused(name):
    loss, target, shape, wrong = TARGETS[name]
    with pytest.raises(DataError, match=wrong):
        TorchLoss(loss).validate(shape, target)


def test_targets_of_any_whole_numbers_are_those_of_int64_or_floats():
    net, (x, y) = image_net().double(), IMAGES
    kinds = [np.int64, np.int32, np.uint8, np.uint16]
    wanted, *found = (train(net, x, y.astype(kind), 2, steps=1, loss=tnn.CrossEntropyLoss())[0] for kind in kinds)
    assert found == [wanted] * 3
    squares = [np.eye(5)[y].astype(kind) for kind in (np.float64, np.int64)]
    wanted, found = (train(net, x, target, 1, steps=1, loss=tnn.MSELoss())[0] for target in squares)
    assert found == wanted


@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("loss", [tnn.CrossEntropyLoss(), tnn.functional.cross_entropy], ids=["module", "function"])
def test_a_loss_of_16_bit_outputs_is_computed_in_float32(loss, kind):
    """As under torch.autocast; the gradient has the format of the outputs."""
    rng = np.random.default_rng(0)
    y, labels = torch.tensor(rng.standard_normal((6, 4)), dtype=kind, requires_grad=True), torch.arange(6) % 4
    wanted = tnn.functional.cross_entropy(y.float(), labels)
    wanted.backward()
    env = SimpleNamespace(xp=np)
    array = to_array(np, y.detach())
    total, weight, saved = TorchLoss(loss).forward(env, array, labels.numpy())
    assert total / weight == pytest.approx(wanted.item(), rel=1e-6)
    gradient = TorchLoss(loss).backward(env, saved, 1 / weight)
    assert gradient.dtype == array.dtype
    assert torch.equal(to_tensor(gradient).to(kind), y.grad)


@pytest.mark.parametrize("ours", [False, True])
def test_only_layers_of_fsdpx_are_warned_of_slow_16_bit_products(monkeypatch, ours):
    """PyTorch multiplies in its modules, with bfloat16 instructions of its own."""
    monkeypatch.setattr(matmul, "get_selected_library", lambda kind="bfloat16": matmul.WIDENED)
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        distributed(nn.Linear(4, 2) if ours else tnn.Linear(4, 2), precision="bf16", comm=spawn(lambda c: c, 1)[0])
    assert any("bf16 is computed as float32" in str(one.message) for one in heard) == ours


def still(which):
    torch.manual_seed(3)
    norms, drop = [tnn.BatchNorm1d(4), tnn.BatchNorm1d(4)], tnn.Dropout(0.5)
    net = tnn.Sequential(tnn.Linear(4, 4), norms[0], tnn.Linear(4, 4), norms[1], drop, tnn.Linear(4, 3)).double()
    for norm in norms:
        torch.nn.init.normal_(norm.running_mean)
    drop.eval()
    if which == "all":
        net.eval()
    elif which == "first norm":
        norms[0].eval()
    return net


@pytest.mark.parametrize("way", ["layers", "module", "cut"])
@pytest.mark.parametrize("which", ["all", "first norm", "dropout"])
def test_what_is_in_evaluation_stays_so_in_training_as_in_pytorch(which, way):
    net, r = still(which), np.random.default_rng(1)
    x, y = r.standard_normal((8, 4)), r.integers(0, 3, 8)
    given = from_torch(net, x) if way == "cut" else net
    if way == "module":
        given = Inside(net)
        given.training = net.training  # of itself alone
    trainer = distributed(given, loss=nn.CrossEntropyLoss(), precision="float64")
    losses, there = train_in_torch(net, x, y, 3, "SGD", lr=0.1)
    found = []
    for _ in range(3):
        found.append(trainer.step(x, y))
        trainer.evaluate(x, y)  # goes back to the modes that were given
    np.testing.assert_allclose(found, losses, rtol=1e-9)
    prefix, parameters = "inner." if way == "module" else "", trainer.parameters()
    for name, value in there.state_dict().items():
        if "num_batches" not in name:
            np.testing.assert_allclose(parameters[prefix + name], value.numpy(), rtol=1e-9, atol=1e-12, err_msg=name)


class Around(tnn.Module):
    """A linear layer, and what a function makes of it and of the input."""

    def __init__(self, compute):
        super().__init__()
        self.compute, self.lin = compute, tnn.Linear(4, 4)

    def forward(self, x):
        return self.compute(self, x)


@pytest.mark.parametrize("kind", [torch.int64, torch.int32, torch.uint8, torch.bool])
def test_saved_buffers_that_are_no_floats_are_constants(kind):
    net, x = Around(lambda own, x: own.lin(x) * own.chosen), np.arange(12, dtype=np.float64).reshape(3, 4) / 7
    net.register_buffer("chosen", torch.tensor([1, 0, 1, 1]).to(kind))
    wanted = tnn.functional.mse_loss(net.double()(torch.tensor(x)), torch.tensor(x)).item()
    found, _, _ = train(net, x, x, 1, steps=1, loss=nn.MSELoss())
    np.testing.assert_allclose(found, [wanted], rtol=1e-12)


def test_a_buffer_of_another_format_is_named():
    net = Around(lambda own, x: own.lin(x) @ own.turn)
    net.register_buffer("turn", torch.eye(4).half(), persistent=False)
    trainer = distributed(net)
    with pytest.raises(ConfigError, match=r"turn is torch\.float16, a buffer that is not saved .* all else is float32"):
        trainer.step(ONES, ONES)


def test_evaluation_draws_the_same_on_any_number_of_ranks_and_none_of_pytorchs_numbers():
    net, x = Around(lambda own, x: own.lin(x) + torch.rand_like(x)).double(), np.ones((4, 4))

    def run(comm):
        trainer = distributed(net, optimizer=optim.SGD(lr=0.0), precision="float64", comm=comm)
        part = slice(comm.rank * 4 // comm.size, (comm.rank + 1) * 4 // comm.size)
        return trainer.evaluate(x[part], x[part]), trainer.step(x[part], x[part])

    before = torch.default_generator.get_state()
    alone, shared = spawn(run, 1)[0], spawn(run, 2)[0]
    np.testing.assert_allclose(alone, shared, rtol=1e-12)
    assert torch.equal(before, torch.default_generator.get_state())


def clamp_weight(own, x):
    with torch.no_grad():
        own.lin.weight.clamp_(-1, 1)
    return own.lin(x)


ERRORS = {
    "input": (lambda own, x: own.lin(x.mul_(2)), "forward writes into input 0: compute new tensors instead"),
    "parameter": (clamp_weight, "forward writes into lin.weight: compute new tensors instead"),
    "random": (
        lambda own, x: own.lin(x + torch.randn(4)),
        "the module draws random numbers in a way that is not known here",
    ),
    "two": (
        lambda own, x: (own.lin(x), own.lin(x)),
        "forward returns tuple, but a layer gives one tensor: choose it with output=",
    ),
    "dict": (lambda own, x: {"a": own.lin(x)}, "forward returns dict, but a layer gives one tensor"),
}


@pytest.mark.parametrize("what", ERRORS)
def test_what_a_module_may_not_do_is_named(what):
    compute, said = ERRORS[what]
    trainer = distributed(Around(compute))
    with pytest.raises(ConfigError, match=re.escape(said)):
        trainer.step(ONES, ONES)


class WithLoss(tnn.Module):
    """Like models of transformers, returns the loss too if it gets labels."""

    def __init__(self, what):
        super().__init__()
        self.what, self.lin = what, tnn.Linear(4, 4)

    def forward(self, x, labels=None):
        y = self.lin(x)
        loss = y.square().mean()
        return {"tensor": loss, "dict": {"loss": loss, "scores": y}, "tuple": (loss, y)}[self.what]


LOSSES = [nn.MSELoss(), tnn.MSELoss(), nn.CrossEntropyLoss(), tnn.CrossEntropyLoss()]


@pytest.mark.parametrize("turn", range(len(LOSSES)))
def test_a_module_that_returns_its_loss_is_told_what_to_return(turn):
    """Each loss with two ways to give a module, and each way with one loss or two: each export takes long."""
    y = ONES if "MSE" in repr(LOSSES[turn]) else np.zeros(3, np.int64)
    ways = [
        (lambda: WithLoss("tensor"), ONES),
        (lambda: from_torch(WithLoss("dict"), output="loss"), ONES),
        (lambda: from_torch(WithLoss("tuple"), ONES, output=0), ONES),
        (lambda: tnn.Sequential(tnn.Linear(4, 4), WithLoss("tensor")), ONES),
        (lambda: TorchModule(WithLoss("dict"), inputs=("x", "labels"), output="loss"), (ONES, ONES)),
    ]
    for make, given in ways[turn : turn + 2]:
        model = make()
        trainer = distributed(model, loss=LOSSES[turn])
        for call in (trainer.step, trainer.evaluate):
            with pytest.raises(ConfigError, match=r"returns a single number, such as its loss: .* as loss=") as caught:
                call(given, y)
        assert ("layer '1'" in str(caught.value)) is isinstance(model, tnn.Sequential)


def test_an_output_that_is_not_there_is_named():
    for what, said in (("tensor", "it gives Tensor"), ("dict", "there are loss, scores"), ("tuple", "there are 0, 1")):
        trainer = distributed(from_torch(WithLoss(what), output="other"))
        with pytest.raises(ConfigError, match=f"forward returns no 'other'; {said}"):
            trainer.step(ONES, ONES)


def test_a_module_that_fsdp_gathers_whole_is_said_on_rank_0():
    def warn_of(net, **options):
        given = {"strategy": "fsdp", "group_bytes": 64, **options}
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            spawn(lambda comm: distributed(net, comm=comm, **given), 2)
        return [str(one.message) for one in caught]

    (said,) = warn_of(Language())
    assert re.match(r"fsdpx: TorchModule\(Language, .*is one unit, .* whole; to split it, pass .*from_torch\(", said)
    assert warn_of(Language(), strategy="zero2") == warn_of(Language(), group_bytes="1MiB") == []
    _, split, _ = cut_and_trained(Language)
    assert [warn_of(net) for net in (split, tnn.Linear(9, 9), image_net())] == [[], [], []]


class Branching(tnn.Module):
    def forward(self, x):
        return x if x.sum() > 0 else -x


def test_a_module_that_looks_at_values_is_one_layer():
    trainer = distributed(tnn.Sequential(tnn.Linear(4, 4), Branching()))
    assert trainer.step(ONES, ONES) > trainer.step(ONES, ONES)


def test_a_module_that_is_one_layer_is_refused_over_a_grid():
    grid, model = fsdpx.Grid.from_shape((4, 6), (2, 1)), from_torch(tnn.Sequential(tnn.Conv2d(1, 1, 3)))
    with pytest.raises(ConfigError, match=r"from_torch\(module, domain=grid\)"):
        partition_model(model, grid.parts)


INTEGERS = tnn.Linear(4, 4)
INTEGERS.steps = tnn.Parameter(torch.zeros(3, dtype=torch.int64), requires_grad=False)


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda: from_text(Language(), units=["Blok"]), r"units: 'Blok' matches no module; the nearest are 'Block', "),
        (lambda: from_torch(Language(), units=["Block"]), "needs an example of the inputs"),
        (lambda: from_torch(Branching(), ONES), r"cannot be split: torch\.export says"),
        (lambda: distributed(tnn.Linear(4, 4, device="meta")), "on PyTorch's device 'meta', without values"),
        (lambda: distributed(INTEGERS), r"Linear: 'steps' is torch\.int64 on cpu; parameters must be floats"),
        (lambda: TorchLoss(tnn.MSELoss(reduction="sum")), "reduction='sum' gives no mean over a batch"),
        (
            lambda: from_torch(tnn.BatchNorm1d(3, momentum=None)),
            "momentum=None and track_running_stats=False are not known",
        ),
    ],
)
def test_other_wrong_choices_are_named(call, said):
    with pytest.raises(ConfigError, match=said):
        call()
