"""Bridges between MPI processes, on any number of ranks."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from coupled import check_snapshot, send_step, solver_grid, trainer_grid, whole_field

import fsdpx

# tests mpi4py communicators, with any backend of `world`
pytestmark = [pytest.mark.world, pytest.mark.mpi, pytest.mark.parametrize("world", ["mpi"], indirect=True)]


@pytest.mark.parametrize("mode", ["lockstep", "queue", "latest"])
def test_ranks_of_mpi_exchange_fields_and_weights(world, mode):
    MPI = pytest.importorskip("mpi4py.MPI")
    if world.size == 1:
        pytest.skip("both sides need a rank")
    for solvers in sorted({1, (world.size + 1) // 2, world.size - 1}):
        trains = world.rank >= solvers
        part = MPI.COMM_WORLD.Split(int(trains))
        grid = trainer_grid(part) if trains else solver_grid(part)
        with fsdpx.Bridge(MPI.COMM_WORLD, **{"trainer" if trains else "solver": grid}, mode=mode) as bridge:
            found = (train if trains else solve)(bridge, grid, mode)
        everyone = world.all_gather_value(found)
        assert all(numbers == everyone[-1] for numbers in everyone[solvers:])
        assert everyone[-1] == list(range(6)) if mode != "latest" else everyone[-1] == sorted(set(everyone[-1]))
        assert all(weights == [*everyone[-1]][-1] for weights in everyone[:solvers])
        grid.close()
        part.Free()


def solve(bridge: fsdpx.Bridge, grid: fsdpx.Grid, mode: str) -> float:
    """Send fields and return the last weight."""
    step, weights, wait = 0, {}, mode != "latest"
    while not bridge.agree_on_whether_other_side_closed() if mode == "latest" else step < 6:
        send_step(bridge, grid, step)
        answer = bridge.receive(wait)
        if answer is not None:
            whole = whole_field(answer.scalars["about"])
            np.testing.assert_array_equal(answer.fields[0], grid.take_local(whole + 1))
        weights = bridge.receive_weights(wait) or weights
        step += 1
    while mode == "latest" and (last := bridge.receive_weights()):
        weights = last
    return float(weights["w"][0])


def train(bridge: fsdpx.Bridge, grid: fsdpx.Grid, mode: str) -> Any:
    numbers = []
    for snapshot in bridge:
        check_snapshot(grid, snapshot)
        numbers.append(snapshot.number)
        bridge.send(snapshot.fields[0] + 1, about=snapshot.number)
        bridge.send_weights({"w": np.full(100_000, snapshot.number, np.float32)})
        if mode == "latest" and len(numbers) == 6:
            break
    return numbers
