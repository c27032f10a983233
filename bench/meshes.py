"""How much processor time does a step of a MeshGraphNet take, compared with PyTorch with `index_add` and one thread?

    python bench/meshes.py [--nodes 5000] [--rounds 5] [--quick]

The mesh is a triangulation with an edge in each direction. Both libraries train the network (128 wide, five
message-passing steps, one sample, float32) by SGD on a squared error, and predict with it, in turns. PyTorch
concatenates the features of an edge and its ends. Hidden layers are kept for backward by both, or recomputed by both
(fsdpx: some of them, as by default; PyTorch: `torch.utils.checkpoint` around each MLP), or recomputed only by fsdpx.
The ratio is PyTorch's processor time over that of fsdpx, the median over rounds: 2 means that fsdpx takes half of it.

Then two ranks take turns with one of them alone: the ratio is the rate of both over that of one, for time that passes
and for processor time (of the slower rank). Last, four ranks train 15 steps on 50,000 nodes, for their memory. The load
of the machine by others is printed, as it spoils the first ratio.
"""

import os

os.environ["OPENBLAS_NUM_THREADS"] = os.environ["OMP_NUM_THREADS"] = os.environ["MKL_NUM_THREADS"] = "1"

import json
import resource
import sys
import time
from collections.abc import Callable
from statistics import median
from typing import Any

import numpy as np
from jobs import environ, finish, mpiexec, start
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


def make_ours(
    mesh: Any, x: np.ndarray, y: np.ndarray, recompute: bool = True, steps: int = STEPS, comm: Any = None
) -> tuple[Call, Call]:
    net = nn.MeshGraphNet(FEATURES, 3, OUT, WIDTH, steps, recompute_hidden=recompute)
    options = {"optimizer": optim.SGD(lr=1e-3), "comm": comm, "domain": mesh, "strategy": "ddp"}
    trainer = net.as_distributed(loss=nn.MSELoss(), **options)
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


def draw_values(mesh: Any) -> list[np.ndarray]:
    rng = np.random.default_rng(0)
    return [rng.standard_normal((mesh.local_shape[0], f)).astype(np.float32) for f in (FEATURES, OUT)]


def list_edges(cells: np.ndarray) -> np.ndarray:
    """Return each edge of triangles once, (2, edges)."""
    return np.unique(np.sort(np.concatenate([cells[:, [0, 1]], cells[:, [1, 2]], cells[:, [2, 0]]]), axis=1), axis=0).T


def measure_ranks(nodes: int, rounds: int) -> None:
    """Run on two ranks, in turns with rank 0 alone. Rank 0 prints milliseconds and ratios."""
    from mpi4py import MPI

    comm = MPI.COMM_WORLD
    points, cells = make_triangulation(nodes)
    graph: dict[str, Any] = {"edges": list_edges(cells), "nodes": len(points), "positions": points, "undirected": True}
    parts = fsdpx.Partition.from_replicated_graph(comm, **graph)
    both = make_ours(parts, *draw_values(parts), comm=comm)[0]
    alone = lambda: None  # noqa: E731
    if comm.rank == 0:
        one = make_single_rank_communicator()
        whole = fsdpx.Partition.from_replicated_graph(one, **graph)
        alone = make_ours(whole, *draw_values(whole), comm=one)[0]
    times = []
    for turn in range(rounds + 1):
        found = []
        for call in (both, alone):
            comm.Barrier()
            begin, processor = time.perf_counter(), time.process_time()
            call()
            spent = time.perf_counter() - begin, time.process_time() - processor
            found.append([max(column) for column in zip(*comm.allgather(spent), strict=True)])
            request = comm.Ibarrier()
            while not request.Test():  # a rank that waits in Barrier would use a core
                time.sleep(0.002)
        times += [found] if turn else []  # the first compiles kernels
    if comm.rank == 0:
        ratios = [[one / two for two, one in zip(*pair, strict=True)] for pair in times]
        both_ms, alone_ms = (1e3 * median(pair[k][0] for pair in times) for k in (0, 1))
        elapsed, processor = (median(ratio[k] for ratio in ratios) for k in (0, 1))
        shares = {"nodes": parts.total_nodes, "ranks": comm.size, "ms": both_ms, "alone_ms": alone_ms}
        print(json.dumps({**shares, "ratio": elapsed, "processor_ratio": processor, "ratios": ratios}), flush=True)


def measure_memory(nodes: int, steps: int) -> None:
    """Run two training steps. Rank 0 prints the largest memory of any rank's process, and what a dry run expects."""
    from mpi4py import MPI

    comm = MPI.COMM_WORLD
    points, cells = make_triangulation(nodes)
    edges = list_edges(cells)
    mesh = fsdpx.Partition.from_replicated_graph(comm, edges, len(points), positions=points, undirected=True)
    x, y = draw_values(mesh)
    step = make_ours(mesh, x, y, steps=steps, comm=comm)[0]
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for _ in range(2):
        step()
    found = comm.gather((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20, before / 2**20))
    net = nn.MeshGraphNet(FEATURES, 3, OUT, WIDTH, steps)
    options: dict[str, Any] = {"optimizer": optim.SGD(lr=1e-3), "ranks": comm.size, "strategy": "ddp"}
    options |= {"rank": comm.rank, "domain": mesh.as_rank(comm.rank)}
    planned = fsdpx.dry_run(net, x, y, loss=nn.MSELoss(), **options).peak_heap_bytes / 2**30
    planned = comm.allreduce(planned, MPI.MAX)
    if comm.rank == 0:
        most, first = (max(column) for column in zip(*found, strict=True))
        sizes = {"nodes": mesh.total_nodes, "steps": steps, "ranks": comm.size}
        print(json.dumps({**sizes, "GiB": most, "GiB_before": first, "GiB_of_a_dry_run": planned}), flush=True)


def run_job(ranks: int, *words: object) -> dict[str, Any]:
    """Run this program with `words` on some ranks, one thread each. Return what rank 0 prints, and the load before."""
    load = os.getloadavg()[0]
    return {"load": load, **finish(start([*mpiexec(ranks), __file__, *map(str, words)], environ()), 1500.0)}


def tables(found: dict[str, Any]) -> list[tuple[str, str]]:
    head = ["call", "hidden layers", "fsdpx ms", "PyTorch ms", "ratio"]
    rows = [
        [m["what"], m["hidden layers"], f"{m['ours']:.0f}", f"{m['theirs']:.0f}", f"{m['ratio']:.2f}"]
        for m in found["network"]
    ]
    two, four = found["ranks"], found["memory"]
    texts = (
        "{ms:.0f} ms, alone {alone_ms:.0f} ms: {ratio:.2f}, by processor time {processor_ratio:.2f} (load {load:.1f})",
        "{GiB:.2f} GiB of each of {ranks} processes, {GiB_before:.2f} before, {GiB_of_a_dry_run:.2f} by a dry run",
    )
    said = [one.get("failed") or text.format(**one) for one, text in zip((two, four), texts, strict=True)]
    return [("network", lines(head, rows, 2)), ("ranks", said[0]), ("memory", said[1])]


def main() -> int:
    p = arguments(__doc__, rounds=5)
    p.add_argument("--nodes", type=int, default=5000, help="nodes of the mesh, about")
    options = p.parse_args()
    nodes, rounds = (400, 2) if options.quick else (options.nodes, options.rounds)
    found = {"rounds": rounds, "load": os.getloadavg()[0], "network": measure_network(nodes, rounds)}
    found["ranks"] = run_job(2, "--ranks", nodes, rounds)
    found["memory"] = run_job(4, "--memory", *((400, 2) if options.quick else (50000, 15)))
    print(f"\nload {found['load']:.1f}\n" + "\n\n".join(text for _, text in tables(found)))
    save("meshes", options, found)
    print(f"\nwritten to {folder_of(options) / 'meshes'}.json")
    return 0


if __name__ == "__main__":
    jobs = {"--ranks": measure_ranks, "--memory": measure_memory}
    if (job := jobs.get(sys.argv[1] if len(sys.argv) > 1 else "")) is not None:
        job(*map(int, sys.argv[2:]))
    else:
        sys.exit(main())
