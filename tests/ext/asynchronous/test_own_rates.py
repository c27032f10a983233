"""Ranks that train by themselves compare learning rates where they meet."""

import pytest
from rates import LATE, rated

from fsdpx import LocalSGD, optim, spawn
from fsdpx.core.comm import Communicator


def test_replicas_that_train_by_themselves_compare_rates_where_they_meet() -> None:
    for options in ({"strategy": LocalSGD(sync_every=3)}, {"strategy": LocalSGD(sync_every=3), "clip_norm": 0.1}):
        for steps, text in spawn(lambda comm: rated(comm, lambda step: 0.125 * (1 + (step > 1)), **options), 2):  # noqa: B023
            assert steps == 2
            assert text.startswith(LATE.format("rank 0"))
    outer = [optim.SGD(lr=lambda round: 0.5), optim.SGD(lr=lambda round: 0.5 + (round == 2))]

    def run(comm: Communicator) -> tuple[int, str]:
        return rated(comm, lambda step: 0.125, strategy=LocalSGD(sync_every=2, outer_optimizer=outer[comm.rank]))

    words = "ranks differ in the learning rate of the outer optimizer of step 4: rank 0: 0.5; rank 1: 1.5."
    for steps, text in spawn(run, 2):
        assert steps == 3
        assert text.startswith(words)


@pytest.mark.parametrize("strategy", ["async", "gossip", "fsdp"])
def test_ranks_compare_the_first_rate_at_the_start(strategy: str) -> None:
    for steps, text in spawn(lambda comm: rated(comm, lambda step: 0.5, strategy=strategy), 2):
        assert (steps, text) == (0, "ranks differ in the learning rate of step 1: rank 0 has 0.125, rank 1 has 0.5")
