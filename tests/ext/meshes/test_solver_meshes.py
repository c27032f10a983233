"""Meshes of dolfinx and of DMPlex: the same graph on any ranks, with and without ghost cells."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from solver_stand_ins import CutMesh
from trials import MPIEXEC, environment

import fsdpx
from fsdpx import spawn
from fsdpx.core.comm import Communicator
from fsdpx.errors import ConfigError


@pytest.mark.parametrize("solver", ["dolfinx", "dmplex"])
def test_a_graph_has_all_edges_whatever_ghosts_the_solver_has(solver: str) -> None:
    mesh = CutMesh.random(4)

    def read(comm: Communicator, nodes: str, has_ghosts: bool) -> list[tuple[int, int]]:
        part, places = mesh.take(comm, has_ghosts), mesh.points if nodes == "vertices" else mesh.centers
        if solver == "dolfinx":
            space, mine = part.make_space(int(nodes == "vertices"))
            made = fsdpx.Partition.from_dolfinx(space)
        else:
            dm, both = part.make_dmplex()
            made, mine = fsdpx.Partition.from_dmplex(dm, nodes=nodes), both[nodes]
        values = np.where(mine.owned[:, None], places[mine.local], np.nan)
        np.testing.assert_array_equal(made.update_ghosts(values), places[mine.local])  # the solver's rows
        np.testing.assert_array_equal(made.gather(values), places[mine.olds])
        graph, old = made.graph, mine.olds
        senders, receivers = old[graph.numbers[graph.senders]], old[graph.numbers[graph.receivers]]
        np.testing.assert_allclose(graph.edge_features[:, :-1], places[senders] - places[receivers], atol=1e-15)
        return [(int(s), int(r)) for s, r in zip(senders, receivers, strict=True)]

    choices = [(nodes, has_ghosts) for nodes in ("vertices", "cells") for has_ghosts in (False, True)]
    everyone = spawn(lambda comm: [read(comm, *choice) for choice in choices], 4)
    for (nodes, _), *found in zip(choices, *everyone, strict=True):
        edges = [edge for one in found for edge in one]
        assert len(edges) == len(set(edges))
        assert set(edges) == mesh.list_edges(nodes == "cells")


def test_pairs_and_positions_replace_those_of_the_solver() -> None:
    mesh = CutMesh.random(2)

    def one(comm: Communicator) -> Any:
        part = mesh.take(comm, True)
        space, dofs = part.make_space(1)
        scaled = 3 * mesh.points[dofs.local]
        made = fsdpx.Partition.from_dolfinx(space, pairs=[(0, 1)], positions=scaled)
        dm, both = part.make_dmplex()
        cells = fsdpx.Partition.from_dmplex(dm, nodes="cells", positions=3 * mesh.centers[both["cells"].local])
        plain = fsdpx.Partition.from_dmplex(dm, nodes="cells")
        np.testing.assert_allclose(cells.graph.edge_features, 3 * plain.graph.edge_features)
        return made.total_edges, np.abs(made.graph.edge_features).max()

    count = len({tuple(sorted(cell[:2])) for cell in mesh.cells.tolist()})
    for total, largest in spawn(one, 2):
        assert total == 2 * count
        assert largest > 1.5  # the points are in a square of side 1


def read_space(comm: Communicator, degree: int, shared: bool = True, **options: Any) -> Any:
    return fsdpx.Partition.from_dolfinx(CutMesh.random(2).take(comm, False).make_space(degree, shared)[0], **options)


def read_dmplex(comm: Communicator, depth: int, **options: Any) -> Any:
    return fsdpx.Partition.from_dmplex(CutMesh.random(2).take(comm, False).make_dmplex(depth)[0], **options)


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda comm: read_space(comm, 1, shared=False), "cells of V share no dofs, .*: take a continuous space"),
        (lambda comm: read_space(comm, 1, pairs=[(0, 3)] if comm.rank else None), "rank 1: pairs=.* from 0 to 2"),
        (lambda comm: read_space(comm, 0, pairs=[(0, 1)]), "pairs= needs a space with several dofs in each cell"),
        (lambda comm: read_dmplex(comm, 1), r"has no edges and facets: call interpolate\(\)"),
        (lambda comm: read_dmplex(comm, 2 - comm.rank, nodes="cells"), r"rank 1: .* call interpolate\(\) first"),
        (lambda comm: read_dmplex(comm, 2, nodes="faces"), "nodes='faces': choose \"vertices\" or \"cells\""),
        (lambda comm: read_dmplex(comm, 2, positions=np.ones((3, 2))), r"positions must be \(\d.*, n\) numbers"),
    ],
)  # fmt: skip
def test_what_gives_no_graph_is_an_error_on_all_ranks(make: Callable[[Communicator], Any], text: str) -> None:
    def one(comm: Communicator) -> str:
        with pytest.raises(ConfigError) as caught:
            make(comm)
        return str(caught.value)

    found = spawn(one, 2)
    assert found[0] == found[1]
    assert re.search(text, found[0])


@pytest.mark.mpi_skip
@pytest.mark.jobs
@pytest.mark.parametrize("library", ["dolfinx", "petsc4py"])
def test_meshes_of_the_libraries_themselves_are_one_graph_on_any_ranks(library: str) -> None:
    """Each printed line is the same on 1, 2 and 4 ranks, and for all ghost modes and overlaps."""
    if importlib.util.find_spec(library) is None:
        pytest.skip(f"could not import {library!r}")

    def read_lines(ranks: int) -> set[str]:
        program = str(Path(__file__).with_name("solver_graphs.py"))
        done = subprocess.run(
            [str(MPIEXEC), "-n", str(ranks), sys.executable, program, library],
            env=environment(OPENBLAS_NUM_THREADS="1"), capture_output=True, text=True, timeout=200,
            stdin=subprocess.DEVNULL,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        return set(done.stdout.splitlines())

    wanted = read_lines(1)
    assert len(wanted) == {"dolfinx": 9, "petsc4py": 6}[library]
    for ranks in (2, 4):
        assert read_lines(ranks) == wanted
