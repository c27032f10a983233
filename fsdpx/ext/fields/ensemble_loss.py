"""Continuous ranked probability score of ensembles."""

from __future__ import annotations

from typing import Any

import numpy as np

from fsdpx.errors import ConfigError, DataError
from fsdpx.nn.layer import Array, LayerContext, require_fraction, require_positive
from fsdpx.nn.losses import (
    CellWeights,
    Loss,
    compute_difference_target_and_weights,
    require_one_output,
    require_target_shape,
)
from fsdpx.nn.shard_specs import FieldPartition

__all__ = ["CRPS"]


class CRPS(Loss):
    """Continuous ranked probability score of an ensemble of M members x_m and a target t (Gneiting and Raftery 2007).
    For each element, the score is the mean of |x_m - t|, minus half of the mean difference |x_m - x_n| between members.

    The output is (samples, members x channels, *cells), with all channels of the first member first; the target is
    (samples, channels, *cells). The fair score divides the sum of differences by M (M - 1), the standard score by M^2
    (Ferro 2014). In expectation, only the fair score is minimal when the members are drawn from the distribution of the
    targets. If `fair` is a number a, the loss is a times the fair score plus 1 - a times the standard score, as in Lang
    et al. (2024), where a = 0.95.

    Parameters
    ----------
    members : number of members, M
    fair : True (default), False, or a number from 0 to 1; the fair score requires at least 2 members
    weights, skipna : as in `RelativeL2`, for the elements of the target
    """

    def __init__(self, members: int, fair: bool | float = True, weights: Any = None, skipna: bool = False) -> None:
        require_positive(self, members=members)
        require_fraction(self, fair=fair)
        if fair and members < 2:
            raise ConfigError(f"CRPS: the fair score needs 2 members or more, got {members}: give fair=False")
        self.members, self.fair = members, fair
        self.weights = None if weights is None else CellWeights("CRPS", weights)
        self.skipna = bool(skipna)
        self.counts = "unknown" if skipna else "samples"

    def bind_partition(self, parts: FieldPartition) -> Loss:
        # this override is needed although it does nothing: on a mesh, only losses that override this method see node
        # features as channels
        return self

    def forward(self, env: LayerContext, y: Array, target: Array) -> tuple[float, float, Any]:
        xp = env.xp
        apart, w = self._split_members(env, y, target)
        errors, share = xp.abs(apart).sum(axis=1) / self.members, self._get_difference_factor()
        for shift in range(1, self.members):
            errors = errors - share * xp.abs(apart[:, shift:] - apart[:, :-shift]).sum(axis=1)
        if w is None:
            return float(errors.sum(dtype=np.float64)), float(errors.size), (y, apart, w)
        weight = float(xp.broadcast_to(w[:, 0], errors.shape).sum(dtype=np.float64))
        return float((w[:, 0] * errors).sum(dtype=np.float64)), weight, (y, apart, w)

    def backward(self, env: LayerContext, saved: Any, seed: float) -> Array:
        (y, apart, w), xp, share = saved, env.xp, self._get_difference_factor()
        slopes = xp.sign(apart) / self.members
        for shift in range(1, self.members):
            signs = xp.sign(apart[:, shift:] - apart[:, :-shift]) * share
            slopes[:, shift:] -= signs
            slopes[:, :-shift] += signs
        slopes = slopes * seed
        return (slopes if w is None else w * slopes).reshape(y.shape).astype(y.dtype, copy=False)

    def validate(self, shape: tuple[int, ...], target: Array) -> None:
        require_one_output(self, shape, target)
        if len(shape) < 2:
            raise DataError(f"{self!r} wants outputs (samples, members x channels, *cells), got {tuple(shape)}")
        samples, channels, *cells = shape
        if channels % self.members:
            raise DataError(f"{self!r}: the output has {channels} channels, not a multiple of {self.members} members")
        wanted = (samples, channels // self.members, *cells)
        require_target_shape(self, wanted, target, "a target with the shape of one member")
        if self.weights is not None:
            self.weights.require_broadcastable(self, wanted)

    def _split_members(self, env: LayerContext, y: Array, target: Array) -> tuple[Array, Array | None]:
        """Return the difference x_m - t of each member m from the target, as (samples, members, channels, *cells), and
        weights that can be broadcast to this shape."""
        members = y.reshape(y.shape[0], self.members, *target.shape[1:])
        apart, _, w = compute_difference_target_and_weights(env, members, target[:, None], self.weights, self.skipna)
        return apart, w

    def _get_difference_factor(self) -> float:
        """Return the factor by which the difference |x_m - x_n| of each pair of members is multiplied."""
        standard = 1.0 / self.members**2
        return standard * (1.0 + float(self.fair) / (self.members - 1)) if self.members > 1 else standard
