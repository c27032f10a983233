"""Ghost cells: what a solver keeps beyond its part of a field, which the first layers take instead of their padding."""

from __future__ import annotations

from typing import Any

from fsdpx.ext.fields.halo import Reach, cells_of, rank_along
from fsdpx.ext.fields.halo_plan import at_dim
from fsdpx.ext.fields.halo_slabs import fold, widen
from fsdpx.nn.layer import Array, Env
from fsdpx.nn.sharding import Parts

__all__ = ["filled", "filled_backward"]


def filled(env: Env, y: Array, first: Array, parts: Parts) -> Array:
    """A state with ghost cells, for the next step. Communicates with the ranks beside this one.

    Ghost cells come from the ranks that own them, also across the ends of a periodic dim; beyond walls they stay as
    they are in `first`. y : this rank's part, (samples, channels, *cells). parts : with ghost cells and periods."""
    state = widen(env, y, _moves(parts))
    for cells in _beyond_walls(env, parts):
        state[cells] = first[cells]
    return state


def filled_backward(env: Env, dstate: Array, dfirst: Array, parts: Parts) -> Array:
    """The adjoint of `filled`: the gradient of `y`; that of `first` is added to `dfirst`. `dstate` is overwritten."""
    for cells in _beyond_walls(env, parts):
        dfirst[cells] += dstate[cells]
        dstate[cells] = 0  # at corners, nothing is left for the second dim
    return fold(env, dstate, _moves(parts))


def _moves(parts: Parts) -> tuple[Reach, ...]:
    return tuple(
        Reach(
            d + 2,
            cuts,
            tuple((a - low, b + high) for a, b, (low, high) in zip(cuts, cuts[1:], sides, strict=False)),
            "circular" if periodic else "zeros",
        )
        for d, (cuts, sides, periodic) in enumerate(zip(parts.cuts, parts.ghosts, parts.periods, strict=True))
    )


def _beyond_walls(env: Env, parts: Parts) -> list[tuple[Any, ...]]:
    """Where ghost cells of this rank lie beyond the ends of dims that are not periodic; at corners twice."""
    found = []
    for d, (cuts, sides, periodic) in enumerate(zip(parts.cuts, parts.ghosts, parts.periods, strict=True)):
        (start, stop), (low, high) = cells_of(env, cuts, d), sides[rank_along(env, cuts, d)]
        if not periodic:
            before, size = slice(0, max(low - start, 0)), stop - start + low + high
            after = slice(max(cuts[-1] + low - start, 0), size)
            found += [at_dim(env.xp, d + 2, one) for one in (before, after)]
    return found
