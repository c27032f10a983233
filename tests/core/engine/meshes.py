"""One way to train a case on a mesh of any axes, and to compare it with one process."""

from functools import lru_cache
from typing import Any

import models

import fsdpx
from fsdpx import Mesh
from fsdpx.core.comm import Communicator
from fsdpx.testing import assert_close

OPTIONS = {"clip_norm": 0.3, "group_bytes": 600}


def train(comm: Communicator, case: str, mesh: Mesh, strategy: Any, sizes: Any = (11, 3), **options: Any) -> Any:
    return models.train(comm, case, strategy, sizes, mesh=mesh, **{**OPTIONS, **options})


@lru_cache
def reference(case: str, sizes: tuple[int, ...] = (11, 3)) -> Any:
    """Losses and parameters of one process."""
    return fsdpx.spawn(lambda comm: train(comm, case, Mesh(shard=1), "ddp", sizes)[:2], 1)[0]


def compare(
    case: str, mesh: Mesh, strategy: Any, delays: int | None = None, sizes: tuple[int, ...] = (11, 3), **options: Any
) -> None:
    """Losses and parameters equal those of one process, on every rank."""
    ranks = fsdpx.spawn(lambda comm: train(comm, case, mesh, strategy, sizes, **options), mesh.size, delays=delays)
    for *got, _ in ranks:
        assert_close(got, reference(case, sizes), 1e-12)
