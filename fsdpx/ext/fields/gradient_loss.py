"""A loss: the relative error of a field and its gradient, measured in the norm of the Sobolev space H1."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from fsdpx.errors import ConfigError
from fsdpx.ext.fields.derivatives import DerivativeTerm, FieldGradient, Spacing, StencilTap
from fsdpx.ext.fields.halo import HaloSpec
from fsdpx.ext.fields.losses import RelativeL2, RootLoss
from fsdpx.nn.layer import Array, LayerContext
from fsdpx.nn.losses import Loss
from fsdpx.nn.shard_specs import FieldPartition, bind_partition

__all__ = ["RelativeH1"]


class _StencilReach(FieldGradient):
    """`FieldGradient` with the absolute values of its stencil weights. For an input of zeros and ones, the output is 0
    exactly where the stencils read only zeros."""

    def _find_halo_taps_and_dim(
        self, env: LayerContext, term: DerivativeTerm, x: Array
    ) -> tuple[HaloSpec, list[StencilTap], int]:
        halo, taps, d = super()._find_halo_taps_and_dim(env, term, x)
        return halo, [StencilTap(tap.out, tap.cells, np.abs(tap.weight)) for tap in taps], d


class RelativeH1(RelativeL2):
    """Relative error of fields and their gradients, averaged over samples.

    The error of a sample is `sqrt(|e|^2 + w |grad e|^2) / sqrt(|target|^2 + w |grad target|^2)`, where e = y - target
    and w is `gradient_weight`.

    With w = 1, the error is measured in the norm of the Sobolev space H1, which neural operators use to learn small
    scales (Li et al. 2022). Norms are over all elements of a sample, and gradients are finite differences as in
    `FieldGradient`. Differences that involve an element of weight 0, such as land, are left out.

    Parameters
    ----------
    gradient_weight : factor w of the squared gradient, in units of length squared; default 1
    spacing, periodic, order : as in `FieldDerivative`
    eps, weights, skipna : as in `RelativeL2`
    """

    needs_grid = True
    kernel_names = (*RootLoss.kernel_names, "apply_stencil")

    def __init__(
        self,
        gradient_weight: float = 1.0,
        spacing: Spacing = 1.0,
        periodic: bool | Sequence[bool] = False,
        order: int = 2,
        eps: float = 0.0,
        weights: Any = None,
        skipna: bool = False,
    ) -> None:
        super().__init__(eps, weights, skipna)
        if not 0 <= gradient_weight < math.inf:
            raise ConfigError(f"RelativeH1: gradient_weight must be a finite number >= 0, got {gradient_weight!r}")
        self.gradient_weight = float(gradient_weight)
        self._gradient, self._reach = FieldGradient(spacing, periodic, order), _StencilReach(1.0, periodic, order)
        self.spacing, self.periodic, self.order = self._gradient.spacing, self._gradient.periodic, order

    def bind_partition(self, parts: FieldPartition) -> Loss:
        bound: Any = super().bind_partition(parts)
        bound._gradient, bound._reach = (bind_partition(layer, parts) for layer in (self._gradient, self._reach))
        return bound

    def forward(self, env: LayerContext, y: Array, target: Array) -> tuple[float, float, Any]:
        xp, samples, channels, dims = env.xp, y.shape[0], y.shape[1], y.ndim - 2
        error, target, w = self._get_error_target_and_weights(env, y, target)
        values = xp.empty((2 * samples, channels, *y.shape[2:]), dtype=error.dtype)
        slopes = xp.empty((2 * samples, channels * dims, *y.shape[2:]), dtype=error.dtype)
        values[:samples], values[samples:] = error, target
        self._gradient.differentiate_into(env.child("gradient"), values, slopes)
        of_slopes = None
        if w is not None:
            w = xp.broadcast_to(w, (w.shape[0], *y.shape[1:]))
            unknown, _ = self._reach.forward(env.child("gradient"), {}, (w <= 0).astype(error.dtype))
            of_slopes = xp.where(unknown > 0, 0.0, xp.repeat(w, dims, axis=1)).astype(error.dtype, copy=False)
        sums, dims_of_sample = 0.0, self._get_reduced_dims(y)
        for array, weights, factor in ((values, w, 1.0), (slopes, of_slopes, self.gradient_weight)):
            pair = array[:samples], array[samples:]
            found = self._sum_weights_and_squares(env, dims_of_sample, weights, *pair)
            sums = found * xp.asarray([1.0, factor, factor])[:, None] + sums
        errors = self._all_reduce_error_sums(env, dims_of_sample, w, sums, target)
        total, weight, scale = self._compute_roots(env, *errors)
        return total, weight, (values[:samples], slopes[:samples], w, of_slopes, scale, y.dtype)

    def backward(self, env: LayerContext, saved: Any, seed: float) -> Array:
        error, slopes, w, of_slopes, scale, dtype = saved
        share = self._compute_gradient_factors(env, error, scale, seed)
        dy = (error if w is None else w * error) * share
        dslopes = (slopes if of_slopes is None else of_slopes * slopes) * (share * self.gradient_weight)
        self._gradient.add_input_gradient_into(env.child("gradient"), dy, dslopes)
        return dy.astype(dtype, copy=False)
