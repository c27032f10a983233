"""Sums and statistics over the cells of a field that may be cut, and weights of cells."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from fsdpx.core.array.sums import chan
from fsdpx.errors import ConfigError, DataError
from fsdpx.nn.gradient_accumulation import wide
from fsdpx.nn.layer import Array, Env

__all__ = ["CellWeights", "moments", "reduced"]


def reduced(env: Env, values: Array, what: str, op: str = "sum") -> Array:
    """`values` over all parts of the field, in place: their sum, or what `op` says. Communicates where it is cut."""
    if env.mesh.parts.size > 1:
        env.mesh.parts.all_reduce(values.reshape(-1), op, what=what).wait()
    return values


def moments(env: Env, x: Array, dims: tuple[int, ...], what: str, w: Array | None = None) -> Array:
    """Count, mean and sum of squares about it, over the last dims, `dims`, of all parts, in float64: `chan` in the
    order of ranks. w: what each element counts; None: 1."""
    xp, ranks, size = env.xp, env.mesh.parts, float(math.prod(x.shape[d] for d in dims))
    mean = (x if w is None else w * x).sum(axis=dims, dtype=np.float64)
    count = xp.full(mean.shape, size, dtype=np.float64)
    if w is not None:
        count = xp.broadcast_to(w, x.shape).sum(axis=dims, dtype=np.float64)
    mean = mean / xp.where(count > 0, count, 1.0)
    apart = x.astype(np.float64) - mean.reshape(*mean.shape, *(1,) * len(dims))
    squares = apart * apart
    found = xp.stack([count, mean, (squares if w is None else w * squares).sum(axis=dims)])
    if ranks.size == 1:
        return found
    everyone = xp.empty((ranks.size, *found.shape), dtype=np.float64)
    ranks.all_gather(xp.ascontiguousarray(found).reshape(-1), everyone.reshape(-1), what=what).wait()
    found = everyone[0]
    for other in everyone[1:]:
        found = chan(xp, found, other)
    return found


class CellWeights:
    """What each cell of this rank's part counts.

    Parameters
    ----------
    owner : for errors
    weights : (*cells) or (channels, *cells), numbers >= 0, or bools
    """

    def __init__(self, owner: str, weights: Any) -> None:
        try:
            self.array = np.asarray(weights, np.float64)
        except (TypeError, ValueError) as error:
            raise ConfigError(f"{owner}: weights must be numbers >= 0, or bools: {error}") from error
        if not (np.isfinite(self.array) & (self.array >= 0)).all():
            raise ConfigError(f"{owner}: weights must be numbers >= 0, or bools")

    def __repr__(self) -> str:
        """The same on all ranks, which compare it."""
        return "<an array>"

    def beside(self, env: Env, y: Array) -> Array:
        """As an array that fits y of (samples, channels, *cells)."""
        key = "weights of cells", id(self), np.dtype(y.dtype).str
        if key not in env.constants:
            shape = (1,) * (y.ndim - self.array.ndim) + self.array.shape
            env.constants[key] = env.xp.asarray(self.array.astype(wide(y.dtype)).reshape(shape))
        return env.constants[key]

    def demand(self, owner: object, shape: tuple[int, ...]) -> None:
        """DataError unless they fit an output of `shape`."""
        if self.array.shape not in (shape[2:], shape[1:], (1, *shape[2:])):
            raise DataError(
                f"{owner!r}: weights of shape {self.array.shape} do not fit: this rank's part of the output is "
                f"(channels, *cells) = {shape[1:]}; give one for each cell, {shape[2:]}, or for each channel of it"
            )


def weighed(
    env: Env, y: Array, target: Array, weights: CellWeights | None, skipna: bool
) -> tuple[Array, Array, Array | None]:
    """y - target, target, and what each element counts, which fits y; None: all count 1. Where one counts 0, the others
    are 0, whatever they were, NaN too. skipna: elements whose target is NaN count 0."""
    xp = env.xp
    y, target = (a.astype(wide(y.dtype), copy=False) for a in (y, target))
    w = None if weights is None else weights.beside(env, y)
    if skipna:
        w = xp.where(xp.isnan(target), 0.0, 1.0 if w is None else w).astype(y.dtype)
    apart = y - target
    if w is not None:
        apart, target = xp.where(w > 0, apart, 0.0), xp.where(w > 0, target, 0.0)
    return apart, target, w
