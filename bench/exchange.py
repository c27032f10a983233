"""One implementation's collectives on 2 or more ranks, timed by size. A job of `collectives.py`.

    mpiexec -n 2 python bench/exchange.py mpi4py [--seconds 0.3] [--sizes 4096 65536]

Rank 0 prints {"times": {collective: {size: seconds}}}. A time is the median over repetitions of the slowest rank's;
small transfers are repeated in blocks between two barriers. Sizes are bytes of the full array: what all-gather leaves
on every rank, what reduce-scatter and all-reduce start from. "mpi4py" needs nothing of fsdpx: any environment will do.
"""

import argparse
import json
import math
import os
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

SIZES = [4**n * 1024 for n in range(1, 10)]  # 4 KiB to 256 MiB
Operations = dict[str, Callable[[], Any]]
BLOCK, MOST = 1e-3, 512  # seconds of calls between two barriers, at least, or that many calls


@dataclass(frozen=True)
class Group:
    """What is timed: `operations(n)` on full arrays of n float32, ready to be called any number of times."""

    rank: int
    operations: Callable[[int], Operations]
    barrier: Callable[[], Any]
    everyone: Callable[[Any], list[Any]]


def copying() -> Group:
    """The limit: every rank copies in shared memory at the same time, as many bytes as the size says."""
    from mpi4py import MPI

    world = MPI.COMM_WORLD

    def operations(n: int) -> Operations:
        window = MPI.Win.Allocate_shared(8 * n, 4, comm=world)
        both = np.frombuffer(window.tomemory(), np.float32).reshape(2, n)
        both[...] = 1.0
        return {"copy": lambda: np.copyto(both[1], both[0])}

    return Group(world.rank, operations, world.Barrier, world.allgather)


def by_mpi4py() -> Group:
    from mpi4py import MPI

    world = MPI.COMM_WORLD

    def operations(n: int) -> Operations:
        full, piece = np.ones(n, np.float32), np.ones(n // world.size, np.float32)
        return {
            "all_reduce": lambda: world.Allreduce(MPI.IN_PLACE, full),
            "all_gather": lambda: world.Allgather(piece, full),
            "reduce_scatter": lambda: world.Reduce_scatter_block(full, piece),
        }

    return Group(world.rank, operations, world.Barrier, world.allgather)


def by_fsdpx(backend: str) -> Group:
    """Through the communicator that the engine uses, with buffers where the engine keeps them."""
    from fsdpx.core.comm.init import open_world

    comm = open_world(backend)

    def operations(n: int) -> Operations:
        full, total, shard, piece = buffers(comm, n)
        own = n // comm.size
        mine = full[comm.rank * own : (comm.rank + 1) * own]
        return {
            "all_reduce": lambda: comm.all_reduce(total).wait(),
            "all_gather": lambda: comm.all_gather(shard, full).wait(),
            "all_gather_in_place": lambda: comm.all_gather(mine, full).wait(),
            "reduce_scatter": lambda: comm.reduce_scatter(total, piece).wait(),
        }

    return Group(comm.rank, operations, lambda: comm.barrier().wait(), comm.all_gather_object)


def buffers(comm: Any, n: int) -> list[np.ndarray]:
    """Where to gather to, what to reduce (n float32 each), this rank's shard, and its piece of the sum.

    With windows the first is one array for all ranks of the host, the second is within reach of all of them.
    """
    made = [np.empty(size, np.float32) for size in (n, n, n // comm.size, n // comm.size)]
    if hasattr(comm, "allocate_node_buffer"):
        windows = comm.allocate_node_buffer(4 * n), comm.allocate_shared(4 * n)
        if windows[0] is None or windows[1] is None:
            raise RuntimeError(f"no room for shared windows of {4 * n:,} bytes")
        made[:2] = [window[: 4 * n].view(np.float32) for window in windows]
    for array in made:
        array[...] = 1.0
    return made


def by_gloo() -> Group:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    size = dist.get_world_size()

    def operations(n: int) -> Operations:
        full, piece = torch.ones(n), torch.ones(n // size)
        return {
            "all_reduce": lambda: dist.all_reduce(full),
            "all_gather": lambda: dist.all_gather_into_tensor(full, piece),
            "reduce_scatter": lambda: dist.reduce_scatter_tensor(piece, full),
        }

    def everyone(value: Any) -> list[Any]:
        values: list[Any] = [None] * size
        dist.all_gather_object(values, value)
        return values

    return Group(dist.get_rank(), operations, dist.barrier, everyone)


GROUPS: dict[str, Callable[[], Group]] = {
    "copy": copying,
    "node": lambda: by_fsdpx("node"),
    "mpi": lambda: by_fsdpx("mpi"),
    "mpi4py": by_mpi4py,
    "gloo": by_gloo,
}


def measure(group: Group, operation: Callable[[], Any], seconds: float) -> float:
    """Median over at least 3 repetitions of the slowest rank's seconds per call.

    A repetition is so many calls that it lasts a while: on the way there small transfers are called often enough that
    caches, branch predictors and Python's own adaptation have settled, in every implementation alike.
    """
    operation()
    group.barrier()
    calls = 1
    while (taken := max(group.everyone(_clocked(operation, calls)))) * calls < BLOCK and calls < MOST:
        calls *= 2
        group.barrier()
    repetitions = max(3, min(math.ceil(seconds / (taken * calls)), 200))
    blocks = []
    for _ in range(repetitions):
        group.barrier()
        blocks.append(_clocked(operation, calls))
    return statistics.median(map(max, zip(*group.everyone(blocks), strict=True)))


def _clocked(operation: Callable[[], Any], calls: int) -> float:
    begin = time.perf_counter()
    for _ in range(calls):
        operation()
    return (time.perf_counter() - begin) / calls


def main() -> int:
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    p.add_argument("implementation", choices=GROUPS)
    p.add_argument("--seconds", type=float, default=0.3, help="of each collective at each size, about")
    p.add_argument("--sizes", type=int, nargs="+", default=SIZES, help="in bytes")
    options = p.parse_args()
    group = GROUPS[options.implementation]()
    times: dict[str, dict[str, float]] = {}
    for size in options.sizes:
        for name, operation in group.operations(size // 4).items():
            times.setdefault(name, {})[str(size)] = measure(group, operation, options.seconds)
    if group.rank == 0:
        print(json.dumps({"times": times}), flush=True)
    if options.implementation == "gloo":
        os._exit(0)  # its process group now and then aborts while the interpreter ends
    return 0


if __name__ == "__main__":
    sys.exit(main())
