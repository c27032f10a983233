"""Layer norm, RMS norm and batch norm, and the sums over channels that they need."""

from __future__ import annotations

from typing import Any

import numpy as np

from fsdpx.core.array.kernels.dispatch import kernel

__all__ = [
    "batch_norm_backward_factors", "batch_norm_scales_and_running_stats", "channel_affine", "channel_gradient_sums",
    "channel_norm_backward_input", "channel_squares", "channel_sums", "layer_norm", "layer_norm_backward_input",
    "layer_norm_backward_params", "rms_norm", "rms_norm_backward_input", "rms_norm_backward_params",
]  # fmt: skip


@kernel()
def layer_norm(xp: Any, x: Any, weight: Any, bias: Any, eps: float) -> tuple[Any, Any, Any]:
    """Normalize each row of x (Ba et al. 2016): return `(x - mean) * rstd * weight + bias`, where
    `rstd = 1 / sqrt(var + eps)`.

    Parameters
    ----------
    x : (rows, features)
    weight, bias : (features,) or None
    eps : number that is added to the variance

    Returns
    -------
    y, mean, rstd : the result, and the statistics (rows,) of each row, in float32 for 16-bit x
    """
    mean = xp.mean(x, axis=1)
    centred = x - mean[:, None]
    rstd = 1.0 / xp.sqrt(xp.mean(xp.square(centred), axis=1) + eps)
    y = centred * rstd[:, None]
    if weight is not None:
        y = y * weight
    return (y if bias is None else y + bias), mean, rstd


@kernel()
def layer_norm_backward_input(xp: Any, x: Any, weight: Any, mean: Any, rstd: Any, dy: Any) -> Any:
    """Return the gradient of `layer_norm` with respect to x: `rstd * (h - mean(h) - n * mean(h * n))`, where
    `h = dy * weight` and n is the normalized row."""
    n = (x - mean[:, None]) * rstd[:, None]
    h = dy if weight is None else dy * weight
    along = xp.mean(h * n, axis=1)[:, None]
    return (h - xp.mean(h, axis=1)[:, None] - n * along) * rstd[:, None]


@kernel(narrow=0, into=("gw", "gb"))
def layer_norm_backward_params(xp: Any, x: Any, mean: Any, rstd: Any, dy: Any, gw: Any, gb: Any) -> None:
    """Add the parameter gradients of `layer_norm` to gw and gb, either of which may be None. The weight gradient is
    the sum of `dy * n` over the rows, where n is the normalized row. The bias gradient is the sum of dy over the
    rows."""
    if gw is not None:
        gw += xp.sum(dy * ((x - mean[:, None]) * rstd[:, None]), axis=0)
    if gb is not None:
        gb += xp.sum(dy, axis=0)


@kernel()
def rms_norm(xp: Any, x: Any, weight: Any, eps: float) -> tuple[Any, Any]:
    """Normalize each row of x by its root mean square (Zhang and Sennrich 2019): return `x * rstd * weight`, where
    `rstd = 1 / sqrt(mean(x^2) + eps)`.

    Parameters
    ----------
    x : (rows, features)
    weight : (features,) or None
    eps : number that is added to the mean square

    Returns
    -------
    y, rstd : the result, and rstd (rows,), in float32 for 16-bit x
    """
    rstd = 1.0 / xp.sqrt(xp.mean(xp.square(x), axis=1) + eps)
    y = x * rstd[:, None]
    return (y if weight is None else y * weight), rstd


@kernel()
def rms_norm_backward_input(xp: Any, x: Any, weight: Any, rstd: Any, dy: Any) -> Any:
    """Return the gradient of `rms_norm` with respect to x: `rstd * (h - n * mean(h * n))`, where `h = dy * weight` and
    `n = x * rstd`."""
    n = x * rstd[:, None]
    h = dy if weight is None else dy * weight
    return (h - n * xp.mean(h * n, axis=1)[:, None]) * rstd[:, None]


@kernel(narrow=0, into=("gw",))
def rms_norm_backward_params(xp: Any, x: Any, rstd: Any, dy: Any, gw: Any) -> None:
    """Add the weight gradient of `rms_norm` to gw. It is the sum of `dy * x * rstd` over the rows."""
    gw += xp.sum(dy * (x * rstd[:, None]), axis=0)


@kernel(narrow=0)
def channel_sums(xp: Any, x: Any) -> Any:
    """Return the sums of x (samples, channels, ...) over all dims except channels, as (channels,) float64."""
    return xp.sum(x, axis=_list_non_channel_dims(x), dtype=np.float64)


@kernel(narrow=0)
def channel_squares(xp: Any, x: Any, mean: Any) -> Any:
    """Given the means (channels,), return the per-channel sums of `(x - mean)^2`, as (channels,) float64."""
    return xp.sum(xp.square(x - _broadcast_channels(mean, x)), axis=_list_non_channel_dims(x), dtype=np.float64)


@kernel()
def channel_affine(xp: Any, x: Any, mean: Any, scale: Any, shift: Any) -> Any:
    """Return `(x - mean) * scale + shift` for x (samples, channels, ...), where mean, scale and shift are
    (channels,)."""
    return (x - _broadcast_channels(mean, x)) * _broadcast_channels(scale, x) + _broadcast_channels(shift, x)


@kernel(narrow=0)
def channel_gradient_sums(xp: Any, dy: Any, x: Any, mean: Any, rstd: Any) -> Any:
    """Return the per-channel sums that the backward pass of batch norm needs, as a float64 array of size 2 * channels:
    the sums of dy, followed by the sums of `dy * (x - mean) * rstd`."""
    normal = (x - _broadcast_channels(mean, x)) * _broadcast_channels(rstd, x)
    sums = [xp.sum(a, axis=_list_non_channel_dims(x), dtype=np.float64) for a in (dy, dy * normal)]
    return xp.concatenate(sums)


@kernel()
def channel_norm_backward_input(xp: Any, dy: Any, x: Any, mean: Any, scale: Any, along: Any, across: Any) -> Any:
    """Return the input gradient of batch norm, `(dy - along - (x - mean) * across) * scale`, where mean, scale, along
    and across are (channels,)."""
    return (
        dy - _broadcast_channels(along, x) - (x - _broadcast_channels(mean, x)) * _broadcast_channels(across, x)
    ) * _broadcast_channels(scale, x)


@kernel(narrow=0, into=("running_mean", "running_var"))
def batch_norm_scales_and_running_stats(
    xp: Any, squares: Any, mean: Any, weight: Any, running_mean: Any, running_var: Any, count: float, eps: float,
    momentum: float,
) -> tuple[Any, Any]:  # fmt: skip
    """Compute the factors of batch norm from its statistics, and update the running statistics in place.

    Return `rstd = 1 / sqrt(squares / count + eps)` and the product of rstd and weight; both are (channels,) float64.
    weight, running_mean and running_var are (channels,) or None. The running statistics move towards the mean and the
    unbiased variance by the fraction `momentum`.
    """
    var = squares / max(count, 1.0)
    rstd = 1.0 / xp.sqrt(var + eps)
    if count:
        unbiased = var * (count / max(count - 1.0, 1.0))
        for running, now in ((running_mean, mean), (running_var, unbiased)):
            if running is not None:
                running *= 1.0 - momentum
                running += (momentum * now).astype(running.dtype)
    return rstd, rstd if weight is None else rstd * weight


@kernel(narrow=0)
def batch_norm_backward_factors(xp: Any, sums: Any, rstd: Any, weight: Any, count: float) -> tuple[Any, Any, Any]:
    """Return the arguments `scale`, `along` and `across` of `channel_norm_backward_input`. Each is a float64 array
    (channels,).

    Parameters
    ----------
    sums : result of `channel_gradient_sums`, summed over `count` elements per channel
    rstd : result of `batch_norm_scales_and_running_stats`
    weight : (channels,) or None
    count : number of elements per channel
    """
    whole = sums / max(count, 1.0)
    scale = rstd if weight is None else rstd * weight
    return scale, whole[: rstd.size], whole[rstd.size :] * rstd


def _list_non_channel_dims(x: Any) -> tuple[int, ...]:
    return (0, *range(2, x.ndim))


def _broadcast_channels(channels: Any, x: Any) -> Any:
    """Reshape and cast per-channel values so that they broadcast with x (samples, channels, ...)."""
    return channels.astype(x.dtype, copy=False).reshape(1, -1, *(1,) * (x.ndim - 2))
