"""Every layer either has the same results on any partition of a mesh, or is refused by name."""

from typing import Any

import numpy as np
from layer_cases import layers_of, rows
from mesh_graphs import draw_parameters, env_of, slope_of
from test_contract import CASES
from test_fields_contract import CASES as OF_FIELDS

import fsdpx
from fsdpx import nn, spawn
from fsdpx.core.comm import Communicator
from fsdpx.errors import ConfigError
from fsdpx.ext.meshes.local_graph import GraphLayer
from fsdpx.nn.layer import iterate_layers
from fsdpx.nn.shard_specs import Replicated

NODES = 6
ALL = {
    **CASES,
    **OF_FIELDS,
    "GlobalMean": (nn.GlobalMean, lambda: rows(3, 2, 4)),  # without weights of the cells of a field
    "PhysicsAttentionOfPoints": (lambda: nn.PhysicsAttention(6, 3, 4), lambda: rows(3, 2, 6)),
    "MoE": (lambda: nn.MoE(4, 3, 5), lambda: rows(3, 2, 4)),
    "MoEBalanced": (lambda: nn.MoE(4, 3, 5, balance=0.1), lambda: rows(3, 2, 4)),
    "LoRALinear": (lambda: nn.LoRALinear(nn.Linear(5, 3), 2, 4.0), lambda: rows(4, 2, 5)),
    "Destandardize": (lambda: nn.Destandardize(range(4), (0.5, 2.0, 3.0, 4.0)), lambda: rows(3, 2, 4)),
    "Standardize": (lambda: nn.Standardize(range(4), (0.5, 2.0, 3.0, 4.0)), lambda: rows(3, 2, 4)),
    "OneHot": (lambda: nn.OneHot(3), lambda: rows(3, 2, 1)),
    "WhereType": (lambda: nn.WhereType(1), lambda: (rows(3, 2, 1), rows(3, 2, 4), rows(3, 2, 4))),
}  # fmt: skip
RUN = {
    "Add", "ChainAfterGraph", "ChainFrozen", "ChainTied", "Concat", "ConcatScalars", "Destandardize", "Dropout",
    "DropoutEvaluating", "DropoutOfAll", "ELU", "FiLM", "FillNaN", "GELU", "GELUTanh", "GatedMLP", "Gate", "GateGELU",
    "GlobalMax", "GlobalMean", "GlobalSum", "Graph", "HeadNorm", "Lambda", "LambdaOfTwo", "LayerNorm", "LayerNormPlain",
    "LeakyReLU", "Linear", "LinearOfSequences", "LoRALinear", "MLP", "MoE", "Multiply", "MultiplyOfThree", "OneHot",
    "PhysicsAttentionOfPoints", "RMSNorm", "RMSNormUnitOffset", "ReLU", "Residual", "Scale", "ScaleShift", "Sequential",
    "SiLU", "Sigmoid",
    "Softmax", "Softplus", "Standardize", "Tanh", "WhereType",
}  # fmt: skip
"""The cases that run on a mesh; all others are refused."""


def test_every_layer_is_tried():
    tried = {type(layer) for make, *_ in ALL.values() for _, layer in iterate_layers(make())}
    missing = {layer for layer in layers_of("fsdpx") - tried if not issubclass(layer, GraphLayer)}
    tried_elsewhere = {"EdgeMLP", "GraphConv", "MeshGraphNet", "NodeMLP", "Prolong", "Restrict"}
    assert {layer.__name__ for layer in missing} <= tried_elsewhere


def make_cycle(comm: Communicator, parts: np.ndarray) -> fsdpx.Partition:
    edges = np.stack([np.arange(NODES), np.roll(np.arange(NODES), 1)])
    return fsdpx.Partition.from_replicated_graph(comm, edges, NODES, parts=parts % comm.size)


def run(comm: Communicator) -> dict[str, Any]:
    """Text of the error, or results, gradients of the inputs and of the parameters, of each layer."""
    mesh = make_cycle(comm, np.array([0, 1, 1, 0, 1, 0]))
    return {name: run_case(comm, mesh, *case) for name, case in ALL.items()}


def run_case(comm: Communicator, mesh: fsdpx.Partition, make: Any, inputs: Any, more: Any = None) -> Any:
    given = inputs() if isinstance(inputs(), tuple) else (inputs(),)
    layer = make()
    if layer.n_inputs is None:
        names = [f"x{i}" for i in range(len(given))]
        layer = nn.Graph({"layer": (layer, *names)}, inputs=names, outputs=("layer",))
    try:
        made, reads, gives = mesh.partition.partition_model(layer)
    except ConfigError as error:
        return str(error)
    rng, x = np.random.default_rng(1), []
    for array, kind in zip(given, reads, strict=True):
        if isinstance(kind, Replicated):
            x.append(rng.standard_normal((2, *array.shape[1:])))
            continue
        features = array.shape[1 if len(given) > 1 and Replicated() in reads else -1]
        types = array.shape[-1] == 1 and features == 1
        whole = rng.integers(0, 3, (2, NODES, 1)) * 1.0 if types else rng.random((2, NODES, features)) + 0.1
        x.append(mesh.take_local(whole))
    p = draw_parameters(layer)
    env = env_of(comm, training=(more or {}).get("training", True))
    y, saved = made.forward(env, p, tuple(x) if len(x) > 1 else x[0])
    results = y if isinstance(y, tuple) else (y,)
    scalars = [isinstance(kind, Replicated) for kind in gives]
    slopes = tuple(
        slope_of(one.shape) / comm.size if is_scalar else mesh.take_local(slope_of((2, NODES, *one.shape[2:])))
        for one, is_scalar in zip(results, scalars, strict=True)
    )
    g = {name: np.zeros_like(p[name]) for name, spec in layer.specs().items() if spec.trainable}
    dx = made.backward(env, p, g, saved, slopes if len(slopes) > 1 else slopes[0])
    dxs = dx if isinstance(dx, tuple) else (dx,)
    slopes_of_inputs = [(d, isinstance(kind, Replicated)) for d, kind in zip(dxs, reads, strict=True) if d is not None]
    return (
        [y if is_scalar else mesh.all_gather(y) for y, is_scalar in zip(results, scalars, strict=True)],
        [mesh.all_gather(d) for d, is_scalar in slopes_of_inputs if not is_scalar],
        [d for d, is_scalar in slopes_of_inputs if is_scalar] + list(g.values()),
    )


def test_each_layer_is_equal_on_two_parts_or_refused():
    (whole,), parts = spawn(run, 1), spawn(run, 2)
    assert {name for name, found in whole.items() if not isinstance(found, str)} == RUN
    for name, wanted in whole.items():
        found = [part[name] for part in parts]
        if isinstance(wanted, str):
            assert found == [wanted] * 2
            assert "reads the nodes of a part of a mesh of 6 nodes" in wanted, (name, wanted)
            continue
        for part in found:
            for a, b in zip([*part[0], *part[1]], [*wanted[0], *wanted[1]], strict=True):
                np.testing.assert_allclose(a, b, rtol=1e-12, atol=1e-12, err_msg=name)
        for a, b, c in zip(found[0][2], found[1][2], wanted[2], strict=True):
            np.testing.assert_allclose(a + b, c, rtol=1e-12, atol=1e-12, err_msg=name)


def test_features_are_standardized_on_nodes_and_edges():
    mean, std = (1.0, -2.0, 3.0), (2.0, 0.5, 4.0)
    x = np.random.default_rng(0).standard_normal((2, NODES, 3))
    first, last = nn.Standardize(mean, std), nn.Destandardize(mean, std)
    net = nn.Sequential(first, nn.GatherNodes("sender"), last, nn.Aggregate())

    def run(comm):
        mesh = make_cycle(comm, np.arange(NODES))
        found = [model.as_distributed(comm=comm, domain=mesh, precision="float64") for model in (net, first)]
        return [mesh.all_gather(trainer.predict(mesh.take_local(x))) for trainer in found]

    for received, standardized in spawn(run, 2):
        np.testing.assert_allclose(received, np.roll(x, -1, axis=1), rtol=1e-12)
        np.testing.assert_allclose(standardized, (x - mean) / std, rtol=1e-12)
