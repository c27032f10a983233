"""The same training in plain PyTorch and on thread ranks of fsdpx."""

from __future__ import annotations

import copy
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import fsdpx  # noqa: E402
from fsdpx import nn, spawn  # noqa: E402
from fsdpx.core.comm import Communicator  # noqa: E402

__all__ = ["train_in_torch", "train_on_ranks"]


def train_in_torch(
    net: Any, x: Any, y: Any, steps: int, optimizer: str = "AdamW", **options: Any
) -> tuple[list[float], Any]:
    """Train a copy of a module on one batch with the cross-entropy. Return the losses, and the copy."""
    net = copy.deepcopy(net)
    update, losses = getattr(torch.optim, optimizer)(net.parameters(), **options), []
    for _ in range(steps):
        update.zero_grad()
        out = net(*(torch.tensor(a) for a in (x if isinstance(x, tuple) else (x,))))
        out = getattr(out, "logits", out)
        loss = torch.nn.functional.cross_entropy(out.flatten(0, -2), torch.tensor(y).flatten())
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
