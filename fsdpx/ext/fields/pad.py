"""`Pad`: adds or removes cells at the boundary of a field, which may be partitioned over ranks."""

from __future__ import annotations

from functools import lru_cache
from operator import index
from typing import Any

from fsdpx.errors import ConfigError, ShapeError
from fsdpx.ext.fields.halo import (
    DimEnds,
    FieldLayer,
    HaloSpec,
    PaddingMode,
    PaddingSide,
    expand_padding_modes,
    require_field_shape,
    require_halo_fits_field,
)
from fsdpx.ext.fields.halo_slabs import exchange_halo, exchange_halo_backward
from fsdpx.nn.layer import Array, LayerContext, Params
from fsdpx.nn.shard_specs import FieldPartition

__all__ = ["Pad"]

Sides = tuple[tuple[int, int], ...]


class Pad(FieldLayer):
    """Pads (samples, channels, *cells) at the ends of the field, or crops the field if `padding` is negative.

    On a grid of ranks, each rank keeps its own cells, and the ranks at the ends of the field also get the added cells.

    Parameters
    ----------
    padding : for each dim, the numbers (before, after) of cells to add at the ends of the field
    mode : values of the added cells, as for `padding_mode` in `Conv`; default "zeros"
    """

    def __init__(self, padding: Sides, mode: PaddingMode = "zeros") -> None:
        try:
            self.padding, self.mode = tuple((index(a), index(b)) for a, b in padding), mode
        except (TypeError, ValueError):
            self.padding = ()
        if not 1 <= len(self.padding) <= 3:
            raise ConfigError(f"Pad: padding={padding!r}: give (before, after) for each of 1 to 3 dims")
        self._modes = expand_padding_modes(self, "mode", mode, len(self.padding))

    def partition_outputs(self, parts: FieldPartition) -> FieldPartition:
        return self._plan_outputs_and_halos(parts)[0]

    def list_dim_ends(self, dims: int) -> list[DimEnds]:
        rows = zip(self.padding, self._modes, strict=True)
        return [DimEnds.of_padding(d, mode) for d, (sides, mode) in enumerate(rows) if max(sides) > 0]

    def forward(self, env: LayerContext, p: Params, x: Array) -> tuple[Array, Any]:
        require_field_shape(self, x, len(self.padding))
        _, halos = self._plan_outputs_and_halos(self.get_partition(x))
        return exchange_halo(env, x, halos), halos

    def backward_input(self, env: LayerContext, p: Params, saved: Any, dy: Array) -> tuple[Array, Any]:
        return exchange_halo_backward(env, dy, saved), ()

    def _plan_outputs_and_halos(self, parts: FieldPartition) -> tuple[FieldPartition, tuple[HaloSpec, ...]]:
        if len(parts.cuts) != len(self.padding):
            raise ShapeError(f"{self!r} pads {len(self.padding)} dims and reads {parts}")
        try:
            return _plan_padding(parts, self.padding, self._modes)
        except ShapeError as error:
            raise ShapeError(f"{self!r}: {error}") from None


@lru_cache(1 << 10)
def _plan_padding(
    parts: FieldPartition, padding: Sides, modes: tuple[tuple[PaddingSide, PaddingSide], ...]
) -> tuple[FieldPartition, tuple[HaloSpec, ...]]:
    """Return the partition of the padded field, and one halo spec per dim, with the cells that each rank needs for its
    part of the padded field."""
    made, halos = [], []
    for d, (cuts, (low, high), mode) in enumerate(zip(parts.cuts, padding, modes, strict=True)):
        total = cuts[-1] + low + high
        if total < 1:
            raise ShapeError(f"nothing is left of a field of shape {parts.shape}")
        out = (0, *(min(max(cut + low, 0), total) for cut in cuts[1:-1]), total)
        halo = HaloSpec(d + 2, cuts, tuple((a - low, b - low) for a, b in zip(out, out[1:], strict=False)), mode)
        require_halo_fits_field(halo, parts)
        made.append(out)
        halos.append(halo)
    return parts.with_cuts(tuple(made)), tuple(halos)
