"""Every kernel, both versions, every float dtype, with rows and without, against PyTorch in float64."""

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from oracle import Draw, close, tensor  # noqa: E402

from fsdpx.array import kernels  # noqa: E402

F = torch.nn.functional
WIDTH = 37  # no multiple of a vector's length


def wide(dtype):
    return np.dtype(np.float32) if dtype.itemsize == 2 else dtype


@pytest.mark.parametrize(
    ("name", "options", "reference"),
    [
        ("gelu", (), F.gelu),
        ("gelu", ("tanh",), lambda x: F.gelu(x, approximate="tanh")),
        ("silu", (), F.silu),
    ],
)
def test_activations(mode, dtype, rows, name, options, reference):
    draw = Draw(dtype)
    x, dy = draw(rows, 3, WIDTH, scale=3), draw(rows, 3, WIDTH)
    tx = tensor(x)
    ty = reference(tx)
    ty.backward(tensor(dy))
    y = getattr(kernels, name)(np, x, *options)
    dx = getattr(kernels, f"{name}_backward")(np, x, dy, *options)
    assert y.dtype == dx.dtype == dtype
    close(y, ty, dtype)
    close(dx, tx.grad, dtype)


def test_sigmoid(mode, dtype, rows):
    x = Draw(dtype)(rows, WIDTH, scale=3)
    close(kernels.sigmoid(np, x), torch.sigmoid(tensor(x)), dtype)


def test_softmax(mode, dtype, rows):
    draw = Draw(dtype)
    x, dy = draw(rows, 2, WIDTH, scale=3), draw(rows, 2, WIDTH)
    y = kernels.softmax(np, x)
    close(y, torch.softmax(tensor(x), -1), dtype)
    ty, tdy = tensor(y), tensor(dy)
    close(kernels.softmax_backward(np, y, dy), ty * (tdy - (ty * tdy).sum(-1, keepdim=True)), dtype)


@pytest.mark.parametrize("affine", ["weight and bias", "weight", "neither"])
def test_layer_norm(mode, dtype, rows, affine):
    draw = Draw(dtype)
    x, dy, weight, bias = draw(rows, WIDTH) + dtype.type(2), draw(rows, WIDTH), draw(WIDTH), draw(WIDTH)
    weight, bias = weight if "weight" in affine else None, bias if "bias" in affine else None
    tx, tw, tb = tensor(x), tensor(weight), tensor(bias)
    ty = F.layer_norm(tx, (WIDTH,), tw, tb, 1e-5)
    ty.backward(tensor(dy))
    y, mean, rstd = kernels.layer_norm(np, x, weight, bias, 1e-5)
    dx = kernels.layer_norm_backward_input(np, x, weight, mean, rstd, dy)
    assert (y.dtype, dx.dtype, mean.dtype, rstd.dtype) == (dtype, dtype, wide(dtype), wide(dtype))
    close(y, ty, dtype, 4)
    close(dx, tx.grad, dtype, 4)
    gw, gb = (None if a is None else np.ones_like(a) for a in (weight, bias))
    kernels.layer_norm_backward_params(np, x, mean, rstd, dy, gw, gb)
    for got, parameter in ((gw, tw), (gb, tb)):
        if got is not None:
            assert got.dtype == dtype
            close(got, parameter.grad + 1, dtype, 4)


@pytest.mark.parametrize("affine", [True, False])
def test_rms_norm(mode, dtype, rows, affine):
    draw = Draw(dtype)
    x, dy, weight = draw(rows, WIDTH), draw(rows, WIDTH), draw(WIDTH) if affine else None
    tx, tw = tensor(x), tensor(weight)
    ty = F.rms_norm(tx, (WIDTH,), tw, 1e-5)
    ty.backward(tensor(dy))
    y, rstd = kernels.rms_norm(np, x, weight, 1e-5)
    close(y, ty, dtype, 4)
    close(kernels.rms_norm_backward_input(np, x, weight, rstd, dy), tx.grad, dtype, 4)
    if affine:
        gw = np.ones(WIDTH, dtype)
        kernels.rms_norm_backward_params(np, x, rstd, dy, gw)
        close(gw, tw.grad + 1, dtype, 4)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_cross_entropy(mode, dtype, rows, smoothing):
    draw = Draw(dtype)
    logits, target = draw(rows, WIDTH, scale=3), draw.rng.integers(0, WIDTH, rows).astype(np.int32)
    target[::3] = -100
    tx = tensor(logits)
    loss = F.cross_entropy(tx, torch.tensor(target.astype(np.int64)), reduction="sum", label_smoothing=smoothing)
    loss.backward()
    total, weight, lse = kernels.cross_entropy(np, logits, target, -100, smoothing)
    assert isinstance(total, float)
    assert isinstance(weight, float)
    assert weight == np.count_nonzero(target != -100)
    assert lse.dtype == wide(dtype)
    close(total, loss, wide(dtype), 4)
    close(lse, torch.logsumexp(tx, 1), wide(dtype))
    gradient = kernels.cross_entropy_backward(np, logits, target, lse, 0.25, -100, smoothing)
    assert gradient.dtype == dtype
    close(gradient, tx.grad * 0.25, dtype)


@pytest.mark.parametrize("time", [1, 5, 64, 70, 130, 0])
@pytest.mark.parametrize("causal", [True, False])
def test_attention(mode, dtype, rows, time, causal):
    draw = Draw(dtype)
    qkv, do = draw(min(rows, 2), time, 3, 2, 8), draw(min(rows, 2), 2, time, 8)
    q, k, v = (qkv[:, :, n].swapaxes(1, 2) for n in range(3))  # strided, as the layer passes them
    tq, tk, tv = tensor(q), tensor(k), tensor(v)
    scores = tq @ tk.transpose(-1, -2) * 0.4
    if causal:
        scores = scores.masked_fill(torch.triu(torch.ones(time, time, dtype=torch.bool), 1), -torch.inf)
    to = torch.softmax(scores, -1) @ tv
    to.backward(tensor(do))
    o, lse = kernels.attention(np, q, k, v, causal, 0.4)
    assert (o.dtype, lse.dtype) == (dtype, wide(dtype))
    close(o, to, dtype, 4)
    close(lse, torch.logsumexp(scores, -1), wide(dtype), 4)
    for got, want in zip(kernels.attention_backward(np, q, k, v, o, lse, do, causal, 0.4), (tq, tk, tv), strict=True):
        assert got.dtype == dtype
        close(got, want.grad, dtype, 8)


def test_embedding_backward(mode, dtype, rows):
    draw = Draw(dtype)
    index, dy, gw = draw.rng.integers(-5, 5, rows), draw(rows, WIDTH), np.ones((5, WIDTH), dtype)
    want = torch.ones(5, WIDTH, dtype=torch.float64).index_add_(0, torch.tensor(index % 5), tensor(dy, False))
    kernels.embedding_backward(np, gw, index, dy)
    close(gw, want, dtype)


def test_square_sum(mode, dtype):
    for size in (0, 1, 1000, 70_000):
        x = Draw(dtype)(size)
        got = kernels.square_sum(np, x)
        assert isinstance(got, float)
        close(got, (tensor(x) ** 2).sum(), np.dtype(np.float64))
