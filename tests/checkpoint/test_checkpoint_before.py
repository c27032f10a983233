"""A checkpoint that an earlier version wrote on two ranks, zero1 with AdamW and BatchNorm: others go on from it."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fsdpx import nn, optim, spawn
from fsdpx.comm import Communicator

SAVED = Path(__file__).parents[1] / "engine" / "data" / "before"
WANTED = json.loads(SAVED.with_suffix(".json").read_text())
"""Of the run that saved it: its fingerprint, the loss of batch 9 by running statistics, and of the steps afterwards."""


def part(comm: Communicator, seed: int, rows: int = 9) -> tuple[Any, Any]:
    rng = np.random.default_rng(seed)
    x, y = rng.standard_normal((rows, 6)).astype(np.float32), rng.integers(0, 3, rows)
    mine = slice(rows * comm.rank // comm.size, rows * (comm.rank + 1) // comm.size)
    return x[mine], y[mine]


@pytest.mark.parametrize("ranks", [1, 3])
def test_a_run_from_before_goes_on(ranks: int) -> None:
    """The third step sees what the optimiser had in its slots."""

    def run(comm: Communicator) -> dict[str, Any]:
        model = nn.Chain(nn.Linear(6, 16), nn.BatchNorm(16), nn.GELU(), nn.Linear(16, 3))
        trainer = model.as_distributed(
            loss=nn.CrossEntropy(), optimizer=optim.AdamW(lr=0.01), strategy="fsdp", comm=comm, seed=8, clip_norm=1.0
        )
        assert trainer.inspect.fingerprint() != WANTED["fingerprint"]
        trainer.load(SAVED)
        return {
            "steps": trainer.steps,
            "fingerprint": trainer.inspect.fingerprint(),
            "evaluated": trainer.evaluate(*part(comm, 9)),
            "losses": [trainer.step(*part(comm, seed)) for seed in (4, 5, 6)],
        }

    for found in spawn(run, ranks):
        assert (found["steps"], found["fingerprint"]) == (WANTED["steps"], WANTED["fingerprint"])
        assert found["evaluated"] == pytest.approx(WANTED["evaluated"], rel=1e-6)
        assert found["losses"] == pytest.approx(WANTED["losses"], rel=1e-6)
