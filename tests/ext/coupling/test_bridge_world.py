"""Bridges between MPI processes, on any number of ranks."""

import numpy as np
import pytest
from coupled import MODES, run_solver, run_trainer, solver_grid, trainer_grid

import fsdpx

# tests mpi4py communicators, with any backend of `world`
pytestmark = [pytest.mark.world, pytest.mark.mpi, pytest.mark.parametrize("world", ["mpi"], indirect=True)]


@pytest.mark.parametrize("mode", MODES)
def test_ranks_of_mpi_exchange_fields_and_weights(world, mode):
    MPI = pytest.importorskip("mpi4py.MPI")
    if world.size == 1:
        pytest.skip("both sides need a rank")
    for solvers in sorted({1, (world.size + 1) // 2, world.size - 1}):
        trains = world.rank >= solvers
        part = MPI.COMM_WORLD.Split(int(trains))
        grid = trainer_grid(part) if trains else solver_grid(part)
        with fsdpx.Bridge(MPI.COMM_WORLD, **{"trainer" if trains else "solver": grid}, mode=mode) as bridge:
            found = (train if trains else solve)(bridge, grid, mode != "latest")
        everyone = world.all_gather_value(found)
        assert all(numbers == everyone[-1] for numbers in everyone[solvers:])
        assert everyone[-1] == list(range(6)) if mode != "latest" else everyone[-1] == sorted(set(everyone[-1]))
        assert all(weights == [*everyone[-1]][-1] for weights in everyone[:solvers])
        grid.close()
        part.Free()


def solve(bridge, grid, wait):
    """Return the last weight."""
    weights = []
    run_solver(bridge, grid, wait, 6, weights.append)
    return float(weights[-1]["w"][0])


def train(bridge, grid, wait):
    return run_trainer(bridge, grid, wait, 6, lambda number: {"w": np.full(100_000, number, np.float32)})
