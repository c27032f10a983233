"""A layer that runs another layer, such as `Linear`, on the channels of each cell of a field."""

from __future__ import annotations

from typing import Any

from fsdpx.core.array.kernels.memory_order import put_channels_last
from fsdpx.errors import ShapeError
from fsdpx.nn.container import map_saved
from fsdpx.nn.layer import Array, Layer, LayerContext, ParameterSpec, Params, ShardedLayer, list_kernels
from fsdpx.nn.shard_specs import FieldPartition, ShardingContext

__all__ = ["OverChannels"]

INPUT = object()
"""Placeholder for the input among the inner layer's saved values. Before the backward pass of the inner layer, a view
of the saved field replaces the placeholder."""
ONLY_INPUT = (INPUT,)
"""The saved values of an inner layer that saves only its input, such as `Linear`. `OverChannels` then saves only its
own input, because `AttentionContainer` requires this of its last step."""


class OverChannels(Layer):
    """Runs a layer on the channels of each cell of (samples, channels, *cells).

    The inner layer gets the field with channels in the last dim. It must act on each position separately, like `Linear`
    and `MLP`, so that the ranks of a field need not communicate. The layer has the same parameters as the inner layer.
    On a mesh, the inner layer is applied directly to the features of the nodes.

    Parameters
    ----------
    layer : the inner layer
    channels : size of dim 1
    """

    fields = True

    def __init__(self, layer: Layer, channels: int) -> None:
        self.layer, self.channels = layer, channels
        self.kernel_names = ("channels_last", *list_kernels(layer))

    def specs(self) -> dict[str, ParameterSpec]:
        return self.layer.specs()

    def shard_over_ranks(self, request: ShardingContext) -> ShardedLayer:
        kind = request.get_common_input_sharding(self)
        if isinstance(kind, FieldPartition) and not kind.has_cells:
            return self.layer.shard_over_ranks(request)  # on a mesh, features are already in the last dim
        return super().shard_over_ranks(request)

    def forward(self, env: LayerContext, p: Params, x: Array) -> tuple[Array, Any]:
        if x.ndim < 3 or x.shape[1] != self.channels:
            raise ShapeError(f"{self!r} wants (samples, {self.channels}, *cells), got {tuple(x.shape)}")
        x = put_channels_last(env.xp, x)
        rows = env.xp.moveaxis(x, 1, -1)
        y, saved = self.layer.forward(env, p, rows)
        # save x itself, with a placeholder for its view `rows`: a container can recognize x as a result that it can
        # recompute, but not a view of x
        inner = map_saved(saved, lambda a: INPUT if a is rows else a)
        return env.xp.moveaxis(y, -1, 1), (x,) if inner == ONLY_INPUT else (x, inner)

    def backward(self, env: LayerContext, p: Params, g: Params, saved: Any, dy: Array) -> Array:
        inner, rows = self.get_inner_saved_and_gradient(env, saved, dy)
        return env.xp.moveaxis(self.layer.backward(env, p, g, inner, rows), -1, 1)

    def backward_leaf(self, env: LayerContext, p: Params, g: Params, saved: Any, dy: Array) -> None:
        inner, rows = self.get_inner_saved_and_gradient(env, saved, dy)
        self.layer.backward_leaf(env, p, g, inner, rows)

    def backward_input(self, env: LayerContext, p: Params, saved: Any, dy: Array) -> tuple[Array, Any]:
        inner, rows = self.get_inner_saved_and_gradient(env, saved, dy)
        dx, kept = self.layer.backward_input(env, p, inner, rows)
        return env.xp.moveaxis(dx, -1, 1), kept

    def backward_params(self, env: LayerContext, g: Params, kept: Any) -> None:
        self.layer.backward_params(env, g, kept)

    def get_inner_saved_and_gradient(self, env: LayerContext, saved: Any, dy: Array) -> tuple[Any, Array]:
        """Return the saved values of the inner layer, and the gradient of its result."""
        x, *inner = saved
        rows, slopes = env.xp.moveaxis(x, 1, -1), env.xp.moveaxis(dy, 1, -1)
        return map_saved(inner[0] if inner else ONLY_INPUT, lambda a: rows if a is INPUT else a), slopes
