"""A mesh on an mpi4py communicator, and the program of the documentation, on any number of ranks."""

import runpy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from mesh_graphs import Graph, make_partition, train
from ranks import from_rank_0

import fsdpx
from fsdpx import nn, spawn
from fsdpx.errors import ConfigError, DataError

pytestmark = [pytest.mark.world, pytest.mark.mpi, pytest.mark.parametrize("world", ["mpi"], indirect=True)]

PROGRAM = Path(__file__).parents[3] / "docs" / "solvers" / "mesh_heat.py"


def train_on_threads(way: str, ranks: int) -> Any:
    return spawn(train, ranks, Graph.random(5, ranks), way, nn.MSELoss())[0]


def test_ranks_of_mpi_train_as_thread_ranks_do(world):
    MPI = pytest.importorskip("mpi4py.MPI")
    graph, way = Graph.random(5, world.size), "anywhere"
    losses, predicted, _, _ = train(MPI.COMM_WORLD, graph, way, nn.MSELoss())
    wanted = from_rank_0(world, train_on_threads, way, world.size)
    assert losses == pytest.approx(wanted[0], rel=1e-12)
    np.testing.assert_allclose(predicted, wanted[1], rtol=0, atol=1e-12)
    made = make_partition(MPI.COMM_WORLD, graph, way)
    with pytest.raises(DataError, match="rank 0"):  # on all ranks
        made.update_ghosts(np.zeros((made.row_counts[1] + (world.rank == 0), 1)))
    with pytest.raises(ConfigError, match="rank 0: method='best': choose one of"):
        fsdpx.Partition.from_replicated_graph(
            MPI.COMM_WORLD, graph.edges, graph.nodes, positions=graph.positions,
            method="coordinates" if world.rank else "best",
        )  # fmt: skip
    made.close()
    made.close()


def test_the_program_of_the_documentation_learns(world, capsys):
    MPI = pytest.importorskip("mpi4py.MPI")
    runpy.run_path(str(PROGRAM))["main"](MPI.COMM_WORLD)
    if world.rank == 0:
        said = capsys.readouterr().out.split()
        assert float(said[said.index("loss") + 1]) == pytest.approx(0.038077, abs=2e-6)
        assert float(said[said.index("to") + 1].rstrip(",")) == pytest.approx(0.000201, abs=2e-6)
