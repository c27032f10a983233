"""Multilayer perceptrons for edges and nodes. Their first layer does not concatenate its inputs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from fsdpx.core.array import kernels
from fsdpx.ext.meshes.ghosts import start_appending_ghosts, start_appending_ghosts_backward
from fsdpx.ext.meshes.kernels import add_gathered_row_pairs
from fsdpx.ext.meshes.local_graph import GraphLayer, has_no_data, require_node_features
from fsdpx.nn.activation import make_activation
from fsdpx.nn.container import Composite
from fsdpx.nn.gradient_accumulation import (
    as_rows,
    get_gradient_and_whether_to_add,
    linear_forward,
    matmul_in_dtype_of_first,
)
from fsdpx.nn.init import uniform
from fsdpx.nn.layer import Array, Layer, LayerContext, ParameterSpec, Params, require_positive
from fsdpx.nn.linear import Linear
from fsdpx.nn.norm import LayerNorm

__all__ = ["EdgeLinear", "EdgeMLP", "NodeMLP", "RecomputedMLP"]


class _SplitWeight:
    """Base class for linear layers with several inputs. Each input is multiplied by its own columns of `weight`."""

    columns: tuple[int, ...]
    """The number of features of each input, in the order of the columns of `weight`."""
    out_features: int

    def specs(self) -> dict[str, ParameterSpec]:
        init = uniform(1.0 / math.sqrt(sum(self.columns)))
        return {
            "weight": ParameterSpec((self.out_features, sum(self.columns)), init),
            "bias": ParameterSpec((self.out_features,), init),
        }

    def split_weight(self, weight: Array) -> list[Array]:
        """Return, for each input, a view of its columns of the weight."""
        ends = np.cumsum(self.columns).tolist()
        return [weight[:, end - count : end] for end, count in zip(ends, self.columns, strict=True)]

    def add_gradients(self, env: LayerContext, g: Params, dy: Array, pairs: Sequence[tuple[Array, Array]]) -> None:
        """Add the gradients of weight and bias to `g`. `dy` is the gradient of the layer's result. Each input x is
        multiplied by its own columns of the weight. For each x, `pairs` contains a pair: the gradient of this product,
        and x itself."""
        if (into := get_gradient_and_whether_to_add(g, "weight")) is not None:
            weight, add = into
            for (slope, x), out in zip(pairs, self.split_weight(weight), strict=True):
                found = matmul_in_dtype_of_first(env.xp, as_rows(slope).T, as_rows(x))
                out[...] = out + found if add else found
        if (into := get_gradient_and_whether_to_add(g, "bias")) is not None:
            kernels.sum_rows(env.xp, as_rows(dy), *into)


class EdgeLinear(_SplitWeight, GraphLayer):
    """Linear layer that is applied to the concatenated features of each edge and its two nodes: nodes (samples, nodes,
    node_features) and edges (samples, edges, edge_features) -> (samples, edges, out_features).

    It computes `y = weight @ [edge, sender, receiver] + bias`. Products with node features are computed once per node
    and then gathered to the edges, so the inputs need not be concatenated. Ranks exchange the products for ghosts
    (nodes of other ranks): ghosts x out_features numbers per sample in the forward pass, and the same number in the
    backward pass.

    Parameters
    ----------
    node_features, edge_features, out_features : sizes of the last dims; `weight` is (out_features, edge_features + 2
        node_features)
    """

    reads = ("nodes", "edges")
    gives = "edges"
    n_inputs = 2
    kernel_names = ("add_gathered_row_pairs", "linear", "segment_sum", "sum_rows")

    def __init__(self, node_features: int, edge_features: int, out_features: int) -> None:
        require_positive(self, node_features=node_features, edge_features=edge_features, out_features=out_features)
        self.node_features, self.edge_features, self.out_features = node_features, edge_features, out_features
        self.columns = (edge_features, node_features, node_features)

    def forward(self, env: LayerContext, p: Params, x: tuple[Array, Array]) -> tuple[Array, Any]:
        nodes, edges = x
        graph = self.graph
        require_node_features(self, nodes, graph.row_count if self.has_ghosts else graph.nodes, self.node_features)
        require_node_features(self, edges, graph.edges, self.edge_features)
        of_senders = linear_forward(env.xp, as_rows(nodes), self.split_weight(p["weight"])[1], None)
        of_senders = of_senders.reshape(*nodes.shape[:2], self.out_features)
        if self.has_ghosts:
            return self._add_products(env, *self._multiply_edges_and_own_nodes(env, p, nodes, edges), of_senders), x
        finish = start_appending_ghosts(env, graph, self, of_senders)
        own = self._multiply_edges_and_own_nodes(env, p, nodes, edges)  # computed while the messages are in flight
        return self._add_products(env, *own, finish()), x

    def _multiply_edges_and_own_nodes(
        self, env: LayerContext, p: Params, nodes: Array, edges: Array
    ) -> tuple[Array, Array]:
        """Return two arrays: the product of the edge features with the weight's columns for edges, plus the bias; and
        the product of the features of this rank's nodes with the weight's columns for receivers."""
        graph, samples, out = self.graph, edges.shape[0], self.out_features
        of_edge, _, of_receiver = self.split_weight(p["weight"])
        y = linear_forward(env.xp, as_rows(edges), of_edge, p["bias"]).reshape(samples, graph.edges, out)
        own = linear_forward(env.xp, as_rows(nodes[:, : graph.nodes]), of_receiver, None)
        return y, own.reshape(samples, graph.nodes, out)

    def _add_products(self, env: LayerContext, y: Array, of_receivers: Array, of_senders: Array) -> Array:
        """Return the sum of `y` (the product of the weight with each edge's own features) and the products for the
        edge's receiver and sender. May overwrite `y`."""
        if has_no_data(env):
            return y
        senders, receivers = (self.graph.get_attribute_on_device(env, name) for name in ("senders", "receivers"))
        summed: Array = add_gathered_row_pairs(env.xp, y, of_senders, senders, of_receivers, receivers)
        return summed

    def backward_input(self, env: LayerContext, p: Params, saved: Any, dy: Array) -> tuple[Any, Any]:
        graph, xp = self.graph, env.xp
        nodes, edges = saved
        of_edge, of_sender, of_receiver = self.split_weight(p["weight"])
        dsenders = graph.sum_at_senders(env, dy)
        finish = None if self.has_ghosts else start_appending_ghosts_backward(env, graph, dsenders)
        dreceivers = graph.sum_at_receivers(env, dy)
        dedges = matmul_in_dtype_of_first(xp, as_rows(dy), of_edge).reshape(edges.shape)
        if finish is not None:
            dsenders = finish()
        dx = matmul_in_dtype_of_first(xp, as_rows(dsenders), of_sender).reshape(nodes.shape)
        own = (dy.shape[0], graph.nodes, self.node_features)
        dx[:, : graph.nodes] += matmul_in_dtype_of_first(xp, as_rows(dreceivers), of_receiver).reshape(own)
        return (dx, dedges), (nodes, edges, dsenders, dreceivers, dy)

    def backward_params(self, env: LayerContext, g: Params, kept: Any) -> None:
        nodes, edges, dsenders, dreceivers, dy = kept
        pairs = (dy, edges), (dsenders, nodes), (dreceivers, nodes[:, : self.graph.nodes])
        self.add_gradients(env, g, dy, pairs)


class RecomputedMLP(Composite):
    """Base class for the MLPs of a graph network. With `recompute_hidden`, the forward pass keeps the input and the
    output of the first layer, and the input of the last `LayerNorm`. The backward pass recomputes the layers between
    the first and the last `Linear` (Chen et al. 2016).

    The output of the first layer is kept because its matrix product is the largest in the MLP, and because recomputing
    it would require another exchange of ghosts. The input of the `LayerNorm` is kept so that the last `Linear`, which
    computes this input, need not run again."""

    unit = fixed = True
    recompute_hidden: bool = False

    def forward(self, env: LayerContext, p: Params, x: Any) -> tuple[Any, Any]:
        if not self.recompute_hidden:
            return super().forward(env, p, x)
        first, parts, last = self.steps[0], self._group_arrays_by_child(p), None
        hidden, held = first.layer.forward(env.child(first.name), parts[first.name], x)
        value = hidden
        for step in self.steps[1:]:
            value, last = step.layer.forward(env.child(step.name), parts.get(step.name, {}), value)
        return value, (held, hidden, *([last] if self.norm else []))

    def backward(self, env: LayerContext, p: Params, g: Params, saved: Any, dy: Any) -> Any:
        return super().backward(env, p, g, self._get_saved(env, p, saved), dy)

    def backward_leaf(self, env: LayerContext, p: Params, g: Params, saved: Any, dy: Any) -> None:
        super().backward_leaf(env, p, g, self._get_saved(env, p, saved), dy)

    def backward_input(self, env: LayerContext, p: Params, saved: Any, dy: Any) -> tuple[Any, Any]:
        return super().backward_input(env, p, self._get_saved(env, p, saved), dy)

    def _get_saved(self, env: LayerContext, p: Params, saved: Any) -> Any:
        """Return the values that each layer needs for its backward pass. With `recompute_hidden`, `saved` contains only
        some of these values, and the others are recomputed."""
        if not self.recompute_hidden:
            return saved
        held, value, *last = saved
        again, parts, found = replace(env, recomputing=True), self._group_arrays_by_child(p), [held]
        for step in self.steps[1 : len(self.steps) - len(last) - 1]:
            value, held = step.layer.forward(again.child(step.name), parts.get(step.name, {}), value)
            found.append(held)
        return (*found, (value,), *last)  # the last Linear saves only its input, `value`

    def _add_layers(self, first: Layer, hidden: int, out: int, hidden_layers: int, activation: str, norm: bool) -> None:
        """Make the layers of the MLP, starting with `first`, and store them in the attributes "0", "1", ...."""
        layers: list[Layer] = [first, make_activation(self, activation)]
        for _ in range(hidden_layers - 1):
            layers += [Linear(hidden, hidden), make_activation(self, activation)]
        layers += [Linear(hidden, out), *([LayerNorm(out)] if norm else [])]
        for i, layer in enumerate(layers):
            setattr(self, str(i), layer)
        self.norm, self._count = norm, len(layers)

    def compose(self, *x: Any) -> Any:
        value = getattr(self, "0")(*x)
        for i in range(1, self._count):
            value = getattr(self, str(i))(value)
        return value


class EdgeMLP(RecomputedMLP):
    """MLP that is applied to the concatenated features of each edge and its two nodes: nodes (samples, nodes,
    node_features) and edges (samples, edges, edge_features) -> (samples, edges, out_features).

    Parameters
    ----------
    node_features, edge_features, out_features : sizes of the last dims
    hidden : size of the hidden layers
    hidden_layers : number of hidden layers; default 2
    activation : name of the activation between layers; default "relu"
    norm : whether a `LayerNorm` follows the last layer; default True
    recompute_hidden : whether the backward pass recomputes the layers between the first and the last `Linear`, so that
        the forward pass saves less; default False
    """

    reads = ("nodes", "edges")

    def __init__(
        self, node_features: int, edge_features: int, out_features: int, hidden: int, hidden_layers: int = 2, *,
        activation: str = "relu", norm: bool = True, recompute_hidden: bool = False,
    ) -> None:  # fmt: skip
        require_positive(self, hidden=hidden, hidden_layers=hidden_layers)
        self.recompute_hidden = bool(recompute_hidden)
        first = EdgeLinear(node_features, edge_features, hidden)
        self._add_layers(first, hidden, out_features, hidden_layers, activation, norm)


class PairLinear(_SplitWeight, Layer):
    """Computes `y = weight @ [a, b] + bias` from two inputs a and b (samples, ..., features) without concatenating
    them."""

    acts_on = "position"
    n_inputs = 2
    kernel_names = ("add", "linear", "sum_rows")

    def __init__(self, a_features: int, b_features: int, out_features: int) -> None:
        self.a_features, self.b_features, self.out_features = a_features, b_features, out_features
        self.columns = (a_features, b_features)

    def forward(self, env: LayerContext, p: Params, x: tuple[Array, Array]) -> tuple[Array, Any]:
        (a, b), (of_a, of_b) = x, self.split_weight(p["weight"])
        y = linear_forward(env.xp, as_rows(a), of_a, p["bias"])
        y = kernels.add(env.xp, y, linear_forward(env.xp, as_rows(b), of_b, None))
        return y.reshape(*a.shape[:-1], self.out_features), x

    def backward_input(self, env: LayerContext, p: Params, saved: Any, dy: Array) -> tuple[Any, Any]:
        slopes = [matmul_in_dtype_of_first(env.xp, as_rows(dy), weight) for weight in self.split_weight(p["weight"])]
        return tuple(dx.reshape(x.shape) for dx, x in zip(slopes, saved, strict=True)), (*saved, dy)

    def backward_params(self, env: LayerContext, g: Params, kept: Any) -> None:
        a, b, dy = kept
        self.add_gradients(env, g, dy, ((dy, a), (dy, b)))


class NodeMLP(RecomputedMLP):
    """MLP that is applied to the aggregated values at each node and to the node's own features: (samples, nodes,
    received) and (samples, nodes, features) -> (samples, nodes, out_features).

    Parameters
    ----------
    received, features, out_features : sizes of the last dims
    hidden, hidden_layers, activation, norm, recompute_hidden : as in `EdgeMLP`
    """

    reads = ("received", "nodes")

    def __init__(
        self, received: int, features: int, out_features: int, hidden: int, hidden_layers: int = 2, *,
        activation: str = "relu", norm: bool = True, recompute_hidden: bool = False,
    ) -> None:  # fmt: skip
        require_positive(self, received=received, features=features, hidden=hidden, hidden_layers=hidden_layers)
        self.recompute_hidden = bool(recompute_hidden)
        first = PairLinear(received, features, hidden)
        self._add_layers(first, hidden, out_features, hidden_layers, activation, norm)
