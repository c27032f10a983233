"""Values that move between a mesh and a coarser one, each with a partition of its own."""

from typing import Any

import numpy as np
import pytest
from mesh_graphs import WAYS, Graph, env_of, make_partition, make_trainer
from threads import on_ranks
from torch_graphs import assert_trained_alike, graph_conv_in_torch, reduce_in_torch, train_in_torch

import fsdpx
from fsdpx import nn, optim, spawn
from fsdpx.core.comm import Communicator
from fsdpx.errors import ConfigError
from fsdpx.nn.shard_specs import ShardingContext

torch = pytest.importorskip("torch")

NODES, COARSE, STEPS = 23, 9, 2
RNG = np.random.default_rng(15)
X, T = (RNG.standard_normal((STEPS, 2, NODES, k)) for k in (3, 2))
BELONGS = RNG.integers(0, COARSE - 1, NODES)  # nothing belongs to the last coarse node


class VCycle(nn.Composite):
    """Convolutions on both meshes, with a mean and a sum of what belongs to a coarse node."""

    def __init__(self, level: fsdpx.MeshLevel) -> None:
        self.first, self.last = nn.GraphConv(3, 4), nn.GraphConv(8, 2)
        self.coarse = nn.GraphConv(8, 4, "mean")
        self.down, self.down_sum, self.up = nn.Restrict(level), nn.Restrict(level, "sum"), nn.Prolong(level)

    def compose(self, x: Any) -> Any:
        h = nn.Tanh()(self.first(x))
        below = nn.Tanh()(self.coarse(nn.Concat()(self.down(h), self.down_sum(h))))
        return self.last(nn.Concat()(h, self.up(below)))


def make_level(comm: Communicator, seed: int, way: str) -> tuple[Graph, Graph, fsdpx.MeshLevel]:
    graphs = Graph.random(seed, comm.size), Graph.random(seed + 1, comm.size, COARSE, 20)
    fine, coarse = (make_partition(comm, graph, one) for graph, one in zip(graphs, (way, "anywhere"), strict=True))
    return *graphs, fsdpx.MeshLevel(fine, coarse, BELONGS[fine.numbers])


def train(comm: Communicator, seed: int, way: str) -> Any:
    *_, level = make_level(comm, seed, way)
    mesh = level.fine
    trainer = make_trainer(VCycle(level), comm, mesh)
    before = trainer.parameters()
    losses = [trainer.step(mesh.take_local(x), mesh.take_local(t)) for x, t in zip(X, T, strict=True)]
    return losses, {"y": mesh.all_gather(trainer.predict(mesh.take_local(X[0])))}, before, trainer.parameters()


@pytest.mark.parametrize("replaced", ["fine", "coarse"])
@on_ranks(2)
def test_edges_of_no_level_are_replaced_between_forward_and_backward(comm, replaced):
    *graphs, level = make_level(comm, 3, "anywhere")
    mesh, graph = getattr(level, replaced), graphs[replaced == "coarse"]
    trainer = VCycle(level).as_distributed(comm=comm, precision="float64", domain=level.fine)
    y = trainer.forward(level.fine.take_local(X[0]))
    mesh.replace_edges(graph.edges)
    with pytest.raises(ConfigError, match="backward: the edges of the mesh were replaced after forward"):
        trainer.backward(y)
    trainer.forward(level.fine.take_local(X[0]))
    trainer.backward(y)


def run_in_torch(p: Any, x: Any, fine: Graph, coarse: Graph) -> Any:
    h, belongs = graph_conv_in_torch(p, "first.", x, fine.edges).tanh(), torch.tensor(BELONGS)
    below = torch.cat([reduce_in_torch(h, belongs, COARSE, how) for how in ("mean", "sum")], dim=2)
    below = graph_conv_in_torch(p, "coarse.", below, coarse.edges, "mean").tanh()
    return graph_conv_in_torch(p, "last.", torch.cat([h, below[:, belongs]], dim=2), fine.edges)


@pytest.mark.parametrize("ranks", [1, 3, 2, 5, 8])
def test_a_cycle_of_two_meshes_trains_as_in_pytorch(ranks):
    way = [way for way in WAYS if way != "owned"][ranks % 5]
    found = spawn(train, ranks, ranks, way)
    graphs = Graph.random(ranks, ranks), Graph.random(ranks + 1, ranks, COARSE, 20)

    def compute_loss(p, x, t):
        return torch.nn.functional.mse_loss(run_in_torch(p, x, *graphs), t)

    losses, p = train_in_torch(found[0][2], compute_loss, zip(*map(torch.tensor, (X, T)), strict=True))
    assert_trained_alike(found, losses, {"y": run_in_torch(p, torch.tensor(X[0]), *graphs)}, p)


@pytest.mark.parametrize("how", ["mean", "sum"])
def test_each_layer_between_levels_has_the_adjoint_as_its_backward(how):
    def run(comm):
        *_, level = make_level(comm, 4, "anywhere")
        env, rng, found = env_of(comm), np.random.default_rng(comm.rank), []
        for layer, (a, b) in (
            (nn.Restrict(level, how), (level.fine, level.coarse)),
            (nn.Prolong(level), (level.coarse, level.fine)),
        ):
            made = layer.shard_over_ranks(ShardingContext("", [a.partition], 1)).layer
            x, dy = rng.standard_normal((2, a.graph.nodes, 3)), rng.standard_normal((2, b.graph.nodes, 3))
            y, saved = made.forward(env, {}, x)
            found += [(y * dy).sum(), -(made.backward(env, {}, {}, saved, dy) * x).sum()]
        return found

    for a, b in np.sum(spawn(run, 3), axis=0).reshape(2, 2):
        assert abs(a + b) < 1e-12
        assert abs(a) > 0.1


@on_ranks(2)
def test_a_dry_run_knows_levels_of_each_rank(comm):
    *_, level = make_level(comm, 2, "split")
    for rank in range(comm.size):
        mesh = level.fine.as_rank(rank)
        x = np.zeros((1, mesh.graph.nodes, 3))
        options = {"loss": nn.MSELoss(), "optimizer": optim.SGD(), "ranks": comm.size, "rank": rank}
        made = fsdpx.dry_run(VCycle(level), x, x[..., :2], domain=mesh, precision="float64", **options)
        assert made.peak_heap_bytes > x.nbytes


def use(build: Any, numbers: Any = None) -> Any:
    def run(comm):
        *_, level = make_level(comm, 2, "split")
        if numbers is not None:
            fsdpx.MeshLevel(level.fine, level.coarse, numbers if comm.rank else BELONGS[level.fine.numbers])
        x = level.fine.take_local(X[0])
        build(level).as_distributed(comm=comm, domain=level.fine, precision="float64").predict(x)

    return run


@pytest.mark.parametrize(
    ("run", "text"),
    [
        (
            use(nn.Prolong),
            r"reads the nodes of a part of a mesh of 23 nodes, and needs the nodes of Partition\(9 nodes",
        ),
        (use(lambda level: nn.Restrict(level, "max")), 'choose "mean" or "sum"'),
        (use(None, [0]), "rank 1: numbers: give 9 numbers of nodes below 9, got 1, of which the largest is 0"),
        (use(None, [9] * 23), "rank 1: numbers: give 9 numbers of nodes below 9"),
        (use(None, [0.5]), "rank 1: numbers must be whole numbers"),
    ],
)
def test_levels_that_do_not_fit_are_refused(run, text):
    with pytest.raises(ConfigError, match=text):
        spawn(run, 2)
