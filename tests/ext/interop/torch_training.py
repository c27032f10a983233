"""The same training in plain PyTorch and on thread ranks of fsdpx."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import fsdpx  # noqa: E402
from fsdpx import nn, spawn  # noqa: E402
from fsdpx.core.comm import Communicator  # noqa: E402

__all__ = ["demand_training", "train_in_torch", "train_on_ranks"]


def compute_cross_entropy(out: Any, y: Any) -> Any:
    return torch.nn.functional.cross_entropy(getattr(out, "logits", out).flatten(0, -2), y.flatten())


def train_in_torch(
    net: Any, x: Any, y: Any, steps: int, optimizer: str = "AdamW", loss: Any = compute_cross_entropy, **options: Any
) -> tuple[list[float], Any]:
    """Train a copy of a module on one batch. Return the losses, and the copy."""
    net, compute_loss = copy.deepcopy(net), loss
    update, losses = getattr(torch.optim, optimizer)(net.parameters(), **options), []
    for _ in range(steps):
        update.zero_grad()
        out = net(*(torch.tensor(a) for a in (x if isinstance(x, tuple) else (x,))))
        loss = compute_loss(out, torch.tensor(y))
        loss.backward()
        update.step()
        losses.append(loss.item())
    return losses, net


def train_on_ranks(
    model: Any, x: Any, y: Any, optimizer: Any, ranks: int = 1, steps: int = 4, data: int | None = None, **options: Any
) -> Any:
    """Train on thread ranks that share the batch. Return rank 0's losses, parameters and predictions.

    data: number of parts of the batch, if not one for each rank"""

    def run(comm: Communicator) -> Any:
        given = {"loss": nn.CrossEntropyLoss(), "optimizer": optimizer, "precision": "float64", **options}
        trainer = fsdpx.distribute(model, comm=comm, **given)
        many = data or comm.size
        part = slice(comm.rank % many * len(y) // many, (comm.rank % many + 1) * len(y) // many)
        mine = tuple(a[part] for a in x) if isinstance(x, tuple) else x[part]
        losses = [trainer.step(mine, y[part]) for _ in range(steps)]
        return losses, trainer.parameters(), trainer.predict(mine)

    return spawn(run, ranks)[0]


def demand_training(found: Any, wanted: Any, rtol: float = 1e-12) -> None:
    """The losses are those of plain PyTorch, and so are all parameters. found, wanted: losses, parameters and more."""
    np.testing.assert_allclose(found[0], wanted[0], rtol=rtol)
    for name, value in found[1].items():
        np.testing.assert_allclose(value, wanted[1][name], atol=1e-9, err_msg=name)
