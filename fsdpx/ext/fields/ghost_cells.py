"""Exchange of the ghost cells of a solver's arrays, which the first layers use instead of padding."""

from __future__ import annotations

from typing import Any

from fsdpx.ext.fields.halo import HaloSpec, get_local_range, get_rank_along
from fsdpx.ext.fields.halo_plan import slice_dim
from fsdpx.ext.fields.halo_slabs import exchange_halo, exchange_halo_backward
from fsdpx.nn.layer import Array, LayerContext
from fsdpx.nn.shard_specs import FieldPartition

__all__ = ["exchange_ghost_cells", "exchange_ghost_cells_backward"]


def exchange_ghost_cells(env: LayerContext, y: Array, initial: Array, parts: FieldPartition) -> Array:
    """Return the state `y` with ghost cells, as the input of the next step. Communicates with the neighboring ranks.

    Ghost cells are received from the ranks that own these cells, also across the ends of periodic dims. Ghost cells
    beyond walls are copied from `initial`. y: this rank's part without ghost cells, (samples, channels, *cells).
    initial: the first input, with ghost cells. parts: partition with ghost cells and periods."""
    state = exchange_halo(env, y, _find_ghost_halos(parts))
    for cells in _list_indices_beyond_walls(env, parts):
        state[cells] = initial[cells]
    return state


def exchange_ghost_cells_backward(env: LayerContext, dstate: Array, dinitial: Array, parts: FieldPartition) -> Array:
    """Return the gradient of `y`, and add that of `initial` to `dinitial`: the adjoint of `exchange_ghost_cells`.

    Overwrites `dstate`. Communicates with the neighboring ranks."""
    for cells in _list_indices_beyond_walls(env, parts):
        dinitial[cells] += dstate[cells]
        dstate[cells] = 0  # a corner cell is beyond two walls, and must be added once
    return exchange_halo_backward(env, dstate, _find_ghost_halos(parts))


def _find_ghost_halos(parts: FieldPartition) -> tuple[HaloSpec, ...]:
    return tuple(
        HaloSpec(
            d + 2,
            cuts,
            tuple((a - low, b + high) for a, b, (low, high) in zip(cuts, cuts[1:], sides, strict=False)),
            "circular" if periodic else "zeros",
        )
        for d, (cuts, sides, periodic) in enumerate(zip(parts.cuts, parts.ghosts, parts.periods, strict=True))
    )


def _list_indices_beyond_walls(env: LayerContext, parts: FieldPartition) -> list[tuple[Any, ...]]:
    """Return the indices of this rank's ghost cells beyond walls, that is, beyond the ends of dims that are not
    periodic. Cells at corners occur in two of these indices."""
    found = []
    for d, (cuts, sides, periodic) in enumerate(zip(parts.cuts, parts.ghosts, parts.periods, strict=True)):
        (start, stop), (low, high) = get_local_range(env, cuts, d), sides[get_rank_along(env, cuts, d)]
        if not periodic:
            before, size = slice(0, max(low - start, 0)), stop - start + low + high
            after = slice(max(cuts[-1] + low - start, 0), size)
            found += [slice_dim(env.xp, d + 2, one) for one in (before, after)]
    return found
