"""Gradient buffers are not zeroed: what was in them before must never show, whatever is or is not written into them."""

from typing import Any

import numpy as np
import pytest
from models import CASES, make, part, placed

from fsdpx import nn, optim, spawn
from fsdpx.comm import Communicator
from fsdpx.state import gradients


@pytest.fixture
def poison(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every buffer holds NaN when it becomes a gradient."""
    begin, close = gradients.WholeGradient.__init__, gradients.ChunkGradients._close

    def born(self: gradients.WholeGradient, buffer: Any, at_home: bool) -> None:
        buffer[...] = np.nan
        begin(self, buffer, at_home)

    def closed(self: gradients.ChunkGradients) -> None:
        close(self)
        for leaf in self.free:
            leaf[...] = np.nan

    monkeypatch.setattr(gradients.WholeGradient, "__init__", born)
    monkeypatch.setattr(gradients.ChunkGradients, "_close", closed)


def run(comm: Communicator, case: str, strategy: str, sizes: tuple[int, ...] = (6, 6), **options: Any) -> bool:
    """Two steps; all parameters and gradients are finite."""
    trainer = make(comm, case, strategy, **options)
    for n in sizes:
        x, y = CASES[case].batch(np.random.default_rng(n), n)
        mine = part(comm, n, options.get("chunks"))
        trainer.step(x[mine], y[mine])
    return all(np.isfinite(a).all() for a in trainer.parameters().values())


@pytest.mark.usefixtures("poison")
@pytest.mark.parametrize(("strategy", "size"), placed([2], [4]))
@pytest.mark.parametrize("case", CASES)
def test_strategies(case: str, strategy: str, size: int) -> None:
    assert all(spawn(lambda comm: run(comm, case, strategy, microbatches=2), size))


@pytest.mark.usefixtures("poison")
@pytest.mark.parametrize("case", ["mlp", "gpt"])
def test_chunks(case: str) -> None:
    assert all(spawn(lambda comm: run(comm, case, "fsdp", chunks=6), 2))


@pytest.mark.usefixtures("poison")
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_ranks_without_samples(strategy: str) -> None:
    assert all(spawn(lambda comm: run(comm, "mlp", strategy, (2, 1, 3), microbatches=2), 3))


@pytest.mark.usefixtures("poison")
def test_frozen_and_unused_parameters() -> None:
    assert all(spawn(lambda comm: run(comm, "gpt", "fsdp", frozen=["*.norm1.*", "embed.position"]), 2))


@pytest.mark.usefixtures("poison")
def test_no_sync() -> None:
    def go(comm: Communicator) -> bool:
        trainer = make(comm, "mlp", "zero2")
        x, y = CASES["mlp"].batch(np.random.default_rng(0), 6)
        with trainer.no_sync():
            trainer.accumulate(x[part(comm, 6)], y[part(comm, 6)])
        trainer.step(x[part(comm, 6)], y[part(comm, 6)])
        return all(np.isfinite(a).all() for a in trainer.parameters().values())

    assert all(spawn(go, 2))


class Scale(nn.Layer):
    """A user's layer: adds in place, and one of its gradients now and then not at all."""

    def specs(self) -> dict[str, nn.Spec]:
        return {"scale": nn.Spec((12,)), "idle": nn.Spec((3,))}

    def forward(self, env: nn.Env, p: Any, x: Any) -> tuple[Any, Any]:
        return x * (1 + p["scale"]), (x,)

    def backward_input(self, env: nn.Env, p: Any, saved: Any, dy: Any) -> tuple[Any, Any]:
        return dy * (1 + p["scale"]), (saved[0], dy)

    def backward_params(self, env: nn.Env, g: Any, kept: Any) -> None:
        x, dy = kept
        g["scale"] += (x * dy).sum(0)


@pytest.mark.filterwarnings("ignore:no gradient reaches")
@pytest.mark.usefixtures("poison")
@pytest.mark.parametrize("microbatches", [1, 2])
def test_a_layer_that_adds_in_place(microbatches: int) -> None:
    def go(comm: Communicator) -> list[np.ndarray]:
        model = nn.Chain(Scale(), nn.Residual(nn.Chain(Scale(), nn.Linear(12, 12))))
        trainer = model.as_distributed(
            loss=nn.MSE(), optimizer=optim.SGD(lr=0.1), comm=comm, precision="float64", microbatches=microbatches
        )
        x, y = np.random.default_rng(1).normal(size=(2, 6, 12))
        trainer.step(x[part(comm, 6)], y[part(comm, 6)])
        return [a.copy() for a in trainer.parameters().values()]

    alone = spawn(go, 1)[0]
    for mine in spawn(go, 2):
        for a, b in zip(mine, alone, strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-12, atol=1e-14, equal_nan=False)
