"""`StaticChannels`: appends fixed channels, such as topography or a land mask, to a field."""

from __future__ import annotations

from typing import Any

import numpy as np

from fsdpx.errors import ConfigError, ShapeError
from fsdpx.ext.fields.halo import FieldLayer
from fsdpx.ext.fields.local_arrays import HoldsLocalArray, convert_to_numeric_array
from fsdpx.nn.layer import Array, LayerContext, Params

__all__ = ["StaticChannels"]


class StaticChannels(FieldLayer, HoldsLocalArray):
    """Appends fixed channels, such as topography, a land mask or coefficients, to a field. The values are passed only
    once, to the constructor. They get no gradient and are not saved in checkpoints.

    The layer maps (samples, channels, *cells) to (samples, channels + constants, *cells). In the model of a `Rollout`,
    all steps read the fixed channels.

    Parameters
    ----------
    values : array (*cells), or (constants, *cells), for this rank's part of the field, without ghost cells
    """

    fields = True

    def __init__(self, values: Any) -> None:
        self.values = convert_to_numeric_array("StaticChannels: values", values)
        if self.values.dtype.kind not in "fiub" or self.values.ndim < 1:
            raise ConfigError(f"StaticChannels: give a number or bool for each cell, got {self.values.dtype}")

    def __repr__(self) -> str:
        """Return a description that excludes the values. Ranks compare their descriptions, but each rank has different
        values."""
        return "StaticChannels()"

    def forward(self, env: LayerContext, p: Params, x: Array) -> tuple[Array, Any]:
        constants = self._get_constants(env, x)
        spread = env.xp.broadcast_to(constants, (x.shape[0], *constants.shape[1:]))
        return env.xp.concatenate([x, spread], axis=1), (x.shape[1],)

    def backward_input(self, env: LayerContext, p: Params, saved: Any, dy: Array) -> tuple[Array, Any]:
        return env.xp.ascontiguousarray(dy[:, : saved[0]]), ()

    def require_local_cells(self, cells: tuple[int, ...]) -> None:
        if not cells or cells not in (self.values.shape, self.values.shape[1:]):
            raise ShapeError(
                f"{self!r} has values of shape {self.values.shape}, and this rank's part of the field has {cells} "
                "cells: give (*cells), or (constants, *cells)"
            )

    def _get_constants(self, env: LayerContext, x: Array) -> Array:
        """Return the fixed values as (1, constants, *cells), in the dtype of x."""
        cells = tuple(x.shape[2:])
        has_channels = self.values.ndim == len(cells) + 1
        if getattr(env.xp, "holds_no_data", False):  # in a dry run, x may be the full field, so skip the check
            return env.xp.empty((1, self.values.shape[0] if has_channels else 1, *cells), dtype=x.dtype)
        self.require_local_cells(cells)
        key = "static channels", id(self), np.dtype(x.dtype).str
        if key not in env.constants:
            values = self.values[None] if has_channels else self.values[None, None]
            env.constants[key] = env.xp.asarray(values.astype(x.dtype))
        return env.constants[key]
