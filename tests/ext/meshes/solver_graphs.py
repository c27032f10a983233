"""Graphs of meshes of dolfinx and PETSc: `mpiexec -n 4 python solver_graphs.py dolfinx`, or `petsc4py`.

Prints for each mesh and space: nodes, edges, and a number that depends on every edge, but not on the ranks."""

import sys
from typing import Any

import numpy as np
from mesh_graphs import env_of
from mpi4py import MPI

import fsdpx
from fsdpx.ext.meshes.ghosts import append_ghosts

comm, world = MPI.COMM_WORLD, fsdpx.init()


def show(name: str, made: Any, places: np.ndarray) -> None:
    """Print the graph. `places` are the positions of all rows of the solver's vectors."""
    graph, dims = made.graph, places.shape[1]
    values = np.where(np.isin(np.arange(len(places)), made.owned_rows)[:, None], places, np.nan)
    np.testing.assert_allclose(made.update_ghosts(values), places, atol=1e-12)
    whole = made.all_gather(places)
    senders, receivers = whole[graph.numbers[graph.senders]], whole[graph.numbers[graph.receivers]]
    np.testing.assert_allclose(graph.edge_features[:, :dims], senders - receivers, atol=1e-12)
    total = (np.sin(senders @ [3, 5, 7][:dims]) * np.cos(receivers @ [2, 4, 6][:dims])).sum()
    require_bytes_of_ghosts(made, places)
    total = comm.allreduce(total)
    if comm.rank == 0:
        print(f"{name}: {made.total_nodes} {made.total_edges} {total:.8f}", flush=True)


def require_bytes_of_ghosts(made: Any, places: np.ndarray) -> None:
    """Check that an exchange of ghosts receives exactly ghosts x width x itemsize bytes."""
    env, width = env_of(world), places.shape[1]
    append_ghosts(env, made.graph, None, made.take_owned_rows(places[None]))
    received = env.mesh.counters.sum_counts("domain", "recv").bytes
    assert received == made.graph.ghosts * width * 8, (received, made.graph.ghosts)


def read_dolfinx() -> None:
    from dolfinx import fem, mesh

    for mode in (mesh.GhostMode.none, mesh.GhostMode.shared_facet):
        for name, made in (
            ("triangles", mesh.create_unit_square(comm, 9, 7, ghost_mode=mode)),
            ("quadrilaterals", mesh.create_unit_square(comm, 5, 4, mesh.CellType.quadrilateral, ghost_mode=mode)),
            ("tetrahedra", mesh.create_unit_cube(comm, 3, 3, 2, ghost_mode=mode)),
        ):
            for element in (("Lagrange", 1), ("Lagrange", 2, (2,)), ("DG", 0, (3,))):
                space = fem.functionspace(made, element)
                u = fem.Function(space).x.array.reshape(-1, space.dofmap.index_map_bs)
                places = space.tabulate_dof_coordinates()[:, : made.geometry.dim]
                assert len(u) == len(places)
                show(f"{name} {element}", fsdpx.Partition.from_dolfinx(space), places)


def read_petsc4py() -> None:
    from petsc4py import PETSc

    at = np.arange(49).reshape(7, 7)
    a, b, c, d = (x.reshape(-1) for x in (at[:-1, :-1], at[:-1, 1:], at[1:, :-1], at[1:, 1:]))
    triangles = np.concatenate([np.stack([a, b, d], axis=1), np.stack([a, d, c], axis=1)]).astype(PETSc.IntType)
    corners, rows = np.stack(np.divmod(at.reshape(-1), 7.0), axis=1), slice(None if comm.rank == 0 else 0)
    for overlap in (0, 1):
        for name, dm in (
            ("triangles", PETSc.DMPlex().createFromCellList(2, triangles[rows], corners[rows], comm=comm)),
            ("quadrilaterals", PETSc.DMPlex().createBoxMesh([5, 4], simplex=False, comm=comm)),
            ("hexahedra", PETSc.DMPlex().createBoxMesh([4, 3, 2], simplex=False, comm=comm)),
        ):
            dm.distribute(overlap=overlap)
            dims = dm.getDimension()
            for nodes in ("vertices", "cells"):
                if nodes == "vertices":
                    places = dm.getCoordinatesLocal().array.reshape(-1, dims)
                else:
                    cells = range(*dm.getHeightStratum(0))
                    places = np.array([dm.computeCellGeometryFVM(cell)[1] for cell in cells]).reshape(-1, dims)
                made = fsdpx.Partition.from_dmplex(dm, nodes=nodes)
                dm.setNumFields(1)
                dm.setSection(
                    dm.createSection([1], [(nodes, d) in (("vertices", 0), ("cells", dims)) for d in range(dims + 1)])
                )
                local, whole = dm.createLocalVec(), dm.createGlobalVec()
                local.array[:] = places[:, 0]
                dm.localToGlobal(local, whole)
                np.testing.assert_array_equal(whole.array, places[made.owned_rows, 0])  # rows of both vectors
                show(f"{name} {nodes}", made, places)


{"dolfinx": read_dolfinx, "petsc4py": read_petsc4py}[sys.argv[1]]()
