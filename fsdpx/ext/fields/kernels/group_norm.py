"""Group normalization of fields in plain array code.

`group_norm` and `group_norm_backward_input` handle fields that one rank holds in full. If a field is partitioned over
ranks, the statistics of each channel of each sample are first computed and combined over ranks. They are then used to
normalize the field."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from fsdpx.core.array.kernels.dispatch import kernel

__all__ = [
    "channel_means_and_square_deviations", "group_norm", "group_norm_affine", "group_norm_backward",
    "group_norm_backward_input", "group_norm_gradient_sums_by_channel", "has_rows_of_channels",
    "merge_channel_moments_into_groups",
]  # fmt: skip

MIN_ROW_ELEMENTS = 16
"""Length, in cells, of the shortest rows that compiled loops read in a field with channels first in memory."""


def has_rows_of_channels(x: Any) -> bool:
    """Return whether the compiled code of `group_norm` reads the field x (samples, channels, *cells) as it is. This is
    so if there are several channels, they are first in memory, and the number of cells is a multiple of
    MIN_ROW_ELEMENTS."""
    cells = math.prod(x.shape[2:])
    return x.ndim > 2 and x.shape[1] > 1 and cells % MIN_ROW_ELEMENTS == 0 < cells and x.flags.c_contiguous


@kernel()
def group_norm(xp: Any, x: Any, weight: Any, bias: Any, groups: int, eps: float) -> tuple[Any, Any, Any]:
    """Return three arrays: the value `(x - mean) * rstd * weight + bias`, `mean`, and `rstd`, which is
    `1 / sqrt(var + eps)`. `mean` and `rstd` have the shape (samples, channels), with equal values for all channels of a
    group. `weight` and `bias` are (channels,) or None."""
    size, cells = x.shape[1] // groups, math.prod(x.shape[2:])
    moments = channel_means_and_square_deviations.__wrapped__(xp, x)  # type: ignore[attr-defined]
    mean, squares = merge_channel_moments_into_groups(xp, moments, groups, cells)
    rstd = 1.0 / xp.sqrt(squares / max(size * cells, 1) + eps)
    mean, rstd = (xp.repeat(a, size, axis=1).astype(x.dtype) for a in (mean, rstd))
    scale, shift = rstd if weight is None else rstd * weight, xp.zeros_like(rstd)
    values = mean, scale, shift if bias is None else shift + bias
    return group_norm_affine.__wrapped__(xp, x, *values), mean, rstd  # type: ignore[attr-defined]


@kernel()
def group_norm_backward_input(
    xp: Any, dy: Any, x: Any, mean: Any, rstd: Any, weight: Any, groups: int
) -> tuple[Any, Any]:
    """Return the gradient of `group_norm` with respect to x, and the same sums as
    `group_norm_gradient_sums_by_channel`."""
    size, cells = x.shape[1] // groups, math.prod(x.shape[2:])
    sums = group_norm_gradient_sums_by_channel.__wrapped__(xp, dy, x, mean, rstd)  # type: ignore[attr-defined]
    totals = (sums if weight is None else sums * weight).reshape(2, x.shape[0], groups, size).sum(axis=3)
    along, across = xp.repeat(totals / max(size * cells, 1), size, axis=2)
    values = mean, rstd if weight is None else rstd * weight, along * rstd, across * rstd * rstd
    return group_norm_backward.__wrapped__(xp, dy, x, *values), sums  # type: ignore[attr-defined]


def merge_channel_moments_into_groups(xp: Any, moments: Any, groups: int, cells: int) -> tuple[Any, Any]:
    """Return the mean and the sum of squared deviations for each group of channels, both (samples, groups). `moments`,
    (2, samples, channels), holds the same two values for each channel, computed over `cells` cells."""
    samples, channels = moments.shape[1:]
    of_groups = moments.reshape(2, samples, groups, channels // groups)
    mean = of_groups[0].mean(axis=2)
    apart = of_groups[0] - mean[:, :, None]
    return mean, of_groups[1].sum(axis=2) + (apart * apart).sum(axis=2) * cells


@kernel(narrow=0)
def channel_means_and_square_deviations(xp: Any, x: Any) -> Any:
    """Return the mean and the sum of squared deviations of each channel of each sample of x (samples, channels,
    *cells), as a float64 array (2, samples, channels). Both are 0 if there are no cells."""
    dims, count = tuple(range(2, x.ndim)), max(math.prod(x.shape[2:]), 1)
    mean = xp.sum(x, axis=dims, dtype=np.float64) / count
    return xp.stack([mean, xp.sum(xp.square(x - _broadcast_over_cells(mean, x)), axis=dims, dtype=np.float64)])


@kernel()
def group_norm_affine(xp: Any, x: Any, mean: Any, scale: Any, shift: Any) -> Any:
    """Return (x - mean) * scale + shift, where mean, scale and shift are (samples, channels)."""
    scaled = (x - _broadcast_over_cells(mean, x)) * _broadcast_over_cells(scale, x)
    return scaled + _broadcast_over_cells(shift, x)


@kernel(narrow=0)
def group_norm_gradient_sums_by_channel(xp: Any, dy: Any, x: Any, mean: Any, rstd: Any) -> Any:
    """Return two sums over cells for each channel of each sample: of dy, and of dy * (x - mean) * rstd. The result is a
    float64 array (2, samples, channels), and mean and rstd are (samples, channels)."""
    normal = (x - _broadcast_over_cells(mean, x)) * _broadcast_over_cells(rstd, x)
    return xp.stack([xp.sum(a, axis=tuple(range(2, x.ndim)), dtype=np.float64) for a in (dy, dy * normal)])


@kernel()
def group_norm_backward(xp: Any, dy: Any, x: Any, mean: Any, scale: Any, along: Any, across: Any) -> Any:
    """Return dy * scale - along - (x - mean) * across, where mean, scale, along and across are (samples, channels)."""
    centred = (x - _broadcast_over_cells(mean, x)) * _broadcast_over_cells(across, x)
    return dy * _broadcast_over_cells(scale, x) - _broadcast_over_cells(along, x) - centred


def _broadcast_over_cells(a: Any, x: Any) -> Any:
    """Return `a`, (samples, channels), converted to a shape and dtype that can be combined with x."""
    return a.astype(x.dtype, copy=False).reshape(*a.shape, *(1,) * (x.ndim - 2))
