"""Different graphs in one batch, each on one rank."""

from typing import Any

import numpy as np
import pytest
from mesh_graphs import Graph, make_trainer
from torch_graphs import (
    assert_trained_alike,
    edge_features_in_torch,
    graph_conv_in_torch,
    mesh_graph_net_in_torch,
    reduce_in_torch,
    train_in_torch,
)

import fsdpx
from fsdpx import data, nn, optim, spawn
from fsdpx.core.comm import Communicator
from fsdpx.errors import ConfigError, DataError

torch = pytest.importorskip("torch")

SIZES, STEPS = (9, 4, 13, 6, 2), 3
RNG = np.random.default_rng(14)
GRAPHS = [Graph(n, RNG.integers(0, n, (2, 3 * n)), RNG.standard_normal((n, 2)), np.zeros(n, np.int64)) for n in SIZES]
X, T = ([RNG.standard_normal((STEPS, 2, n, k)) for n in SIZES] for k in (3, 2))


def pack() -> data.PackedGraphs:
    return data.pack_graphs([graph.edges for graph in GRAPHS], SIZES)


def train(comm: Communicator) -> Any:
    packed = pack()
    mesh = fsdpx.Partition.from_replicated_graph(
        comm, packed.edges, packed.total_nodes, parts=packed.assign_parts(comm.size), undirected=False,
        positions=packed.pack([graph.positions for graph in GRAPHS]),
    )  # fmt: skip
    assert mesh.graph.ghosts == 0
    trainer = make_trainer(nn.MeshGraphNet(3, 3, 2, 6, 2, activation="silu"), comm, mesh)
    before, losses = trainer.parameters(), []
    for step in range(STEPS):
        x, t = (mesh.take_local(packed.pack([a[step] for a in arrays])) for arrays in (X, T))
        losses.append(trainer.step(x, t))
    outputs = {str(i): y for i, y in enumerate(packed.unpack(mesh.all_gather(trainer.predict(x))))}
    return losses, outputs, before, trainer.parameters()


@pytest.mark.parametrize("ranks", [1, 3, 2, 5, 8])
def test_packed_graphs_train_as_each_by_itself_in_pytorch(ranks):
    found = spawn(train, ranks)
    total = 2 * 2 * sum(SIZES)

    def run(p, graph, x):
        features = edge_features_in_torch(graph, x.shape[0])
        return mesh_graph_net_in_torch(p, torch.tensor(x), features, graph, torch.nn.functional.silu)

    def compute_loss(p, i):
        errors = [(run(p, g, x[i]) - torch.tensor(t[i])) ** 2 for g, x, t in zip(GRAPHS, X, T, strict=True)]
        return sum(error.sum() for error in errors) / total

    losses, p = train_in_torch(found[0][2], compute_loss, [(i,) for i in range(STEPS)])
    outputs = {str(i): run(p, g, x[-1]) for i, (g, x) in enumerate(zip(GRAPHS, X, strict=True))}
    assert_trained_alike(found, losses, outputs, p)


class Readout(nn.Composite):
    """A value of each node, and the mean and the sum over each graph."""

    def __init__(self, level: fsdpx.MeshLevel) -> None:
        self.conv, self.head, self.total = nn.GraphConv(3, 4), nn.Linear(4, 2), nn.Restrict(level, "sum")
        self.mean = nn.Restrict(level)

    def compose(self, x: Any) -> Any:
        h = nn.Tanh()(self.conv(x))
        return h, self.head(self.mean(h)), self.total(h)


TARGETS = [RNG.standard_normal((STEPS, 2, n, k)) for n, k in ((sum(SIZES), 4), (len(SIZES), 2), (len(SIZES), 4))]


def train_readouts(comm: Communicator) -> Any:
    """Graphs lie across ranks, and the nodes of the coarser mesh, which are the graphs, anywhere."""
    packed, parts = pack(), np.arange(sum(SIZES)) % comm.size
    mesh = fsdpx.Partition.from_replicated_graph(comm, packed.edges, packed.total_nodes, parts=parts, undirected=False)
    graphs = fsdpx.Partition.from_replicated_graph(
        comm, np.zeros((2, 0), int), len(SIZES), parts=np.arange(len(SIZES))[::-1] % comm.size
    )
    level = fsdpx.MeshLevel(mesh, graphs, packed.graph_numbers[mesh.numbers])
    trainer = make_trainer(
        Readout(level), comm, mesh, loss=nn.MultiOutputLoss(*[nn.MSELoss()] * 3), optimizer=optim.SGD(lr=0.05)
    )
    before, losses = trainer.parameters(), []
    for step in range(STEPS):
        x = mesh.take_local(packed.pack([a[step] for a in X]))
        u, *others = (a[step] for a in TARGETS)
        losses.append(trainer.step(x, (mesh.take_local(u), *map(graphs.take_local, others))))
    with pytest.raises(ConfigError, match="values of a coarser mesh"):
        trainer.output_grid  # noqa: B018
    y = [grid.all_gather(a) for grid, a in zip((mesh, graphs, graphs), trainer.predict(x), strict=True)]
    wrong = [np.zeros((2, n + (n > 0), k)) for n, k in ((0, 4), (graphs.graph.nodes, 2), (0, 4))]
    with pytest.raises(DataError, match=r"target 1 has shape .* but this rank has \d+ nodes: give"):
        trainer.step(x, (mesh.take_local(u), *wrong[1:]))
    return losses, y, before, trainer.parameters()


@pytest.mark.parametrize("ranks", [1, 3, 2, 5, 8])
def test_values_of_each_graph_train_as_in_pytorch(ranks):
    found, packed = spawn(train_readouts, ranks), pack()
    numbers = torch.tensor(packed.graph_numbers)

    def compute_loss(p, i):
        x, targets = torch.tensor(packed.pack([a[i] for a in X])), [torch.tensor(a[i]) for a in TARGETS]
        h = torch.tanh(graph_conv_in_torch(p, "conv.", x, packed.edges))
        mean, total = (reduce_in_torch(h, numbers, len(SIZES), how) for how in ("mean", "sum"))
        y = h, mean @ p["head.weight"].T + p["head.bias"], total
        return sum(torch.nn.functional.mse_loss(*pair) for pair in zip(y, targets, strict=True))

    losses, p = train_in_torch(found[0][2], compute_loss, [(i,) for i in range(STEPS)], momentum=0.0)
    assert_trained_alike(found, losses, {}, p)
    assert [one.shape for one in found[0][1]] == [(2, sum(SIZES), 4), (2, len(SIZES), 2), (2, len(SIZES), 4)]


def test_graphs_are_even_over_ranks_and_come_back():
    packed = pack()
    for ranks in (1, 2, 3, 8):
        parts = packed.assign_parts(ranks)
        assert all(np.unique(part).size == 1 for part in np.split(parts, packed.offsets[1:-1]))
        loads = np.bincount(parts, minlength=ranks)
        assert loads.max() <= max(np.ceil(sum(SIZES) / ranks) * 4 / 3, max(SIZES))
    for array, back in zip(X, packed.unpack(packed.pack([a[0] for a in X])), strict=True):
        np.testing.assert_array_equal(back, array[0])


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda: data.pack_graphs([np.array([[0], [2]])], [2]), "edges of graph 0 have node 2, and the graph 2 nodes"),
        (lambda: data.pack_graphs([np.zeros((1, 2), int)], [2]), r"integers \(2, edges\), got \(1, 2\)"),
        (lambda: data.pack_graphs([], [2]), "edges of 0 graphs, and numbers of nodes of 1"),
        (lambda: pack().pack([a[0] for a in X[::-1]]), "for graphs of"),
        (lambda: pack().pack([a[0] if i else a[0, 0] for i, a in enumerate(X)]), "differ in more than their nodes"),
    ],
)
def test_what_does_not_fit_together_is_refused(call, text):
    with pytest.raises(DataError, match=text):
        call()


def draw_batch(step: int) -> tuple[data.PackedGraphs, np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Return graphs of other sizes for each step, padded to 30 nodes, with positions, values of edges, inputs and
    targets."""
    rng = np.random.default_rng(step)
    sizes = rng.multinomial(24, [0.3, 0.5, 0.2]) + 1
    edges = [np.stack(np.divmod(rng.choice(n * n, rng.integers(0, n * n), replace=False), n)) for n in sizes]
    packed = data.pack_graphs([*edges, np.zeros((2, 0), int)], [*sizes, 30 - sizes.sum()])
    arrays = [rng.standard_normal((30, k)) for k in (2, 3, 2)]
    arrays[2][sizes.sum() :] = np.nan
    return packed, rng.standard_normal((packed.edges.shape[1], 1)), *arrays


def train_on_changing_graphs(comm: Communicator, precision: str) -> Any:
    packed, _, positions, *_ = draw_batch(0)
    parts = np.random.default_rng(comm.size).integers(0, comm.size, 30)
    given = {"parts": parts, "positions": positions, "undirected": False}
    mesh = fsdpx.Partition.from_replicated_graph(comm, packed.edges, 30, **given)
    model = nn.MeshGraphNet(3, 3, 2, 6, 2, edge_inputs=1, activation="silu")
    trainer = make_trainer(model, comm, mesh, loss=nn.MSELoss(skipna=True), precision=precision)
    before, losses = trainer.parameters(), []
    for step in range(STEPS):
        packed, values, positions, x, t = draw_batch(step)
        mine = np.arange(packed.edges.shape[1]) % comm.size == comm.rank if step % 2 else slice(None)
        mesh.replace_edges(packed.edges[:, mine], positions=mesh.take_local(positions), undirected=False)
        losses.append(trainer.step((mesh.take_local(x), mesh.exchange_edges(values[mine])), mesh.take_local(t)))
        assert mesh.total_edges == len(values)
        assert sum(comm.all_gather_value(mesh.graph.edges)) == len(values)
    trainer.forward((mesh.take_local(x), mesh.exchange_edges(values[mine])))
    with pytest.raises(ConfigError, match="rank 0: edges has node 30, but there are 30 nodes"):
        mesh.replace_edges([[30], [0]], positions=mesh.take_local(positions))
    mesh.replace_edges(packed.edges)
    with pytest.raises(ConfigError, match="backward: the edges of the mesh were replaced after forward"):
        trainer.backward(mesh.take_local(t))
    with pytest.raises(ConfigError, match="edges of the partition have 0 features, but the model expects 3"):
        trainer.predict((mesh.take_local(x), mesh.exchange_edges(values)))
    return losses, before, trainer.parameters()


@pytest.mark.parametrize(("ranks", "precision"), [(1, "float64"), (2, "float32"), *((n, "float64") for n in (3, 5, 8))])
def test_graphs_that_change_from_step_to_step_train_as_in_pytorch(ranks, precision):
    found = spawn(train_on_changing_graphs, ranks, precision)

    def compute_loss(p, i):
        packed, values, positions, x, t = draw_batch(i)
        graph, known = Graph(30, packed.edges, positions, np.zeros(30, np.int64)), torch.tensor(~np.isnan(t[:, 0]))
        features = torch.cat([edge_features_in_torch(graph), torch.tensor(values)[None]], dim=2)
        y = mesh_graph_net_in_torch(p, torch.tensor(x)[None], features, graph, torch.nn.functional.silu)
        return torch.nn.functional.mse_loss(y[0, known], torch.tensor(t)[known])

    losses, p = train_in_torch(found[0][1], compute_loss, [(i,) for i in range(STEPS)])
    assert_trained_alike(found, losses, {}, p, 1e-12 if precision == "float64" else 1e-5)
