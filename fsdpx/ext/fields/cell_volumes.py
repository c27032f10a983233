"""Weights for cells that differ in size, for losses and metrics: cell volumes, and latitude weights on a sphere."""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from typing import Any

import numpy as np

from fsdpx.errors import ConfigError
from fsdpx.ext.fields.grid import Grid

__all__ = ["compute_cell_volumes", "compute_latitude_weights"]

Numbers = Sequence[float] | np.ndarray


def compute_cell_volumes(widths: Sequence[Any], grid: Grid | None = None) -> np.ndarray:
    """Return the volume of each cell: the product of its widths along all dims. Does not communicate.

    Parameters
    ----------
    widths : for each dim, an array with the width of each cell of the full field, such as `np.diff(bounds)`, or one
        width for all cells, which requires `grid`. Other weights, such as those from `compute_latitude_weights`, can
        take the place of the widths along a dim
    grid : the grid of the field. If given, return only the volumes of the cells in this rank's part of the field; if
        None (default), return those of the full field

    Returns
    -------
    numpy.ndarray
        float64, (*cells), for the argument `weights` of losses

    Raises
    ------
    ConfigError : if widths are not finite numbers >= 0, or if they do not match the grid
    """
    if isinstance(widths, str) or not hasattr(widths, "__len__") or getattr(widths, "ndim", 1) == 0 or not len(widths):
        raise ConfigError(f"compute_cell_volumes: widths={widths!r}: give a tuple with the widths along each dim")
    each = [_to_finite_array("compute_cell_volumes: widths", one) for one in widths]
    if grid is not None and len(each) != len(grid.shape):
        raise ConfigError(f"compute_cell_volumes: {len(each)} widths, and a grid of {len(grid.shape)} dims")
    found = []
    for d, one in enumerate(each):
        n = one.size if grid is None else grid.shape[d]
        if one.ndim > 1 or (one.ndim == 1 and one.size != n) or (one.ndim == 0 and grid is None):
            several = f"one width, or one for each of {n} cells"
            wanted = several if grid is not None else "an array with the width of each cell"
            raise ConfigError(f"compute_cell_volumes: widths[{d}] has shape {one.shape}: give {wanted}")
        if (one < 0).any():
            raise ConfigError(f"compute_cell_volumes: widths[{d}] has numbers below 0")
        along = np.broadcast_to(one, (n,))
        found.append(along if grid is None else along[grid.offsets[d] : grid.offsets[d] + grid.local_shape[d]])
    return np.array(reduce(np.multiply.outer, found))


def compute_latitude_weights(latitudes: Numbers, bounds: Numbers | None = None) -> np.ndarray:
    """Return the weight of each latitude in averages over a sphere (WeatherBench 2, Rasp et al. 2024). For each
    latitude, take the difference between the sines of the upper and lower bound of its cells. The weight is this
    difference divided by the mean of all differences.

    Parameters
    ----------
    latitudes : latitudes of the cells of the full field in degrees, in increasing or decreasing order
    bounds : the bounds of these cells in degrees, with one element more than `latitudes`; needed if the field does not
        reach from pole to pole; if None (default), the poles and the midpoints between neighboring latitudes

    Returns
    -------
    numpy.ndarray
        float64, one number per latitude, with mean 1

    Raises
    ------
    ConfigError : if latitudes or bounds are not monotonic or are beyond the poles, or if a latitude does not lie
        between its bounds
    """
    at = _to_finite_array("compute_latitude_weights: latitudes", latitudes)
    if at.ndim != 1 or at.size < 1:
        raise ConfigError(f"compute_latitude_weights: latitudes of shape {at.shape}: give one number per latitude")
    pole = 90.0 if at[-1] >= at[0] else -90.0
    between = [-pole, *(at[1:] + at[:-1]) / 2, pole] if bounds is None else bounds
    ends = _to_finite_array("compute_latitude_weights: bounds", between)
    if ends.shape != (at.size + 1,):
        raise ConfigError(
            f"compute_latitude_weights: bounds of shape {ends.shape}: {at.size} latitudes have {at.size + 1}"
        )
    for name, values in (("latitudes", at), ("bounds", ends)):
        steps = np.diff(values)
        if np.abs(values).max() > 90.0 or not ((steps > 0).all() or (steps < 0).all()):
            raise ConfigError(f"compute_latitude_weights: {name} must increase or decrease between -90 and 90 degrees")
    low, high = np.sort(np.stack([ends[:-1], ends[1:]]), axis=0)
    if (outside := (at < low) | (at > high)).any():
        i = int(outside.argmax())
        raise ConfigError(
            f"compute_latitude_weights: latitude {at[i]:g} does not lie between its bounds {ends[i]:g} and "
            f"{ends[i + 1]:g}: bounds must have the order of the latitudes"
        )
    sizes = np.abs(np.diff(np.sin(np.deg2rad(ends))))
    return np.asarray(sizes / sizes.mean())


def _to_finite_array(name: str, values: Any) -> np.ndarray:
    try:
        array = np.asarray(values, np.float64)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{name}: {error}") from error
    if not np.isfinite(array).all():
        raise ConfigError(f"{name} must be finite numbers")
    return array
