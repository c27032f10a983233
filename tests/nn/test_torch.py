"""PyTorch as the reference: results, gradients, and the names, shapes and first values of parameters."""

import numpy as np
import pytest
from present import needs

torch = pytest.importorskip("torch")

from setting import env, gradients, normal, parameters  # noqa: E402

from fsdpx import nn  # noqa: E402

tnn = torch.nn


PAIRS = {
    "linear": (nn.Linear(5, 3), lambda: tnn.Linear(5, 3), (4, 2, 5)),
    "linear without bias": (nn.Linear(5, 3, bias=False), lambda: tnn.Linear(5, 3, bias=False), (4, 5)),
    "layer norm": (nn.LayerNorm(6), lambda: tnn.LayerNorm(6), (3, 2, 6)),
    "layer norm of two dims": (nn.LayerNorm((2, 6), eps=1e-3), lambda: tnn.LayerNorm((2, 6), 1e-3), (3, 2, 6)),
    "rms norm": (nn.RMSNorm(6), lambda: tnn.RMSNorm(6), (3, 2, 6)),
    "rms norm with eps": (nn.RMSNorm(6, 1e-2), lambda: tnn.RMSNorm(6, 1e-2), (3, 6)),
    "batch norm": (nn.BatchNorm(3), lambda: tnn.BatchNorm1d(3), (5, 3)),
    "batch norm of images": (nn.BatchNorm(3, momentum=0.3), lambda: tnn.BatchNorm2d(3, momentum=0.3), (4, 3, 2, 5)),
    "relu": (nn.ReLU(), tnn.ReLU, (4, 6)),
    "gelu": (nn.GELU(), tnn.GELU, (4, 6)),
    "gelu with tanh": (nn.GELU("tanh"), lambda: tnn.GELU("tanh"), (4, 6)),
    "silu": (nn.SiLU(), tnn.SiLU, (4, 6)),
    "tanh": (nn.Tanh(), tnn.Tanh, (4, 6)),
    "sigmoid": (nn.Sigmoid(), tnn.Sigmoid, (4, 6)),
    "leaky relu": (nn.LeakyReLU(), tnn.LeakyReLU, (4, 6)),
    "elu": (nn.ELU(1.5), lambda: tnn.ELU(1.5), (4, 6)),
    "softplus": (nn.Softplus(3.0, 2.0), lambda: tnn.Softplus(3.0, 2.0), (4, 6)),
    "softmax": (nn.Softmax(1), lambda: tnn.Softmax(1), (4, 6, 3)),
    "flatten": (nn.Flatten(), tnn.Flatten, (3, 2, 4)),
    "flatten from 2": (nn.Flatten(2), lambda: tnn.Flatten(2), (3, 2, 4, 2)),
    "chain": (
        nn.Sequential(nn.Linear(5, 4), nn.GELU(), nn.Sequential(nn.Linear(4, 3), nn.Tanh())),
        lambda: tnn.Sequential(tnn.Linear(5, 4), tnn.GELU(), tnn.Sequential(tnn.Linear(4, 3), tnn.Tanh())),
        (4, 5),
    ),
}


def shaken(module):
    """The module in float64, its parameters away from zeros and ones; state stays as it begins."""
    torch.manual_seed(0)
    module = module.double()
    with torch.no_grad():
        for parameter in module.parameters():
            parameter += 0.3 * torch.randn_like(parameter)
    return module


def compare(layer, module, x, names=None):
    """y, dx, all gradients and all state after one pass in training. names: parts of their names -> of ours"""

    def rename(name):
        for theirs, ours in (names or {}).items():
            name = name.replace(theirs, ours)
        return name

    theirs = {name: t for name, t in module.state_dict().items() if not name.endswith("num_batches_tracked")}
    p = {rename(name): tensor.numpy().copy() for name, tensor in theirs.items()}
    assert {name: array.shape for name, array in p.items()} == {n: s.shape for n, s in layer.specs().items()}
    g = gradients(layer, p)
    y, saved = layer.forward(env(), p, x)
    dy = normal(*y.shape, seed=9)
    dx = layer.backward(env(), p, g, saved, dy)
    tx = torch.tensor(x, requires_grad=x.dtype.kind == "f")
    ty = module(tx)
    ty.backward(torch.tensor(dy))
    close = {"rtol": 1e-10, "atol": 1e-12}
    np.testing.assert_allclose(y, ty.detach().numpy(), **close)
    if tx.requires_grad:
        np.testing.assert_allclose(dx, tx.grad.numpy(), **close)
    for name, parameter in module.named_parameters():
        np.testing.assert_allclose(g[rename(name)], parameter.grad.numpy(), err_msg=name, **close)
    for name, buffer in module.named_buffers():
        if not name.endswith("num_batches_tracked"):
            np.testing.assert_allclose(p[rename(name)], buffer.numpy(), err_msg=name, **close)


@pytest.mark.parametrize("name", PAIRS)
def test_layer(name):
    layer, make, shape = PAIRS[name]
    compare(layer, shaken(make()), normal(*shape))


def test_batch_norm_evaluating():
    layer, module, x = nn.BatchNorm(3), shaken(tnn.BatchNorm1d(3)), normal(5, 3)
    p = {"running_mean": np.zeros(3), "running_var": np.ones(3)}
    p |= {name: t.detach().numpy().copy() for name, t in module.named_parameters()}
    layer.forward(env(), p, x)
    module(torch.tensor(x))
    module.eval()
    np.testing.assert_allclose(layer.forward(env(training=False), p, x)[0], module(torch.tensor(x)).detach())


def test_embedding():
    compare(nn.Embedding(7, 4), shaken(tnn.Embedding(7, 4)), np.array([[1, 6, 1], [0, 1, 3]]))


class TorchAttention(tnn.MultiheadAttention):
    def forward(self, x):
        mask = torch.triu(torch.ones(x.shape[1], x.shape[1], dtype=torch.bool), 1) if self.causal else None
        return super().forward(x, x, x, attn_mask=mask, need_weights=False)[0]


@pytest.mark.parametrize("causal", [True, False])
def test_attention(causal):
    module, names = shaken(TorchAttention(6, 2, batch_first=True)), {"in_proj_": "qkv.", "out_proj.": "out."}
    module.causal = causal
    compare(nn.MultiHeadAttention(6, 2, causal), module, normal(3, 4, 6), names)


class TorchGPT(tnn.Module):
    def __init__(self, vocab, d_model, n_layers, n_heads, seq_len):
        super().__init__()
        self.embed = tnn.Embedding(vocab, d_model)
        self.position = tnn.Parameter(torch.randn(seq_len, d_model))
        block = [tnn.TransformerEncoderLayer(d_model, n_heads, 4 * d_model, 0.0, "gelu", batch_first=True,
                                             norm_first=True) for _ in range(n_layers)]  # fmt: skip
        self.blocks = tnn.ModuleList(block)
        self.norm = tnn.LayerNorm(d_model)

    def forward(self, x):
        mask = torch.triu(torch.ones(x.shape[1], x.shape[1], dtype=torch.bool), 1)
        h = self.embed(x) + self.position[: x.shape[1]]
        for block in self.blocks:
            h = block(h, src_mask=mask)
        return self.norm(h) @ self.embed.weight.T


GPT = {"position": "embed.position", "self_attn.in_proj_": "attn.qkv.", "self_attn.out_proj.": "attn.out."}
GPT |= {"linear1": "mlp.up", "linear2": "mlp.down"}


def test_gpt():
    compare(nn.GPT(11, 8, 2, 2, 6), shaken(TorchGPT(11, 8, 2, 2, 6)), np.arange(15).reshape(3, 5) % 11, GPT)


BEGINNINGS = {
    "linear": (lambda: nn.Linear(400, 300), lambda: tnn.Linear(400, 300)),
    "embedding": (lambda: nn.Embedding(300, 200), lambda: tnn.Embedding(300, 200)),
    "conv": (lambda: nn.Conv2d(30, 200, 5), lambda: tnn.Conv2d(30, 200, 5)),
    "layer norm": (lambda: nn.LayerNorm(20), lambda: tnn.LayerNorm(20)),
    "batch norm": (lambda: nn.BatchNorm(20), lambda: tnn.BatchNorm1d(20)),
    "attention": (lambda: nn.MultiHeadAttention(120, 2), lambda: tnn.MultiheadAttention(120, 2)),
}


@pytest.mark.parametrize("name", [*sorted(BEGINNINGS.keys() - {"conv"}), pytest.param("conv", marks=needs("fields"))])
def test_parameters_begin_as_in_torch(name):
    """Same mean, spread and bounds; the random numbers themselves differ."""
    make, make_theirs = BEGINNINGS[name]
    torch.manual_seed(1)
    state = make_theirs().state_dict().items()
    theirs = {n.replace("in_proj_", "qkv.").replace("out_proj", "out"): t.numpy() for n, t in state}
    for key, ours in parameters(make()).items():
        want = theirs[key]
        assert ours.shape == want.shape
        spread = float(want.std())
        assert abs(ours.mean() - want.mean()) <= 5 * spread / np.sqrt(ours.size) + 1e-12, key
        assert abs(ours.std() - spread) <= 5 * spread / np.sqrt(ours.size), key
        assert np.abs(ours).max() <= np.abs(want).max() * (1.0 if spread == 0 else 1.3), key


LOSSES = {
    "cross entropy": ("CrossEntropyLoss", {}),
    "ignoring": ("CrossEntropyLoss", {"ignore_index": 2}),
    "smoothed": ("CrossEntropyLoss", {"label_smoothing": 0.1, "ignore_index": 1}),
    "mse": ("MSELoss", {}),
    "l1": ("L1Loss", {}),
    "huber": ("HuberLoss", {"delta": 0.7}),
    "smooth l1": ("SmoothL1Loss", {"beta": 0.7}),
    "bce": ("BCEWithLogitsLoss", {}),
}
"""Name -> the class, which has the same name here and there, and its options."""


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("shape", [(6, 5), (3, 4, 5)])
def test_loss(name, shape):
    kind, options = LOSSES[name]
    loss = getattr(nn, kind)(**options)
    y = 3 * normal(*shape)
    classes = isinstance(loss, nn.CrossEntropyLoss)
    target = np.arange(y.size // 5).reshape(shape[:-1]) % 5 if classes else normal(*shape, seed=4) ** 2 % 1.0
    total, weight, saved = loss.forward(env(), y, target)
    ty = torch.tensor(y, requires_grad=True)
    result = getattr(tnn, kind)(**options)(ty.movedim(-1, 1) if classes else ty, torch.tensor(target))
    result.backward()
    np.testing.assert_allclose(total / weight, result.item(), rtol=1e-12)
    np.testing.assert_allclose(loss.backward(env(), saved, 1.0 / weight), ty.grad.numpy(), rtol=1e-10, atol=1e-14)
