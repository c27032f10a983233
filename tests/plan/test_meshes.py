"""Plans of models whose nodes are divided over ranks by a `Partition`."""

import re
from math import prod

import numpy as np
import pytest
from steps import demand_equal_on_parts, observed, place_on_data_axis

import fsdpx
from fsdpx import nn, optim
from fsdpx.errors import ConfigError
from fsdpx.plan import predict

OPTIONS = {"loss": nn.MSELoss(), "optimizer": optim.AdamW()}
NODES, WIDTH, STEPS = 40, 8, 2
POINTS = np.random.default_rng(0).standard_normal((NODES, 2))
EDGES = np.random.default_rng(1).integers(0, NODES, (2, 150))


def net(**options):
    return nn.MeshGraphNet(2, 3, 1, WIDTH, STEPS, hidden_layers=1, **options)


def batch(samples):
    return ((samples, NODES, 2), "float32"), ((samples, NODES, 1), "float32")


def make_description(ranks, **options):
    return fsdpx.Partition.from_graph(EDGES, NODES, ranks, positions=POINTS, **options)


@pytest.mark.parametrize(
    ("ranks", "parts", "samples", "undirected", "chosen"),
    [
        (4, 4, 1, True, {"strategy": "fsdp"}),
        (3, 3, 2, False, {"strategy": "ddp", "microbatches": 2}),
        (4, 2, 3, True, {"strategy": "zero2"}),
        (4, 2, 2, True, {"strategy": "zero1", "mesh": fsdpx.Mesh(pipe=2), "microbatches": 2}),
        (2, 2, 1, True, {"strategy": "zero1", "recompute": "all"}),
    ],
)
def test_predicted_bytes_calls_and_memory_are_those_of_ranks(ranks, parts, samples, undirected, chosen):
    mesh = make_description(parts, undirected=undirected)
    found = predict(net(), batch(samples), ranks=ranks, machine="epyc-100g", domain=mesh, **OPTIONS, **chosen)

    def run(comm):
        members, part, rows = place_on_data_axis(found, comm.rank, parts, samples)
        here = comm if members == [*range(ranks)] else comm.subgroup(members)
        real = fsdpx.Partition.from_replicated_graph(here, EDGES, NODES, positions=POINTS, undirected=undirected)
        made = net().as_distributed(comm=comm, domain=real, **OPTIONS, **chosen)
        arrays = (np.ones((rows, *real.local_shape, n), "f4") for n in (2, 1))
        return observed(made, *arrays), (part, real.graph.sizes)

    real = fsdpx.spawn(run, ranks)
    demand_equal_on_parts(found, [seen for seen, _ in real])
    sizes = dict(part for _, part in real)
    assert [tuple(mesh.as_rank(r).graph.sizes) for r in range(parts)] == [tuple(sizes[r]) for r in range(parts)]


@pytest.mark.parametrize("part", [0, 1])
def test_bytes_are_ghosts_by_width_in_forward_and_backward(part):
    """Of sizes alone: each step sends the rows that the other rank lacks, and back the gradients of its own ghosts."""
    mesh = fsdpx.Partition.from_sizes([25, 15], [80, 70], [4, 9], part, edge_features=3)
    x, y = (((2, *mesh.local_shape, n), "float32") for n in (2, 1))
    run = fsdpx.dry_run(net(), x, y, ranks=2, rank=part, domain=mesh, strategy="ddp", **OPTIONS)
    assert run.report.traffic["domain", "send"].bytes == STEPS * 2 * WIDTH * 4 * (4 + 9)
    assert run.report.traffic["domain", "recv"].bytes == STEPS * 2 * WIDTH * 4 * (4 + 9)
    # three values of each edge outlive a step: those before and after it, and messages
    assert run.activations >= STEPS * 2 * WIDTH * 4 * (mesh.local_shape[0] + [80, 70][part])


def test_inputs_of_edges_and_scalars_have_their_own_sizes():
    nodes = {
        "h": (nn.FiLM(1, 2), "x", "reynolds"),
        "u": (nn.MeshGraphNet(2, 0, 1, WIDTH, 1, edge_inputs=1), "h", "e"),
        "drag": (nn.GlobalMean(), "u"),
    }
    model = nn.Graph(nodes, inputs=("x", "reynolds", "e"), outputs=("drag",))
    mesh = fsdpx.Partition.from_sizes([5, 3], [6, 2], [1, 1])  # as many nodes as edges
    shapes = mesh.as_rank(1).compute_local_shapes(model, [(2, 8, 2), (2, 1), (2, 8, 1)], (2, 1))
    assert shapes == ([(2, 3, 2), (2, 1), (2, 2, 1)], (2, 1))
    says = r"of the batch has shape \(2, 4, 1\); give \(samples, 8, features\), the val"
    with pytest.raises(ConfigError, match=says):
        mesh.compute_local_shapes(model, [(2, 8, 2), (2, 1), (2, 4, 1)], (2, 1))
    with pytest.raises(ConfigError, match=r"^Graph has 3 inputs, and the batch 1$"):
        mesh.compute_local_shapes(model, [(2, 8, 2)], (2, 1))


def test_a_search_keeps_the_parts():
    mesh = make_description(2)
    options = OPTIONS | {"domain": mesh, "microbatches": 1, "recompute": None}
    found = fsdpx.plan(net(), batch=batch(2), ranks=2, machine="laptop", memory="1GiB", **options)
    assert {one.options["domain"] for one in found.candidates} == {mesh}
    assert {prod(one.prediction.mesh.domain) for one in found.candidates} == {2}
    assert "domain=partition" in found.python_line
    assert found.longest == ()
    assert [one.mesh.size for one in found.scaling] == [2, 4]


def test_ranks_of_a_mesh_plan_for_it():
    def run(comm):
        mesh = fsdpx.Partition.from_replicated_graph(comm, EDGES, NODES, positions=POINTS)
        made = net().as_distributed(domain=mesh, strategy="auto", batch=batch(1), machine="laptop", **OPTIONS)
        made.step(*(mesh.take_local(np.ones((1, NODES, n), "f4")) for n in (2, 1)))
        return made.report().planned

    words = fsdpx.spawn(run, 2)
    assert words[0] == words[1]
    assert re.match(r"strategy='\w+', domain=partition, microbatches=1; predicted: ", words[0])


@pytest.mark.parametrize("domain", ["any", (2,)])
def test_no_partition_is_chosen(domain):
    says = r"'edgefeatures' EdgeFeatures\(3\) needs a mesh, which plans do not divide: pass dom"
    with pytest.raises(ConfigError, match=says):
        fsdpx.plan(net(), batch=batch(1), ranks=2, machine="laptop", domain=domain, **OPTIONS)


def test_what_only_sizes_cannot_do_is_refused():
    mesh = fsdpx.Partition.from_sizes([25, 15], [80, 70], [4, 9])
    says = r"^Partition\(40 nodes and 150 edges over 2 ranks\): only sizes are known"
    for call, nodes in ((mesh.all_gather, 25), (mesh.take_local, 40)):
        with pytest.raises(ConfigError, match=says):
            call(np.ones((nodes, 1)))
    says = r"^Partition.from_sizes: pass the numbers of nodes, edges and ghosts of each "
    with pytest.raises(ConfigError, match=says):
        fsdpx.Partition.from_sizes([25, 15], [80], [4, 9])
    with pytest.raises(ConfigError, match=r"^Partition.from_graph: ranks=0: give the number of ranks"):
        fsdpx.Partition.from_graph(EDGES, NODES, 0)
