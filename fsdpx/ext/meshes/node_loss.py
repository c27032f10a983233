"""Losses for values on the nodes of a mesh."""

from __future__ import annotations

from copy import copy
from typing import Any

from fsdpx.errors import ConfigError, DataError
from fsdpx.ext.fields.losses import FieldLoss
from fsdpx.ext.fields.physics import PhysicsLoss
from fsdpx.nn.layer import Array, LayerContext
from fsdpx.nn.losses import CellWeights, Loss, LossSum, WrappedLoss, require_one_output
from fsdpx.nn.shard_specs import Cuts, FieldPartition

__all__ = ["NodeLoss", "bind_loss_to_local_nodes"]


def bind_loss_to_local_nodes(loss: Loss, cuts: tuple[Cuts, ...]) -> Loss:
    """Return `loss`, adapted to this rank's nodes. `cuts` describes how the nodes are divided over the ranks. A loss
    for fields, or a loss with weights, treats features as channels, and nodes as the cells of a field."""
    if isinstance(loss, LossSum):
        return LossSum([(factor, bind_loss_to_local_nodes(term, cuts)) for factor, term in loss.terms])
    if isinstance(loss, PhysicsLoss) or (isinstance(loss, FieldLoss) and loss.needs_grid):
        raise ConfigError(f"{loss!r} needs the cells of a grid, and cannot be computed on a mesh")
    weights = getattr(loss, "weights", None)
    of_fields = type(loss).bind_partition is not Loss.bind_partition
    if isinstance(weights, CellWeights):
        loss = copy(loss)
        loss.weights = weights.of_nodes  # type: ignore[attr-defined]
    elif not of_fields:
        return loss
    return NodeLoss(loss.bind_partition(FieldPartition(cuts)))


class NodeLoss(WrappedLoss):
    """Applies a loss for fields (samples, channels, cells) to node values (samples, nodes, features)."""

    def forward(self, env: LayerContext, y: Array, target: Array) -> tuple[float, float, Any]:
        return self.loss.forward(env, _swap_nodes_and_features(y), _swap_nodes_and_features(target))

    def backward(self, env: LayerContext, saved: Any, seed: float) -> Array:
        return env.xp.ascontiguousarray(_swap_nodes_and_features(super().backward(env, saved, seed)))

    def validate(self, shape: tuple[int, ...], target: Array) -> None:
        require_one_output(self.loss, shape, target)
        if len(shape) != 3 or target.ndim != 3:
            raise DataError(f"{self.loss!r} compares (samples, nodes, features), got {shape} and {target.shape}")
        super().validate((shape[0], shape[2], shape[1]), _swap_nodes_and_features(target))


def _swap_nodes_and_features(values: Array) -> Array:
    """Return a view of `values` with the last two dims (nodes and features) swapped."""
    return values.transpose(0, 2, 1)
