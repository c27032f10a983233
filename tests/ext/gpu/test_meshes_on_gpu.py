"""Meshes over ranks on a GPU, and on the stand-in: the same losses and predictions as on the host."""

from typing import Any

import numpy as np
import pytest
from mesh_graphs import Graph, make_partition
from test_fields_on_gpu import gpu as gpu
from test_graph_layers import LAYERS, make_batches

from fsdpx import nn, optim, spawn
from fsdpx.core.comm import Communicator


def train(comm: Communicator, name: str, device: str) -> tuple[list[float], np.ndarray]:
    graph = Graph.random(5, 3)
    partition = make_partition(comm, graph, "split")
    trainer = nn.Sequential(LAYERS[name](), nn.Linear(3 if name in ("softmax", "max") else 2, 2)).as_distributed(
        loss=nn.RelativeL2(), optimizer=optim.SGD(lr=0.01), comm=comm, precision="float64", domain=partition,
        device=device,
    )  # fmt: skip
    batches: Any = zip(*make_batches(graph), strict=True)
    losses = [trainer.step(partition.take_local(x), partition.take_local(y)) for x, y in batches]
    found: Any = trainer.predict(partition.take_local(make_batches(graph)[0][0]))
    return losses, partition.all_gather(found.get() if hasattr(found, "get") else found)


@pytest.mark.parametrize("name", ["net", "shared", "conv mean", "conv max", "softmax"])
def test_a_mesh_on_a_gpu_trains_as_on_the_host(gpu: str, name: str) -> None:
    wanted, predicted = spawn(lambda comm: train(comm, name, "cpu"), 3)[0]
    losses, found = spawn(lambda comm: train(comm, name, "cuda"), 3)[0]
    np.testing.assert_allclose(losses, wanted, rtol=1e-9)
    np.testing.assert_allclose(found, predicted, rtol=0, atol=1e-9)
