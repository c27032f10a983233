"""MeshGraphNets with weights of other projects have the same outputs as there."""

import numpy as np
import pytest
from models import distributed

import fsdpx
from fsdpx import models, spawn
from fsdpx.errors import CheckpointError
from fsdpx.testing import assert_close

torch = pytest.importorskip("torch")

RNG = np.random.default_rng(5)
NODES, HIDDEN, STEPS = 11, 6, 2
EDGES = RNG.integers(0, NODES, (2, 30))
X, FEATURES = RNG.standard_normal((NODES, 3)), RNG.standard_normal((30, 4))


def aggregate(values):
    return torch.zeros(NODES, values.shape[1], dtype=values.dtype).index_add(0, torch.tensor(EDGES[1]), values)


class Mlp(torch.nn.Module):
    """MLP as in PhysicsNeMo, with a name for each layer."""

    def __init__(self, inputs, outputs, norm=True):
        super().__init__()
        t = torch.nn
        layers = [t.Linear(inputs, HIDDEN), t.SiLU(), t.Linear(HIDDEN, HIDDEN), t.SiLU(), t.Linear(HIDDEN, outputs)]
        self.model = t.Sequential(*layers, *([t.LayerNorm(outputs)] if norm else []))


class SumMlp(torch.nn.Module):
    """MLP whose first matrix is split into three parts."""

    def __init__(self):
        super().__init__()
        whole = Mlp(3 * HIDDEN, HIDDEN)
        for name in ("lin_efeat", "lin_src", "lin_dst"):
            setattr(self, name, torch.nn.Parameter(torch.randn(HIDDEN, HIDDEN)))
        self.bias, self.model = whole.model[0].bias, torch.nn.Sequential(*list(whole.model)[1:])


class PhysicsNeMo(torch.nn.Module):
    def __init__(self, concat):
        super().__init__()
        self.register_buffer("device_buffer", torch.empty(0))
        self.edge_encoder, self.node_encoder = Mlp(4, HIDDEN), Mlp(3, HIDDEN)
        self.node_decoder, layers = Mlp(HIDDEN, 2, norm=False), torch.nn.ModuleList()
        for _ in range(STEPS):
            layers.append(torch.nn.ModuleDict({"edge_mlp": Mlp(3 * HIDDEN, HIDDEN) if concat else SumMlp()}))
            layers.append(torch.nn.ModuleDict({"node_mlp": Mlp(2 * HIDDEN, HIDDEN)}))
        self.processor = torch.nn.ModuleDict({"processor_layers": layers})

    def forward(self, x, features):
        e, h, (s, r) = self.edge_encoder.model(features), self.node_encoder.model(x), EDGES
        for block in self.processor.processor_layers:
            ((name, mlp),) = block.items()
            if name == "node_mlp":
                h = h + mlp.model(torch.cat([aggregate(e), h], dim=1))
            elif isinstance(mlp, Mlp):
                e = e + mlp.model(torch.cat([e, h[s], h[r]], dim=1))
            else:
                e = e + mlp.model(e @ mlp.lin_efeat.T + (h @ mlp.lin_src.T)[s] + (h @ mlp.lin_dst.T + mlp.bias)[r])
        return self.node_decoder.model(h)


def deepmind_variables():
    found = {"Model/output_normalizer/Variable:0": np.ones(2), "global_step:0": np.array(7)}

    def add(path, number, inputs, outputs, norm=True):
        for i, (a, b) in enumerate(((inputs, HIDDEN), (HIDDEN, HIDDEN), (HIDDEN, outputs))):
            found[f"{path}/mlp{number}/linear_{i}/w:0"] = RNG.standard_normal((a, b))
            found[f"{path}/mlp{number}/linear_{i}/b:0"] = RNG.standard_normal(b)
        if norm:
            for name in ("gamma", "beta"):
                found[f"{path}/layer_norm{number}/{name}:0"] = RNG.standard_normal(outputs)

    add("EncodeProcessDecode/encoder", "", 3, HIDDEN)
    add("EncodeProcessDecode/encoder", "_1", 4, HIDDEN)
    for i in range(STEPS):
        block = f"EncodeProcessDecode/GraphNetBlock{f'_{i}' if i else ''}"
        add(f"{block}/mesh_edges_edge_fn", "", 3 * HIDDEN, HIDDEN)
        add(f"{block}/node_fn", "", 2 * HIDDEN, HIDDEN)
    add("EncodeProcessDecode/decoder", "", HIDDEN, 2, norm=False)
    return found


def deepmind_forward(variables, x, features):
    v, (s, r) = {name: torch.tensor(a) for name, a in variables.items()}, EDGES

    def mlp(path, x, number="", norm=True):
        path = f"EncodeProcessDecode/{path}"
        for i in range(3):
            x = (x.relu() if i else x) @ v[f"{path}/mlp{number}/linear_{i}/w:0"]
            x = x + v[f"{path}/mlp{number}/linear_{i}/b:0"]
        if not norm:
            return x
        gamma, beta = (v[f"{path}/layer_norm{number}/{name}:0"] for name in ("gamma", "beta"))
        return torch.nn.functional.layer_norm(x, (HIDDEN,), gamma, beta)

    h, e = mlp("encoder", torch.tensor(x)), mlp("encoder", torch.tensor(features), "_1")
    for i in range(STEPS):
        block = f"GraphNetBlock{f'_{i}' if i else ''}"
        m = mlp(f"{block}/mesh_edges_edge_fn", torch.cat([h[s], h[r], e], dim=1))
        h, e = h + mlp(f"{block}/node_fn", torch.cat([h, aggregate(m)], dim=1)), e + m
    return mlp("decoder", h, norm=False).numpy()


def from_physicsnemo(concat):
    module = PhysicsNeMo(concat).double()

    def forward(state, x, features):
        module.load_state_dict({name: torch.tensor(a) for name, a in state.items()})
        with torch.no_grad():
            return module(torch.tensor(x), torch.tensor(features)).numpy()

    return {name: a.numpy().copy() for name, a in module.state_dict().items()}, forward, {"activation": "silu"}


CASES = {
    "physicsnemo": lambda: from_physicsnemo(True),
    "physicsnemo in parts": lambda: from_physicsnemo(False),
    "deepmind": lambda: (deepmind_variables(), deepmind_forward, {}),
}


@pytest.mark.parametrize("name", CASES)
def test_networks_of_other_projects_compute_the_same_and_go_back(name):
    """Also after a step of training."""
    state, forward, options = CASES[name]()

    def run(comm):
        given = {"parts": np.arange(NODES) * comm.size // NODES, "edge_features": FEATURES, "undirected": False}
        mesh = fsdpx.Partition.from_replicated_graph(comm, EDGES, NODES, **given)
        trainer = distributed(models.from_state_dict(state, **options), comm, precision="float64", domain=mesh)
        x, before = mesh.take_local(X), models.to_state_dict(trainer.parameters(), state, **options)
        found = [mesh.all_gather(trainer.predict(x))]
        trainer.step(x, x[:, :2])
        found.append(mesh.all_gather(trainer.predict(x)))
        return found, before, models.to_state_dict(trainer.parameters(), state, **options)

    for found, before, after in spawn(run, 2):
        assert_close({name: before[name] for name in state}, state)
        for y, values in zip(found, (state, after), strict=True):
            assert_close({"y": y}, {"y": forward(values, X, FEATURES)}, 1e-11)
    assert not np.allclose(*found)


def test_weights_that_are_missing_or_left_over_are_named():
    state = deepmind_variables()
    name = "EncodeProcessDecode/GraphNetBlock_1/node_fn/layer_norm/beta:0"
    with pytest.raises(CheckpointError, match=r"missing: node_1\.5\.bias"):
        models.from_state_dict({key: a for key, a in state.items() if key != name})
    with pytest.raises(CheckpointError, match="not in the model: EncodeProcessDecode/encoder/mlp_2/linear_0/w"):
        models.from_state_dict(state | {"EncodeProcessDecode/encoder/mlp_2/linear_0/w:0": np.ones((2, 2))})
    with pytest.raises(CheckpointError, match=r"missing: edge_encoder\.0\.weight"):
        models.from_state_dict({"EncodeProcessDecode/encoder/mlp/linear_0/w": np.ones((2, 2))})
