"""Pipelines: the same result as one process for every schedule, cut and placement; one hash with chunks."""

from functools import lru_cache
from typing import Any

import numpy as np
import pytest
from models import CASES, distance, make, part

import fsdpx
from fsdpx import Mesh
from fsdpx.comm import Communicator
from fsdpx.engine.trainer import Trainer

SCHEDULES = ("gpipe", "1f1b", "interleaved", "zb-h1", "zb-h2", "zbv")
OPTIONS = {"clip_norm": 0.3, "group_bytes": 600}


def train(
    comm: Communicator, case: str, mesh: Mesh, strategy: Any, sizes: tuple[int, ...] = (11, 11, 3), **options: Any
) -> tuple[list[float], dict[str, np.ndarray], Trainer]:
    """As `models.train`, but every data rank brings its part, whatever the other axes."""
    trainer = make(comm, case, strategy, mesh=mesh, **{**OPTIONS, **options})
    rng, losses = np.random.default_rng(5), []
    for n in sizes:
        x, y = CASES[case].batch(rng, n)
        mine = part(trainer.data, n, options.get("chunks"))
        losses.append(trainer.step(x[mine], y[mine]))
    return losses, trainer.parameters(), trainer


@lru_cache
def reference(case: str) -> tuple[list[float], dict[str, np.ndarray], Trainer]:
    return fsdpx.spawn(lambda comm: train(comm, case, Mesh(shard=1), "ddp"), 1)[0]


def compare(case: str, mesh: Mesh, strategy: str, delays: int | None = None, **options: Any) -> None:
    losses, want, _ = reference(case)
    size = mesh.resolve(mesh.size).size
    for got_losses, got, _ in fsdpx.spawn(
        lambda comm: train(comm, case, mesh, strategy, **options), size, delays=delays
    ):
        np.testing.assert_allclose(got_losses, losses, rtol=1e-12)
        assert distance(want, got) < 1e-12


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
@pytest.mark.parametrize("width", [2, 3, 4])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_every_schedule_equals_one_process(schedule: str, width: int, strategy: str) -> None:
    compare("deep", Mesh(shard=1, pipe=width), strategy, delays=width, schedule=schedule)
