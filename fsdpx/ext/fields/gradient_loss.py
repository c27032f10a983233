"""Relative error of a field and its gradient: the norm of the Sobolev space H1."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from fsdpx.errors import ConfigError
from fsdpx.ext.fields.derivatives import DerivativeTerm, FieldGradient, Spacing, StencilTap
from fsdpx.ext.fields.halo import HaloSpec
from fsdpx.ext.fields.losses import RelativeL2
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

    def _get_error_target_and_weights(
        self, env: LayerContext, y: Array, target: Array
    ) -> tuple[Array, Array, Array | None]:
        """Return the error, the target and the weights of elements. The gradient of the error, scaled by
        sqrt(`gradient_weight`), is appended to the error as further channels. The gradient of the target is appended to
        the target in the same way."""
        error, target, w = super()._get_error_target_and_weights(env, y, target)
        xp, channels, scale = env.xp, y.shape[1], math.sqrt(self.gradient_weight)
        # allocate in C order even if the input has channels last in memory, because stencils then read memory
        # sequentially
        both = xp.empty((y.shape[0], 2 * channels, *y.shape[2:]), dtype=error.dtype)
        both[:, :channels], both[:, channels:] = error, target
        slopes, _ = self._gradient.forward(env.child("gradient"), {}, both)
        at = channels * (y.ndim - 2)
        if scale != 1:
            slopes *= scale
        if w is not None:
            w = xp.broadcast_to(w, (w.shape[0], *y.shape[1:]))
            unknown, _ = self._reach.forward(env.child("gradient"), {}, (w <= 0).astype(error.dtype))
            w = xp.concatenate([w, xp.where(unknown > 0, 0.0, xp.repeat(w, y.ndim - 2, axis=1))], axis=1)
            w = w.astype(error.dtype, copy=False)
        return (
            xp.concatenate([both[:, :channels], slopes[:, :at]], axis=1),
            xp.concatenate([both[:, channels:], slopes[:, at:]], axis=1),
            w,
        )

    def backward(self, env: LayerContext, saved: Any, seed: float) -> Array:
        *kept, dtype = saved
        slopes = super().backward(env, (*kept, kept[0].dtype), seed)
        channels = slopes.shape[1] // (slopes.ndim - 1)
        dy, dgradient = slopes[:, :channels], slopes[:, channels:]
        if self.gradient_weight != 1:
            dgradient = dgradient * math.sqrt(self.gradient_weight)
        return (dy + self._gradient.backward_input(env.child("gradient"), {}, dy, dgradient)[0]).astype(dtype)
