"""Positions of the cells of a field along a dim, either equidistant or specified by the caller."""

from __future__ import annotations

from collections.abc import Sequence
from numbers import Real
from typing import Any

import numpy as np

from fsdpx.errors import ConfigError, ShapeError
from fsdpx.nn.layer import Array, LayerContext

__all__ = ["CellPositions", "compute_cell_widths", "compute_stencil_weights", "parse_spacing", "shape_along_dim"]


class CellPositions(tuple[float, ...]):
    """Positions along one dim of the n values of a field, or of the n + 1 bounds of its cells."""

    __slots__ = ()

    def __repr__(self) -> str:
        """Return a short description instead of all positions: error messages show the repr of layers, and a dim may
        have thousands of cells."""
        return f"{len(self)} positions from {self[0]:g} to {self[-1]:g}"

    def compute_value_positions(self, n: int, periodic: bool, name: str) -> tuple[np.ndarray, float]:
        """Return the positions of the n values of a field along a dim, and the period of that dim.

        If this object holds the bounds of cells, the values lie at the cell centers, and the period is the distance
        between the outermost bounds. Raises ShapeError, which names the dim `name`, if the number of positions does not
        match n."""
        if len(self) == n + 1:
            return (np.array(self[1:]) + self[:-1]) / 2, self[-1] - self[0]
        if len(self) != n or periodic:
            wanted = f"the {n + 1} bounds of its cells"
            wanted = wanted if periodic else f"{n} positions of values, or {wanted}"
            kind = "periodic " if periodic else ""
            raise ShapeError(f"{kind}{name} has {n} cells: spacing needs {wanted}, got {len(self)}")
        return np.array(self), 0.0


def parse_spacing(layer: object, given: Any) -> Any:
    """Return `given` with arrays of positions replaced by `CellPositions`. `given` is one spacing, or a sequence with
    one spacing per dim.

    Raises ConfigError if positions are not finite or not monotonic. Spacings that are single numbers are not
    checked."""
    if isinstance(given, str) or not isinstance(given, Sequence | np.ndarray) or getattr(given, "ndim", 1) == 0:
        return given
    return tuple(_parse_spacing_along_dim(layer, one) for one in given)


def _parse_spacing_along_dim(layer: object, given: Any) -> Any:
    if not isinstance(given, Sequence | np.ndarray) or isinstance(given, str) or getattr(given, "ndim", 1) == 0:
        return given
    steps = np.zeros(0)
    if all(isinstance(at, Real) for at in given):
        steps = np.diff(np.asarray(given, np.float64))
    if not steps.size or not np.isfinite(steps).all() or not ((steps > 0).all() or (steps < 0).all()):
        shown = repr(given) if len(given) < 5 else f"the array of {len(given)} along a dim"
        raise ConfigError(
            f"{type(layer).__name__}: spacing: {shown} must be positions that increase or decrease, one for each value "
            "or bound of a cell; the bounds of cells of given widths are np.concatenate([[0], np.cumsum(widths)])"
        )
    return CellPositions(float(at) for at in given)


def compute_cell_widths(spacing: float | CellPositions, n: int, name: str) -> np.ndarray:
    """Return the signed widths of n cells along a dim, which are negative if positions decrease.

    Raises ShapeError, which names the dim `name`, unless `spacing` is a number or the bounds of n cells."""
    if not isinstance(spacing, CellPositions):
        return np.full(n, float(spacing))
    if len(spacing) != n + 1:
        raise ShapeError(f"{name} has {n} cells: spacing needs their {n + 1} bounds, got {len(spacing)}")
    return np.diff(np.array(spacing))


def compute_stencil_weights(at: np.ndarray, points: np.ndarray, derivative: int) -> np.ndarray:
    """Return weights (m, s) for computing derivatives at the m positions `at` as weighted sums of the values at
    `points`, (m, s) (Fornberg 1988). With s points, the derivative is exact for polynomials of degree up to s - 1."""
    count = points.shape[1]
    weights = np.zeros((*points.shape, derivative + 1))
    weights[:, 0, 0] = 1.0
    before, distance = np.ones(len(at)), points[:, 0] - at
    for i in range(1, count):
        product, last, distance = np.ones(len(at)), distance, points[:, i] - at
        for j in range(i):
            gap = points[:, i] - points[:, j]
            product = product * gap
            if j == i - 1:
                for k in range(min(i, derivative), -1, -1):
                    lower = k * weights[:, j, k - 1] if k else 0.0
                    weights[:, i, k] = before * (lower - last * weights[:, j, k]) / product
            for k in range(min(i, derivative), -1, -1):
                lower = k * weights[:, j, k - 1] if k else 0.0
                weights[:, j, k] = (distance * weights[:, j, k] - lower) / gap
        before = product
    return weights[:, :, derivative]


def shape_along_dim(env: LayerContext, weights: np.ndarray, x: Array, d: int) -> Array:
    """Return `weights`, one number per cell along cell dim `d`, reshaped to broadcast with (samples, channels, *cells)
    and converted to the dtype of `x`."""
    return env.xp.asarray(weights.astype(x.dtype)).reshape(-1, *(1,) * (x.ndim - 3 - d))
