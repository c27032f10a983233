"""The same training in plain PyTorch and on thread ranks of fsdpx."""

import copy

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import fsdpx  # noqa: E402
from fsdpx import nn, spawn  # noqa: E402

__all__ = ["demand_training", "train_in_torch", "train_on_ranks"]


def compute_cross_entropy(out, y):
    return torch.nn.functional.cross_entropy(getattr(out, "logits", out).flatten(0, -2), y.flatten())


def train_in_torch(net, x, y, steps, optimizer="AdamW", loss=compute_cross_entropy, **options):
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


def train_on_ranks(model, x, y, optimizer, ranks=1, steps=4, data=None, **options):
    """Train on thread ranks that share the batch. Return rank 0's losses, parameters and predictions.

    data: number of parts of the batch, if not one for each rank"""

    def run(comm):
        given = {"loss": nn.CrossEntropyLoss(), "optimizer": optimizer, "precision": "float64", **options}
        trainer = fsdpx.distribute(model, comm=comm, **given)
        many = data or comm.size
        part = slice(comm.rank % many * len(y) // many, (comm.rank % many + 1) * len(y) // many)
        mine = tuple(a[part] for a in x) if isinstance(x, tuple) else x[part]
        losses = [trainer.step(mine, y[part]) for _ in range(steps)]
        return losses, trainer.parameters(), trainer.predict(mine)

    return spawn(run, ranks)[0]


def demand_training(found, wanted, rtol=1e-12):
    """The losses are those of plain PyTorch, and so are all parameters. found, wanted: losses, parameters and more."""
    np.testing.assert_allclose(found[0], wanted[0], rtol=rtol)
    for name, value in found[1].items():
        np.testing.assert_allclose(value, wanted[1][name], atol=1e-9, err_msg=name)
