"""Which ranks train: how many of the remaining ranks a mesh can use, and which ones."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from fsdpx.comm.mesh import Mesh
from fsdpx.config import Apart, Sharding
from fsdpx.errors import ConfigError, MeshError

__all__ = ["mesh_for", "seated"]


def mesh_for(mesh: Mesh | None, strategy: str | Sharding | Apart, ranks: int) -> Mesh:
    """The widest mesh for at most `ranks` ranks: the pipe and tensor axes as they are, the data axes as they must be.

    Where all widths were given, there may be fewer replicas. MeshError if not even one fits."""
    asked = mesh or Mesh()
    widths = range(asked.replica or 1, 0, -1)
    tries = [asked, *(replace(asked, replica=width) for width in widths)]
    for size in range(ranks, 0, -1):
        for one in tries:
            try:
                return one.filled(strategy, size)
            except ConfigError:
                continue
    raise MeshError(f"mesh {asked} with strategy {strategy!r}: {ranks} ranks are left, which is too few for it")


def seated(seats: Sequence[int | None], count: int) -> list[int]:
    """The `count` ranks that train from now on, in order: first those that did, in the order of their seats, since they
    hold the state; then idle ones. seats: by rank, None if idle."""
    order = sorted(range(len(seats)), key=lambda rank: (seats[rank] is None, seats[rank] or 0, rank))
    return order[:count]
