"""Random graphs that are partitioned over ranks, all ways to pass them to a `Partition`, and functions that run layers
on them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

import fsdpx
from fsdpx import nn, optim, spawn
from fsdpx.core.array.random import Random
from fsdpx.core.comm import Communicator
from fsdpx.core.comm.mesh import Mesh, connect_axes
from fsdpx.ext.fields.sample_groups import group_ranks_sharing_samples
from fsdpx.nn import Layer, LayerContext
from fsdpx.nn.layer import iterate_layers

RANKS = [1, 2, 3, 4, 5, 8]
WAYS = ["split", "receivers", "senders", "anywhere", "twice", "owned"]


@dataclass
class Graph:
    """A graph with self loops, double edges and isolated nodes, and the rank of each node; some ranks may be empty."""

    nodes: int
    edges: np.ndarray
    positions: np.ndarray
    parts: np.ndarray

    @classmethod
    def random(cls, seed: int, ranks: int, nodes: int = 23, edges: int = 90) -> Graph:
        rng = np.random.default_rng([seed, ranks])
        some = rng.choice((nodes - 2) ** 2, edges, replace=False)
        ends = np.stack(np.divmod(some, nodes - 2))  # the last two nodes are isolated
        ends = np.concatenate([ends, ends[:, :3]], axis=1)
        parts = rng.integers(0, ranks, nodes)
        if ranks > 2:
            parts[parts == 1] = 0  # rank 1 is empty
        return cls(nodes, ends, rng.standard_normal((nodes, 2)), parts)

    def assign(self, parts: np.ndarray) -> Graph:
        """Return the same graph with nodes on other ranks."""
        return replace(self, parts=parts)

    def in_rank_order(self) -> tuple[Graph, np.ndarray]:
        """Return the same graph with nodes numbered in rank order, and the old number of each node."""
        order = np.argsort(self.parts, kind="stable")
        new = np.argsort(order)
        return Graph(self.nodes, new[self.edges], self.positions[order], self.parts[order]), order


def make_partition(comm: Communicator, graph: Graph, way: str, **more: Any) -> Any:
    """Return the partition of `graph` if ranks pass their parts in the given way. Rows are shuffled, with ghosts among
    them."""
    if way == "split":
        made = fsdpx.Partition.from_replicated_graph(
            comm, graph.edges, graph.nodes, parts=graph.parts, positions=graph.positions, **more
        )
        made.passed = np.arange(graph.edges.shape[1])  # edges that this rank passed
        return made
    rng = np.random.default_rng(0)  # the same on all ranks
    ends = graph.parts[graph.edges]
    somewhere = rng.integers(0, comm.size, ends.shape[1])
    double = np.arange(ends.shape[1]) >= ends.shape[1] - 3  # the owner of the receiver passes double edges twice
    home = np.where(double, ends[1], {"senders": ends[0], "anywhere": somewhere}.get(way, ends[1]))
    double[:3] = True
    mine = np.flatnonzero(np.where(double, ends[1], home) == comm.rank)
    if way == "twice":
        mine = np.flatnonzero((ends == comm.rank).any(axis=0))
        mine = mine[(ends[1, mine] == comm.rank) | ~double[mine]]
    own = np.flatnonzero(graph.parts == comm.rank)
    known = np.unique(np.concatenate([own, graph.edges[:, mine].reshape(-1)]))
    ghosts = np.random.default_rng(comm.rank).permutation(np.setdiff1d(known, own))
    rows = np.concatenate([own, ghosts]) if way == "owned" else np.random.default_rng(comm.rank).permutation(known)
    where = np.zeros(graph.nodes, np.int64)
    where[rows] = np.arange(rows.size)
    more |= {"edges": where[graph.edges[:, mine]], "positions": graph.positions[rows]}
    if way == "owned":
        assert (own == np.arange(own.size) + (graph.parts < comm.rank).sum()).all()
        made = fsdpx.Partition(comm, owned=own.size, ghosts=ghosts, owners=graph.parts[ghosts], **more)
    else:
        made = fsdpx.Partition.from_numbers(comm, rows, graph.parts[rows] == comm.rank, **more)
    made.passed = mine
    return made


def env_of(comm: Communicator, training: bool = True) -> LayerContext:
    mesh = Mesh(shard=comm.size).resolve_open_axis(comm.size)
    groups = group_ranks_sharing_samples(mesh, comm.rank, (comm.size,), [None] * comm.size)
    return LayerContext(np, connect_axes(mesh, comm, check=True, samples=groups), Random(5, "layer", 3), training)


def draw_parameters(layer: Layer, seed: int = 0) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    return {name: rng.standard_normal(spec.shape) * 0.5 for name, spec in layer.specs().items()}


@dataclass
class Ran:
    """Result, and gradients of the input and of the parameters; rows in the order of global numbers."""

    y: np.ndarray
    dx: np.ndarray
    g: dict[str, np.ndarray]


def run_layer(
    layer: Layer, p: dict[str, np.ndarray], x: np.ndarray, dy: Callable[..., Any], graph: Graph, way: str, ranks: int
) -> Ran:
    """Run a layer of nodes on ranks. x: (samples, nodes, features). dy: a function of the result's shape."""

    def one(comm):
        partition = make_partition(comm, graph, way)
        made, _ = partition.shard_model(layer)
        env = env_of(comm)
        y, saved = made.forward(env, p, partition.take_local(x))
        g = {name: np.zeros_like(p[name]) for name, spec in layer.specs().items() if spec.trainable}
        whole = dy((x.shape[0], graph.nodes, y.shape[2]))
        dx = made.backward(env, p, g, saved, partition.take_local(whole))
        return partition.all_gather(y), partition.all_gather(dx), g, [repr(one) for _, one in iterate_layers(made)]

    found = spawn(one, ranks)
    for y, dx, _, layers in found[1:]:
        assert (y == found[0][0]).all()
        assert (dx == found[0][1]).all()
        assert layers == found[0][3]  # as trainings require
    return Ran(found[0][0], found[0][1], {name: sum(g[name] for _, _, g, _ in found) for name in found[0][2]})


def slope_of(shape: Sequence[int]) -> np.ndarray:
    return np.cos(np.arange(float(np.prod(shape)))).reshape(shape)


def make_net() -> nn.Layer:
    return nn.MeshGraphNet(3, 3, 2, 6, 2, activation="silu")


def make_trainer(model: nn.Layer, comm: Communicator, domain: Any, **options: Any) -> fsdpx.Trainer:
    given = {"loss": nn.MSELoss(), "optimizer": optim.SGD(lr=0.05, momentum=0.9), **options}
    return model.as_distributed(comm=comm, domain=domain, **{"precision": "float64", **given})


def train(comm: Communicator, graph: Graph, way: str, loss: nn.Loss) -> Any:
    """Return the losses of three steps, the prediction, and the parameters before and after."""
    partition = make_partition(comm, graph, way)
    trainer = make_trainer(make_net(), comm, partition, loss=loss)
    x, t = make_batches(graph)
    before = trainer.parameters()
    losses = [trainer.step(partition.take_local(a), partition.take_local(b)) for a, b in zip(x, t, strict=True)]
    return losses, partition.all_gather(trainer.predict(partition.take_local(x[0, 0]))), before, trainer.parameters()


def make_batches(graph: Graph) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(7)
    return rng.standard_normal((3, 2, graph.nodes, 3)), rng.standard_normal((3, 2, graph.nodes, 2))
