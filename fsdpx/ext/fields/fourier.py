"""Fourier transforms of real fields that may be partitioned over ranks.

Along a partitioned dim, an all-to-all gives each rank some complete lines of cells. The rank transforms these lines,
and a second all-to-all distributes their modes. No rank ever holds the full field."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from itertools import accumulate, pairwise

import numpy as np

from fsdpx.ext.fields.halo import get_rank_along
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
    """Return this rank's Fourier modes of a real field (samples, channels, *cells), unscaled as in `numpy.fft.rfftn`.
    `what` is the name of the transform in error messages. Collective over the ranks that share the field."""
    fft, modes, last = env.xp.fft, make_mode_partition(parts), len(parts.cuts) - 1
    for d in reversed(range(last + 1)):
        x = _transform_dim(env, x, d, (parts.cuts[d], modes.cuts[d]), fft.rfft if d == last else fft.fft, what)
    return x


def transform_modes_to_cells(env: LayerContext, modes: Array, parts: FieldPartition, what: str) -> Array:
    """Return this rank's part of a real field, given its Fourier modes. This is the inverse of
    `transform_cells_to_modes`. Collective."""
    fft, kept, last = env.xp.fft, make_mode_partition(parts), len(parts.cuts) - 1
    for d in range(last + 1):
        inverse = partial(fft.irfft, n=parts.shape[d]) if d == last else fft.ifft
        modes = _transform_dim(env, modes, d, (kept.cuts[d], parts.cuts[d]), inverse, what)
    return modes


def _transform_dim(
    env: LayerContext, x: Array, d: int, cuts: tuple[Cuts, Cuts], transform: Callable[..., Array], what: str
) -> Array:
    """Apply `transform`, a function of `numpy.fft`, along cell dim `d` of x. `cuts` holds the bounds of the ranks'
    parts before and after the transform."""
    xp, ranks, rank = env.xp, len(cuts[0]) - 1, get_rank_along(env, cuts[0], d)
    if ranks == 1:
        return transform(x, axis=d + 2)
    turned = xp.moveaxis(x, d + 2, -1)
    shape, count = turned.shape[:-1], math.prod(turned.shape[:-1])
    before, after = ([b - a for a, b in pairwise(bounds)] for bounds in cuts)
    lines = [stop - start for start, stop in (shard_bounds(count, r, ranks) for r in range(ranks))]
    # size of the piece for each rank: number of lines of that rank x number of cells of this rank
    pieces = [[n * sizes[rank] for n in lines] for sizes in (before, after)]
    # size of the piece for each rank: number of lines of this rank x number of cells of that rank
    columns = [[lines[rank] * size for size in sizes] for sizes in (before, after)]
    flat = _all_to_all(env, d, turned.reshape(count * before[rank]), pieces[0], columns[0], what)
    ends = pairwise(accumulate(columns[0], initial=0))
    blocks = [flat[a:b].reshape(lines[rank], n) for (a, b), n in zip(ends, before, strict=True)]
    whole = transform(xp.concatenate(blocks, axis=1), axis=1)
    blocks = [whole[:, a:b].reshape(n) for (a, b), n in zip(pairwise(cuts[1]), columns[1], strict=True)]
    y = _all_to_all(env, d, xp.concatenate(blocks), columns[1], pieces[1], what)
    return xp.moveaxis(y.reshape(*shape, after[rank]), -1, d + 2)


def _all_to_all(
    env: LayerContext, d: int, flat: Array, sent: Sequence[int], received: Sequence[int], what: str
) -> Array:
    """Send consecutive pieces of `flat`, which holds real or complex numbers, to the ranks along dim `d`. Return the
    pieces received from these ranks. `sent` and `received` are the sizes of the pieces."""
    complex_dtype = flat.dtype
    if np.dtype(complex_dtype).kind != "c":
        return all_to_all_rows(env.xp, env.mesh.domain[d], flat, sent, received, what=what)
    pairs = flat.view(np.empty(0, complex_dtype).real.dtype).reshape(flat.shape[0], 2)
    found = all_to_all_rows(env.xp, env.mesh.domain[d], pairs, sent, received, what=what)
    return found.reshape(2 * found.shape[0]).view(complex_dtype)
