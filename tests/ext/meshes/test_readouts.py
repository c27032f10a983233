"""Scalars and the nodes of a mesh: reductions over all nodes, and scalars that modulate nodes."""

from typing import Any

import numpy as np
import pytest
from mesh_graphs import WAYS, Graph, make_partition, make_trainer
from torch_graphs import assert_trained_alike, graph_conv_in_torch, train_in_torch

import fsdpx
from fsdpx import nn, optim, spawn
from fsdpx.core.comm import Communicator
from fsdpx.errors import ConfigError, DataError

torch = pytest.importorskip("torch")

NODES, STEPS = 23, 2
RNG = np.random.default_rng(11)
X, T = RNG.standard_normal((STEPS, 2, NODES, 3)), RNG.standard_normal((STEPS, 2, NODES, 4))
S, DRAG, VOLUMES = RNG.random((STEPS, 2, 2)), RNG.standard_normal((STEPS, 2, 2)), RNG.random(NODES)


def make_net(volumes: np.ndarray) -> nn.Graph:
    """Make a net in which scalars modulate nodes and are appended to them; three reductions and the scalars determine a
    drag."""
    return nn.Graph(
        {
            "film": (nn.FiLM(2, 3), "x", "s"),
            "wide": (nn.ConcatScalars(), "film", "s"),
            "conv": (nn.GraphConv(5, 4), "wide"),
            "act": (nn.Tanh(), "conv"),
            "mean": (nn.GlobalMean(volumes), "act"),
            "sum": (nn.GlobalSum(), "film"),
            "most": (nn.GlobalMax(), "act"),
            "found": (nn.Concat(-1), "mean", "sum", "most", "s"),
            "drag": (nn.Sequential(nn.Linear(13, 4), nn.LayerNorm(4), nn.Tanh(), nn.Linear(4, 2)), "found"),
        },
        inputs=("x", "s"),
        outputs=("act", "drag"),
    )


LOSS = nn.MultiOutputLoss(nn.MSELoss(), nn.MSELoss(), loss_weights=(1.0, 0.5))


def train(comm: Communicator, graph: Graph, way: str) -> Any:
    """Return the losses of five steps, predictions, gradients of the inputs, and the parameters before and after."""
    mesh = make_partition(comm, graph, way)
    trainer = make_trainer(make_net(mesh.take_local(VOLUMES)), comm, mesh, loss=LOSS)
    before = trainer.parameters()
    losses = [
        trainer.step((mesh.take_local(x), s), (mesh.take_local(t), d)) for x, s, t, d in zip(X, S, T, DRAG, strict=True)
    ]
    u, drag = trainer.predict((mesh.take_local(X[0, 0]), S[0, 0]))  # without a dim of samples
    trainer.forward((mesh.take_local(X[0]), S[0]))
    dx, ds = trainer.backward((mesh.take_local(T[0]), DRAG[0]))
    assert trainer.output_grid == (mesh, None)
    values = {"u": mesh.all_gather(u), "drag": drag, "dx": mesh.all_gather(dx), "ds": ds}
    return losses, values, before, trainer.parameters()


def run_in_torch(p: Any, x: Any, s: Any, edges: Any) -> tuple[Any, Any]:
    scale, shift = (s @ p["film.linear.weight"].T + p["film.linear.bias"]).chunk(2, dim=1)
    film = (1 + scale[:, None]) * x + shift[:, None]
    wide = torch.cat([film, s[:, None].expand(-1, NODES, -1)], dim=2)
    act = torch.tanh(graph_conv_in_torch(p, "conv.", wide, edges))
    w = torch.tensor(VOLUMES)[:, None]
    found = torch.cat([(act * w).sum(1) / w.sum(), film.sum(1), act.amax(1), s], dim=1)
    h = torch.nn.functional.linear(found, p["drag.0.weight"], p["drag.0.bias"])
    h = torch.tanh(torch.nn.functional.layer_norm(h, (4,), p["drag.1.weight"], p["drag.1.bias"]))
    return act, torch.nn.functional.linear(h, p["drag.3.weight"], p["drag.3.bias"])


@pytest.mark.parametrize("ranks", [1, 3, 2, 5, 8])
def test_readouts_and_scalars_train_as_in_pytorch(ranks):
    graph, way = Graph.random(7, ranks), [way for way in WAYS if way != "owned"][ranks % 5]
    found = spawn(lambda comm: train(comm, graph, way), ranks)
    edges = torch.tensor(graph.edges)

    def compute_loss(p, x, s, t, d):
        u, drag = run_in_torch(p, x, s, edges)
        return torch.nn.functional.mse_loss(u, t) + 0.5 * torch.nn.functional.mse_loss(drag, d)

    losses, p = train_in_torch(found[0][2], compute_loss, zip(*map(torch.tensor, (X, S, T, DRAG)), strict=True))
    x, s = (torch.tensor(a[0], requires_grad=True) for a in (X, S))
    u, drag = run_in_torch(p, x, s, edges)
    ((u * torch.tensor(T[0])).sum() + (drag * torch.tensor(DRAG[0])).sum()).backward()
    assert_trained_alike(found, losses, {"u": u[0], "drag": drag[0], "dx": x.grad, "ds": s.grad}, p)


def test_equal_maxima_share_their_gradient_also_between_ranks():
    x = np.zeros((2, NODES, 2))
    x[0, [3, 9, 17], 0] = 2.0
    x[1, 5, 1] = np.nan
    dy = np.array([[6.0, 23.0], [1.0, 1.0]])
    graph = Graph.random(7, 3)

    def run(comm):
        mesh = make_partition(comm, graph, "anywhere")
        trainer = nn.GlobalMax().as_distributed(comm=comm, precision="float64", domain=mesh)
        y = trainer.forward(mesh.take_local(x))
        return y, mesh.all_gather(trainer.backward(dy))

    for y, dx in spawn(run, 3):
        np.testing.assert_array_equal(y, [[2.0, 0.0], [0.0, np.nan]])
        assert dx[0, :, 0].nonzero()[0].tolist() == [3, 9, 17]
        np.testing.assert_allclose(dx[0, [3, 9, 17], 0], 2.0)
        np.testing.assert_allclose(dx[0, :, 1], 1.0)


MIXED = nn.Graph({"m": (nn.GlobalMean(), "x"), "y": (nn.Add(), "x", "m")}, inputs=("x",), outputs=("y",))


@pytest.mark.parametrize(
    ("model", "x", "text"),
    [
        (nn.Sequential(nn.GatherNodes("sender"), nn.GlobalMean()), X[0, 0], "reads the edges of a part of a mesh of 2"),
        (nn.Sequential(nn.Conv1d(3, 3, 1), nn.GlobalMean()), X[0, 0], "a mesh of 23 nodes, and needs the cells of a f"),
        (nn.Sequential(nn.GlobalMean(), nn.BatchNorm(3)), X[0, 0], "takes statistics of scalars, which several ranks"),
        (MIXED, X[0, 0], "reads the nodes of a part of a mesh of 23 nodes, a whole in"),
        (nn.GlobalMean(np.ones(5)), X[0, 0], "weights of shape (5,) do not fit"),
        (make_net(None), (X[0, 0], np.ones((1, 2))), "the model reads or returns scalars there, which every rank"),
    ],
)  # fmt: skip
def test_what_cannot_be_read_out_is_refused(model, x, text):
    def run(comm):
        mesh = make_partition(comm, Graph.random(7, 2), "split")
        first, *rest = x if isinstance(x, tuple) else (x,)
        given = (mesh.take_local(first), *rest) if rest else mesh.take_local(first)
        model.as_distributed(comm=comm, precision="float64", domain=mesh).predict(given)

    with pytest.raises((ConfigError, DataError, fsdpx.errors.ShapeError)) as error:
        spawn(run, 2)
    assert text in str(error.value)


def test_scalars_that_differ_between_ranks_are_told():
    def run(comm):
        mesh = make_partition(comm, Graph.random(7, 2), "split")
        net = make_net(mesh.take_local(VOLUMES))
        trainer = net.as_distributed(comm=comm, domain=mesh, loss=LOSS, optimizer=optim.SGD(lr=0.1))
        trainer.step((mesh.take_local(X[0]), S[0] + comm.rank), (mesh.take_local(T[0]), DRAG[0]))

    with pytest.warns(RuntimeWarning, match="rank 1 passes other scalars than rank 0 with its part of the same mesh"):
        spawn(run, 2)
