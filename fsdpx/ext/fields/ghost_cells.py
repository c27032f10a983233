"""Exchange of ghost cells, the copies of neighboring ranks' cells that surround a solver's local arrays. The first
layers of a model read ghost cells instead of padding."""

from __future__ import annotations

from typing import Any

from fsdpx.ext.fields.halo import HaloSpec, get_local_range, get_rank_along
from fsdpx.ext.fields.halo_plan import slice_dim
from fsdpx.ext.fields.halo_slabs import exchange_halo, exchange_halo_backward
from fsdpx.nn.layer import Array, LayerContext
from fsdpx.nn.shard_specs import FieldPartition

__all__ = ["add_to_own_cells", "drop_ghost_cells", "exchange_ghost_cells", "exchange_ghost_cells_backward"]


def exchange_ghost_cells(env: LayerContext, y: Array, initial: Array, parts: FieldPartition) -> Array:
    """Return the state `y` surrounded by ghost cells, for use as the input of the next time step. Communicates with
    neighboring ranks.

    The values of ghost cells come from the ranks that own these cells. Periodic dims wrap around. Ghost cells beyond
    walls are copied from `initial`, the first input of the rollout. `y` is this rank's part without ghost cells,
    (samples, channels, *cells). `parts` is the partition of the field, which includes the widths of ghost cells and the
    periodicity of dims."""
    state = exchange_halo(env, y, _make_ghost_halo_specs(parts))
    for cells in _list_indices_beyond_walls(env, parts):
        state[cells] = initial[cells]
    return state


def exchange_ghost_cells_backward(env: LayerContext, dstate: Array, dinitial: Array, parts: FieldPartition) -> Array:
    """Return the gradient with respect to `y` in `exchange_ghost_cells`, and add the gradient with respect to `initial`
    to `dinitial`.

    `dstate` is the gradient of the result of `exchange_ghost_cells`, and is overwritten. Communicates with neighboring
    ranks."""
    for cells in _list_indices_beyond_walls(env, parts):
        dinitial[cells] += dstate[cells]
        dstate[cells] = 0  # set to zero so that corner cells, which lie beyond several walls, are added only once
    return exchange_halo_backward(env, dstate, _make_ghost_halo_specs(parts))


def drop_ghost_cells(env: LayerContext, state: Array, parts: FieldPartition) -> Array:
    """Return a view of `state` without its ghost cells. `state` is this rank's part of a field, (samples, channels,
    *cells)."""
    return state[_make_own_index(env, parts)]


def add_to_own_cells(env: LayerContext, own: Array, ghosts: Array, parts: FieldPartition) -> Array:
    """Return a copy of `ghosts`, an array with ghost cells, with `own` added to the rank's own cells."""
    state = ghosts.copy()
    state[_make_own_index(env, parts)] += own
    return state


def _make_own_index(env: LayerContext, parts: FieldPartition) -> tuple[slice, ...]:
    """Return the index that selects this rank's own cells in an array with ghost cells."""
    index = [slice(None), slice(None)]
    for d, (cuts, sides) in enumerate(zip(parts.cuts, parts.ghosts, strict=True)):
        (start, stop), low = get_local_range(env, cuts, d), sides[get_rank_along(env, cuts, d)][0]
        index.append(slice(low, low + stop - start))
    return tuple(index)


def _make_ghost_halo_specs(parts: FieldPartition) -> tuple[HaloSpec, ...]:
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
    """Return the array indices of this rank's ghost cells beyond walls, which are the ends of dims that are not
    periodic. There is one index per wall. A corner cell lies beyond several walls and is therefore covered by several
    indices."""
    found = []
    for d, (cuts, sides, periodic) in enumerate(zip(parts.cuts, parts.ghosts, parts.periods, strict=True)):
        (start, stop), (low, high) = get_local_range(env, cuts, d), sides[get_rank_along(env, cuts, d)]
        if not periodic:
            before, size = slice(0, max(low - start, 0)), stop - start + low + high
            after = slice(max(cuts[-1] + low - start, 0), size)
            found += [slice_dim(env.xp, d + 2, one) for one in (before, after)]
    return found
