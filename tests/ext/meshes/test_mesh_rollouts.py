"""Several steps of a model of a mesh, with noise and dropout that do not depend on the partition."""

from typing import Any

import numpy as np
import pytest
from amount import few
from mesh_graphs import WAYS, Graph, make_partition, make_trainer

from fsdpx import nn, spawn
from fsdpx.core.array.random import Random
from fsdpx.core.comm import Communicator
from fsdpx.errors import ConfigError, ShapeError
from fsdpx.testing import assert_close

NODES, EDGES, STEPS, AHEAD = 23, 93, 2, 3
RNG = np.random.default_rng(13)
X, F, E = (RNG.standard_normal((STEPS, 2, n, k)) for n, k in ((NODES, 5), (NODES, AHEAD), (EDGES, AHEAD)))
S, T = RNG.standard_normal((STEPS, 2, AHEAD)), RNG.standard_normal((STEPS, 2, NODES, 2 * AHEAD))
WEIGHTS = np.arange(NODES) % 3 / 2.0


class Step(nn.Composite):
    """Computes the next state from two states, a constant, forces at nodes and at edges, and a scalar."""

    def __init__(self, drop: float) -> None:
        self.drop, self.drop_messages = nn.Dropout(drop), nn.Dropout(drop)
        self.film = nn.FiLM(1, 6)
        self.messages = nn.EdgeMLP(6, 1, 4, 5, 1, activation="tanh", norm=False)
        self.update = nn.NodeMLP(4, 6, 2, 5, 1, activation="tanh", norm=False)

    def compose(self, x: Any, f: Any, e: Any, s: Any) -> Any:
        h = self.drop(self.film(nn.Concat()(x, f), s))
        return self.update(nn.Aggregate()(self.drop_messages(self.messages(h, e))), h)


def make_rollout(drop: float = 0.0, **more: Any) -> nn.Rollout:
    return nn.Rollout(Step(drop), AHEAD, inputs=2, constants=1, forcing=("f", "e", "s"), **more)


def train(comm: Communicator, graph: Graph, way: str, random: bool, **more: Any) -> Any:
    mesh = make_partition(comm, graph, way)
    if random:
        more |= {"noise": 0.3, "noise_weights": mesh.take_local(WEIGHTS), "drop": 0.2}
    trainer = make_trainer(make_rollout(**more), comm, mesh)
    before = trainer.parameters()
    losses = []
    for x, f, e, s, t in zip(X, F, E, S, T, strict=True):
        given = mesh.take_local(x), mesh.take_local(f), mesh.exchange_edges(e[:, mesh.passed]), s
        losses.append(trainer.step(given, mesh.take_local(t)))
    y = mesh.all_gather(trainer.predict(tuple(a[0] for a in given)))
    trainer.forward(given)
    dx, df, _, ds = trainer.backward(mesh.take_local(T[0]))
    values = {"y": y, "dx": mesh.all_gather(dx), "df": mesh.all_gather(df), "ds": ds}
    return losses, values, before, trainer.parameters()


@pytest.mark.parametrize("ranks", [1, 3, 2, 5, 8])
def test_a_rollout_of_a_mesh_trains_as_in_pytorch(ranks):
    torch = pytest.importorskip("torch")
    from torch_graphs import assert_trained_alike, mlp_in_torch, train_in_torch

    graph, way = Graph.random(9, ranks), [way for way in WAYS if way != "owned"][(ranks + 1) % 5]
    found = spawn(lambda comm: train(comm, graph, way, False), ranks)
    s_, r_ = torch.tensor(graph.edges)

    def roll_out(p, x, f, e, s):
        states, constant, made = [x[..., :2], x[..., 2:4]], x[..., 4:], []
        for i in range(AHEAD):
            h = torch.cat([*states[-2:], constant, f[..., i : i + 1]], dim=-1)
            scale, shift = (s[:, i : i + 1] @ p["film.linear.weight"].T + p["film.linear.bias"]).chunk(2, dim=1)
            h = (1 + scale[:, None]) * h + shift[:, None]
            m = torch.cat([e[..., i : i + 1], h[:, s_], h[:, r_]], dim=-1)
            m = mlp_in_torch(p, "messages", m, torch.tanh, norm=False)
            got = torch.zeros(2, NODES, 4, dtype=m.dtype).index_add(1, r_, m)
            made.append(mlp_in_torch(p, "update", torch.cat([got, h], dim=-1), torch.tanh, norm=False))
            states.append(made[-1])
        return torch.cat(made, dim=-1)

    def compute_loss(p, *batch):
        return torch.nn.functional.mse_loss(roll_out(p, *batch[:-1]), batch[-1])

    losses, p = train_in_torch(found[0][2], compute_loss, zip(*map(torch.tensor, (X, F, E, S, T)), strict=True))
    x, f, s = (torch.tensor(a[-1], requires_grad=True) for a in (X, F, S))
    y = roll_out(p, x, f, torch.tensor(E[-1]), s)
    (y * torch.tensor(T[0])).sum().backward()
    assert_trained_alike(found, losses, {"y": y[0], "dx": x.grad, "df": f.grad, "ds": s.grad}, p)


def test_noise_and_dropout_are_the_same_on_any_partition():
    whole = Graph.random(9, 1)
    losses, values, _, parameters = spawn(lambda comm: train(comm, whole, "split", True), 1)[0]
    for k, ranks in enumerate(few([3, 5, 2], 3)):
        parts = Graph.random(k, ranks).parts
        graph, way = Graph(NODES, whole.edges, whole.positions, parts), ("anywhere", "twice", "senders")[k % 3]
        for got, found, _, after in spawn(lambda comm, g=graph, w=way: train(comm, g, w, True), ranks):
            np.testing.assert_allclose(got, losses, rtol=1e-12)
            assert_close(found, values, 1e-12)
            assert_close(after, parameters, 1e-12)
    assert spawn(lambda comm: train(comm, whole, "split", False), 1)[0][0] != losses


@pytest.mark.parametrize("width", [3, 700])
def test_numbers_of_rows_are_those_of_the_larger_array(width):
    """Rows of which some are close to each other and some are far apart."""
    rng, total = np.random.default_rng(0), 4000
    rows = np.concatenate([rng.choice(900, 40, replace=False), [3999, 1500, 1501]])
    random = Random(3, "layer", 2, 7)
    whole = random.get_number_range((2, total, width)).make_fractions(np).reshape(2, total, width)
    found = random.get_numbers_for_rows_of_array((2, rows.size, width), rows, total).make_fractions(np)
    np.testing.assert_array_equal(found, whole[:, rows])
    none = random.get_numbers_for_rows_of_array((2, 0, width), rows[:0], total).make_fractions(np)
    assert none.shape == (2, 0, width)


@pytest.mark.parametrize(
    ("net", "more", "text"),
    [
        (nn.GatherNodes("sender"), {}, "a step returns the edges of a part"),
        (nn.GlobalMean(), {}, "a step returns a whole input for the nodes"),
        (nn.GraphConv(5, 3), {}, "it must keep the shape"),
        (nn.GraphConv(5, 5), {"boundary": True}, "boundary=True needs a grid with ghost cells"),
        (nn.GraphConv(5, 5), {"noise": 0.1, "noise_weights": np.ones(4)}, r"noise_weights of shape \(4,\) do not fit"),
    ],
)
def test_a_step_that_does_not_fit_is_refused(net, more, text):
    def run(comm):
        mesh = make_partition(comm, Graph.random(9, 1), "split")
        make_trainer(nn.Rollout(net, 2, **more), comm, mesh).step(X[0], np.concatenate([X[0], X[0]], axis=-1))

    with pytest.raises((ConfigError, ShapeError), match=text):
        spawn(run, 1)
