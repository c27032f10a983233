"""Ranks that step at their own speed as processes: through the memory of a machine, and through windows of MPI."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from test_apart import X as INPUTS
from test_apart import Y as TARGETS
from test_apart import make as made
from test_apart import mine, train

from fsdpx import Async, Gossip
from fsdpx.comm import Communicator
from fsdpx.comm.opening import world as open_world

pytestmark = [pytest.mark.world, pytest.mark.mpi]


@pytest.fixture(scope="module", params=["node", "mpi"])
def world(request: Any) -> Iterator[Communicator]:
    comm = open_world(request.param)
    yield comm
    comm.close()


def test_staleness_0_is_synchronous_training_bit_for_bit(world: Communicator) -> None:
    found = []
    for strategy in ("zero1", Async(staleness=0)):
        with made(world, strategy) as trainer:
            found.append(train(trainer, 3))
    if world.size <= 2:  # of more, MPI libraries add in another order
        assert found[0] == found[1]
    assert len(set(world.all_gather_object(found[1]))) == 1


@pytest.mark.parametrize("strategy", ["async", Async(staleness=1), Gossip(), "easgd"])
def test_ranks_make_different_numbers_of_steps_and_have_one_model(world: Communicator, strategy: Any) -> None:
    with made(world, strategy) as trainer:
        rows = mine(trainer)
        first = trainer.evaluate(INPUTS[rows], TARGETS[rows])
        found = train(trainer, 10 + 5 * world.rank)
        assert len(set(world.all_gather_object(found))) == 1
        last = trainer.evaluate(INPUTS[rows], TARGETS[rows])
        assert last < first
        assert np.isfinite(last)
