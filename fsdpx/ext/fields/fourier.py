"""Fourier transforms of real fields that may be partitioned over ranks.

Along a partitioned dim, an all-to-all gives each rank some complete lines of cells. The rank transforms these lines,
and a second all-to-all distributes their modes. No rank ever holds the full field."""

from __future__ import annotations

import math
from itertools import accumulate, pairwise

from fsdpx.ext.fields.halo import get_rank_along
from fsdpx.ext.fields.kernels import fourier_along_dim
from fsdpx.nn.collectives import all_to_all_rows
from fsdpx.nn.layer import Array, LayerContext
from fsdpx.nn.shard_specs import Cuts, FieldPartition, shard_bounds

__all__ = ["make_mode_partition", "transform_cells_to_modes", "transform_modes_to_cells"]


def make_mode_partition(parts: FieldPartition) -> FieldPartition:
    """Return the partition of a real field's Fourier modes over ranks. Along the last dim, n cells have modes 0 to n //
    2, which are distributed evenly. Along the other dims, modes are in the order of `numpy.fft`, and are partitioned
    like the cells."""
    *others, last = parts.cuts
    ranks, modes = len(last) - 1, last[-1] // 2 + 1
    return parts.with_cuts((*others, (*(shard_bounds(modes, rank, ranks)[0] for rank in range(ranks)), modes)))


def transform_cells_to_modes(env: LayerContext, x: Array, parts: FieldPartition, what: str) -> Array:
    """Transform a real field (samples, channels, *cells) to Fourier modes. Return this rank's modes as (samples,
    channels, *modes, 2), with real and imaginary parts in the last dim. The modes are unscaled, as in
    `numpy.fft.rfftn`. `what` is the name of the transform in error messages. Collective over the ranks that share the
    field."""
    modes, last, y = make_mode_partition(parts), len(parts.cuts) - 1, x[..., None]
    for d in reversed(range(last + 1)):
        y = _transform_dim(env, y, d, (parts.cuts[d], modes.cuts[d]), "rfft" if d == last else "fft", what)
    return y


def transform_modes_to_cells(env: LayerContext, modes: Array, parts: FieldPartition, what: str) -> Array:
    """Return this rank's part of a real field, given its Fourier modes. This is the inverse of
    `transform_cells_to_modes`. Collective."""
    kept, last = make_mode_partition(parts), len(parts.cuts) - 1
    for d in range(last + 1):
        modes = _transform_dim(env, modes, d, (kept.cuts[d], parts.cuts[d]), "irfft" if d == last else "ifft", what)
    return modes[..., 0]


def _transform_dim(env: LayerContext, x: Array, d: int, cuts: tuple[Cuts, Cuts], transform: str, what: str) -> Array:
    """Apply `transform`, a function of `numpy.fft`, along cell dim `d` of x, whose last dim holds real and imaginary
    parts. `cuts` holds the bounds of the ranks' parts before and after the transform."""
    xp, ranks, rank = env.xp, len(cuts[0]) - 1, get_rank_along(env, cuts[0], d)
    cells = max(cuts[0][-1], cuts[1][-1])
    if ranks == 1:
        return fourier_along_dim(xp, x, d + 2, cells, transform)
    turned = xp.moveaxis(x, d + 2, -2)
    shape, count, parts = turned.shape[:-2], math.prod(turned.shape[:-2]), x.shape[-1]
    before, after = ([b - a for a, b in pairwise(bounds)] for bounds in cuts)
    lines = [stop - start for start, stop in (shard_bounds(count, r, ranks) for r in range(ranks))]
    # size of the piece for each rank: number of lines of that rank x number of cells of this rank
    pieces = [[n * sizes[rank] for n in lines] for sizes in (before, after)]
    # size of the piece for each rank: number of lines of this rank x number of cells of that rank
    columns = [[lines[rank] * size for size in sizes] for sizes in (before, after)]
    ranks_of_dim = env.mesh.domain[d]
    flat = turned.reshape(count * before[rank], parts)
    flat = all_to_all_rows(xp, ranks_of_dim, flat, pieces[0], columns[0], what=what)
    ends = pairwise(accumulate(columns[0], initial=0))
    blocks = [flat[a:b].reshape(lines[rank], n, parts) for (a, b), n in zip(ends, before, strict=True)]
    whole = fourier_along_dim(xp, xp.concatenate(blocks, axis=1), 1, cells, transform)
    parts = whole.shape[2]
    blocks = [whole[:, a:b].reshape(n, parts) for (a, b), n in zip(pairwise(cuts[1]), columns[1], strict=True)]
    y = all_to_all_rows(xp, ranks_of_dim, xp.concatenate(blocks), columns[1], pieces[1], what=what)
    return xp.moveaxis(y.reshape(*shape, after[rank], parts), -2, d + 2)
