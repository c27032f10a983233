"""Graph networks on a whole graph in PyTorch."""

from __future__ import annotations

from typing import Any

import pytest
from mesh_graphs import Graph

torch = pytest.importorskip("torch")


def reduce_in_torch(values: Any, receivers: Any, nodes: int, how: str, temperature: float = 1.0) -> Any:
    """(samples, edges, ...) -> (samples, nodes, ...)."""
    shape = (values.shape[0], nodes, *values.shape[2:])
    if how == "max":
        index = receivers.reshape(1, -1, *(1,) * (values.ndim - 2)).expand(values.shape)
        most = torch.full(shape, -torch.inf, dtype=values.dtype).scatter_reduce(1, index, values, "amax")
        return torch.where(most == -torch.inf, 0.0, most)
    zeros = torch.zeros(shape, dtype=values.dtype)
    if how == "softmax":
        values = values * softmax_in_torch(values * temperature, receivers, nodes)
    total = zeros.index_add(1, receivers, values)
    if how != "mean":
        return total
    degree = torch.bincount(receivers, minlength=nodes).clamp(min=1)
    return total / degree.reshape(1, -1, *(1,) * (values.ndim - 2))


def softmax_in_torch(scores: Any, receivers: Any, nodes: int) -> Any:
    most = reduce_in_torch(scores.detach(), receivers, nodes, "max")
    e = (scores - most[:, receivers]).exp()
    return e / torch.zeros_like(most).index_add(1, receivers, e)[:, receivers]


def mlp_in_torch(p: Any, path: str, x: Any, activation: Any, norm: bool = True) -> Any:
    places = sorted({int(name[len(path) + 1 :].split(".")[0]) for name in p if name.startswith(f"{path}.")})
    for i in places[: len(places) - norm]:
        x = activation(x) if i else x
        x = torch.nn.functional.linear(x, p[f"{path}.{i}.weight"], p[f"{path}.{i}.bias"])
    if not norm:
        return x
    weight, bias = (p[f"{path}.{places[-1]}.{name}"] for name in ("weight", "bias"))
    return torch.nn.functional.layer_norm(x, x.shape[-1:], weight, bias)


def mesh_graph_net_in_torch(
    p: Any, x: Any, features: Any, graph: Graph, activation: Any, residual: str = "messages", how: str = "sum"
) -> Any:
    """`MeshGraphNet` of nodes x and features of edges, with the parameters p. The number of steps follows from p."""
    (s, r), n = torch.tensor(graph.edges), graph.nodes
    e, h = mlp_in_torch(p, "edge_encoder", features, activation), mlp_in_torch(p, "node_encoder", x, activation)
    for i in range(len({name.split(".")[0] for name in p if name.startswith("node_")}) - 1):
        m = mlp_in_torch(p, f"edge_{i}", torch.cat([e, h[:, s], h[:, r]], dim=-1), activation)
        e = e + m
        got = reduce_in_torch(m if residual == "messages" else e, r, n, how)
        h = h + mlp_in_torch(p, f"node_{i}", torch.cat([got, h], dim=-1), activation)
    return mlp_in_torch(p, "decoder", h, activation, norm=False)
