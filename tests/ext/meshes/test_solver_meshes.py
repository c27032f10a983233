"""Meshes of dolfinx, DMPlex and meshio: the same graph on any ranks, with and without ghost cells."""

import importlib.util
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from models import alike
from solver_stand_ins import CutMesh
from trials import MPIEXEC, environment

import fsdpx
from fsdpx import spawn
from fsdpx.core.comm import Communicator
from fsdpx.errors import ConfigError


@pytest.mark.parametrize("solver", ["dolfinx", "dmplex"])
def test_a_graph_has_all_edges_whatever_ghosts_the_solver_has(solver):
    mesh = CutMesh.random(4)

    def read(comm, nodes, has_ghosts):
        part, places = mesh.take(comm, has_ghosts), mesh.points if nodes == "vertices" else mesh.centers
        if solver == "dolfinx":
            space, mine = part.make_space(int(nodes == "vertices"))
            made = fsdpx.Partition.from_dolfinx(space)
        else:
            dm, both = part.make_dmplex()
            made, mine = fsdpx.Partition.from_dmplex(dm, nodes=nodes), both[nodes]
        values = np.where(mine.owned[:, None], places[mine.local], np.nan)
        np.testing.assert_array_equal(made.update_ghosts(values), places[mine.local])  # the solver's rows
        np.testing.assert_array_equal(made.all_gather(values), places[mine.olds])
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


def test_pairs_and_positions_replace_those_of_the_solver():
    mesh = CutMesh.random(2)

    def one(comm):
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
def test_what_gives_no_graph_is_an_error_on_all_ranks(make, text):
    assert re.search(f"^ConfigError: (?s:.*){text}", alike(2, make))


POINTS = np.array([(x, y, z) for z in (0, 1) for y in (0, 1) for x in (0, 1, 2)], float)
FLAT = np.array([[0, 0], [1, 0], [2, 0], [2, 1], [1, 1], [0, 1], [9, 9]], float)
BLOCKS: dict[str, tuple[np.ndarray, list[tuple[str, list[list[int]]]], str]] = {
    "flat": (
        np.pad(FLAT, ((0, 0), (0, 1)), constant_values=4.0),  # meshio writes a third coordinate
        [("vertex", [[6]]), ("line", [[0, 1], [1, 2]]), ("quad", [[0, 1, 4, 5]]), ("triangle", [[1, 2, 3], [1, 3, 4]])],
        "01 14 45 50 12 23 31 34",
    ),
    "solid": (
        POINTS,
        [("hexahedron", [[0, 1, 4, 3, 6, 7, 10, 9]]), ("wedge", [[1, 2, 4, 7, 8, 10]]), ("tetra", [[2, 4, 5, 11]])],
        "01 14 43 30 67 7a a9 96 06 17 4a 39 12 24 78 8a 28 45 5b 4b 25 2b",
    ),
    "pyramid": (
        POINTS[:7],
        [("pyramid", [[0, 1, 4, 3, 6]]), ("line3", [[2, 5, 4]])],
        "01 14 43 30 06 16 46 36 25 24 54",
    ),
}  # fmt: skip


@pytest.mark.parametrize("library", ["stand-in", "meshio"])
@pytest.mark.parametrize("name", BLOCKS)
def test_a_mesh_of_meshio_is_partitioned(name, library, tmp_path):
    points, blocks, wanted = BLOCKS[name]
    if library == "meshio":
        meshio, path = pytest.importorskip("meshio"), tmp_path / "mesh.vtk"
        meshio.Mesh(points, blocks, {"u": points[:, 0]}).write(path)
        mesh = meshio.read(path)
    else:
        cells = [SimpleNamespace(type=kind, data=np.array(rows)) for kind, rows in blocks]
        mesh = SimpleNamespace(points=points, cells=cells, point_data={"u": points[:, 0]})

    def read(comm):
        made = fsdpx.Partition.from_meshio(comm, mesh, parts=np.arange(len(points)) % comm.size)
        edges = {frozenset(pair) for pair in made.edges.T.tolist()}
        return edges, made.total_edges, made.edge_feature_count, made.all_gather(made.take_local(mesh.point_data["u"]))

    found, joined = spawn(read, 3), {frozenset(int(n, 12) for n in pair) for pair in wanted.split()}
    assert set.union(*(edges for edges, *_ in found)) == joined
    for _, total, features, values in found:
        assert total == 2 * len(joined)
        assert features == (3 if name == "flat" else 4)
        np.testing.assert_array_equal(values, points[:, 0])


def test_cells_of_meshio_without_a_table_are_an_error():
    ragged = SimpleNamespace(points=POINTS, cells=[SimpleNamespace(type="polyhedron4", data=[[[0, 1], [2]], [[3]]])])
    with pytest.raises(ConfigError, match="cells of type 'polyhedron4' must be an array"):
        fsdpx.Partition.from_meshio(spawn(lambda comm: comm, 1)[0], ragged)


@pytest.mark.mpi_skip
@pytest.mark.jobs
@pytest.mark.parametrize("library", ["dolfinx", "petsc4py"])
def test_meshes_of_the_libraries_themselves_are_one_graph_on_any_ranks(library):
    """Each printed line is the same on 1, 2 and 4 ranks, and for all ghost modes and overlaps."""
    if importlib.util.find_spec(library) is None:
        pytest.skip(f"could not import {library!r}")

    def read_lines(ranks):
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
