"""One rank slowed five times: steps per second of the others, beside their own speed, by strategy.

    mpiexec -n 3 python bench/asynchronous.py [--quick]

A step sleeps as long as a small one computes, and on the last rank, where it is slow, five times as long."""

import sys
import time
from typing import Any

import numpy as np
from records import arguments, lines, save

import fsdpx
from fsdpx import nn, optim
from fsdpx.comm import Communicator

__all__ = ["main", "tables"]

STRATEGIES = ("ddp", "async", "gossip")
SLOWER, WIDTH, SAMPLES = 5, 256, 32


def rate(comm: Communicator, strategy: str, steps: int, slow: bool, pause: float) -> float:
    """Steps per second of this rank. Ranks that wait for each other make equally many, others as they come."""
    model = nn.Chain(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH))
    options: dict[str, Any] = {"loss": nn.MSE(), "optimizer": optim.AdamW(lr=1e-4), "strategy": strategy}
    trainer = model.as_distributed(comm=comm, **options)
    late = slow and comm.rank == comm.size - 1
    x = np.random.default_rng(comm.rank).standard_normal((SAMPLES, WIDTH)).astype(np.float32)
    trainer.step(x, x)
    trainer.finish()
    mine = steps // SLOWER if late and trainer.apart else steps
    begin = time.perf_counter()
    for _ in range(mine):
        time.sleep(pause * (SLOWER if late else 1))
        trainer.step(x, x)
    found = mine / (time.perf_counter() - begin)
    trainer.finish()
    trainer.close()
    return found


def main() -> int:
    options = arguments(__doc__ or "", 5).parse_args()
    comm = fsdpx.init()
    steps, pause = (20, 0.002) if options.quick else (200, 0.02)
    rows = []
    for strategy in STRATEGIES:
        own, slowed = list[list[float]](), list[list[float]]()
        for _ in range(1 if options.quick else options.rounds):  # in turns: the machine has its moods
            for slow, into in ((False, own), (True, slowed)):
                into.append(comm.all_gather_object(rate(comm, strategy, steps, slow, pause))[:-1])
        alone, beside = (float(np.median([r for ranks in found for r in ranks])) for found in (own, slowed))
        rows.append({"strategy": strategy, "own": alone, "beside": beside})
    if comm.rank == 0:
        found = {"ranks": comm.size, "slower": SLOWER, "rows": rows}
        save("asynchronous", options, found)
        for _, text in tables(found):
            print(text, flush=True)
    fsdpx.finalize()
    return 0


def tables(found: dict[str, Any]) -> list[tuple[str, str]]:
    head = ("strategy", "steps/s, all alike", f"one rank {found['slower']} times slower", "ratio")
    rows = [
        (row["strategy"], f"{row['own']:.1f}", f"{row['beside']:.1f}", f"{row['beside'] / row['own']:.2f}")
        for row in found["rows"]
    ]
    return [("speed", lines(head, rows))]


if __name__ == "__main__":
    sys.exit(main())
