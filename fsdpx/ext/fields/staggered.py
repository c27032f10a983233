"""Partitions of the values on cell faces, given the partition of the cells."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product

from fsdpx.ext.fields.halo import compute_output_bounds_of_ranks
from fsdpx.nn.shard_specs import Cuts, FieldPartition, GhostWidths

__all__ = ["compute_ghost_widths_of_faces", "find_face_cuts", "list_cell_and_face_partitions"]


def find_face_cuts(cuts: Cuts) -> Cuts:
    """Return the cuts (part boundaries) of the n + 1 faces across a dim, given the cuts of the dim's n cells. Each rank
    owns the low faces of its cells, and the last rank that has cells also owns the last face."""
    return compute_output_bounds_of_ranks(cuts, cuts, cuts[-1] + 1)


def compute_ghost_widths_of_faces(cuts: Cuts, faces: Cuts, sides: Sequence[GhostWidths]) -> tuple[GhostWidths, ...]:
    """Return the widths of the ghost cells of arrays that hold both faces of each cell. The high face of a rank's last
    cell belongs to the next rank, so it is an additional ghost cell.

    `cuts` and `faces` hold the boundaries between the ranks' parts along the dim, as indices of cells and of faces.
    `sides` holds each rank's ghost widths for arrays of cells. If the last ranks along the dim own no cells, their
    empty parts begin after the last face. The arrays of these ranks hold only the last face, as a ghost cell before the
    empty part."""
    found = []
    for rank, (low, high) in enumerate(sides):
        lacks = cuts[rank + 1] - cuts[rank] + 1 - (faces[rank + 1] - faces[rank])
        behind = faces[rank] > cuts[-1]
        found.append((low + lacks * behind, high + lacks * (not behind)))
    return tuple(found)


def list_cell_and_face_partitions(parts: FieldPartition) -> list[FieldPartition]:
    """Return the partition of the cells, followed by one partition for each kind of faces. There is one kind for each
    combination of one or more dims along which values lie on faces instead of in cells."""
    both = [(cuts, find_face_cuts(cuts)) for cuts in parts.cuts]
    found = [parts.with_cuts(cuts) for cuts in product(*both)]
    return sorted(found, key=lambda one: sum(one.shape))
