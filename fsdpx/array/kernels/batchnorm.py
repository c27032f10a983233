"""Batch norm per channel, dim 1: sums for its statistics, and passes over the elements."""

from typing import Any

import numpy as np

from fsdpx.array.kernels.dispatch import kernel

__all__ = ["channel_affine", "channel_norm_backward", "channel_squares", "channel_sums", "channel_sums_with"]


@kernel(narrow=0)
def channel_sums(xp: Any, x: Any) -> Any:
    """The sum of each channel of x (samples, channels, ...), float64."""
    return xp.sum(x, axis=_others(x), dtype=np.float64)


@kernel(narrow=0)
def channel_squares(xp: Any, x: Any, mean: Any) -> Any:
    """The sum of (x - mean)^2 of each channel, float64; mean (channels,)."""
    return xp.sum(xp.square(x - _broad(mean, x)), axis=_others(x), dtype=np.float64)


@kernel()
def channel_affine(xp: Any, x: Any, mean: Any, scale: Any, shift: Any) -> Any:
    """(x - mean) scale + shift, each (channels,)."""
    return (x - _broad(mean, x)) * _broad(scale, x) + _broad(shift, x)


@kernel(narrow=0)
def channel_sums_with(xp: Any, dy: Any, x: Any, mean: Any, rstd: Any) -> Any:
    """The sums of dy, then those of dy (x - mean) rstd, of each channel: (2 channels,) float64."""
    normal = (x - _broad(mean, x)) * _broad(rstd, x)
    sums = [xp.sum(a, axis=_others(x), dtype=np.float64) for a in (dy, dy * normal)]
    return xp.concatenate(sums)


@kernel()
def channel_norm_backward(xp: Any, dy: Any, x: Any, mean: Any, scale: Any, along: Any, across: Any) -> Any:
    """(dy - along - (x - mean) across) scale, each (channels,)."""
    return (dy - _broad(along, x) - (x - _broad(mean, x)) * _broad(across, x)) * _broad(scale, x)


def _others(x: Any) -> tuple[int, ...]:
    return (0, *range(2, x.ndim))


def _broad(channels: Any, x: Any) -> Any:
    """One value per channel, in shape and dtype to be combined with x."""
    return channels.astype(x.dtype, copy=False).reshape(1, -1, *(1,) * (x.ndim - 2))
