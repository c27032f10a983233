"""Warnings about likely mistakes in the use of a `Grid`: parts that overlap (for example because ghost cells were not
declared in `ghosts`), whole fields that are passed in place of parts, and layers whose padding conflicts with the
grid's periodicity."""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b
from typing import Any

import numpy as np

from fsdpx.core.array.namespace import to_host
from fsdpx.ext.fields.conv import WindowLayer
from fsdpx.ext.fields.halo import FieldLayer
from fsdpx.ext.fields.local_arrays import iterate_layers_including_rollout_nets
from fsdpx.nn.layer import Layer
from fsdpx.nn.shard_specs import GhostWidths

__all__ = [
    "are_parts_of_all_ranks_identical",
    "count_overlap_rows_by_dim",
    "describe_padding_periodicity_conflict",
    "hash_edge_rows_of_part",
    "make_overlapping_parts_warning",
    "make_same_array_on_all_ranks_warning",
]

WIDTHS = range(2, 7)
"""Numbers of shared rows to search for. Neighboring parts with one to three ghost cells on each side share 2 to 6 rows.
A single shared row is not searched for because two rows may be equal by chance."""

Ends = list[list[tuple[str | None, str | None]]]
"""Hashes of the first and last rows of a part, for each dim and each number of rows in `WIDTHS`. A hash is None if the
rows are too uniform to compare."""


def hash_edge_rows_of_part(local_shape: Sequence[int], ghosts: Sequence[GhostWidths], x: Any) -> Ends:
    """Return hashes of the first and last rows of cells of this rank's part along each dim, for comparison with those
    of neighbors.

    `x` is an input (samples, channels, *cells), and its first sample is hashed. `local_shape` is the number of cells of
    the part along each dim, and `ghosts` are the widths of the ghost cells around the part in `x`."""
    found: Ends = []
    for dim in range(len(local_shape)):
        found.append([])
        for width in WIDTHS:
            cells: list[Any] = [slice(None)]
            for d, (n, (before, _)) in enumerate(zip(local_shape, ghosts, strict=True)):
                # leave out corners because some solvers do not fill them
                edge = width if d != dim and n > 2 * width else 0
                cells.append(slice(before + edge, before + n - edge))
            part = x[0][tuple(cells)] if x.shape[0] else x
            enough = part.ndim == len(cells) and min(part.shape) > 0 and local_shape[dim] >= 2 * width
            low, high = (_hash_edge_rows(part, dim + 1, width, end) if enough else None for end in (1, -1))
            found[dim].append((low, high))
    return found


def _hash_edge_rows(part: Any, dim: int, width: int, end: int) -> str | None:
    """Return a hash of the first (`end` = 1) or last (`end` = -1) `width` rows along `dim`.

    Returns None if the rows are too uniform to compare: if two neighboring rows are equal, or if the rows equal the
    next `width` rows inward."""
    first, last = (0, 2 * width) if end > 0 else (part.shape[dim] - 2 * width, part.shape[dim])
    rows = np.moveaxis(np.asarray(to_host(part[(slice(None),) * dim + (slice(first, last),)])), dim, 0)
    rows = np.where(np.isnan(rows), 0.5, rows + 0.0) if rows.dtype.kind == "f" else rows
    rows, inner = (rows[:width], rows[width:]) if end > 0 else (rows[width:], rows[:width])
    same = [bool((a == b).all()) for a, b in zip(rows, rows[1:], strict=False)]
    if any(same) or (rows == inner).all():
        return None
    return blake2b(np.ascontiguousarray(rows).tobytes(), digest_size=8).hexdigest()


def count_overlap_rows_by_dim(
    dims: Sequence[int], letters: str, periods: Sequence[bool], ends: Sequence[Ends]
) -> dict[str, int]:
    """Return the number of rows that neighboring parts share, as a dict of dim letter -> count. Dims without overlap
    are left out.

    Parts overlap along a dim if all comparable pairs of neighbors share rows. For each dim, `dims` holds the number of
    ranks, `letters` holds the name, and `periods` states whether the dim is periodic. `ends` holds the hashes from all
    ranks of the field, in the order of the grid."""
    found: dict[str, int] = {}
    places = np.arange(len(ends)).reshape(tuple(dims))
    for dim, letter in enumerate(letters):
        line = np.moveaxis(places, dim, 0)
        pairs = list(zip(line[:-1].ravel().tolist(), line[1:].ravel().tolist(), strict=True))
        if periods[dim]:
            pairs += zip(line[-1].ravel().tolist(), line[0].ravel().tolist(), strict=True)
        for number, width in enumerate(WIDTHS):
            told = {(ends[one][dim][number][1], ends[other][dim][number][0]) for one, other in pairs}
            told.discard((None, None))
            if told and all(last == first for last, first in told):
                found.setdefault(letter, width)
    return found


def are_parts_of_all_ranks_identical(dims: Sequence[int], ends: Sequence[Ends]) -> bool:
    """Return whether the parts of all ranks begin and end with the same rows along each dim.

    Return False if there is only one rank, or if the rows are too uniform to compare along a dim that is divided. For
    example, if a field does not vary along this dim, its parts are equal even if they are passed correctly. `dims`
    holds the number of ranks along each dim, and `ends` holds the hashes from all ranks of the field."""
    divided = [of_dim for of_dim, ranks in zip(ends[0], dims, strict=True) if ranks > 1]
    return len(ends) > 1 and all(one == ends[0] for one in ends) and all(any(map(any, of_dim)) for of_dim in divided)


def make_same_array_on_all_ranks_warning(cells: Sequence[int], ranks: int, whole: Sequence[int]) -> str:
    """Return a warning that all ranks pass the same array. `ranks` is the number of ranks, `cells` is the size of the
    array along each dim, and `whole` is the size of the full field that results if each array is taken as one rank's
    part."""
    own, field = (" x ".join(map(str, sizes)) for sizes in (cells, whole))
    return (
        f"fsdpx: all {ranks} ranks of the grid pass the same array of {own} cells, of which it makes a field of "
        f"{field} cells: it seems that each rank gave the whole field. Give the shape of the part to fsdpx.Grid, and "
        "arrays of the shape grid.local_shape, as grid.take_local(array) cuts them"
    )


def make_overlapping_parts_warning(shared: dict[str, int]) -> str:
    """Return a warning that parts overlap, with advice. `shared` holds the number of shared rows along each dim with
    overlaps."""
    rows = ", ".join(f"{letter} ({width} rows)" for letter, width in shared.items())
    widths = set(shared.values())
    each = f"{widths.pop() // 2}" if len(widths) == 1 and not min(widths) % 2 else "((low, high), ...)"
    return (
        f"fsdpx: along dim {rows} the end of each part is the beginning of the next one: it seems that the arrays have "
        "ghost cells that were not passed to the grid, and that count twice. Pass only the cells of the part as shape, "
        f"and the others as ghosts: fsdpx.Grid(comm, interior_shape, ghosts={each})"
    )


def describe_padding_periodicity_conflict(
    model: Layer, letters: Sequence[str], periods: Sequence[bool], ghosts: Sequence[GhostWidths]
) -> str:
    """Return a warning about the first layer whose padding, or other handling of the ends of a dim, conflicts with the
    grid's periodicity. Return "" if there is no such layer.

    If no dim is periodic, there is no warning, because the caller may not have specified the periods. Along dims with
    ghost cells, the model's first convolution or pool is not checked, because ghost cells replace its padding."""
    windows = 0
    for path, layer in iterate_layers_including_rollout_nets(model) if any(periods) else ():
        if not isinstance(layer, FieldLayer):
            continue
        windows += isinstance(layer, WindowLayer)
        for ends in layer.list_dim_ends(len(periods)):
            if ends.dim >= len(periods) or periods[ends.dim] == ends.periodic:
                continue
            if not (windows == 1 and isinstance(layer, WindowLayer) and any(ghosts[ends.dim])):
                is_periodic = f"dim {letters[ends.dim]} is {'' if periods[ends.dim] else 'not '}periodic"
                remedy = ends.advice[periods[ends.dim]]
                return f"fsdpx: {is_periodic}, but layer {path!r} {ends.text}: choose {remedy} for this dim"
    return ""
