"""Groups of data-parallel ranks that share samples. Each rank of a group holds a different part of the same fields."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

from fsdpx.core.comm.mesh import Mesh, SampleGroups
from fsdpx.errors import MeshError

__all__ = ["group_ranks_sharing_samples"]


def group_ranks_sharing_samples(mesh: Mesh, rank: int, dims: Sequence[int], grids: Sequence[Any]) -> SampleGroups:
    """Given the grids of all ranks, return the groups of ranks that share samples on the data axis of `rank`.

    Parameters
    ----------
    mesh : mesh with the width of each axis
    rank : number of the rank in the world
    dims : number of ranks along each dim of a field
    grids : for each world rank, the ranks that hold its field, in the order of its grid. If the entries are None, each
        group consists of consecutive data ranks

    Returns
    -------
    SampleGroups

    Raises
    ------
    MeshError : if the size of the data axis is not a multiple of the number of ranks of a field, if the ranks of a grid
        are not on one data axis, or if their order differs between pipeline stages
    """
    data = _list_data_axis_ranks(mesh, rank)
    width = prod(dims)
    if len(data) % width:
        raise MeshError(
            f"domain: a field is on {width} ranks, and the data axis of {mesh} has {len(data)}: their number must "
            "be a multiple; train on the communicator of the grid, comm=grid.comm"
        )
    if grids[rank] is None:
        found = [tuple(data[i : i + width]) for i in range(0, len(data), width)]
    else:
        _require_grids_on_data_axes(mesh, grids)
        found = sorted({tuple(grids[r]) for r in data}, key=min)
    return SampleGroups("domain", tuple(dims), next(grid for grid in found if rank in grid), tuple(found))


def _require_grids_on_data_axes(mesh: Mesh, grids: Sequence[Any]) -> None:
    """Raise MeshError unless the ranks of each grid are on one data axis, and in the same order on all pipeline
    stages."""
    places: dict[int, list[int]] = {}
    for r, grid in enumerate(grids):
        line = _list_data_axis_ranks(mesh, r)
        if r not in grid or any(list(grids[one]) != list(grid) or one not in line for one in grid):
            raise MeshError(
                f"domain: rank {r} has a grid of ranks {list(grid)}, of which each must have the same grid and "
                f"be on the data axis of rank {r}, {line}"
            )
        at = [line.index(one) for one in grid]
        if places.setdefault(line.index(r), at) != at:
            raise MeshError(f"domain: the grid of rank {r} has another order than the grids of its pipeline")


def _list_data_axis_ranks(mesh: Mesh, rank: int) -> list[int]:
    return mesh.ranks_along(mesh.coordinates_of(rank), ("replica", "shard"))
