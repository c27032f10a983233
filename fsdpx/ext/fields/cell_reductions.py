"""Sums and statistics over the cells of a field that may be partitioned."""

from __future__ import annotations

import math

import numpy as np

from fsdpx.core.array.sums import combine_moments
from fsdpx.nn.layer import Array, LayerContext

__all__ = ["all_reduce_moments", "all_reduce_over_parts"]


def all_reduce_over_parts(env: LayerContext, values: Array, what: str, op: str = "sum") -> Array:
    """All-reduce `values` in place by `op` over the ranks that share each field, and return `values`. Without a
    partitioned field, this does nothing."""
    if env.mesh.parts.size > 1:
        env.mesh.parts.all_reduce(values.reshape(-1), op, what=what).wait()
    return values


def all_reduce_moments(
    env: LayerContext, x: Array, dims: tuple[int, ...], what: str, weights: Array | None = None
) -> Array:
    """Return the count, mean and sum of squared deviations of a field over `dims`, merged over ranks, as a float64
    array of these three rows.

    `dims` must be the last dims of `x`. `weights` holds the weight of each element; None gives all elements weight 1.
    The moments of the ranks are merged in rank order by the rule of Chan et al. (1979). Communicates only if the field
    is partitioned."""
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
