"""Layers that gather node values to edges, return edge features, or aggregate values at nodes."""

from __future__ import annotations

from typing import Any

from fsdpx.errors import ConfigError
from fsdpx.ext.meshes.ghosts import append_ghosts, append_ghosts_backward
from fsdpx.ext.meshes.kernels import segment_max, segment_softmax, segment_softmax_backward
from fsdpx.ext.meshes.local_graph import GraphLayer, has_no_data, require_node_features
from fsdpx.nn.layer import Array, LayerContext, Params

__all__ = ["Aggregate", "AggregateSenders", "EdgeFeatures", "GatherNodes"]


class GatherNodes(GraphLayer):
    """Copies the value of each edge's sender or receiver to the edge: (samples, nodes, features) -> (samples, edges,
    features).

    Parameters
    ----------
    end : the node whose value is copied to the edge: "sender" or "receiver"
    """

    gives = "edges"
    kernel_names = ("segment_sum",)

    def __init__(self, end: str) -> None:
        if end not in ("sender", "receiver"):
            raise ConfigError(f'GatherNodes: end={end!r}: choose "sender" or "receiver"')
        self.end = end

    def forward(self, env: LayerContext, p: Params, x: Array) -> tuple[Array, Any]:
        graph = self.graph
        require_node_features(self, x, graph.row_count if self.has_ghosts else graph.nodes)
        if self.end == "receiver":
            return graph.gather_receivers(env, x), ()
        return graph.gather_senders(env, x if self.has_ghosts else append_ghosts(env, graph, self, x)), ()

    def backward_input(self, env: LayerContext, p: Params, saved: Any, dy: Array) -> tuple[Array, Any]:
        graph = self.graph
        if self.end == "sender":
            dx = graph.sum_at_senders(env, dy)
            return dx if self.has_ghosts else append_ghosts_backward(env, graph, dx), ()
        dx = graph.sum_at_receivers(env, dy)
        if not self.has_ghosts or not graph.ghosts:
            return dx, ()
        wide = env.xp.zeros((dx.shape[0], graph.row_count, dx.shape[2]), dtype=dx.dtype)
        wide[:, : graph.nodes] = dx
        return wide, ()


class EdgeFeatures(GraphLayer):
    """Returns the edge features of the `Partition`, including features computed from positions: (samples, nodes, n) ->
    (samples, edges, features). Only the number of samples is taken from the input.

    Parameters
    ----------
    features : number of edge features; a `Partition` with a different number raises an error
    """

    gives = "edges"

    def __init__(self, features: int) -> None:
        self.features = features

    def forward(self, env: LayerContext, p: Params, x: Array) -> tuple[Array, Any]:
        graph = self.graph
        found = graph.edge_features.shape[1]
        if found != self.features:
            raise ConfigError(
                f"{self!r}: edges of the partition have {found} features, but the model expects {self.features}: pass "
                "positions= or edge_features= to the Partition, or change edge_features= of the model"
            )
        if has_no_data(env):
            return env.xp.empty((x.shape[0], graph.edges, found), dtype=x.dtype), ()
        one = graph.get_attribute_on_device(env, "edge_features", x.dtype)
        return env.xp.ascontiguousarray(env.xp.broadcast_to(one, (x.shape[0], *one.shape))), ()

    def backward_input(self, env: LayerContext, p: Params, saved: Any, dy: Array) -> tuple[Any, Any]:
        return None, ()


class Aggregate(GraphLayer):
    """Combines the values of each node's incoming edges: (samples, edges, features) -> (samples, nodes, features).

    A node without incoming edges gets 0. Each rank has all incoming edges of its nodes, so nothing is communicated, and
    "mean" averages over all of the node's incoming edges in the whole mesh.

    Parameters
    ----------
    how : "sum"; "mean"; "max", where the gradient goes to the first of several equal maxima; or "softmax", which sums
        the values of each feature, weighted by softmax(temperature * value) over the node's edges (Li et al. 2020,
        `SoftmaxAggregation` in PyTorch Geometric)
    temperature : factor that multiplies the values in the softmax; default 1
    """

    reads = ("edges",)
    kernel_names = ("segment_max", "segment_softmax", "segment_softmax_backward", "segment_sum")

    def __init__(self, how: str = "sum", temperature: float = 1.0) -> None:
        if how not in ("sum", "mean", "max", "softmax"):
            raise ConfigError(f'Aggregate: how={how!r}: choose "sum", "mean", "max" or "softmax"')
        self.how, self.temperature = how, float(temperature)

    def forward(self, env: LayerContext, p: Params, x: Array) -> tuple[Array, Any]:
        graph = self.graph
        require_node_features(self, x, graph.edges)
        if has_no_data(env) or self.how == "sum":
            return graph.sum_at_receivers(env, x), ()
        offsets = graph.get_attribute_on_device(env, "offsets")
        if self.how == "mean":
            return graph.sum_at_receivers(env, x) * graph.compute_inverse_in_degrees(env, x.dtype), ()
        if self.how == "max":
            return segment_max(env.xp, x, offsets, graph.max_in_degree)
        weights = segment_softmax(
            env.xp, x * self.temperature, offsets, graph.get_attribute_on_device(env, "receivers"), graph.max_in_degree
        ).astype(x.dtype, copy=False)
        return graph.sum_at_receivers(env, weights * x), (x, weights)

    def backward_input(self, env: LayerContext, p: Params, saved: Any, dy: Array) -> tuple[Array, Any]:
        graph, xp = self.graph, env.xp
        if has_no_data(env) or self.how == "sum":
            return graph.gather_receivers(env, dy), ()
        if self.how == "mean":
            return graph.gather_receivers(env, dy * graph.compute_inverse_in_degrees(env, dy.dtype)), ()
        spread = graph.gather_receivers(env, dy)
        if self.how == "max":
            winner = xp.take(saved, graph.get_attribute_on_device(env, "receivers"), axis=1)
            return xp.where(winner == xp.arange(graph.edges)[None, :, None], spread, 0).astype(dy.dtype), ()
        x, weights = saved
        index = graph.get_attribute_on_device(env, "offsets"), graph.get_attribute_on_device(env, "receivers")
        slope = segment_softmax_backward(xp, weights, spread * x, *index, graph.max_in_degree)
        return (weights * spread + slope * self.temperature).astype(dy.dtype, copy=False), ()


class AggregateSenders(GraphLayer):
    """Sums or averages the values of each node's senders: (samples, nodes, features) -> (samples, nodes, features).
    Equivalent to `GatherNodes` followed by `Aggregate`, but does not allocate an array of edge values."""

    kernel_names = ("segment_sum",)

    def __init__(self, how: str) -> None:
        self.how = how

    def forward(self, env: LayerContext, p: Params, x: Array) -> tuple[Array, Any]:
        graph = self.graph
        require_node_features(self, x, graph.row_count if self.has_ghosts else graph.nodes)
        y = graph.sum_features_of_senders(env, x if self.has_ghosts else append_ghosts(env, graph, self, x))
        return (y * graph.compute_inverse_in_degrees(env, y.dtype) if self._is_mean(env) else y), ()

    def backward_input(self, env: LayerContext, p: Params, saved: Any, dy: Array) -> tuple[Array, Any]:
        graph = self.graph
        dx = graph.sum_receiver_values_per_sender(
            env, dy * graph.compute_inverse_in_degrees(env, dy.dtype) if self._is_mean(env) else dy
        )
        return (dx if self.has_ghosts else append_ghosts_backward(env, graph, dx)), ()

    def _is_mean(self, env: LayerContext) -> bool:
        return self.how == "mean" and not has_no_data(env)
