"""Stand-ins for a function space of dolfinx and for a DMPlex, with the attributes that fsdpx reads, on a mesh that is
split over ranks."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from types import SimpleNamespace
from typing import Any

import numpy as np

from fsdpx.core.comm import Communicator


@dataclass
class CutMesh:
    """A mesh of triangles or segments whose cells are on ranks.

    Attributes
    ----------
    points, cells, parts : coordinates; nodes of each cell; rank of each cell
    """

    points: np.ndarray
    cells: np.ndarray
    parts: np.ndarray

    @classmethod
    def random(cls, ranks: int, n: int = 5) -> CutMesh:
        rng, at = np.random.default_rng(ranks), np.arange((n + 1) ** 2).reshape(n + 1, n + 1)
        corners = np.stack([at[:-1, :-1], at[1:, :-1], at[1:, 1:], at[:-1, 1:]], axis=-1).reshape(-1, 4)
        corners = np.where(rng.random((len(corners), 1)) < 0.5, corners, np.roll(corners, 1, axis=1))
        cells = corners[:, [0, 1, 2, 0, 2, 3]].reshape(-1, 3)
        return cls(rng.random((at.size, 2)), cells, rng.integers(0, ranks, len(cells)))

    @cached_property
    def sides(self) -> tuple[np.ndarray, np.ndarray]:
        """Return the ends (sides, 2) of each side, and the sides (cells, 3) of each cell."""
        ends = np.sort(np.stack([self.cells[:, [0, 1]], self.cells[:, [0, 2]], self.cells[:, [1, 2]]], axis=1), axis=2)
        found, sides = np.unique(ends.reshape(-1, 2), axis=0, return_inverse=True)
        return found, sides.reshape(-1, 3)

    @property
    def centers(self) -> np.ndarray:
        return self.points[self.cells].mean(axis=1)

    def list_edges(self, of_cells: bool) -> set[tuple[int, int]]:
        """Return sender and receiver of each edge between vertices, or between cells that share a side."""
        ends, sides = self.sides
        if of_cells:
            ends = np.array(
                [pair for s in range(len(ends)) if len(pair := np.flatnonzero((sides == s).any(axis=1))) > 1]
            )
        return {(int(a), int(b)) for pair in ends for a, b in (pair, pair[::-1])}

    def take(self, comm: Communicator, has_ghosts: bool) -> Part:
        """Return this rank's part: its cells and, if `has_ghosts`, the cells that share a vertex with them."""
        own = np.flatnonzero(self.parts == comm.rank)
        around = np.flatnonzero(np.isin(self.cells, self.cells[own]).any(axis=1) & (self.parts != comm.rank))
        return Part(self, comm, np.concatenate([own, around if has_ghosts else around[:0]]))


class Numbers:
    """Local things (cells, vertices or edges) in the order of `local`, and their global numbers in rank order."""

    def __init__(self, owners: np.ndarray, local: np.ndarray, rank: int) -> None:
        self.olds, self.local = np.argsort(owners, kind="stable"), local
        self.of, self.owned = np.argsort(self.olds)[local], owners[local] == rank
        ends = np.cumsum([0, *np.bincount(owners, minlength=rank + 1)])
        self.index_map = SimpleNamespace(
            size_local=int(self.owned.sum()), size_global=owners.size, ghosts=self.of[~self.owned],
            local_range=(int(ends[rank]), int(ends[rank + 1])),
        )  # fmt: skip

    def find(self, things: np.ndarray) -> np.ndarray:
        """Return the local index of each of the given things."""
        order = np.argsort(self.local)
        return order[np.searchsorted(self.local, things, sorter=order)]

    def signed(self) -> Any:
        """Return the numbers as PETSc does: those of ghosts are negative."""
        return SimpleNamespace(getIndices=lambda: np.where(self.owned, self.of, -self.of - 1).astype(np.int32))


class Part:
    """One rank's part of a mesh. A vertex or edge belongs to the lowest rank with a cell that has it."""

    def __init__(self, mesh: CutMesh, comm: Communicator, cells: np.ndarray) -> None:
        self.mesh, self.comm, (self.ends, sides) = mesh, comm, mesh.sides
        self.tables = {"cells": np.arange(len(mesh.cells))[:, None], "vertices": mesh.cells, "sides": sides}
        self.cells = cells

    def number(self, kind: str, owned_first: bool = True) -> Numbers:
        table, rank = self.tables[kind], self.comm.rank
        owners = np.full(table.max() + 1, self.comm.size)
        np.minimum.at(owners, table, self.mesh.parts[:, None])
        local = np.random.default_rng(rank).permutation(np.unique(table[self.cells]))
        if owned_first or kind == "cells":  # as in all solvers, own cells come first
            owned = owners[local] == rank
            own = np.argsort(owners, kind="stable")
            local = np.concatenate([own[owners[own] == rank], local[~owned]])
        return Numbers(owners, local, rank)

    def make_space(self, degree: int, shared: bool = True) -> tuple[Any, Numbers]:
        """Return a function space of degree 0 or 1, and its dofs. `shared`: whether cells share dofs."""
        dofs, sides = self.number("vertices" if degree else "cells"), self.number("sides")
        cells = self.number("cells")
        table = dofs.find((self.tables["vertices"] if degree else self.tables["cells"])[cells.local])
        if not shared:
            dofs.index_map.size_global = 3 * len(self.mesh.cells)
        facets = sides.find(self.tables["sides"][cells.local])
        maps = {2: cells.index_map, 1: sides.index_map}
        topology = SimpleNamespace(
            dim=2, index_map=maps.__getitem__, create_connectivity=lambda a, b: None,
            connectivity=lambda a, b: SimpleNamespace(array=facets.reshape(-1), offsets=3 * np.arange(len(facets) + 1)),
        )  # fmt: skip
        places = (self.mesh.points if degree else self.mesh.centers)[dofs.local]
        space = SimpleNamespace(
            mesh=SimpleNamespace(comm=self.comm, topology=topology, geometry=SimpleNamespace(dim=2)),
            dofmap=SimpleNamespace(index_map=dofs.index_map, list=table.astype(np.int32)),
            tabulate_dof_coordinates=lambda: np.pad(places, [(0, 0), (0, 1)]),
        )
        return space, dofs

    def make_dmplex(self, depth: int = 2) -> Any:
        """Points are cells, then vertices, then edges."""
        cells, vertices, sides = (self.number(kind, False) for kind in ("cells", "vertices", "sides"))
        v, e = len(cells.local), len(cells.local) + len(vertices.local)
        stop = e + len(sides.local)
        cones = [*(e + sides.find(self.tables["sides"][cells.local])), *vertices.local * 0]
        cones += [*(v + vertices.find(self.ends[sides.local]))]
        base = len(self.tables["cells"]), len(self.mesh.points)
        numbers = np.concatenate([cells.of, base[0] + vertices.of, sum(base) + sides.of])
        owned = np.concatenate([cells.owned, vertices.owned, sides.owned])
        everything = SimpleNamespace(getIndices=lambda: np.where(owned, numbers, -numbers - 1).astype(np.int32))
        centers, places = self.mesh.centers[cells.local], self.mesh.points[vertices.local].reshape(-1)
        section = SimpleNamespace(getOffset=lambda point: 2 * (point - v))
        return SimpleNamespace(
            comm=self.comm, getDimension=lambda: 2, getCoordinateDim=lambda: 2, getDepth=lambda: depth if stop else -1,
            getHeightStratum=[(0, v), (e, stop)].__getitem__, getDepthStratum=[(v, e), (e, stop)].__getitem__,
            getCone=lambda point: np.asarray(cones[point], np.int32), getCellNumbering=cells.signed,
            getVertexNumbering=vertices.signed, createPointNumbering=lambda: everything,
            computeCellGeometryFVM=lambda point: (0.0, centers[point], None), getCoordinateSection=lambda: section,
            getCoordinatesLocal=lambda: SimpleNamespace(array=places),
        ), {"cells": cells, "vertices": vertices}  # fmt: skip
