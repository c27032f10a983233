"""Reads graphs for `Partition` from meshes of dolfinx, PETSc DMPlex and meshio, without importing these libraries."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from fsdpx.errors import ConfigError
from fsdpx.ext.meshes.arguments import as_integer_array
from fsdpx.ext.meshes.graph_building import exchange_arrays, find_rows

__all__ = [
    "SolverMesh", "exchange_facets_and_list_cell_edges", "get_meshio_points_and_edges", "list_edges_of_cells",
    "read_dmplex", "read_graph_of_dolfinx_space",
]  # fmt: skip

Table = np.ndarray


def _list_ring(first: int, count: int) -> list[tuple[int, int]]:
    """Return the pairs of neighbors in a ring of the numbers first, first + 1, ..., first + count - 1."""
    return [(first + i, first + (i + 1) % count) for i in range(count)]


CELL_EDGES = {
    "quad": _list_ring(0, 4),
    "pyramid": [*_list_ring(0, 4), *((i, 4) for i in range(4))],
    "wedge": [*_list_ring(0, 3), *_list_ring(3, 3), *((i, i + 3) for i in range(3))],
    "hexahedron": [*_list_ring(0, 4), *_list_ring(4, 4), *((i, i + 4) for i in range(4))],
}
"""Pairs of nodes that are joined by an edge, for the meshio cell types in which some pairs of nodes are not joined."""


class SolverMesh(NamedTuple):
    """One rank's part of a solver's mesh. Its rows are the nodes of the graph, in the solver's order.

    Attributes
    ----------
    comm : the solver's communicator
    numbers : global number of each row
    owned : whether the rank owns the node in each row
    positions : coordinates (rows, dims) of all rows, or of the owned rows only
    edges : rows of the two nodes of each edge, (2, edges); None if `facets` is given
    facets : for each facet of an owned cell, the row of the cell and the global number of the facet, (2, facets of
        owned cells). Cells that share a facet are joined. None if the nodes are not cells
    """

    comm: Any
    numbers: Table
    owned: Table
    positions: Any
    edges: Table | None = None
    facets: Table | None = None


def read_graph_of_dolfinx_space(V: Any, pairs: Sequence[tuple[int, int]] | None, positions: Any) -> SolverMesh:
    """Return the graph of the dofs of a dolfinx function space. The arguments are the same as for
    `Partition.from_dolfinx`."""
    dofs, topology = V.dofmap.index_map, V.mesh.topology
    numbers = _list_global_numbers(dofs)
    owned = np.arange(numbers.size) < dofs.size_local
    if positions is None:
        positions = V.tabulate_dof_coordinates()[:, : V.mesh.geometry.dim]
    mesh = SolverMesh(V.mesh.comm, numbers, owned, positions)
    cells, dim = np.asarray(V.dofmap.list), topology.dim
    if cells.shape[1] > 1:
        whole = topology.index_map(dim).size_global
        if dofs.size_global == whole * cells.shape[1] and whole > 1:
            raise ConfigError(
                "cells of V share no dofs, so no edge would join them: take a continuous space, or degree 0"
            )
        return mesh._replace(edges=list_edges_of_cells(cells, pairs))
    # collective, so it must be called before any rank can raise an error and leave the others waiting
    topology.create_connectivity(dim, dim - 1)
    if pairs is not None:
        raise ConfigError("pairs= needs a space with several dofs in each cell")
    facets = topology.connectivity(dim, dim - 1)
    rows = np.repeat(cells[:, 0], np.diff(facets.offsets))
    mine = owned[rows]
    shared = _list_global_numbers(topology.index_map(dim - 1))[facets.array]
    return mesh._replace(facets=np.stack([rows[mine], shared[mine]]))


def read_dmplex(dm: Any, nodes: str, positions: Any) -> SolverMesh:
    """Return the graph of the vertices or cells of a DMPlex. The arguments are the same as for
    `Partition.from_dmplex`."""
    of_cells = nodes == "cells"
    first, stop = dm.getHeightStratum(0) if of_cells else dm.getDepthStratum(0)
    given = (dm.getCellNumbering() if of_cells else dm.getVertexNumbering()).getIndices().astype(np.int64)
    owned = given >= 0
    numbers = np.where(owned, given, -given - 1)  # PETSc stores the number of a ghost as -number - 1
    rows, dim = np.flatnonzero(owned), dm.getCoordinateDim()
    # collective, so it must be called before any rank can raise an error and leave the others waiting
    points = dm.createPointNumbering().getIndices().astype(np.int64)
    if nodes not in ("vertices", "cells"):
        raise ConfigError(f'nodes={nodes!r}: choose "vertices" or "cells"')
    if dm.getDepth() not in (dm.getDimension(), -1):  # -1 means that the rank has no cells
        raise ConfigError("the DMPlex has no edges and facets: call interpolate() first")
    if of_cells:
        if positions is None:
            positions = _stack_rows([dm.computeCellGeometryFVM(first + row)[1] for row in rows], (rows.size, dim))
        cones = [dm.getCone(first + row) for row in rows]
        shared = points[np.concatenate([*cones, np.zeros(0, np.int64)]).astype(np.int64)]
        facets = np.stack([np.repeat(rows, [len(cone) for cone in cones]), np.where(shared < 0, -shared - 1, shared)])
        return SolverMesh(dm.comm, numbers, owned, positions, facets=facets)
    if positions is None:
        section, values = dm.getCoordinateSection(), dm.getCoordinatesLocal().array
        offsets = np.array([section.getOffset(point) for point in range(first, stop)], np.int64)
        positions = values[offsets[:, None] + np.arange(dim)]
    low, high = dm.getDepthStratum(1)
    ends = _stack_rows([dm.getCone(edge) for edge in range(low, high)], (high - low, 2)).astype(np.int64)
    return SolverMesh(dm.comm, numbers, owned, positions, edges=ends.T - first)


def get_meshio_points_and_edges(mesh: Any) -> tuple[Table, Table]:
    """Return the points of a meshio mesh, (points, dims), and its edges, (2, edges), as point indices. Dims in which
    all points have the same coordinate are left out."""
    points = np.asarray(mesh.points, np.float64)
    edges = [np.zeros((2, 0), np.int64)]
    for block in mesh.cells:
        cells = as_integer_array(f"cells of type {block.type!r}", block.data, 2)
        pairs = _list_ring(0, cells.shape[1]) if block.type == "polygon" else CELL_EDGES.get(block.type)
        edges.append(list_edges_of_cells(cells, pairs))
    return points[:, (points != points[:1]).any(axis=0)], np.concatenate(edges, axis=1)


def list_edges_of_cells(cells: Table, pairs: Any) -> Table:
    """Return the edges (2, edges) of `cells` (cells, nodes of a cell), which may be empty. An edge occurs once for each
    cell that has it. `pairs` is as in `Partition.from_cells`; raise ConfigError if it does not match the cells."""
    corners = cells.shape[1]
    joined = as_integer_array("pairs", [*itertools.combinations(range(corners), 2)] if pairs is None else pairs, 2)
    joined = joined if joined.size else joined.reshape(0, 2)
    if joined.shape[1] != 2 or (len(cells) and joined.max(initial=0) >= max(corners, 1)):
        raise ConfigError(f"pairs={pairs}: give pairs of numbers from 0 to {corners - 1}, the nodes of a cell")
    return cells[:, joined.T].transpose(1, 0, 2).reshape(2, -1) if len(cells) else np.zeros((2, 0), np.int64)


def exchange_facets_and_list_cell_edges(comm: Any, size: int, mesh: SolverMesh) -> tuple[Table, Table]:
    """Make an edge between every two cells that share a facet. Return two arrays: the edges, of shape (2, number of
    edges), as the rows of their two cells; and, for each row, the global number of its cell. Collective.

    The first rows are the cells of `mesh`, in the same order. If the solver has no ghost cells, neighboring cells on
    other ranks follow. Each edge is returned on only one rank, which owns one of its two cells."""
    assert mesh.facets is not None
    rows, shared = mesh.facets
    home = shared % size
    table = np.stack([shared, mesh.numbers[rows]], axis=1)
    found = exchange_arrays(comm, [table[home == r] for r in range(size)])
    everyone, source = np.concatenate(found), np.repeat(np.arange(size), [len(one) for one in found])
    order = np.argsort(everyone[:, 0], kind="stable")
    facets, cells, source = everyone[order, 0], everyone[order, 1], source[order]
    first, second = [order[:0]], [order[:0]]
    # a facet has two cells, or more where surfaces branch; this loop finds all pairs of cells
    for apart in range(1, facets.size):
        same = np.flatnonzero(facets[apart:] == facets[:-apart])
        if not same.size:
            break
        first.append(same)
        second.append(same + apart)
    a, b = np.concatenate(first), np.concatenate(second)
    ends = np.stack([cells[a], cells[b]], axis=1)
    pairs = np.concatenate(exchange_arrays(comm, [ends[source[a] == r] for r in range(size)])).T
    numbers = np.concatenate([mesh.numbers, np.setdiff1d(pairs[1], mesh.numbers)])
    return find_rows(numbers, pairs), numbers


def _list_global_numbers(index_map: Any) -> Table:
    """Return the global number of each local index of a dolfinx index map."""
    return np.concatenate([np.arange(*index_map.local_range), index_map.ghosts]).astype(np.int64)


def _stack_rows(rows: Sequence[Any], shape: tuple[int, int]) -> Table:
    """Stack `rows` into one array of shape `shape`. `rows` may be empty."""
    return np.array(rows).reshape(shape)
