"""Graph networks on a whole graph in PyTorch."""

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import pytest
from mesh_graphs import Graph

from fsdpx.testing import assert_close

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


def graph_conv_in_torch(p: Any, path: str, x: Any, edges: Any, how: str = "sum") -> Any:
    """`GraphConv` with the parameters whose names begin with path."""
    got = reduce_in_torch(x[:, edges[0]], torch.as_tensor(edges[1]), x.shape[1], how)
    got = torch.nn.functional.linear(got, p[f"{path}lin_rel.weight"], p.get(f"{path}lin_rel.bias"))
    return got + x @ p[f"{path}lin_root.weight"].T


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


def edge_features_in_torch(graph: Graph, samples: int = 1) -> Any:
    """Return differences of positions and their norms (samples, edges, features)."""
    (s, r), positions = torch.tensor(graph.edges), torch.tensor(graph.positions)
    apart = positions[s] - positions[r]
    return torch.cat([apart, apart.norm(dim=1, keepdim=True)], dim=1)[None].expand(samples, -1, -1)


def train_in_torch(
    before: Any, compute_loss: Callable[..., Any], batches: Iterable[Any], momentum: float = 0.9
) -> tuple[list[float], dict[str, Any]]:
    """Train parameters with SGD, in a step for each batch, on `compute_loss(parameters, *batch)`. Return the losses and
    the parameters."""
    p = {name: torch.tensor(value, dtype=torch.float64, requires_grad=True) for name, value in before.items()}
    sgd, losses = torch.optim.SGD(p.values(), lr=0.05, momentum=momentum), []
    for batch in batches:
        sgd.zero_grad()
        loss = compute_loss(p, *batch)
        loss.backward()
        sgd.step()
        losses.append(loss.item())
    return losses, p


def assert_trained_alike(found: Any, losses: list[float], values: Any, p: Any, tolerance: float = 1e-12) -> None:
    """Compare (losses, values, ..., parameters) of each rank with those of PyTorch."""
    values, wanted = ({name: t.detach().numpy() for name, t in one.items()} for one in (values, p))
    for of_rank in found:
        np.testing.assert_allclose(of_rank[0], losses, rtol=tolerance)
        assert_close(of_rank[-1], wanted, tolerance)
        if values:
            assert_close(of_rank[1], values, tolerance)
