"""How much does a bridge in mode "latest" slow down a solver whose trainer is 20 times slower?

    mpiexec -n 3 python bench/coupling.py [--solvers 2] [--side 256] [--steps 100] [--rounds 9] [--slower 20]

Solver ranks hold rows of a periodic field and take steps of the heat equation, with messages to their neighbors. The
trainer sleeps for as long as 20 steps take after each snapshot, which leaves the cores to the solver. The solver takes
turns: some steps without the bridge, and as many with a snapshot sent after each. Rank 0 prints the medians, and writes
them to results/coupling.json.
"""

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

import numpy as np

import fsdpx


def step(comm: Any, u: np.ndarray, work: int) -> np.ndarray:
    """Take `work` explicit steps of the heat equation on rows of a periodic field."""
    up, down = (comm.rank - 1) % comm.size, (comm.rank + 1) % comm.size
    for _ in range(work):
        wide = np.pad(u, ((1, 1), (1, 1)), mode="wrap")
        if comm.size > 1:
            low, high = np.ascontiguousarray(u[0]), np.ascontiguousarray(u[-1])
            above, below = np.empty_like(low), np.empty_like(high)
            comm.Sendrecv(high, down, recvbuf=above, source=up)
            comm.Sendrecv(low, up, recvbuf=below, source=down)
            wide[0, 1:-1], wide[-1, 1:-1] = above, below
        u = u + 0.1 * (wide[:-2, 1:-1] + wide[2:, 1:-1] + wide[1:-1, :-2] + wide[1:-1, 2:] - 4 * u)
    return u


def solve(comm: Any, bridge: Any, u: np.ndarray, args: argparse.Namespace) -> dict[str, list[float]]:
    """Return the steps per second of each round, without and with the bridge."""
    rates: dict[str, list[float]] = {"without": [], "with": []}
    for _ in range(args.rounds):
        for name, found in rates.items():
            comm.Barrier()
            begin = time.perf_counter()
            for _ in range(args.steps):
                u = step(comm, u, args.work)
                if name == "with":
                    bridge.send(u)
            comm.Barrier()
            found.append(args.steps / (time.perf_counter() - begin))
    return rates


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    for name, default in {"solvers": 2, "side": 256, "steps": 100, "rounds": 9, "slower": 20, "work": 4}.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    args = parser.parse_args()
    fsdpx.init()
    from mpi4py import MPI

    world = MPI.COMM_WORLD
    trains = world.rank >= args.solvers
    part = world.Split(int(trains))
    side, count = args.side, part.size
    own = len(np.array_split(np.arange(side), count)[part.rank])
    shape, dims = ((side, own), (1, count)) if trains else ((own, side), (count, 1))
    grid = fsdpx.Grid(part, shape, dims=dims, layout="yx")
    u = np.random.default_rng(world.rank).random(shape)
    if not trains:
        u = step(part, u, args.work)
        begin = time.perf_counter()
        for _ in range(10):
            u = step(part, u, args.work)
        took = (time.perf_counter() - begin) / 10
    seconds = world.bcast(None if trains else took, 0)
    with fsdpx.Bridge(world, **{"trainer" if trains else "solver": grid}, mode="latest") as bridge:
        if trains:
            numbers = []
            for snapshot in bridge:
                numbers.append(snapshot.number)
                time.sleep(args.slower * seconds)
        else:
            rates = solve(part, bridge, u, args)
    received = world.bcast(len(numbers) if trains else None, args.solvers)
    if world.rank == 0:
        ratio = statistics.median(b / a for a, b in zip(rates["without"], rates["with"], strict=True))
        found = {
            "solvers": args.solvers, "trainers": world.size - args.solvers, "side": side, "slower": args.slower,
            "steps_per_second": {name: round(statistics.median(values), 1) for name, values in rates.items()},
            "median_ratio": round(ratio, 4), "sent": args.steps * args.rounds, "received": received,
        }  # fmt: skip
        text = json.dumps(found)
        (Path(__file__).parent / "results" / "coupling.json").write_text(text + "\n")
        print(text)


if __name__ == "__main__":
    main()
