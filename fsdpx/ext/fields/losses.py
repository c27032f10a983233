"""Losses and error metrics for fields, such as VRMSE. They are computed over the full field even if it is partitioned
over ranks.

They can be used for training and as metrics, for example in `fit(metrics={"vrmse": nn.VRMSE()})`."""

from __future__ import annotations

import math
from typing import Any, ClassVar

import numpy as np

from fsdpx.core.array.kernels import squared_error, sum_squares_of_blocks
from fsdpx.core.array.kernels.memory_order import put_channels_first
from fsdpx.errors import ConfigError, DataError
from fsdpx.ext.fields.cell_reductions import all_reduce_moments, all_reduce_over_parts, sum_squares_over_cells
from fsdpx.ext.fields.halo import get_local_range
from fsdpx.nn.layer import Array, LayerContext, require_finite_arguments
from fsdpx.nn.losses import (
    CellWeights,
    Loss,
    compute_difference_target_and_weights,
    match_memory_order,
    require_target_shape,
)
from fsdpx.nn.shard_specs import Cuts, FieldPartition, bind_partition

__all__ = [
    "RMSE", "VRMSE", "BandRMSE", "BoundaryRMSE", "ConservedRMSE", "FieldLoss", "MaxError", "RelativeL2", "RootLoss",
]  # fmt: skip


LARGE_SAMPLE = 1 << 14
"""Number of elements from which `RelativeL2` sums the errors of each sample in a call of its own, without copies."""


class FieldLoss(Loss):
    """Base class for losses that compare fields (samples, channels, *cells) with targets of the same shape. Cells may
    have weights."""

    parts: FieldPartition | None = None
    needs_grid: ClassVar[bool] = False
    """Whether the loss depends on the positions of cells and therefore cannot be computed on a mesh."""

    def __init__(self, weights: Any = None, skipna: bool = False) -> None:
        self.weights = None if weights is None else CellWeights(type(self).__name__, weights)
        self.skipna = bool(skipna)
        self.counts = "unknown" if skipna else "samples"

    def bind_partition(self, parts: FieldPartition) -> Loss:
        return bind_partition(self, parts)

    def validate(self, shape: tuple[int, ...], target: Array) -> None:
        require_target_shape(self, tuple(shape), target, "a target of the output's shape")
        if self.weights is not None:
            self.weights.require_broadcastable(self, tuple(shape))

    def _all_reduce_weighted_sums(
        self, env: LayerContext, dims: tuple[int, ...], weights: Array | None, *values: Array
    ) -> Array:
        """Return the sum of weights and the weighted sum of each of `values`, stacked in one float64 array. Sums are
        over `dims` and over all parts of the field.

        Without weights, the sum of weights is the number of elements. Communicates only if the field is partitioned."""
        sums = self._sum_weighted_values(env, dims, weights, *values)
        return all_reduce_over_parts(env, sums, type(self).__name__)

    def _sum_weighted_values(
        self, env: LayerContext, dims: tuple[int, ...], weights: Array | None, *values: Array
    ) -> Array:
        """Return what `_all_reduce_weighted_sums` returns, but only for this rank's part."""
        xp = env.xp
        shape = tuple(n for d, n in enumerate(values[0].shape) if d not in dims)
        if weights is None:
            many = xp.full(shape, float(math.prod(values[0].shape[d] for d in dims)), dtype=np.float64)
        else:
            many = xp.broadcast_to(weights, values[0].shape).sum(axis=dims, dtype=np.float64)
        found = [(v if weights is None else weights * v).sum(axis=dims, dtype=np.float64) for v in values]
        return xp.stack([many, *found])

    def _sum_weights_and_squares(
        self, env: LayerContext, dims: tuple[int, ...], weights: Array | None, *values: Array
    ) -> Array:
        """Return what `_all_reduce_weighted_sums` returns for the squares of `values`, for this rank's part only."""
        xp = env.xp
        if weights is not None or values[0].ndim < 3:
            return self._sum_weighted_values(env, dims, weights, *(v * v for v in values))
        sums = [sum_squares_over_cells(xp, v) for v in values]
        cells = xp.full(sums[0].shape, float(math.prod(values[0].shape[2:])), dtype=np.float64)
        stacked = xp.stack([cells, *sums])
        return stacked.sum(axis=2) if 1 in dims else stacked

    def _get_cuts(self, y: Array) -> tuple[Cuts, ...]:
        """Return, for each cell dim, the first cell of each rank's part, followed by the number of cells of the
        field."""
        return (self.parts or FieldPartition.on_one_rank(y.shape[2:])).cuts

    def _compute_loss_share(self, env: LayerContext, values: Array, counts: Array) -> tuple[float, float]:
        """Return this rank's share (total, weight) of the loss: the field's total and weight, each divided by the
        number of ranks that hold parts of the field.

        The field's total is the sum of the `values` whose entry in `counts` is above 0, and its weight is the number of
        these values. All ranks of a field hold the same values, so each returns an equal share."""
        xp, ranks = env.xp, env.mesh.parts.size
        counted = counts > 0
        return float(xp.where(counted, values, 0.0).sum()) / ranks, float(counted.sum(dtype=np.float64)) / ranks


class RootLoss(FieldLoss):
    """Base class for losses that compute sqrt(sum(w error^2) / denominator) for each group of elements, such as each
    channel of a sample.

    A group consists of the elements along the dims that `_get_reduced_dims` returns."""

    kernel_names: tuple[str, ...] = ("channels_last", "sum_squares_of_blocks")
    reads_any_memory_order = True
    _divides_by_squared_target = False

    def forward(self, env: LayerContext, y: Array, target: Array) -> tuple[float, float, Any]:
        dims = self._get_reduced_dims(y)
        error, target, w = self._get_error_target_and_weights(env, y, target)
        squared = (error, target) if self._divides_by_squared_target else (error,)
        sums = self._sum_weights_and_squares(env, dims, w, *squared)
        count, squares, below = self._all_reduce_error_sums(env, dims, w, sums, target)
        total, weight, scale = self._compute_roots(env, count, squares, below)
        return total, weight, (error, w, scale, y.dtype)

    def backward(self, env: LayerContext, saved: Any, seed: float) -> Array:
        error, w, scale, dtype = saved
        share = self._compute_gradient_factors(env, error, scale, seed)
        return ((error if w is None else w * error) * share).astype(dtype, copy=False)

    def _compute_roots(
        self, env: LayerContext, count: Array, squares: Array, below: Array
    ) -> tuple[float, float, Array]:
        """Return this rank's share of the total and of the weight, and the denominators of the gradients. The arguments
        are the results of `_all_reduce_error_sums`."""
        xp = env.xp
        value = xp.sqrt(squares / xp.where(below > 0, below, 1.0))
        value = xp.where((below > 0) | (squares == 0), value, math.inf)
        return *self._compute_loss_share(env, value, count), value * below

    def _compute_gradient_factors(self, env: LayerContext, error: Array, scale: Array, seed: float) -> Array:
        """Return the factors that multiply the errors in the gradient, shaped to multiply `error`. `scale` holds the
        denominators."""
        xp = env.xp
        share = xp.where(scale > 0, seed / xp.where(scale > 0, scale, 1.0), 0.0).astype(error.dtype)
        return share.reshape(*share.shape, *(1,) * (error.ndim - share.ndim))

    def _get_error_target_and_weights(
        self, env: LayerContext, y: Array, target: Array
    ) -> tuple[Array, Array, Array | None]:
        # float64 sums over the cells of a channel are fast if these cells are consecutive in memory
        y, target = (put_channels_first(env.xp, a) for a in (y, target))
        return compute_difference_target_and_weights(env, y, target, self.weights, self.skipna)

    def _get_reduced_dims(self, y: Array) -> tuple[int, ...]:
        """Return the dims over which errors are summed, by default the cell dims."""
        return tuple(range(2, y.ndim))

    def _all_reduce_error_sums(
        self, env: LayerContext, dims: tuple[int, ...], weights: Array | None, sums: Array, target: Array
    ) -> tuple[Array, Array, Array]:
        """Return (count, sum(w error^2), denominator) for each group of elements, computed over all parts of the field.
        `sums` holds sums over this rank's part: of weights, of squared errors and, if the loss divides by it, of the
        squared target."""
        count, squares = all_reduce_over_parts(env, sums, type(self).__name__)
        return count, squares, count


class RelativeL2(RootLoss):
    """Relative L2 error |y - target| / |target| of each sample, averaged over samples.

    Output and target have the same shape (samples, ...), and norms are over all elements of a sample. On a grid of
    ranks, the sums over the parts of the field take one all-reduce of 24 bytes per sample. The relative L2 error is the
    usual error measure of neural operators (Li et al. 2021). If `eps` is 0, a target that is all zeros raises
    DataError, because its relative error is undefined.

    Parameters
    ----------
    eps : number added to |target|, for targets that are all zeros; default 0
    weights : weight of each cell in the sums: an array (*cells) or (channels, *cells) for this rank's part of the
        field; a bool array is a mask. Elements with weight 0 may be NaN, and their gradient is 0. If None (default),
        all weights are 1
    skipna : whether to ignore elements whose target is NaN, as in xarray, so that each batch can have its own mask;
        default False
    """

    kernel_names = (*RootLoss.kernel_names, "squared_error")
    _divides_by_squared_target = True

    def __init__(self, eps: float = 0.0, weights: Any = None, skipna: bool = False) -> None:
        super().__init__(weights, skipna)
        require_finite_arguments(self, eps=eps)
        self.eps = float(eps)

    def forward(self, env: LayerContext, y: Array, target: Array) -> tuple[float, float, Any]:
        plain = type(self) is RelativeL2 and self.weights is None and not self.skipna  # others may define other errors
        large = env.xp is np and y.ndim > 2 and y[:1].size >= LARGE_SAMPLE and y.dtype.char in "fd"
        if not (plain and large and y.dtype == target.dtype and target.flags.c_contiguous):
            return super().forward(env, y, target)
        squares = sum_squares_of_blocks(np, target.reshape(-1), target[0].size)
        errors = [squared_error(np, y[n : n + 1], target[n : n + 1]) for n in range(len(y))]
        sums = np.stack([np.full(len(y), float(target[0].size)), np.array(errors), squares])
        found = self._all_reduce_error_sums(env, self._get_reduced_dims(y), None, sums, target)
        total, weight, scale = self._compute_roots(env, *found)
        return total, weight, ((y, target), None, scale, y.dtype)

    def backward(self, env: LayerContext, saved: Any, seed: float) -> Array:
        if not isinstance(saved[0], tuple):
            return super().backward(env, saved, seed)
        (y, target), _, scale, _ = saved
        error = y - match_memory_order(None, target, y)
        error *= self._compute_gradient_factors(env, error, scale, seed)
        return error

    def _get_reduced_dims(self, y: Array) -> tuple[int, ...]:
        return tuple(range(1, y.ndim))

    def _all_reduce_error_sums(
        self, env: LayerContext, dims: tuple[int, ...], weights: Array | None, sums: Array, target: Array
    ) -> tuple[Array, Array, Array]:
        count, squares, of_target = all_reduce_over_parts(env, sums, type(self).__name__)
        if self.eps == 0:
            self._require_nonzero_targets((count > 0) & (of_target == 0))
        return count, squares, (env.xp.sqrt(of_target) + self.eps) ** 2

    def validate(self, shape: tuple[int, ...], target: Array) -> None:
        super().validate(shape, target)
        if self.parts is None and self.weights is None and not self.skipna and self.eps == 0 and target.size:
            first = target[(slice(None), *(0,) * (target.ndim - 1))]  # if these are not 0, no others need be read
            if not bool((first != 0).all()):
                self._require_nonzero_targets(~target.reshape(len(target), -1).any(axis=1))

    def _require_nonzero_targets(self, is_zero: Array) -> None:
        """Raise DataError if any sample has a target that is all zeros. `is_zero` holds one bool per sample."""
        if getattr(is_zero, "holds_no_data", False) or not bool(is_zero.any()):
            return
        raise DataError(
            f"{self!r}: all of the target of sample {int(is_zero.argmax())} is 0, so no error is relative to it: give "
            "eps=..., which is added to |target|, or leave such samples out"
        )


class RMSE(RootLoss):
    """Root mean squared error over the cells of each channel, averaged over channels and samples.

    Output and target have the same shape (samples, channels, *cells).

    Parameters
    ----------
    weights, skipna : as in `RelativeL2`
    """


class VRMSE(RootLoss):
    """Variance-scaled RMSE of each channel, sqrt(mean((y - target)^2) / (var(target) + eps)), averaged over channels
    and samples.

    Mean and variance are over the cells of a channel. A model that predicts the mean of the target has a loss of 1. As
    in The Well's code (Ohana et al. 2024), the variance is the sum of squared deviations divided by the number of cells
    minus 1. The variance is merged from the counts, means and sums of squared deviations of the parts, which avoids
    cancellation.

    Parameters
    ----------
    eps : number added to the variance; default 1e-7
    weights, skipna : as in `RelativeL2`
    """

    kernel_names = (*RootLoss.kernel_names, "channel_means_and_square_deviations")

    def __init__(self, eps: float = 1e-7, weights: Any = None, skipna: bool = False) -> None:
        super().__init__(weights, skipna)
        require_finite_arguments(self, eps=eps)
        self.eps = float(eps)

    def _all_reduce_error_sums(
        self, env: LayerContext, dims: tuple[int, ...], weights: Array | None, sums: Array, target: Array
    ) -> tuple[Array, Array, Array]:
        count, squares, _ = super()._all_reduce_error_sums(env, dims, weights, sums, target)
        variance = all_reduce_moments(env, target, dims, "VRMSE", weights)[2] / env.xp.maximum(count - 1.0, 1.0)
        return count, squares, count * (variance + self.eps)


class BoundaryRMSE(RootLoss):
    """`RMSE` over only the cells at the boundary of the domain (bRMSE of PDEBench, Takamoto et al. 2022).

    A cell at an edge or corner counts once for each boundary that it belongs to."""

    needs_grid = True

    def __init__(self) -> None:
        super().__init__()

    def _get_error_target_and_weights(
        self, env: LayerContext, y: Array, target: Array
    ) -> tuple[Array, Array, Array | None]:
        apart, target, _ = super()._get_error_target_and_weights(env, y, target)
        w = env.xp.zeros((1,) * y.ndim, dtype=apart.dtype)
        for d, cuts in enumerate(self._get_cuts(y)):
            at = np.arange(*get_local_range(env, cuts, d))
            ends = (at == 0).astype(apart.dtype) + (at == cuts[-1] - 1)
            w = w + env.xp.asarray(ends).reshape(-1, *(1,) * (y.ndim - 3 - d))
        return apart, target, w


class BandRMSE(RootLoss):
    """`RMSE` of the part of the error whose wavenumbers |k| are in [low, high) (fRMSE of PDEBench, Takamoto et al.
    2022).

    A mode has k1, k2, ... waves along the dims of the full field, and |k| is the length of the vector (k1, k2, ...).
    PDEBench uses the bands from 0 to 4, from 4 to 12, and from 12 on. It sums a quarter of the modes and averages over
    shells. In contrast, the squared errors of several `BandRMSE` add up to the squared `RMSE` if their bands cover each
    wavenumber exactly once. Only the modes below `high` are communicated. If `high` is None, the modes below `low` are
    communicated instead and subtracted from the error.

    Parameters
    ----------
    low, high : bounds of the band; high=None (default) means that there is no upper bound
    """

    needs_grid = True

    def __init__(self, low: float, high: float | None = None) -> None:
        super().__init__()
        require_finite_arguments(self, low=low, high=low if high is None else high)
        if low < 0 or (high is not None and high <= low):
            raise ConfigError(f"BandRMSE: a band of wavenumbers is from low >= 0 to a larger one, got {low}, {high}")
        self.low, self.high = low, high

    def _get_error_target_and_weights(
        self, env: LayerContext, y: Array, target: Array
    ) -> tuple[Array, Array, Array | None]:
        apart, target, _ = super()._get_error_target_and_weights(env, y, target)
        if getattr(env.xp, "holds_no_data", False):
            return apart, target, None
        if self.high is None and self.low**2 > sum((cuts[-1] // 2) ** 2 for cuts in self._get_cuts(y)):
            # return an error of 0: the grid cannot represent waves this short, so only rounding errors would remain
            return apart * 0, target, None
        last = self.low if self.high is None else self.high
        inside = self._filter_band(env, apart.astype(np.float64), last)
        return (inside if self.high is not None else apart - inside).astype(apart.dtype), target, None

    def _filter_band(self, env: LayerContext, error: Array, stop: float) -> Array:
        """Return the error after removing all modes with a wavenumber of at least `stop` and, if `high` is given, also
        all modes with a wavenumber below `low`."""
        xp, cuts_of = env.xp, self._get_cuts(error)
        waves, tables, cells = [], [], math.prod(cuts[-1] for cuts in cuts_of)
        for d, cuts in enumerate(cuts_of):
            n, most = cuts[-1], math.ceil(stop) - 1
            k = np.arange(-min(most, (n - 1) // 2), min(most, n // 2) + 1)
            turns = np.outer(np.arange(*get_local_range(env, cuts, d)), k) % n * (2 * np.pi / n)
            waves.append(k)
            tables.append(xp.asarray(np.exp(-1j * turns)))
        modes = error
        for table in tables:  # each iteration replaces the first cell dim by a mode dim at the end
            modes = xp.tensordot(modes, table, axes=([2], [0]))
        modes = xp.ascontiguousarray(modes)
        all_reduce_over_parts(env, modes.view(np.float64), "BandRMSE")
        length = np.sqrt(sum(np.square(k) for k in np.meshgrid(*waves, indexing="ij")))
        least = self.low if self.high is not None else 0.0
        modes = modes * xp.asarray(((length >= least) & (length < stop)) / max(cells, 1))
        for table in tables:
            modes = xp.tensordot(modes, table.conj(), axes=([2], [1]))
        return modes.real


class ConservedRMSE(FieldLoss):
    """Error in the conservation of means: |mean(y) - mean(target)| over the cells of each channel, averaged over
    channels and samples.

    This is the cRMSE of PDEBench (Takamoto et al. 2022), except that PDEBench takes the root mean square over samples.

    Parameters
    ----------
    weights, skipna : as in `RelativeL2`; weights may be cell volumes
    """

    def forward(self, env: LayerContext, y: Array, target: Array) -> tuple[float, float, Any]:
        apart, _, w = compute_difference_target_and_weights(env, y, target, self.weights, self.skipna)
        count, total = self._all_reduce_weighted_sums(env, tuple(range(2, y.ndim)), w, apart)
        below = env.xp.where(count > 0, count, 1.0)
        return *self._compute_loss_share(env, env.xp.abs(total) / below, count), (y, w, env.xp.sign(total) / below)

    def backward(self, env: LayerContext, saved: Any, seed: float) -> Array:
        y, w, slope = saved
        dy = (seed * slope).reshape(*slope.shape, *(1,) * (y.ndim - 2)).astype(y.dtype)
        return (env.xp.broadcast_to(dy, y.shape) if w is None else w * dy).astype(y.dtype)


class MaxError(FieldLoss):
    """Largest |y - target| in each sample, averaged over samples. If the maximum occurs at several elements, they share
    its gradient equally.

    Parameters
    ----------
    weights, skipna : as in `RelativeL2`, except that weights are used only as a mask
    """

    def forward(self, env: LayerContext, y: Array, target: Array) -> tuple[float, float, Any]:
        xp, dims = env.xp, tuple(range(1, y.ndim))
        apart, _, w = compute_difference_target_and_weights(env, y, target, self.weights, self.skipna)
        far = xp.abs(apart).reshape(y.shape[0], math.prod(y.shape[1:]))
        most = xp.zeros((y.shape[0],), dtype=np.float64)
        if far.shape[1]:
            most = far.max(axis=1).astype(np.float64)
        all_reduce_over_parts(env, most, "MaxError", "max")
        hits = (far == most[:, None].astype(far.dtype)).reshape(y.shape)
        count, many = self._all_reduce_weighted_sums(env, dims, w, hits.astype(np.float64))
        return *self._compute_loss_share(env, most, count), (xp.sign(apart) * hits, many, y.dtype)

    def backward(self, env: LayerContext, saved: Any, seed: float) -> Array:
        signs, many, dtype = saved
        share = (seed / env.xp.maximum(many, 1.0)).reshape(-1, *(1,) * (signs.ndim - 1))
        return (signs * share).astype(dtype)
