"""Standardization of channels with fixed means and standard deviations, and its inverse."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from fsdpx.errors import ConfigError, ShapeError
from fsdpx.ext.fields.halo import FieldLayer
from fsdpx.nn.layer import Array, LayerContext, Params

__all__ = ["Destandardize", "Standardize"]

ROUNDING = 2.0**-50
"""The smallest standard deviation, relative to the mean, that float64 can distinguish from 0."""


class Standardize(FieldLayer):
    """Standardizes each channel of (samples, channels, ...) as (x - mean) / std, computed in float64. On a mesh, it
    standardizes each feature of (samples, rows, features).

    Mean and std can be computed by `fsdpx.data.gather_channel_statistics`.

    Parameters
    ----------
    mean, std : one number for each channel
    """

    fields = takes_ghosts = True
    rows_of_mesh = ("nodes", "ghosts", "edges")

    def __init__(self, mean: Sequence[float], std: Sequence[float]) -> None:
        self.mean, self.std = (tuple(float(v) for v in np.ravel(values)) for values in (mean, std))
        kind = type(self).__name__
        if len(self.mean) != len(self.std):
            raise ConfigError(
                f"{kind}: {len(self.mean)} means and {len(self.std)} deviations: give both of each channel"
            )
        for channel, (m, s) in enumerate(zip(self.mean, self.std, strict=True)):
            if not (math.isfinite(m) and math.isfinite(s) and s > 0):
                raise ConfigError(f"{kind}: channel {channel} has mean {m} and std {s}: finite, and std above 0")
            if s < abs(m) * ROUNDING:
                raise ConfigError(
                    f"{kind}: channel {channel} has std {s}, which is rounding of its mean {m}: give a channel that "
                    "never changes std 1, as fsdpx.data.gather_channel_statistics does"
                )

    def forward(self, env: LayerContext, p: Params, x: Array) -> tuple[Array, Any]:
        channels = len(self.mean)
        if x.ndim < 2 or x.shape[self._find_channels_dim(x)] != channels:
            wanted = f"{channels}, ..." if self._find_channels_dim(x) == 1 else f"rows, {channels}"
            raise ShapeError(f"{self!r} wants (samples, {wanted}), got {tuple(x.shape)}")
        mean, std = self._broadcast_statistics(env, x)
        return self._apply_statistics(x, mean, std).astype(x.dtype), ()

    def backward_input(self, env: LayerContext, p: Params, saved: Any, dy: Array) -> tuple[Array, Any]:
        _, std = self._broadcast_statistics(env, dy)
        return self._apply_statistics(dy, 0.0, std).astype(dy.dtype), ()

    def _apply_statistics(self, x: Array, mean: Any, std: Array) -> Array:
        return (x - mean) / std

    def _find_channels_dim(self, x: Array) -> int:
        return 1 if self.parts is None or self.parts.has_cells else x.ndim - 1

    def _broadcast_statistics(self, env: LayerContext, x: Array) -> list[Array]:
        """Return the means and standard deviations in a shape that broadcasts with x."""
        shape = [1] * x.ndim
        shape[self._find_channels_dim(x)] = -1
        return [env.xp.asarray(np.array(values)).reshape(shape) for values in (self.mean, self.std)]


class Destandardize(Standardize):
    """The inverse of `Standardize`: maps each channel x to x * std + mean. The parameters are as in `Standardize`."""

    def _apply_statistics(self, x: Array, mean: Any, std: Array) -> Array:
        return x * std + mean
