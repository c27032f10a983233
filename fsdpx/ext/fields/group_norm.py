"""Group norm and instance norm, whose statistics cover all cells of a field that may be partitioned over ranks."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from fsdpx.errors import ConfigError, DataError, ShapeError
from fsdpx.ext.fields.cell_reductions import all_reduce_moments, all_reduce_over_parts
from fsdpx.nn.gradient_accumulation import accumulation_dtype, add_sum_into
from fsdpx.nn.layer import Array, Layer, LayerContext, ParameterSpec, Params, require_positive
from fsdpx.nn.norm import make_affine_specs

__all__ = ["GroupNorm", "InstanceNorm"]


class GroupNorm(Layer):
    """Group normalization of (samples, num_channels, *cells) (Wu and He 2018): (x - mean) / sqrt(var + eps) * weight +
    bias.

    Mean and biased variance are taken over the channels of a group and all cells, separately for each sample. On a
    grid of ranks, the counts, means and sums of squares of the parts are merged in float64 by the rule of Chan et al.
    (1979), which avoids cancellation. For each sample and group, forward all-gathers 24 bytes, and backward
    all-reduces 16 bytes. A batch of one sample with one value per group raises DataError, as in PyTorch.

    Parameters
    ----------
    num_groups : number of groups of channels; must divide num_channels
    num_channels : size of dim 1
    eps : added to the variance; default 1e-5
    affine : whether the layer has `weight` (initially ones) and `bias` (initially zeros), both `(num_channels,)`;
        default True
    """

    fields = True

    def __init__(self, num_groups: int, num_channels: int, eps: float = 1e-5, affine: bool = True) -> None:
        require_positive(self, num_groups=num_groups, num_channels=num_channels)
        if num_channels % num_groups:
            raise ConfigError(f"GroupNorm: num_channels={num_channels} must be a multiple of num_groups={num_groups}")
        self.num_groups, self.num_channels = num_groups, num_channels
        self.eps, self.affine = float(eps), bool(affine)

    def specs(self) -> dict[str, ParameterSpec]:
        return make_affine_specs((self.num_channels,)) if self.affine else {}

    def forward(self, env: LayerContext, p: Params, x: Array) -> tuple[Array, Any]:
        if x.ndim < 2 or x.shape[1] != self.num_channels:
            wanted = f"(samples, {self.num_channels}, ...)"
            raise ShapeError(f"{self!r} wants an input of shape {wanted}, got {tuple(x.shape)}")
        grouped = self._split_into_groups(x)
        if env.mesh.parts.size == 1 and grouped.shape[2] == 1 and self._refuses_single_values(env, x):
            raise DataError(
                f"{self!r}: more than 1 value per group is needed, and an input {tuple(x.shape)} has 1: it is its own "
                "mean, and the result does not depend on it. Give more cells or channels per group, or leave it out"
            )
        count, mean, squares = all_reduce_moments(env, grouped, (2,), "GroupNorm")
        rstd = 1.0 / env.xp.sqrt(squares / env.xp.maximum(count, 1.0) + self.eps)
        mean, rstd = (a.astype(accumulation_dtype(x.dtype))[:, :, None] for a in (mean, rstd))
        normal = ((grouped - mean) * rstd).astype(x.dtype, copy=False).reshape(x.shape)
        y = normal
        if self.affine:
            y = normal * _reshape_for_broadcast(p["weight"], x) + _reshape_for_broadcast(p["bias"], x)
        return y.astype(x.dtype, copy=False), (normal, rstd, count)

    def backward_input(self, env: LayerContext, p: Params, saved: Any, dy: Array) -> tuple[Array, Any]:
        normal, rstd, count = saved
        g = self._split_into_groups(dy * _reshape_for_broadcast(p["weight"], dy) if self.affine else dy)
        grouped = self._split_into_groups(normal)
        sums = env.xp.stack([g.sum(axis=2, dtype=np.float64), (g * grouped).sum(axis=2, dtype=np.float64)])
        all_reduce_over_parts(env, sums, "GroupNorm backward")
        means = (sums / env.xp.maximum(count, 1.0)).astype(accumulation_dtype(dy.dtype))
        dx = (g - means[0][:, :, None] - grouped * means[1][:, :, None]) * rstd
        return dx.astype(dy.dtype, copy=False).reshape(dy.shape), (normal, dy)

    def backward_params(self, env: LayerContext, g: Params, kept: Any) -> None:
        normal, dy = kept
        dims = (0, *range(2, dy.ndim))
        if "weight" in g:
            add_sum_into(env.xp, g["weight"], dy * normal, dims)
        if "bias" in g:
            add_sum_into(env.xp, g["bias"], dy, dims)

    def _refuses_single_values(self, env: LayerContext, x: Array) -> bool:
        """Return whether groups with a single value raise DataError: as in PyTorch, only if the batch is one sample."""
        return x.shape[0] == 1 and env.mesh.data.size == 1 and not getattr(env.xp, "holds_no_data", False)

    def _split_into_groups(self, x: Array) -> Array:
        """Reshape (samples, channels, *cells) to (samples, groups, elements)."""
        size = x.shape[1] // self.num_groups * math.prod(x.shape[2:])
        return x.reshape(x.shape[0], self.num_groups, size)


class InstanceNorm(GroupNorm):
    """Instance normalization (Ulyanov et al. 2016): `GroupNorm` with one channel per group.

    Like PyTorch's InstanceNorm1d, 2d and 3d without running statistics. A field of one cell raises DataError for any
    number of samples.

    Parameters
    ----------
    num_features : size of dim 1
    eps, affine : as in `GroupNorm`; affine is False by default
    """

    def __init__(self, num_features: int, eps: float = 1e-5, *, affine: bool = False) -> None:
        super().__init__(num_features, num_features, eps, affine)
        self.num_features = num_features

    def _refuses_single_values(self, env: LayerContext, x: Array) -> bool:
        return x.size > 0


def _reshape_for_broadcast(a: Array, x: Array) -> Array:
    return a.reshape(-1, *(1,) * (x.ndim - 2))
