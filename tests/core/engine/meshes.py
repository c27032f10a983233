"""One way to train a case on a mesh of any axes, and to compare it with one process."""

from functools import lru_cache
from typing import Any

import numpy as np
from models import KNOWN, make, part

import fsdpx
from fsdpx import Mesh
from fsdpx.core.comm import Communicator
from fsdpx.core.trainer.trainer import Trainer
from fsdpx.testing import assert_close

OPTIONS = {"clip_norm": 0.3, "group_bytes": 600}

Trained = tuple[list[float], dict[str, np.ndarray], Trainer]


def train(
    comm: Communicator, case: str, mesh: Mesh, strategy: Any, sizes: tuple[int, ...] = (11, 3), **options: Any
) -> Trained:
    """As `models.train`, but every data rank brings its part, whatever the other axes."""
    trainer = make(comm, case, strategy, mesh=mesh, **{**OPTIONS, **options})
    rng, losses = np.random.default_rng(5), []
    for n in sizes:
        x, y = KNOWN[case].batch(rng, n)
        mine = part(trainer.data_group, n, options.get("reproducible_chunks"))
        losses.append(trainer.step(x[mine], y[mine]))
    return losses, trainer.parameters(), trainer


@lru_cache
def reference(case: str, sizes: tuple[int, ...] = (11, 3)) -> Trained:
    return fsdpx.spawn(lambda comm: train(comm, case, Mesh(shard=1), "ddp", sizes), 1)[0]


def compare(
    case: str, mesh: Mesh, strategy: Any, delays: int | None = None, sizes: tuple[int, ...] = (11, 3), **options: Any
) -> None:
    """Losses and parameters equal those of one process, on every rank."""
    losses, want, _ = reference(case, sizes)
    ranks = fsdpx.spawn(lambda comm: train(comm, case, mesh, strategy, sizes, **options), mesh.size, delays=delays)
    for got_losses, got, _ in ranks:
        np.testing.assert_allclose(got_losses, losses, rtol=1e-12)
        assert_close(got, want, 1e-12)
