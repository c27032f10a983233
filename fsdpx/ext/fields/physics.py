"""Physical constraints on fields: a layer that conserves means, and a loss with the residual of a differential
equation."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from fsdpx.errors import ConfigError, ShapeError
from fsdpx.ext.fields.cell_reductions import all_reduce_over_parts
from fsdpx.ext.fields.halo import FieldLayer
from fsdpx.ext.fields.over_parts import partition_model
from fsdpx.nn.layer import Array, Layer, LayerContext, Params, list_kernels, require_finite_arguments
from fsdpx.nn.losses import Loss, WrappedLoss, require_one_output
from fsdpx.nn.shard_specs import FieldPartition

__all__ = ["MatchMean", "PhysicsLoss"]


class MatchMean(FieldLayer):
    """Shifts y so that its mean over all cells equals the mean of x for each channel and sample:
    `y - mean(y) + mean(x)`.

    The layer takes two inputs, y and x, of the same shape (samples, channels, *cells). The result is the field closest
    to y that has the same mean as x. On a grid of ranks, the forward and backward passes each all-reduce 8 bytes per
    sample and channel."""

    n_inputs = 2

    def forward(self, env: LayerContext, p: Params, x: Any) -> tuple[Array, Any]:
        y, before = x
        if y.shape != before.shape or y.ndim < 3:
            raise ShapeError(f"{self!r} wants two inputs (samples, channels, *cells), got {y.shape} and {before.shape}")
        return y + self._all_reduce_mean_over_cells(env, before - y), ()

    def backward_input(self, env: LayerContext, p: Params, saved: Any, dy: Array) -> tuple[Any, Any]:
        mean = self._all_reduce_mean_over_cells(env, dy)
        return (dy - mean, env.xp.broadcast_to(mean, dy.shape).astype(dy.dtype)), ()

    def _all_reduce_mean_over_cells(self, env: LayerContext, a: Array) -> Array:
        """Return the mean of `a` over all cells of the full field, with the cell dims kept as dims of size 1."""
        cells = self.get_partition(a).shape
        total = a.sum(axis=tuple(range(2, a.ndim)), dtype=np.float64)
        mean = all_reduce_over_parts(env, total, env.random.path) / max(math.prod(cells), 1)
        return mean.astype(a.dtype).reshape(*mean.shape, *(1,) * (a.ndim - 2))


class PhysicsLoss(WrappedLoss):
    """Physics-informed loss: loss + weight * mean(residual(y)^2), where the mean is over all elements of the residual.

    The residual is a layer without parameters. It returns 0 where the output satisfies an equation, such as
    `FieldDivergence` for incompressible flow (Raissi et al. 2019). If the field is partitioned, this layer exchanges
    halos like the layers of a model.

    Parameters
    ----------
    loss : loss that compares outputs with targets
    residual : layer with one input, one output and no parameters, which is applied to the model's output
    weight : factor by which the mean squared residual is multiplied; default 1
    """

    def __init__(self, loss: Loss, residual: Layer, weight: float = 1.0) -> None:
        if not isinstance(loss, Loss) or not isinstance(residual, Layer):
            raise ConfigError(f"PhysicsLoss: a loss and a layer are needed, got {loss!r} and {residual!r}")
        if (residual.n_inputs, residual.n_outputs) != (1, 1) or residual.specs():
            raise ConfigError(f"PhysicsLoss: {residual!r} must have one input, one output and no parameters")
        require_finite_arguments(self, weight=weight)
        super().__init__(loss)
        self.residual, self.weight = residual, float(weight)
        self.kernel_names = (*loss.kernel_names, *list_kernels(residual))
        self.counts = "unknown" if loss.counts == "unknown" else "samples"

    def bind_partition(self, parts: FieldPartition) -> Loss:
        return PhysicsLoss(self.loss.bind_partition(parts), partition_model(self.residual, parts)[0], self.weight)

    def forward(self, env: LayerContext, y: Array, target: Array) -> tuple[float, float, Any]:
        at = env.child("residual")
        total, weight, saved = self.loss.forward(env, y, target)
        r, kept = self.residual.forward(at, {}, y)
        sums = env.xp.asarray(np.array([0.0, float(r.size), float(weight)]))
        sums[0] += (r * r).sum(dtype=np.float64)
        squares, count, weights = (float(v) for v in all_reduce_over_parts(env, sums, "PhysicsLoss"))
        share = self.weight / max(count, 1.0)
        return float(total) + share * weight * squares, weight, (saved, r, kept, 2.0 * share * weights)

    def backward(self, env: LayerContext, saved: Any, seed: float) -> Array:
        ours, r, kept, slope = saved
        slopes = (r * (slope * seed)).astype(r.dtype, copy=False)
        dr, _ = self.residual.backward_input(env.child("residual"), {}, kept, slopes)
        return self.loss.backward(env, ours, seed) + dr

    def validate(self, shape: tuple[int, ...], target: Array) -> None:
        require_one_output(self, shape, target)
        super().validate(shape, target)
