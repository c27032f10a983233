"""Ranks that train by themselves compare learning rates where they meet."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from models import CASES, make, part

from fsdpx import Local, optim, spawn
from fsdpx.core.comm import Communicator
from fsdpx.errors import ConfigError


def rated(comm: Communicator, ours: Callable[[int], Any], how: str = "step", **options: Any) -> tuple[int, str]:
    """Steps made, and the error. ours: the rate of rank 1."""
    steps = 0
    try:
        schedule = ours if comm.rank == 1 else lambda step: 0.125
        trainer = make(comm, "mlp", options.pop("strategy", "ddp"), optimizer=optim.SGD(lr=schedule), **options)
        x, y = CASES["mlp"].batch(np.random.default_rng(0), 12)
        mine = slice(None) if "mesh" in options else part(comm, 12)
        while trainer.steps < 6:
            steps = trainer.steps
            getattr(trainer, how)(x[mine], y[mine])
            if how == "accumulate":
                trainer.update()
    except ConfigError as error:
        return steps, str(error)
    return steps, "none"


LATE = "ranks differ in the learning rate of step 3: {}: 0.125; rank 1: 0.25. A schedule is a function of the step"


def test_replicas_that_train_by_themselves_compare_rates_where_they_meet() -> None:
    for options in ({"strategy": Local(every=3)}, {"strategy": Local(every=3), "clip_norm": 0.1}):
        for steps, text in spawn(lambda comm: rated(comm, lambda step: 0.125 * (1 + (step > 1)), **options), 2):  # noqa: B023
            assert steps == 2
            assert text.startswith(LATE.format("rank 0"))
    outer = [optim.SGD(lr=lambda round: 0.5), optim.SGD(lr=lambda round: 0.5 + (round == 2))]

    def run(comm: Communicator) -> tuple[int, str]:
        return rated(comm, lambda step: 0.125, strategy=Local(every=2, outer=outer[comm.rank]))

    words = "ranks differ in the learning rate of the outer optimiser of step 4: rank 0: 0.5; rank 1: 1.5."
    for steps, text in spawn(run, 2):
        assert steps == 3
        assert text.startswith(words)


@pytest.mark.parametrize("strategy", ["async", "gossip", "fsdp"])
def test_ranks_compare_the_first_rate_at_the_start(strategy: str) -> None:
    for steps, text in spawn(lambda comm: rated(comm, lambda step: 0.5, strategy=strategy), 2):
        assert (steps, text) == (0, "ranks differ in the learning rate of step 1: rank 0 has 0.125, rank 1 has 0.5")
