"""Group norm and instance norm. Statistics are computed over all cells of a field, which may be partitioned over
ranks."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np

from fsdpx.core.array.kernels.memory_order import channels_last, put_channels_last
from fsdpx.errors import ConfigError, DataError, ShapeError
from fsdpx.ext.fields import kernels
from fsdpx.ext.fields.cell_reductions import all_gather_and_merge_moments, all_reduce_moments, all_reduce_over_parts
from fsdpx.ext.fields.kernels.convolution import write_or_add_gradient
from fsdpx.ext.fields.kernels.group_norm import has_rows_of_channels, merge_channel_moments_into_groups
from fsdpx.ext.fields.local_arrays import HoldsLocalArray, require_weights_of_cells, require_weights_of_channels
from fsdpx.nn.gradient_accumulation import get_gradient_and_whether_to_add
from fsdpx.nn.layer import Array, Layer, LayerContext, ParameterSpec, Params, ShardedLayer, require_positive
from fsdpx.nn.losses import CellWeights
from fsdpx.nn.norm import cast_channel_arrays, make_affine_specs
from fsdpx.nn.shard_specs import FieldPartition, ShardingContext, bind_partition

__all__ = ["GroupNorm", "InstanceNorm"]


class GroupNorm(Layer, HoldsLocalArray):
    """Group normalization of (samples, num_channels, *cells) (Wu and He 2018): (x - mean) / sqrt(var + eps) * weight +
    bias.

    Mean and biased variance are computed over the channels of a group and all cells, separately for each sample. On a
    grid of ranks, the parts' counts, means and sums of squared deviations are merged in float64 with the method of Chan
    et al. (1979), which avoids cancellation. For each sample and group, the forward pass all-gathers 24 bytes per rank,
    and the backward pass all-reduces 16 bytes. As in PyTorch, DataError is raised if the batch has one sample and each
    group has a single value.

    Parameters
    ----------
    num_groups : number of groups of channels, which must divide num_channels
    num_channels : size of dim 1
    eps : number added to the variance; default 1e-5
    affine : whether the layer has `weight` (initially ones) and `bias` (initially zeros), both `(num_channels,)`;
        default True
    weights : weight of each cell in mean and variance, such as its volume: an array (*cells) or (num_channels, *cells)
        of numbers >= 0 for this rank's part of the field. Default None: all weights are 1
    """

    fields = True
    parts: FieldPartition | None = None
    """Partition of the input. It is needed only if there are `weights`, because their shape must fit this rank's
    part."""
    kernel_names = (
        "channels_last", "group_norm", "group_norm_affine", "group_norm_backward", "group_norm_backward_input",
        "group_norm_gradient_sums_by_channel", "channel_means_and_square_deviations",
    )  # fmt: skip

    def __init__(
        self, num_groups: int, num_channels: int, eps: float = 1e-5, affine: bool = True, *, weights: Any = None
    ) -> None:
        require_positive(self, num_groups=num_groups, num_channels=num_channels)
        if num_channels % num_groups:
            raise ConfigError(f"GroupNorm: num_channels={num_channels} must be a multiple of num_groups={num_groups}")
        self.num_groups, self.num_channels = num_groups, num_channels
        self.eps, self.affine = float(eps), bool(affine)
        self.weights = None if weights is None else CellWeights(type(self).__name__, weights)

    def specs(self) -> dict[str, ParameterSpec]:
        return make_affine_specs((self.num_channels,)) if self.affine else {}

    def shard_over_ranks(self, request: ShardingContext) -> ShardedLayer:
        made = super().shard_over_ranks(request)
        if self.weights is None or not isinstance(made.kind, FieldPartition):
            return made
        if not made.kind.has_cells:
            raise ConfigError(f"{request.path!r} {self!r} reads {made.kind}: weights are for cells of a grid")
        return replace(made, layer=bind_partition(self, made.kind))

    def require_local_cells(self, cells: tuple[int, ...]) -> None:
        require_weights_of_cells(self, "weights", self.weights, cells)

    def forward(self, env: LayerContext, p: Params, x: Array) -> tuple[Array, Any]:
        if x.ndim < 2 or x.shape[1] != self.num_channels:
            wanted = f"(samples, {self.num_channels}, ...)"
            raise ShapeError(f"{self!r} wants an input of shape {wanted}, got {tuple(x.shape)}")
        alone = env.mesh.parts.size == 1 and env.xp is np and self.weights is None
        if not (alone and has_rows_of_channels(x)):
            x = put_channels_last(env.xp, x)
        elif env.ignores_memory_order:  # use channels last: the loops for channels first add in a different order
            x = channels_last(np, x)
        count = float(self.num_channels // self.num_groups * math.prod(x.shape[2:]))
        if env.mesh.parts.size == 1 and count == 1 and self._refuses_single_values(env, x):
            raise DataError(
                f"{self!r}: more than 1 value per group is needed, and an input {tuple(x.shape)} has 1: it is its own "
                "mean, and the result does not depend on it. Give more cells or channels per group, or leave it out"
            )
        if alone:
            y, mean, rstd = kernels.group_norm(np, x, p.get("weight"), p.get("bias"), self.num_groups, self.eps)
            return y, (x, mean, rstd, None)
        if self.weights is None:
            moments = all_gather_and_merge_moments(env, self._compute_local_group_moments(env, x, count), "GroupNorm")
        else:
            moments = self._all_reduce_weighted_moments(env, x)
        count, mean, squares = moments
        count = env.xp.maximum(count, 1.0) if self.weights is None else count
        rstd = 1.0 / env.xp.sqrt(squares / count + self.eps)
        mean, rstd = cast_channel_arrays(x, *(self._repeat_for_channels(env, a) for a in (mean, rstd)))
        scale, shift = rstd, env.xp.zeros_like(rstd)
        if self.affine:
            scale, shift = rstd * p["weight"], shift + p["bias"]
        y = kernels.group_norm_affine(env.xp, x, *cast_channel_arrays(x, mean, scale, shift))
        return y, (x, mean, rstd, count)

    def backward_input(self, env: LayerContext, p: Params, saved: Any, dy: Array) -> tuple[Array, Any]:
        x, mean, rstd, count = saved
        if count is None:
            dx, sums = kernels.group_norm_backward_input(np, dy, x, mean, rstd, p.get("weight"), self.num_groups)
            return dx, (sums,)
        sums = kernels.group_norm_gradient_sums_by_channel(env.xp, dy, x, mean, rstd)
        weighted = sums * p["weight"].astype(np.float64) if self.affine else sums
        totals = weighted.reshape(2, x.shape[0], self.num_groups, self.num_channels // self.num_groups).sum(axis=3)
        all_reduce_over_parts(env, totals, "GroupNorm backward")
        along, across = (self._repeat_for_channels(env, a) * rstd for a in totals / count)
        scale = rstd * p["weight"] if self.affine else rstd
        mean, scale, along, across = cast_channel_arrays(x, mean, scale, along, across * rstd)
        if self.weights is None:
            return kernels.group_norm_backward(env.xp, dy, x, mean, scale, along, across), (sums,)
        # compute in the dtype of the weights: quotients of values and the sum of weights may not fit in 16 bits
        weights = self._get_weights(env, x)
        shared = kernels.group_norm_affine(env.xp, x.astype(weights.dtype, copy=False), mean, across, along) * weights
        return (dy * scale.reshape(*scale.shape, *(1,) * (x.ndim - 2)) - shared).astype(dy.dtype, copy=False), (sums,)

    def backward_params(self, env: LayerContext, g: Params, kept: Any) -> None:
        (sums,) = kept
        for name, values in zip(("bias", "weight"), sums.sum(axis=1), strict=True):
            if (into := get_gradient_and_whether_to_add(g, name)) is not None:
                write_or_add_gradient(into, values)

    def _compute_local_group_moments(self, env: LayerContext, x: Array, count: float) -> Array:
        """Return the count, mean and sum of squared deviations over this rank's cells for each sample and group, as a
        float64 array (3, samples, groups)."""
        xp, cells = env.xp, math.prod(x.shape[2:])
        moments = kernels.channel_means_and_square_deviations(xp, x)
        mean, squares = merge_channel_moments_into_groups(xp, moments, self.num_groups, cells)
        return xp.stack([xp.full(mean.shape, count, dtype=np.float64), mean, squares])

    def _all_reduce_weighted_moments(self, env: LayerContext, x: Array) -> Array:
        """Return the sum of weights, the weighted mean and the weighted sum of squared deviations for each sample and
        group, as a float64 array (3, samples, groups). All three cover all cells of the field."""

        def split(a: Array) -> Array:
            groups = self.num_groups if a.shape[1] > 1 else 1
            return a.reshape(a.shape[0], groups, a.shape[1] // groups, *a.shape[2:])

        weights, dims = self._get_weights(env, x), tuple(range(2, x.ndim + 1))
        weights = env.xp.broadcast_to(split(weights), (1, *split(x).shape[1:]))
        # add up and check the weights only once, because a check makes the host wait for a GPU
        key = "sums of weights", id(self.weights), self.num_groups, weights.dtype.str
        if (count := env.constants.get(key)) is None:
            count = weights.sum(axis=dims, dtype=np.float64)
        moments = all_reduce_moments(env, split(x), dims, "GroupNorm", weights, count)
        if key not in env.constants and x.shape[0]:
            if not getattr(env.xp, "holds_no_data", False) and not bool((moments[0] > 0).all()):
                raise DataError(f"{self!r}: all weights of a group are 0: give some cell a weight above 0")
            env.constants[key] = count
        return moments

    def _get_weights(self, env: LayerContext, x: Array) -> Array:
        """Return the weights in a shape that broadcasts with x."""
        assert self.weights is not None
        require_weights_of_channels(self, "weights", self.weights, x)
        if getattr(env.xp, "holds_no_data", False):  # in a dry run, x may be the full field, so skip the check
            return env.xp.empty((1, *x.shape[1:]), dtype=x.dtype)
        self.weights.require_broadcastable(self, x.shape, error=ShapeError)
        return self.weights.reshape_to_broadcast(env, x)

    def _repeat_for_channels(self, env: LayerContext, a: Array) -> Array:
        """Repeat the value of each group for each of its channels: (samples, groups) -> (samples, channels)."""
        return env.xp.repeat(a, self.num_channels // self.num_groups, axis=1)

    def _refuses_single_values(self, env: LayerContext, x: Array) -> bool:
        """Return whether a group with a single value raises DataError. As in PyTorch, it does so only if the batch has
        one sample."""
        return x.shape[0] == 1 and env.mesh.data.size == 1 and not getattr(env.xp, "holds_no_data", False)


class InstanceNorm(GroupNorm):
    """Instance normalization (Ulyanov et al. 2016): `GroupNorm` with one channel per group.

    Equivalent to PyTorch's InstanceNorm1d, 2d and 3d without running statistics. A field with a single cell raises
    DataError, regardless of the number of samples.

    Parameters
    ----------
    num_features : size of dim 1
    eps, affine, weights : as in `GroupNorm`; affine is False by default
    """

    def __init__(self, num_features: int, eps: float = 1e-5, *, affine: bool = False, weights: Any = None) -> None:
        super().__init__(num_features, num_features, eps, affine, weights=weights)
        self.num_features = num_features

    def _refuses_single_values(self, env: LayerContext, x: Array) -> bool:
        return x.size > 0
