"""Nobody reads the gradient of data: layers that read nothing else are spared making it; all else stays the same."""

from functools import partial
from typing import Any

import numpy as np
import pytest

from fsdpx import nn, optim, spawn
from fsdpx.array import blas
from fsdpx.comm import Communicator


class WholeLinear(nn.Linear):
    """Makes the gradient of its input whether or not it is read."""

    backward_leaf = nn.Layer.backward_leaf


class WholeConv(nn.Conv2d):
    backward_leaf = nn.Layer.backward_leaf


MODELS = {
    "linear": (lambda first: nn.Chain(first(4, 5), nn.GELU(), nn.Linear(5, 3)), nn.Linear, WholeLinear, (8, 4)),
    "conv": (
        lambda first: nn.Chain(first(1, 2, 3), nn.Flatten(), nn.Linear(8, 3)), nn.Conv2d, WholeConv, (8, 1, 4, 4)
    ),
}  # fmt: skip


def train(comm: Communicator, kind: str, whole: bool = False, **options: Any) -> dict[str, Any]:
    made, spared, slow, shape = MODELS[kind]
    trainer = made(slow if whole else spared).as_distributed(
        comm=comm, loss=nn.MSE(), optimizer=optim.SGD(lr=0.1), precision="float64", strategy="fsdp", **options
    )
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=shape), rng.normal(size=(shape[0], 3))
    mine = slice(8 * comm.rank // comm.size, 8 * (comm.rank + 1) // comm.size)
    for _ in range(3):
        trainer.step(x[mine], y[mine])
    return trainer.parameters()


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("frozen", [[], ["0.weight"], ["0.*"]])
@pytest.mark.parametrize("ranks", [1, 2])
def test_the_same_bits(kind: str, frozen: list[str], ranks: int) -> None:
    want = spawn(lambda comm: train(comm, kind, whole=True, frozen=frozen), ranks)[0]
    got = spawn(lambda comm: train(comm, kind, frozen=frozen), ranks)[0]
    assert all(np.array_equal(got[name], want[name]) for name in want)


def test_no_product_for_the_gradient_of_data(monkeypatch: pytest.MonkeyPatch) -> None:
    """The layer behind makes both gradients in one call, the one at the data that of its parameters only."""
    calls: list[str] = []
    for name in ("linear_gradients", "linear_backward"):
        run = getattr(blas, name)
        monkeypatch.setattr(blas, name, lambda *a, name=name, run=run: (calls.append(name), run(*a))[1])
    spawn(lambda comm: train(comm, "linear"), 1)
    assert calls[-6:] == ["linear_backward", "linear_gradients"] * 3  # before them kernels were warmed up


BLOCKS = {
    "block": (lambda: nn.TransformerBlock(8, 2), ["norm1.*"], 3 + 4),
    "mlp": (lambda: nn.TransformerBlock(8, 2), ["attn.*", "norm1.*", "norm2.*"], 1 + 2),
    "out": (lambda: nn.MultiHeadAttention(8, 2), ["qkv.*"], 0 + 1),
    "residual": (lambda: nn.Residual(nn.Linear(8, 8)), [], 0 + 1),
}
"""Whole units at the data: what is frozen in them, and the products of backward: gradients of inputs and of weights."""


@pytest.mark.parametrize("kind", BLOCKS)
def test_units_at_the_data_make_the_gradients_inside_of_them_only(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    made, frozen, products = BLOCKS[kind]

    def run(comm: Communicator, leaf: bool) -> dict[str, Any]:
        layer = made()
        if not leaf:
            monkeypatch.setattr(type(layer), "backward_leaf", nn.Layer.backward_leaf)
        trainer = layer.as_distributed(
            comm=comm, loss=nn.MSE(), optimizer=optim.SGD(lr=0.1), precision="float64", frozen=frozen
        )
        x = np.random.default_rng(0).normal(size=(2, 3, 8))
        calls: list[str] = []
        for name in ("gemm", "linear_gradients", "linear_backward"):
            product, times = getattr(blas, name), 1 + (name == "linear_backward")
            count = partial(lambda times, product, *a: (calls.extend("x" * times), product(*a))[1], times, product)
            monkeypatch.setattr(blas, name, count)
        trainer.step(x, x + 1)
        monkeypatch.undo()
        return {"products": len(calls), **trainer.parameters()}

    want, got = (spawn(lambda comm: run(comm, leaf), 1)[0] for leaf in (False, True))  # noqa: B023
    assert got.pop("products") == products < want.pop("products")
    assert all(np.array_equal(got[name], want[name]) for name in want)
