"""Sums and statistics over the cells of a field that may be partitioned over ranks."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from fsdpx.core.array.kernels import sum_squares_of_blocks
from fsdpx.core.array.sums import combine_moments
from fsdpx.ext.fields.kernels import channel_means_and_square_deviations
from fsdpx.nn.layer import Array, LayerContext

__all__ = [
    "all_gather_and_merge_moments", "all_reduce_moments", "all_reduce_over_parts", "sum_squares_over_cells",
]  # fmt: skip


def all_reduce_over_parts(env: LayerContext, values: Array, what: str, op: str = "sum") -> Array:
    """All-reduce `values` in place, with operation `op`, over the ranks that share a field, and return `values`.
    Communicates only if the field is partitioned. `what` is the name of the values in error messages."""
    if env.mesh.parts.size > 1:
        flat = env.xp.ascontiguousarray(values).reshape(-1)
        env.mesh.parts.all_reduce(flat, op, what=what).wait()
        values[...] = flat.reshape(values.shape)  # needed if `values` is not in C order, because `flat` is then a copy
    return values


def all_reduce_moments(
    env: LayerContext, x: Array, dims: tuple[int, ...], what: str, weights: Array | None = None,
    count: Array | None = None,
) -> Array:  # fmt: skip
    """Return the moments of the full field over `dims`, merged from the parts of all ranks. The moments are the rows of
    a float64 array: count, mean, and sum of squared deviations.

    `dims` must be the last dims of `x`. `weights` holds the weight of each element; if it is None, all weights are 1.
    `count` is the sum of weights of this rank's part; if it is None, the weights are added up in this call. `what` is
    the name of the moments in error messages. The moments of the ranks are merged in rank order with the formula of
    Chan et al. (1979). Communicates only if the field is partitioned."""
    xp, size = env.xp, float(math.prod(x.shape[d] for d in dims))
    if weights is None and count is None and dims == tuple(range(2, x.ndim)):
        mean, sums = channel_means_and_square_deviations(xp, x)
        cells = xp.full(mean.shape, size, dtype=np.float64)
        return all_gather_and_merge_moments(env, xp.stack([cells, mean, sums]), what)
    mean = (x if weights is None else weights * x).sum(axis=dims, dtype=np.float64)
    if count is None and weights is not None:
        count = xp.broadcast_to(weights, x.shape).sum(axis=dims, dtype=np.float64)
    count = xp.full(mean.shape, size, dtype=np.float64) if count is None else xp.broadcast_to(count, mean.shape)
    mean = mean / xp.where(count > 0, count, 1.0)
    apart = x.astype(np.float64) - mean.reshape(*mean.shape, *(1,) * len(dims))
    squares = apart * apart
    sums = (squares if weights is None else weights * squares).sum(axis=dims)
    return all_gather_and_merge_moments(env, xp.stack([count, mean, sums]), what)


def all_gather_and_merge_moments(env: LayerContext, moments: Array, what: str) -> Array:
    """All-gather the moments (count, mean, sum of squared deviations) of all parts of the field, and merge them in rank
    order with the formula of Chan et al. (1979). Communicates only if the field is partitioned. `what` names the
    moments in error messages."""
    xp, ranks = env.xp, env.mesh.parts
    if ranks.size == 1:
        return moments
    of_ranks = xp.empty((ranks.size, *moments.shape), dtype=np.float64)
    ranks.all_gather(xp.ascontiguousarray(moments).reshape(-1), of_ranks.reshape(-1), what=what).wait()
    merged = of_ranks[0]
    for other in of_ranks[1:]:
        merged = combine_moments(xp, merged, other)
    return merged


def sum_squares_over_cells(xp: Any, x: Array) -> Array:
    """Return the sum of squares of each channel of x (samples, channels, *cells), in float64, as (samples,
    channels)."""
    if xp is np and x.flags.c_contiguous and x.size:
        return sum_squares_of_blocks(xp, x.reshape(-1), math.prod(x.shape[2:])).reshape(x.shape[:2])
    return (x * x).sum(axis=tuple(range(2, x.ndim)), dtype=np.float64)
