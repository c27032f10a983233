"""Group normalization of fields in plain array code: statistics of each channel of each sample, and their gradients."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from fsdpx.core.array.kernels.dispatch import kernel

__all__ = ["group_norm_affine", "group_norm_backward", "group_norm_gradient_sums", "group_norm_moments"]


@kernel(narrow=0)
def group_norm_moments(xp: Any, x: Any) -> Any:
    """Return the mean of each channel of each sample of x (samples, channels, *cells), followed by the sum of squared
    deviations from it: (2, samples, channels) float64. Both are 0 if there are no cells."""
    dims, count = tuple(range(2, x.ndim)), max(math.prod(x.shape[2:]), 1)
    mean = xp.sum(x, axis=dims, dtype=np.float64) / count
    return xp.stack([mean, xp.sum(xp.square(x - _broadcast_over_cells(mean, x)), axis=dims, dtype=np.float64)])


@kernel()
def group_norm_affine(xp: Any, x: Any, mean: Any, scale: Any, shift: Any) -> Any:
    """Return (x - mean) * scale + shift, where mean, scale and shift are (samples, channels)."""
    scaled = (x - _broadcast_over_cells(mean, x)) * _broadcast_over_cells(scale, x)
    return scaled + _broadcast_over_cells(shift, x)


@kernel(narrow=0)
def group_norm_gradient_sums(xp: Any, dy: Any, x: Any, mean: Any, rstd: Any) -> Any:
    """Return, for each channel of each sample, the sum over cells of dy, followed by the sum of dy * (x - mean) *
    rstd: (2, samples, channels) float64. mean and rstd are (samples, channels)."""
    normal = (x - _broadcast_over_cells(mean, x)) * _broadcast_over_cells(rstd, x)
    return xp.stack([xp.sum(a, axis=tuple(range(2, x.ndim)), dtype=np.float64) for a in (dy, dy * normal)])


@kernel()
def group_norm_backward(xp: Any, dy: Any, x: Any, mean: Any, scale: Any, along: Any, across: Any) -> Any:
    """Return dy * scale - along - (x - mean) * across, where mean, scale, along and across are (samples, channels)."""
    centred = (x - _broadcast_over_cells(mean, x)) * _broadcast_over_cells(across, x)
    return dy * _broadcast_over_cells(scale, x) - _broadcast_over_cells(along, x) - centred


def _broadcast_over_cells(a: Any, x: Any) -> Any:
    """Return values (samples, channels) in a shape and dtype that can be combined with x."""
    return a.astype(x.dtype, copy=False).reshape(*a.shape, *(1,) * (x.ndim - 2))
