"""Ghost cells: what a solver keeps beyond its part of a field, which the first layers take instead of their padding."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from fsdpx.nn.cut import Parts
from fsdpx.nn.layer import Array, Env
from fsdpx.nn.parts import Reach, rank_along
from fsdpx.nn.rims import fold, widen

__all__ = ["bare", "filled", "filled_backward"]


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
        dstate[cells] = 0
    return fold(env, dstate, _moves(parts))


def bare(parts: Parts) -> Parts:
    """The same parts without ghost cells."""
    return replace(parts, ghosts=(), periods=())


def _moves(parts: Parts) -> tuple[Reach, ...]:
    return tuple(
        Reach(
            d + 2,
            cuts,
            tuple((a - g, b + g) for a, b in zip(cuts, cuts[1:], strict=False)),
            "circular" if periodic else "zeros",
        )
        for d, (cuts, g, periodic) in enumerate(zip(parts.cuts, parts.ghosts, parts.periods, strict=True))
    )


def _beyond_walls(env: Env, parts: Parts) -> list[tuple[Any, ...]]:
    """Where ghost cells of this rank lie beyond the ends of dims that are not periodic; no two of these overlap."""
    found: list[tuple[Any, ...]] = []
    inner: list[slice] = []
    for d, (cuts, g, periodic) in enumerate(zip(parts.cuts, parts.ghosts, parts.periods, strict=True)):
        rank, n = rank_along(env, cuts, d), cuts[-1]
        low = 0 if periodic else min(max(g - cuts[rank], 0), 2 * g + cuts[rank + 1] - cuts[rank])
        high = 0 if periodic else max(cuts[rank + 1] + g - n, 0)
        before = (..., *inner)
        after = (slice(None),) * (len(parts.cuts) - d - 1)
        size = cuts[rank + 1] - cuts[rank] + 2 * g
        high = min(high, size - low)
        found += [(*before, slice(0, low), *after)] if low else []
        found += [(*before, slice(size - high, size), *after)] if high else []
        inner.append(slice(low, size - high))
    return found
