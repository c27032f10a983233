"""How much processor time does a step of a MeshGraphNet take, compared with PyTorch with `index_add` and one thread?

    python bench/meshes.py [--nodes 5000] [--rounds 5] [--quick]

The mesh is a triangulation with an edge in each direction. Both libraries train the network (128 wide, five
message-passing steps, one sample, float32) by SGD on a squared error, and predict with it, in turns. PyTorch
concatenates the features of an edge and its ends. Hidden layers are kept for backward by both, or recomputed by both
(fsdpx: some of them, as by default; PyTorch: `torch.utils.checkpoint` around each MLP), or recomputed only by fsdpx.
The ratio is PyTorch's processor time over that of fsdpx, the median over rounds: 2 means that fsdpx takes half of it.
"""

import os

os.environ["OPENBLAS_NUM_THREADS"] = os.environ["OMP_NUM_THREADS"] = os.environ["MKL_NUM_THREADS"] = "1"

import sys
import time
from collections.abc import Callable
from statistics import median
from typing import Any

import numpy as np
from records import arguments, folder_of, lines, save

import fsdpx
from fsdpx import nn, optim
from fsdpx.core.comm.local import make_single_rank_communicator

__all__ = ["make_triangulation", "measure_network", "tables"]

WIDTH, STEPS, FEATURES, OUT = 128, 5, 5, 3
Call = Callable[[], Any]


def make_triangulation(nodes: int) -> tuple[np.ndarray, np.ndarray]:
    """Return coordinates of about `nodes` nodes, and the cells between them."""
    n = max(int(nodes**0.5), 2)
    at = np.arange(n * n).reshape(n, n)
    points = np.stack(np.divmod(at, n), axis=-1).reshape(-1, 2) + np.random.default_rng(0).uniform(
        -0.3, 0.3, (n * n, 2)
    )
    a, b, c, d = at[:-1, :-1], at[1:, :-1], at[1:, 1:], at[:-1, 1:]
    return points, np.stack([a, b, c, a, c, d], axis=-1).reshape(-1, 3)


def make_ours(mesh: Any, x: np.ndarray, y: np.ndarray, recompute: bool) -> tuple[Call, Call]:
    net = nn.MeshGraphNet(FEATURES, 3, OUT, WIDTH, STEPS, recompute_hidden=recompute)
    trainer = net.as_distributed(loss=nn.MSELoss(), optimizer=optim.SGD(lr=1e-3), domain=mesh, strategy="ddp")
    return lambda: trainer.step(x, y), lambda: trainer.predict(x)


def make_theirs(mesh: Any, x: np.ndarray, y: np.ndarray, recompute: bool) -> tuple[Call, Call]:
    import torch
    from torch.nn import LayerNorm, Linear, Module, ModuleList, ReLU, Sequential
    from torch.utils.checkpoint import checkpoint

    def mlp(features: int, out: int, norm: bool = True) -> Module:
        layers = [Linear(features, WIDTH), ReLU(), Linear(WIDTH, WIDTH), ReLU(), Linear(WIDTH, out)]
        return Sequential(*layers, *([LayerNorm(out)] if norm else []))

    graph = mesh.graph
    senders, receivers = torch.tensor(graph.senders), torch.tensor(graph.receivers)
    features = torch.tensor(graph.edge_features, dtype=torch.float32)

    def call(layer: Module, *values: Any) -> Any:
        if recompute and torch.is_grad_enabled():
            return checkpoint(lambda *parts: layer(torch.cat(parts, dim=1)), *values, use_reentrant=False)
        return layer(torch.cat(values, dim=1))

    class Net(Module):
        def __init__(self) -> None:
            super().__init__()
            self.of_nodes, self.of_edges, self.decoder = mlp(FEATURES, WIDTH), mlp(3, WIDTH), mlp(WIDTH, OUT, False)
            self.edges = ModuleList([mlp(3 * WIDTH, WIDTH) for _ in range(STEPS)])
            self.nodes = ModuleList([mlp(2 * WIDTH, WIDTH) for _ in range(STEPS)])

        def forward(self, x: Any) -> Any:
            h, e = call(self.of_nodes, x), call(self.of_edges, features)
            for edge, node in zip(self.edges, self.nodes, strict=True):
                messages = call(edge, e, h[senders], h[receivers])
                received = torch.zeros_like(h).index_add_(0, receivers, messages)
                h, e = h + call(node, received, h), e + messages
            return call(self.decoder, h)

    net = Net()
    sgd = torch.optim.SGD(net.parameters(), lr=1e-3)
    inputs, target = torch.tensor(x), torch.tensor(y)

    def step() -> None:
        sgd.zero_grad()
        torch.nn.functional.mse_loss(net(inputs), target).backward()
        sgd.step()

    def predict() -> None:
        with torch.no_grad():
            net(inputs)

    return step, predict


def time_call(call: Call) -> float:
    """Return the processor time of a call in seconds."""
    begin = time.process_time()
    call()
    return time.process_time() - begin


def measure_network(nodes: int, rounds: int) -> list[dict[str, Any]]:
    """Return milliseconds of processor time and ratios of a step and a prediction."""
    import torch

    torch.set_num_threads(1)
    points, cells = make_triangulation(nodes)
    mesh = fsdpx.Partition.from_cells(make_single_rank_communicator(), cells, positions=points)
    rng = np.random.default_rng(0)
    x, y = (rng.standard_normal((mesh.total_nodes, f)).astype(np.float32) for f in (FEATURES, OUT))
    measured = []
    for name, recomputes in (
        ("kept", (False, False)),
        ("recomputed", (True, True)),
        ("recomputed, kept", (True, False)),
    ):
        ours, theirs = make_ours(mesh, x, y, recomputes[0]), make_theirs(mesh, x, y, recomputes[1])
        for what, a, b in list(zip(("step", "predict"), ours, theirs, strict=True))[: 1 + (name == "kept")]:
            a(), b()  # compiles kernels and allocates buffers
            pairs = [(time_call(a), time_call(b)) for _ in range(rounds)]
            measured.append(
                {
                    "hidden layers": name, "what": what, "nodes": mesh.total_nodes, "edges": mesh.total_edges,
                    "ours": 1e3 * median(p[0] for p in pairs), "theirs": 1e3 * median(p[1] for p in pairs),
                    "ratio": median(b / a for a, b in pairs), "ratios": [b / a for a, b in pairs],
                }
            )  # fmt: skip
    return measured


def tables(found: dict[str, Any]) -> list[tuple[str, str]]:
    head = ["call", "hidden layers", "fsdpx ms", "PyTorch ms", "ratio"]
    rows = [
        [m["what"], m["hidden layers"], f"{m['ours']:.0f}", f"{m['theirs']:.0f}", f"{m['ratio']:.2f}"]
        for m in found["network"]
    ]
    return [("network", lines(head, rows, 2))]


def main() -> int:
    p = arguments(__doc__, rounds=5)
    p.add_argument("--nodes", type=int, default=5000, help="nodes of the mesh, about")
    options = p.parse_args()
    nodes, rounds = (400, 2) if options.quick else (options.nodes, options.rounds)
    found = {"rounds": rounds, "network": measure_network(nodes, rounds)}
    print(f"\n{dict(tables(found))['network']}")
    save("meshes", options, found)
    print(f"\nwritten to {folder_of(options) / 'meshes'}.json")
    return 0


if __name__ == "__main__":
    sys.exit(main())
