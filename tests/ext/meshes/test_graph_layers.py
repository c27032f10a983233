"""Graph layers on any partition, compared with PyTorch on the whole graph."""

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from mesh_graphs import (
    RANKS,
    WAYS,
    Graph,
    Ran,
    draw_parameters,
    env_of,
    make_batches,
    make_net,
    make_partition,
    make_trainer,
    run_layer,
    slope_of,
    train,
)
from torch_graphs import (
    assert_trained_alike,
    edge_features_in_torch,
    graph_conv_in_torch,
    mesh_graph_net_in_torch,
    mlp_in_torch,
    reduce_in_torch,
    softmax_in_torch,
    train_in_torch,
)

import fsdpx
from fsdpx import nn, optim, spawn
from fsdpx.core.array.kernels import choice
from fsdpx.core.array.namespace import parse_dtype
from fsdpx.errors import ConfigError, DataError
from fsdpx.ext.meshes import kernels
from fsdpx.ext.meshes.ghosts import append_ghosts, append_ghosts_backward
from fsdpx.ext.meshes.node_loss import bind_loss_to_local_nodes

torch = pytest.importorskip("torch")


class Pool(nn.Composite):
    """Messages of both ends, aggregated."""

    def __init__(self, how: str, temperature: float = 1.0) -> None:
        self.how, self.temperature = how, temperature

    def compose(self, x: Any) -> Any:
        messages = nn.GatherNodes("sender")(x) * nn.GatherNodes("receiver")(x) + nn.GatherNodes("sender")(x)
        return nn.Aggregate(self.how, self.temperature)(messages)


class Shared(nn.Composite):
    """Ghosts that are exchanged once and read by several layers."""

    def __init__(self) -> None:
        self.mlp = nn.EdgeMLP(3, 3, 4, 6, 1, activation="tanh", norm=False)
        self.update = nn.NodeMLP(4, 3, 2, 5, 2, activation="silu", recompute_hidden=True)

    def compose(self, x: Any) -> Any:
        wide = nn.ExchangeGhosts()(x)
        messages = self.mlp(wide, nn.EdgeFeatures(3)(x) + nn.GatherNodes("sender")(wide))
        messages = messages + self.mlp(wide, nn.GatherNodes("receiver")(wide))
        return self.update(nn.Aggregate("mean")(messages), x)


class GhostsFirst(nn.Composite):
    """Layers of nodes that read values with ghosts together with values without."""

    def __init__(self) -> None:
        self.conv = nn.GraphConv(3, 3)
        self.update = nn.NodeMLP(3, 3, 2, 5, 2, activation="silu", recompute_hidden=True)

    def compose(self, x: Any) -> Any:
        wide = nn.ExchangeGhosts()(x)
        return self.update(self.conv(wide) + wide, wide)


LAYERS: dict[str, Callable[[], nn.Layer]] = {
    "sum": lambda: Pool("sum"),
    "mean": lambda: Pool("mean"),
    "max": lambda: Pool("max"),
    "softmax": lambda: Pool("softmax", 0.7),
    "shared": Shared,
    "ghosts first": GhostsFirst,
    "conv": lambda: nn.GraphConv(3, 5),
    "conv max": lambda: nn.GraphConv(3, 2, "max"),
    "conv mean": lambda: nn.GraphConv(3, 2, "mean", bias=False),
    "gat": lambda: nn.GATConv(3, 4, heads=2),
    "gat average": lambda: nn.GATConv(3, 4, 3, concat=False, negative_slope=0.1, bias=False),
    "net": make_net,
    "net of edges": lambda: nn.MeshGraphNet(
        3, 3, 2, 6, 2, residual="edges", how="mean", hidden_layers=1, recompute_hidden=False, activation="tanh"
    ),
    "rollout of net": lambda: nn.Rollout(make_net(), 3, constants=1),
    "rollout of ghosts first": lambda: nn.Rollout(GhostsFirst(), 2, constants=1),
}


def run_in_torch(name: str, p: Any, x: Any, graph: Graph) -> Any:
    s, r = torch.tensor(graph.edges)
    n, features = graph.nodes, edge_features_in_torch(graph, x.shape[0])
    if name in ("sum", "mean", "max", "softmax"):
        return reduce_in_torch(x[:, s] * x[:, r] + x[:, s], r, n, name, 0.7)
    if name == "shared":

        def mlp(e):
            return mlp_in_torch(p, "mlp", torch.cat([e, x[:, s], x[:, r]], dim=-1), torch.tanh, norm=False)

        got = reduce_in_torch(mlp(features + x[:, s]) + mlp(x[:, r]), r, n, "mean")
        return mlp_in_torch(p, "update", torch.cat([got, x], dim=-1), torch.nn.functional.silu)
    if name == "ghosts first":
        conv = graph_conv_in_torch(p, "conv.", x, graph.edges)
        return mlp_in_torch(p, "update", torch.cat([conv + x, x], dim=-1), torch.nn.functional.silu)
    if name.startswith("conv"):
        return graph_conv_in_torch(p, "", x, graph.edges, name[5:] or "sum")
    if name.startswith("gat"):
        h = (x @ p["lin.weight"].T).reshape(x.shape[0], n, *p["att_src"].shape[1:])
        score = (h * p["att_src"]).sum(-1)[:, s] + (h * p["att_dst"]).sum(-1)[:, r]
        weight = softmax_in_torch(torch.nn.functional.leaky_relu(score, 0.2 if name == "gat" else 0.1), r, n)
        y = reduce_in_torch(weight[..., None] * h[:, s], r, n, "sum")
        return y.flatten(2) + p["bias"] if name == "gat" else y.mean(2)
    if name.startswith("rollout of "):
        states = [x[..., :2]]
        for _ in range(3 if name == "rollout of net" else 2):
            states.append(run_in_torch(name[11:], p, torch.cat([states[-1], x[..., 2:]], dim=-1), graph))
        return torch.cat(states[1:], dim=-1)
    act, residual = (torch.nn.functional.silu, "messages") if name == "net" else (torch.tanh, "edges")
    return mesh_graph_net_in_torch(p, x, features, graph, act, residual, "sum" if name == "net" else "mean")


def run_whole_in_torch(name: str, p: dict[str, np.ndarray], x: np.ndarray, graph: Graph) -> Ran:
    q = {key: torch.tensor(value, requires_grad=True) for key, value in p.items()}
    inputs = torch.tensor(x, requires_grad=True)
    y = run_in_torch(name, q, inputs, graph)
    (y * torch.tensor(slope_of(y.shape))).sum().backward()
    return Ran(y.detach().numpy(), inputs.grad.numpy(), {key: value.grad.numpy() for key, value in q.items()})


def assert_ran_alike(got: Ran, wanted: Ran, place: str, tolerance: float = 1e-12) -> None:
    pairs = {"y": (got.y, wanted.y), "dx": (got.dx, wanted.dx)}
    pairs |= {name: (got.g[name], wanted.g[name]) for name in wanted.g}
    for what, (a, b) in pairs.items():
        np.testing.assert_allclose(a, b, rtol=0, atol=tolerance * max(np.abs(b).max(), 1.0), err_msg=f"{place} {what}")


@pytest.mark.parametrize("name", LAYERS)
def test_any_partition_gives_what_pytorch_gives(name):
    layer = LAYERS[name]()
    p = draw_parameters(layer)
    for k, ranks in enumerate(RANKS):
        graph, way = Graph.random(k, ranks), WAYS[(k + len(name)) % len(WAYS)]
        if way == "owned":
            graph, _ = graph.in_rank_order()
        x = np.random.default_rng(k).standard_normal((2, graph.nodes, 3))
        got = run_layer(layer, p, x, slope_of, graph, way, ranks)
        assert_ran_alike(got, run_whole_in_torch(name, p, x, graph), f"{name} {ranks} {way}")


class Forced(nn.Composite):
    """A state of two features and a constant one, with a forcing."""

    def __init__(self) -> None:
        self.conv = nn.GraphConv(4, 2)

    def compose(self, x: Any, f: Any) -> Any:
        return self.conv(nn.Concat()(x, f))


def test_each_step_of_a_rollout_reads_its_forcing():
    graph = Graph.random(4, 3)
    rng = np.random.default_rng(3)
    x, f, t = (rng.standard_normal((2, graph.nodes, n)) for n in (3, 3, 6))

    def run(comm):
        made = make_partition(comm, graph.assign(graph.parts % comm.size), "anywhere")
        rollout = nn.Rollout(Forced(), 3, constants=1, forcing="f")
        trainer, one = (make_trainer(model, comm, made, optimizer=optim.SGD(lr=0.1)) for model in (rollout, Forced()))
        u, g, later = map(made.take_local, (x, f, t))
        states = [u[..., :2]]
        for i in range(3):
            states.append(one.predict((np.concatenate([states[-1], u[..., 2:]], axis=2), g[..., i : i + 1])))
        np.testing.assert_allclose(trainer.predict((u, g)), np.concatenate(states[1:], axis=2), rtol=1e-12)
        with pytest.raises(DataError, match=r"target of the output's shape: \(2, \d+, 6\), got \(2, \d+, 2\)"):
            trainer.step((u, g), later[..., :2])
        return [trainer.step((u, g), later) for _ in range(3)]

    np.testing.assert_allclose(spawn(run, 3)[0], spawn(run, 1)[0], rtol=1e-12)


@pytest.mark.parametrize(("format", "mode"), [("bf16", "plain"), ("bf16", "numba"), ("float16", "plain")])
def test_16_bits_stay_16_bits(format, mode):
    """In all layers, on two ranks; results are close to those in float64."""
    graph, dtype = Graph.random(0, 2, 9, 20), parse_dtype(format)
    x = np.random.default_rng(0).standard_normal((2, graph.nodes, 3)).astype(dtype)
    for name, make in LAYERS.items():
        p = {key: a.astype(dtype) for key, a in draw_parameters(make()).items()}
        wide = {key: a.astype(float) for key, a in p.items()}
        with choice.use_mode(mode):
            got = run_layer(make(), p, x, lambda s: slope_of(s).astype(dtype), graph, "split", 2)
        wanted = run_layer(make(), wide, x.astype(float), slope_of, graph, "split", 2)
        assert (got.y.dtype, got.dx.dtype) == (dtype, dtype), name
        assert np.abs(got.y.astype(float) - wanted.y).max() <= 0.1 * np.abs(wanted.y).max(), name


@pytest.mark.parametrize("mode", ["plain", "numba"])
def test_of_equal_rows_of_a_segment_the_first_is_the_maximum(mode):
    offsets, values = np.array([0, 0, 3, 4, 4, 9]), np.random.default_rng(0).integers(0, 4, (2, 9, 3)).astype(float)
    with choice.use_mode(mode):
        _, found = kernels.segment_max(np, values, offsets, 5)
    wanted = [values[:, a:b].argmax(axis=1) + a for a, b in pairwise(offsets) if b > a]
    np.testing.assert_array_equal(found[:, [1, 2, 4]], np.stack(wanted, axis=1))


def test_of_equal_values_the_first_in_the_order_of_senders_is_the_maximum():
    """Also if the edges or the ranks of their senders are in another order."""
    graph = Graph(4, np.array([[3, 1, 2], [0, 0, 0]]), np.zeros((4, 2)), np.array([0, 2, 1, 0]))
    x = np.array([5.0, 1.0, 1.0, 1.0]).reshape(1, 4, 1)
    largest = nn.Sequential(nn.GatherNodes("sender"), nn.Aggregate("max"))
    for way in ("split", "anywhere"):
        got = run_layer(largest, {}, x, np.ones, graph, way, 3)
        assert got.dx[0, :, 0].tolist() == [0, 1, 0, 0]


def test_sums_at_nodes_have_the_same_bits_on_any_partition():
    graph = Graph.random(0, 5)
    x = np.random.default_rng(0).standard_normal((1, graph.nodes, 2))
    found = []
    for ranks in RANKS:
        cut = graph.assign(np.random.default_rng(1).integers(0, ranks, graph.nodes))
        found.append(run_layer(Pool("sum"), {}, x, slope_of, cut, "anywhere", ranks).y)
    assert all((y == found[0]).all() for y in found)


@pytest.mark.parametrize("ranks", [1, 3, 5])
def test_the_exchange_of_ghosts_is_adjoint_and_moves_ghosts_times_width(ranks):
    graph = Graph.random(3, ranks)

    def one(comm):
        local, env = make_partition(comm, graph, "anywhere").graph, env_of(comm)
        rng = np.random.default_rng(comm.rank)
        x, dy = rng.standard_normal((2, local.nodes, 3)), rng.standard_normal((2, local.row_count, 3))
        y = append_ghosts(env, local, None, x)
        counters = env.mesh.counters
        moved = [counters.sum_counts("domain", verb).bytes for verb in ("recv", "send")]
        dx = append_ghosts_backward(env, local, dy)
        sent = sum(rows.size for _, rows in local.sends)
        assert moved == [local.ghosts * 3 * 8 * 2, sent * 3 * 8 * 2]
        assert counters.sum_counts("domain").bytes == 2 * sum(moved)
        return (y * dy).sum(), (x * dx).sum(), (y * y).sum(), (dy * dy).sum()

    a, b, *squares = np.sum(spawn(one, ranks), axis=0)
    assert abs(a - b) <= 1e-13 * np.sqrt(np.prod(squares))


@pytest.mark.parametrize(("ranks", "way"), list(zip(RANKS, WAYS, strict=True)))
def test_steps_are_those_of_pytorch(ranks, way):
    graph = Graph.random(5, ranks)
    if way == "owned":
        graph, _ = graph.in_rank_order()
    found = spawn(train, ranks, graph, way, nn.MSELoss())

    def compute_loss(p, x, t):
        return torch.nn.functional.mse_loss(run_in_torch("net", p, x, graph), t)

    x, t = map(torch.tensor, make_batches(graph))
    losses, p = train_in_torch(found[0][2], compute_loss, zip(x, t, strict=True))
    predicted = run_in_torch("net", p, x[0, :1], graph)[0]
    assert_trained_alike([(a, {"y": y}, after) for a, y, _, after in found], losses, {"y": predicted}, p)


LOSSES = {
    "mse": nn.MSELoss(),
    "relative": nn.RelativeL2(),
    "vrmse": nn.VRMSE(),
    "rmse": nn.RMSE(skipna=True),
    "most": nn.MaxError(),
    "conserved": nn.ConservedRMSE(),
    "sum": 0.5 * nn.MSELoss() + nn.VRMSE() + nn.RMSE(skipna=True),
}


@pytest.mark.parametrize("name", [*LOSSES, "weights"])
def test_losses_of_nodes_are_those_of_one_process(name):
    graph = Graph.random(5, 4)
    weights = np.random.default_rng(2).random(graph.nodes)
    weights[:4] = 0

    def run(comm):
        cut = graph.assign(graph.parts % comm.size)
        loss = nn.MSELoss(weights=weights[cut.parts == comm.rank]) if name == "weights" else LOSSES[name]
        return train(comm, cut, "split", loss)

    wanted = spawn(run, 1)[0]
    for losses, predicted, _, after in spawn(run, 4):
        np.testing.assert_allclose(losses, wanted[0], rtol=1e-12)
        np.testing.assert_allclose(predicted, wanted[1], rtol=0, atol=1e-12)
        for key, value in wanted[3].items():
            np.testing.assert_allclose(after[key], value, rtol=0, atol=1e-12, err_msg=key)


@pytest.mark.parametrize("shape", [(5,), (5, 1), (5, 2), (4,), (2, 5)])
def test_weights_are_of_nodes_or_of_their_features(shape):
    rng = np.random.default_rng(0)
    y, target, weights = rng.standard_normal((3, 5, 2)), rng.standard_normal((3, 5, 2)), rng.random(shape)
    loss = bind_loss_to_local_nodes(0.5 * nn.MSELoss(weights=weights), ((0, 5),))
    env = env_of(spawn(lambda comm: comm, 1)[0])
    if shape[0] != 5:
        with pytest.raises(DataError, match="this rank owns 5 nodes, of 2 features here; give one for") as text:
            loss.validate(y.shape, target)
        assert f"weights of shape {shape}" in str(text.value)
        return
    loss.validate(y.shape, target)
    wide = np.broadcast_to(weights if weights.ndim == 2 else weights[:, None], y.shape)
    total, weight, saved = loss.forward(env, y, target)
    assert total / weight == pytest.approx(0.5 * (wide * (y - target) ** 2).sum() / wide.sum())
    np.testing.assert_allclose(loss.backward(env, saved, 1 / weight), wide * (y - target) / wide.sum())


def test_losses_that_need_neighboring_cells_are_refused():
    losses = nn.BandRMSE(0, 2), nn.BoundaryRMSE(), nn.RelativeH1(), nn.SpectrumRMSE()
    for loss in (*losses, nn.PhysicsLoss(nn.MSELoss(), nn.FieldLaplacian())):
        with pytest.raises(ConfigError, match="needs the cells of a grid, and cannot be computed on a mesh"):
            bind_loss_to_local_nodes(0.5 * nn.MSELoss() + loss, ((0, 5),))


@pytest.mark.parametrize("weighted", [False, True])
def test_ensembles_of_node_values(weighted):
    """Members are blocks of features. Five steps on any partition."""
    graph, weights = Graph.random(0, 3), np.random.default_rng(1).random(Graph.random(0, 3).nodes)
    x, y = np.random.default_rng(2).standard_normal((2, graph.nodes, 3))

    def run(comm):
        partition = make_partition(comm, graph if comm.size == 3 else Graph.random(0, 1), "split")
        own = partition.take_local(weights[:, None])[: partition.row_counts[0], 0] if weighted else None
        model, loss = nn.Sequential(nn.Linear(3, 6), nn.Tanh()), nn.CRPS(2, weights=own)
        trainer = make_trainer(model, comm, partition, loss=loss, optimizer=optim.SGD(lr=0.5))
        mine, target = partition.take_local(x), partition.take_local(y)
        return [trainer.step(mine, target) for _ in range(5)]

    (want,) = spawn(run, 1)
    for got in spawn(run, 3):
        np.testing.assert_allclose(got, want, rtol=1e-12)


class Doubled(nn.Layer):
    """A layer that claims to keep the rows, but changes them."""

    acts_on = "position"

    def forward(self, env: nn.LayerContext, p: Any, x: Any) -> tuple[Any, Any]:
        return env.xp.concatenate([x, x], axis=1), ()

    def backward_input(self, env: nn.LayerContext, p: Any, saved: Any, dy: Any) -> tuple[Any, Any]:
        return dy[:, ::2] + dy[:, 1::2], ()


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: nn.BatchNorm(3), "reads the nodes of a part of a mesh of 23 nodes"),
        (lambda: nn.Sequential(nn.GraphConv(3, 3), nn.Aggregate()), "needs values of edges"),
        (lambda: nn.GatherNodes("edge"), "GatherNodes: end='edge': choose \"sender\" or \"receiver\""),
        (lambda: nn.GatherNodes("sender"), "outputs must be values of nodes, or scalars"),
        (
            lambda: nn.Graph({"e": (nn.GatherNodes("sender"), "x"), "s": (nn.Add(), "x", "e")}, ("x",), ("s",)),
            "GatherNodes brings values of nodes to edges",
        ),
        (Doubled, r"output 0 of the model is \(1, 46, 3\) for the whole mesh, and must be \(1, 23, 3\)"),
        (lambda: nn.MeshGraphNet(3, 4, 2, 4, 1), "edges of the partition have 3 features, but the model expects 4"),
    ],
)
def test_a_model_that_does_not_fit_is_refused(make, text):
    graph = Graph.random(0, 2)

    def run(comm):
        partition = make_partition(comm, graph, "split")
        make_trainer(make(), comm, partition).predict(partition.take_local(np.zeros((graph.nodes, 3))))

    with pytest.raises(ConfigError, match=text):
        spawn(run, 2)
    one = Graph.random(0, 1)
    with pytest.raises(ConfigError, match="needs the cells of a grid, and cannot be computed on a mesh"):
        spawn(lambda comm: train(comm, one, "split", 1.0 * nn.BandRMSE(0, 2)), 1)
    with pytest.raises(ConfigError, match=r"needs a mesh: pass domain=fsdpx\.Partition"):
        nn.GraphConv(3, 2).as_distributed().predict(np.zeros((1, 5, 3)))
    for wrong in (lambda: nn.Aggregate("min"), lambda: nn.GatherNodes("both"), lambda: nn.GATConv(3, 0)):
        with pytest.raises(ConfigError):
            wrong()


WAYS_TO_TRAIN: dict[str, tuple[int, dict[str, Any], float]] = {
    "ddp": (3, {"strategy": "ddp"}, 1e-12),
    "fsdp, units recomputed": (3, {"strategy": "fsdp", "recompute": "all", "microbatches": 2}, 1e-12),
    "pipeline": (4, {"mesh": fsdpx.Mesh(pipe=2, shard=2), "microbatches": 2, "schedule": "zb-h1"}, 1e-12),
    "float32": (2, {"precision": "float32"}, 1e-6),
    "bf16": (2, {"precision": "bf16"}, 5e-2),
}


@pytest.mark.parametrize("name", WAYS_TO_TRAIN)
def test_a_mesh_trains_alike_with_each_strategy(name):
    """In a pipeline, each stage has its own partition."""
    graph = Graph.random(5, 3)
    x, t = make_batches(graph)

    def run(comm, parts, **options):
        own = comm.subgroup([comm.rank // parts * parts + r for r in range(parts)]) if parts < comm.size else comm
        partition = make_partition(own, graph.assign(graph.parts % parts), "split")
        trainer = make_trainer(make_net(), comm, partition, optimizer=optim.SGD(lr=0.05), **options)
        return [trainer.step(partition.take_local(a), partition.take_local(b)) for a, b in zip(x, t, strict=True)]

    wanted = spawn(run, 1, 1)[0]
    ranks, options, tolerance = WAYS_TO_TRAIN[name]
    for losses in spawn(lambda comm: run(comm, 2 if "mesh" in options else ranks, **options), ranks):
        np.testing.assert_allclose(losses, wanted, rtol=tolerance)


def test_a_part_of_a_mesh_takes_a_part_of_the_memory():
    """Measured by dry runs, which make the same allocations as a step."""
    n = 40
    at = np.arange(n * n).reshape(n, n)
    edges = np.concatenate(
        [np.stack([a.reshape(-1), b.reshape(-1)]) for a, b in ((at[1:], at[:-1]), (at[:, 1:], at[:, :-1]))], axis=1
    )
    points = np.stack(np.divmod(np.arange(n * n), n), axis=-1)

    def measure(comm):
        mesh = fsdpx.Partition.from_replicated_graph(comm, edges, n * n, positions=points, undirected=True)
        x, y = (np.zeros((1, *mesh.local_shape, f), np.float32) for f in (4, 2))
        options = {"loss": nn.MSELoss(), "optimizer": optim.SGD(), "ranks": comm.size, "rank": comm.rank}
        return fsdpx.dry_run(nn.MeshGraphNet(4, 3, 2, 16, 4), x, y, domain=mesh, **options).peak_heap_bytes

    (whole,) = spawn(measure, 1)
    assert max(spawn(measure, 4)) < 0.3 * whole
