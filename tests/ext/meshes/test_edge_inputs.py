"""Features of edges that differ between samples, and types of nodes."""

from typing import Any

import numpy as np
import pytest
from mesh_graphs import WAYS, Graph, make_partition, make_trainer
from torch_graphs import assert_trained_alike, edge_features_in_torch, mesh_graph_net_in_torch, train_in_torch

import fsdpx
from fsdpx import nn, spawn
from fsdpx.core.comm import Communicator
from fsdpx.errors import DataError, ShapeError

torch = pytest.importorskip("torch")

NODES, EDGES, STEPS = 23, 93, 2
RNG = np.random.default_rng(12)
X, T, E = (RNG.standard_normal((STEPS, 2, n, k)) for n, k in ((NODES, 3), (NODES, 3), (EDGES, 2)))
TYPES = RNG.integers(0, 3, (STEPS, 2, NODES, 1))


def make_net() -> nn.Graph:
    net = nn.MeshGraphNet(6, 3, 3, 6, 2, activation="silu", residual="edges", edge_inputs=2)
    return nn.Graph(
        {
            "types": (nn.OneHot(3), "kinds"),
            "wide": (nn.Concat(), "x", "types"),
            "moved": (nn.Tanh(), "edges"),
            "net": (net, "wide", "moved"),
            "kept": (nn.WhereType((0, 2)), "kinds", "net", "x"),
        },
        inputs=("x", "kinds", "edges"),
        outputs=("kept",),
    )


def train(comm: Communicator, graph: Graph, way: str) -> Any:
    mesh = make_partition(comm, graph, way)
    trainer = make_trainer(make_net(), comm, mesh)
    before = trainer.parameters()
    inputs = [
        (mesh.take_local(x), mesh.take_local(kinds), mesh.exchange_edges(e[:, mesh.passed]))
        for x, kinds, e in zip(X, TYPES, E, strict=True)
    ]
    losses = [trainer.step(x, mesh.take_local(t)) for x, t in zip(inputs, T, strict=True)]
    y = mesh.all_gather(trainer.predict(tuple(a[0] for a in inputs[0])))
    trainer.forward(inputs[0])
    dx, _, de = trainer.backward(mesh.take_local(T[0]))
    numbered = mesh.exchange_edges(mesh.passed[:, None].astype(float))[:, 0].astype(int)
    assert (mesh.edges == graph.edges[:, numbered]).all()
    return losses, {"y": y, "dx": mesh.all_gather(dx)}, (numbered, de), before, trainer.parameters()


def run_in_torch(p: Any, x: Any, kinds: Any, e: Any, graph: Graph) -> Any:
    wide = torch.cat([x, torch.nn.functional.one_hot(kinds[..., 0], 3).to(x.dtype)], dim=-1)
    p = {name.removeprefix("net."): value for name, value in p.items()}
    features = torch.cat([edge_features_in_torch(graph, x.shape[0]), e.tanh()], dim=-1)
    y = mesh_graph_net_in_torch(p, wide, features, graph, torch.nn.functional.silu, "edges")
    return torch.where(kinds == 1, x, y)


@pytest.mark.parametrize("ranks", [1, 3, 2, 5, 8])
def test_edges_of_samples_and_types_of_nodes_train_as_in_pytorch(ranks):
    graph, way = Graph.random(9, ranks), WAYS[ranks % len(WAYS)]
    graph = graph.in_rank_order()[0] if way == "owned" else graph
    found = spawn(lambda comm: train(comm, graph, way), ranks)

    def compute_loss(p, x, kinds, e, t):
        return torch.nn.functional.mse_loss(run_in_torch(p, x, kinds, e, graph), t)

    losses, p = train_in_torch(found[0][3], compute_loss, zip(*map(torch.tensor, (X, TYPES, E, T)), strict=True))
    x, e = (torch.tensor(a[0], requires_grad=True) for a in (X, E))
    y = run_in_torch(p, x, torch.tensor(TYPES[0]), e, graph)
    (y * torch.tensor(T[0])).sum().backward()
    assert_trained_alike(found, losses, {"y": y[0], "dx": x.grad}, p)
    de = np.full(E[0].shape, np.nan)
    for _, _, (numbers, part), *_ in found:
        de[:, numbers] = part
    np.testing.assert_allclose(de, e.grad.numpy(), rtol=0, atol=1e-12)


def exchange(rows: int, width: int = 1) -> Any:
    return lambda mesh: mesh.exchange_edges(np.zeros((rows, width) if mesh.offsets[0] else (EDGES, 1)))


def predict(model: nn.Layer, x: Any) -> Any:
    return lambda mesh: model.as_distributed(comm=mesh.comm, domain=mesh).predict(x)


@pytest.mark.parametrize(
    ("ranks", "undirected", "call", "text"),
    [
        (2, None, exchange(92), r"Partition.exchange_edges: rank 1: an array of shape \(92, 1\) has not the 93 edges"),
        (2, None, exchange(93, 2), "rank 0 has .*, and rank 1 "),
        (2, True, exchange(93), "rank 0: undirected=True: compute values of each direction"),
        (
            1,
            None,
            predict(nn.Sequential(nn.Aggregate()), np.zeros((5, 2))),
            r"has shape \(5, 2\), but this rank has \d+ edges",
        ),
        (1, None, predict(nn.OneHot(2), np.full((NODES, 1), 2)), "types must be whole numbers from 0 to 1"),
        (1, None, predict(nn.OneHot(2), np.zeros((NODES, 2))), r"wants types of shape \(samples, nodes, 1\)"),
    ],
)
def test_edges_and_types_that_do_not_fit_are_refused(ranks, undirected, call, text):
    graph = Graph.random(9, ranks)
    options = {"parts": graph.parts, "undirected": undirected}

    def one(comm):
        call(fsdpx.Partition.from_replicated_graph(comm, graph.edges, NODES, **options))

    with pytest.raises((DataError, ShapeError), match=text):
        spawn(one, ranks)
