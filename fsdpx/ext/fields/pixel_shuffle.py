"""`PixelShuffle` and `PixelUnshuffle`, which trade channels for resolution. Fields may be partitioned."""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any

from fsdpx.errors import ShapeError
from fsdpx.ext.fields.halo import FieldLayer, HaloSpec, compute_output_bounds_of_ranks
from fsdpx.ext.fields.halo_slabs import exchange_halo, exchange_halo_backward
from fsdpx.nn.layer import Array, LayerContext, Params, require_positive
from fsdpx.nn.shard_specs import FieldPartition

__all__ = ["PixelShuffle", "PixelUnshuffle"]


class PixelShuffle(FieldLayer):
    """Rearranges channels into cells (Shi et al. 2016): `(samples, channels * r^dims, *cells)` ->
    `(samples, channels, *(r * cells))`, for fields of 1 to 3 dims.

    In two dims, channel c of output cell (r * y + i, r * x + j) is channel c * r^2 + i * r + j of input cell (y, x), as
    in PyTorch. On a grid of ranks, each rank refines its own cells without communication.

    Parameters
    ----------
    upscale_factor : the factor r by which the number of cells along each dim is multiplied
    """

    def __init__(self, upscale_factor: int) -> None:
        require_positive(self, upscale_factor=upscale_factor)
        self.upscale_factor = upscale_factor

    def partition_outputs(self, parts: FieldPartition) -> FieldPartition:
        return parts.with_cuts(tuple(tuple(cut * self.upscale_factor for cut in cuts) for cuts in parts.cuts))

    def forward(self, env: LayerContext, p: Params, x: Array) -> tuple[Array, Any]:
        block = self.upscale_factor ** (x.ndim - 2)
        if not 3 <= x.ndim <= 5 or x.shape[1] % block:
            raise ShapeError(
                f"{self!r} wants (samples, channels, *cells) with a multiple of {block} channels and 1 to 3 dims of "
                f"cells, got {tuple(x.shape)}"
            )
        return _move_channels_to_cells(x, self.upscale_factor), ()

    def backward_input(self, env: LayerContext, p: Params, saved: Any, dy: Array) -> tuple[Array, Any]:
        return _move_cells_to_channels(dy, self.upscale_factor), ()


class PixelUnshuffle(FieldLayer):
    """Rearranges cells into channels: `(samples, channels, *(r * cells))` -> `(samples, channels * r^dims, *cells)`,
    for fields of 1 to 3 dims. This is the inverse of `PixelShuffle`.

    The sizes of the field must be multiples of r. On a grid of ranks, an output cell belongs to the rank that owns the
    first of its r^dims input cells. Other ranks send the missing input cells to this rank.

    Parameters
    ----------
    downscale_factor : the factor r by which the number of cells along each dim is divided
    """

    def __init__(self, downscale_factor: int) -> None:
        require_positive(self, downscale_factor=downscale_factor)
        self.downscale_factor = downscale_factor

    def partition_outputs(self, parts: FieldPartition) -> FieldPartition:
        return self._plan_outputs_and_halos(parts)[0]

    def forward(self, env: LayerContext, p: Params, x: Array) -> tuple[Array, Any]:
        if not 3 <= x.ndim <= 5:
            raise ShapeError(f"{self!r} wants (samples, channels, *cells) with 1 to 3 dims of cells, got {x.shape}")
        _, halos = self._plan_outputs_and_halos(self.get_partition(x))
        return _move_cells_to_channels(exchange_halo(env, x, halos), self.downscale_factor), halos

    def backward_input(self, env: LayerContext, p: Params, saved: Any, dy: Array) -> tuple[Array, Any]:
        return exchange_halo_backward(env, _move_channels_to_cells(dy, self.downscale_factor), saved), ()

    def _plan_outputs_and_halos(self, parts: FieldPartition) -> tuple[FieldPartition, tuple[HaloSpec, ...]]:
        for d, n in enumerate(parts.shape):
            if n % self.downscale_factor:
                raise ShapeError(
                    f"{self!r}: the field has {n} cells along {parts.get_dim_name(d)}, which is not a multiple of "
                    f"{self.downscale_factor}"
                )
        return _plan_partition_of_blocks_and_halos(parts, self.downscale_factor)


@lru_cache(1 << 10)
def _plan_partition_of_blocks_and_halos(parts: FieldPartition, r: int) -> tuple[FieldPartition, tuple[HaloSpec, ...]]:
    """Divide the field into blocks of r cells along each dim. Return the partition of the blocks over the ranks. Also
    return, for each dim, a halo spec with the range of cells in each rank's blocks."""
    made, halos = [], []
    for d, cuts in enumerate(parts.cuts):
        out = compute_output_bounds_of_ranks(cuts, [-(-cut // r) for cut in cuts], cuts[-1] // r)
        needs = tuple((a * r, b * r) for a, b in zip(out, out[1:], strict=False))
        made.append(out)
        halos.append(HaloSpec(d + 2, cuts, needs))
    return parts.with_cuts(tuple(made)), tuple(halos)


def _move_channels_to_cells(x: Array, r: int) -> Array:
    samples, channels, *cells = x.shape
    dims = len(cells)
    split = x.reshape(samples, channels // r**dims, *(r,) * dims, *cells)
    pairs = [axis for d in range(dims) for axis in (2 + dims + d, 2 + d)]
    return split.transpose(0, 1, *pairs).reshape(samples, channels // r**dims, *(n * r for n in cells))


def _move_cells_to_channels(x: Array, r: int) -> Array:
    samples, channels, *cells = x.shape
    dims, coarse = len(cells), [n // r for n in cells]
    split = x.reshape(samples, channels, *(size for n in coarse for size in (n, r)))
    inner, outer = range(3, 2 + 2 * dims, 2), range(2, 2 + 2 * dims, 2)
    return split.transpose(0, 1, *inner, *outer).reshape(samples, channels * math.prod((r,) * dims), *coarse)
