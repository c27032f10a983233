"""Graph convolutions: `GraphConv`, and graph attention, `GATConv`. Parameters are the same as in PyTorch Geometric."""

from __future__ import annotations

import math
from typing import Any

from fsdpx.errors import ConfigError
from fsdpx.ext.meshes.aggregate import Aggregate, AggregateSenders, GatherNodes
from fsdpx.ext.meshes.ghosts import append_ghosts, append_ghosts_backward
from fsdpx.ext.meshes.kernels import segment_softmax, segment_softmax_backward
from fsdpx.ext.meshes.local_graph import GraphLayer, has_no_data, require_node_features
from fsdpx.nn.container import Composite
from fsdpx.nn.gradient_accumulation import (
    add_matmul_gradient,
    add_sum_over_dims_into,
    as_rows,
    linear_forward,
    matmul_in_dtype_of_first,
)
from fsdpx.nn.init import uniform, zeros
from fsdpx.nn.layer import Array, LayerContext, ParameterSpec, Params, require_positive
from fsdpx.nn.linear import Linear

__all__ = ["GATConv", "GraphConv"]


class GraphConv(Composite):
    """Graph convolution y_i = lin_rel(aggregate of x_j over the edges j -> i) + lin_root(x_i), like `GraphConv` in
    PyTorch Geometric (Morris et al. 2019): (samples, nodes, in_channels) -> (samples, nodes, out_channels).

    Parameters
    ----------
    in_channels, out_channels : number of node features in the input and in the result
    aggr : how the values of senders are combined; takes the same values as `how` in `Aggregate`; default "sum"
    bias : whether lin_rel has a bias; default True
    """

    def __init__(self, in_channels: int, out_channels: int, aggr: str = "sum", bias: bool = True) -> None:
        self.in_channels, self.out_channels, self.aggr, self.bias = in_channels, out_channels, aggr, bias
        self.lin_rel = Linear(in_channels, out_channels, bias)
        self.lin_root = Linear(in_channels, out_channels, bias=False)

    def compose(self, x: Any) -> Any:
        if self.aggr in ("sum", "mean"):
            received = AggregateSenders(self.aggr)(x)
        else:
            received = Aggregate(self.aggr)(GatherNodes("sender")(x))
        return self.lin_rel(received) + self.lin_root(x)


class GATConv(GraphLayer):
    """Graph attention (Velickovic et al. 2018), like `GATConv` in PyTorch Geometric with add_self_loops=False:
    (samples, nodes, in_channels) -> (samples, nodes, heads * out_channels).

    With h = lin(x), each head computes a weighted sum of h over the senders of a node. The weights are the softmax of
    `leaky_relu(att_src . h_sender + att_dst . h_node)` over the node's incoming edges. A node without incoming edges
    gets only the bias. To let nodes attend to themselves, pass the `Partition` an edge from each node to itself.

    Parameters
    ----------
    in_channels, out_channels : number of node features in the input, and number of features per head in the result
    heads : number of heads; default 1
    concat : whether heads are concatenated; if False, they are averaged, and the result has out_channels features;
        default True
    negative_slope : slope of leaky_relu for negative inputs; default 0.2
    bias : whether a bias is added; default True
    """

    kernel_names = ("linear", "segment_softmax", "segment_softmax_backward", "segment_sum")

    def __init__(
        self, in_channels: int, out_channels: int, heads: int = 1, concat: bool = True, negative_slope: float = 0.2,
        bias: bool = True,
    ) -> None:  # fmt: skip
        require_positive(self, in_channels=in_channels, out_channels=out_channels, heads=heads)
        if negative_slope < 0:
            raise ConfigError(f"GATConv: negative_slope={negative_slope} must be at least 0")
        self.in_channels, self.out_channels, self.heads, self.concat = in_channels, out_channels, heads, bool(concat)
        self.negative_slope, self.bias = float(negative_slope), bool(bias)

    def specs(self) -> dict[str, ParameterSpec]:
        heads, out = self.heads, self.out_channels
        glorot = math.sqrt(6.0 / (self.in_channels + heads * out))
        found = {
            "lin.weight": ParameterSpec((heads * out, self.in_channels), uniform(glorot)),
            "att_src": ParameterSpec((1, heads, out), uniform(math.sqrt(6.0 / (heads + out)))),
            "att_dst": ParameterSpec((1, heads, out), uniform(math.sqrt(6.0 / (heads + out)))),
        }
        if self.bias:
            found["bias"] = ParameterSpec((heads * out if self.concat else out,), zeros)
        return found

    def forward(self, env: LayerContext, p: Params, x: Array) -> tuple[Array, Any]:
        graph, xp, (samples, _, _) = self.graph, env.xp, x.shape
        require_node_features(self, x, graph.row_count if self.has_ghosts else graph.nodes, self.in_channels)
        h = linear_forward(xp, as_rows(x), p["lin.weight"], None).reshape(
            samples, x.shape[1], self.heads * self.out_channels
        )
        wide = h if self.has_ghosts else append_ghosts(env, graph, self, h)
        per_head = wide.reshape(samples, graph.row_count, self.heads, self.out_channels)
        of_senders = graph.gather_senders(env, (per_head * p["att_src"]).sum(axis=-1))
        own = per_head[:, : graph.nodes]
        scores = of_senders + graph.gather_receivers(env, (own * p["att_dst"]).sum(axis=-1))
        positive = scores > 0
        scores = xp.where(positive, scores, scores * self.negative_slope).astype(x.dtype, copy=False)
        weights = scores
        if not has_no_data(env):
            index = graph.get_attribute_on_device(env, "offsets"), graph.get_attribute_on_device(env, "receivers")
            weights = segment_softmax(xp, scores, *index, graph.max_in_degree)
        values = graph.gather_senders(env, wide).reshape(samples, graph.edges, self.heads, self.out_channels)
        y = graph.sum_at_receivers(env, (weights[..., None] * values).reshape(samples, graph.edges, wide.shape[2]))
        if not self.concat:
            y = y.reshape(samples, graph.nodes, self.heads, self.out_channels).sum(axis=2) * (1.0 / self.heads)
            y = y.astype(x.dtype, copy=False)
        return y + p["bias"] if self.bias else y, (x, wide, weights, positive)

    def backward_input(self, env: LayerContext, p: Params, saved: Any, dy: Array) -> tuple[Array, Any]:
        x, wide, weights, positive = saved
        graph, xp, samples, heads, out = self.graph, env.xp, x.shape[0], self.heads, self.out_channels
        spread = dy
        if not self.concat:
            shape = (samples, graph.nodes, heads, out)
            share = (dy * (1.0 / heads)).astype(dy.dtype, copy=False)
            spread = xp.broadcast_to(share[:, :, None], shape).reshape(samples, graph.nodes, heads * out)
        of_edges = graph.gather_receivers(env, spread).reshape(samples, graph.edges, heads, out)
        values = graph.gather_senders(env, wide).reshape(of_edges.shape)
        slope = (of_edges * values).sum(axis=-1)
        if not has_no_data(env):
            index = graph.get_attribute_on_device(env, "offsets"), graph.get_attribute_on_device(env, "receivers")
            slope = segment_softmax_backward(xp, weights, slope, *index, graph.max_in_degree)
        slope = xp.where(positive, slope, slope * self.negative_slope).astype(dy.dtype, copy=False)
        at_senders, at_receivers = graph.sum_at_senders(env, slope), graph.sum_at_receivers(env, slope)
        dwide = graph.sum_at_senders(env, (weights[..., None] * of_edges).reshape(samples, graph.edges, wide.shape[2]))
        dwide = dwide + (at_senders[..., None] * p["att_src"]).reshape(dwide.shape)
        dh = dwide if self.has_ghosts else append_ghosts_backward(env, graph, dwide)
        dh[:, : graph.nodes] += (at_receivers[..., None] * p["att_dst"]).reshape(samples, graph.nodes, wide.shape[2])
        dx = matmul_in_dtype_of_first(xp, as_rows(dh), p["lin.weight"]).reshape(x.shape)
        return dx, (x, wide, dh, at_senders, at_receivers, dy)

    def backward_params(self, env: LayerContext, g: Params, kept: Any) -> None:
        x, wide, dh, at_senders, at_receivers, dy = kept
        graph, heads = self.graph, (self.heads, self.out_channels)
        add_matmul_gradient(env.xp, g, "lin.weight", as_rows(dh).T, as_rows(x))
        per_head = wide.reshape(*wide.shape[:2], *heads)
        for name, values, slope in (
            ("att_src", per_head, at_senders),
            ("att_dst", per_head[:, : graph.nodes], at_receivers),
        ):
            if name in g:
                add_sum_over_dims_into(env.xp, g[name], (values * slope[..., None]).reshape(-1, 1, *heads), 0)
        if "bias" in g:
            add_sum_over_dims_into(env.xp, g["bias"], as_rows(dy), 0)
