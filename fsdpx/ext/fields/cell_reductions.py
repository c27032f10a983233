"""Sums and statistics over the cells of a field that may be partitioned."""

from __future__ import annotations

import math

import numpy as np

from fsdpx.core.array.sums import combine_moments
from fsdpx.nn.layer import Array, LayerContext

__all__ = ["all_reduce_moments", "all_reduce_over_parts"]


def all_reduce_over_parts(env: LayerContext, values: Array, what: str, op: str = "sum") -> Array:
    """Return `values` reduced by `op` over all parts of the field, in place. Communicates if the field is
    partitioned."""
    if env.mesh.parts.size > 1:
        env.mesh.parts.all_reduce(values.reshape(-1), op, what=what).wait()
    return values


def all_reduce_moments(
    env: LayerContext, x: Array, dims: tuple[int, ...], what: str, weights: Array | None = None
) -> Array:
    """Return count, mean and sum of squared deviations, stacked in float64, over the last dims, `dims`, of all parts.

    The moments of ranks are merged by the rule of Chan et al. (1979), in the order of ranks. weights: weight of each
    element; None: 1. Communicates if the field is partitioned."""
    xp, ranks, size = env.xp, env.mesh.parts, float(math.prod(x.shape[d] for d in dims))
    mean = (x if weights is None else weights * x).sum(axis=dims, dtype=np.float64)
    count = xp.full(mean.shape, size, dtype=np.float64)
    if weights is not None:
        count = xp.broadcast_to(weights, x.shape).sum(axis=dims, dtype=np.float64)
    mean = mean / xp.where(count > 0, count, 1.0)
    apart = x.astype(np.float64) - mean.reshape(*mean.shape, *(1,) * len(dims))
    squares = apart * apart
    found = xp.stack([count, mean, (squares if weights is None else weights * squares).sum(axis=dims)])
    if ranks.size == 1:
        return found
    everyone = xp.empty((ranks.size, *found.shape), dtype=np.float64)
    ranks.all_gather(xp.ascontiguousarray(found).reshape(-1), everyone.reshape(-1), what=what).wait()
    found = everyone[0]
    for other in everyone[1:]:
        found = combine_moments(xp, found, other)
    return found
