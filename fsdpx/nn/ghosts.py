"""Ghost cells: what a solver keeps beyond its part of a field, which the first layers take instead of their padding."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from fsdpx.nn.cut import Parts
from fsdpx.nn.layer import Array, Env
from fsdpx.nn.masks import chosen
from fsdpx.nn.parts import Reach, cells_of
from fsdpx.nn.rims import fold, widen

__all__ = ["bare", "filled", "filled_backward"]


def filled(env: Env, y: Array, first: Array, parts: Parts) -> Array:
    """A state with ghost cells, for the next step. Communicates with the ranks beside this one.

    Ghost cells come from the ranks that own them, also across the ends of a periodic dim; beyond walls they stay as
    they are in `first`. y : this rank's part, (samples, channels, *cells). parts : with ghost cells and periods."""
    return env.xp.where(_beyond_walls(env, parts), first, widen(env, y, _moves(parts)))


def filled_backward(env: Env, dstate: Array, dfirst: Array, parts: Parts) -> Array:
    """The adjoint of `filled`: the gradient of `y`; that of `first` is added to `dfirst`."""
    beyond = _beyond_walls(env, parts)
    dfirst += chosen(env, beyond, dstate, 0.0)
    return fold(env, chosen(env, ~beyond, dstate, 0.0), _moves(parts))


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


def _beyond_walls(env: Env, parts: Parts) -> Array:
    """Which cells of this rank's array lie beyond the ends of dims that are not periodic."""
    found = np.zeros((1,) * len(parts.cuts), bool)
    for d, (cuts, g, periodic) in enumerate(zip(parts.cuts, parts.ghosts, parts.periods, strict=True)):
        start, stop = cells_of(env, cuts, d)
        at = np.arange(start - g, stop + g)
        beyond = np.zeros(at.size, bool) if periodic else (at < 0) | (at >= cuts[-1])
        found = found | beyond.reshape(-1, *(1,) * (len(parts.cuts) - d - 1))
    return env.xp.asarray(found)
