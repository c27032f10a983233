"""Steps of linear chains of many sizes, and steps with communication switched on and off. Jobs of `scaling.py`.

    [mpiexec -n 2] python bench/sweep.py chains --layers 10 100 --widths 32 [--threads 2]
    mpiexec -n 2 python bench/sweep.py share --model many [--group-bytes 0]

Rank 0 prints one line of JSON.
"""

import argparse
import json
import math
import statistics
import sys
import time
from itertools import product
from typing import Any

import numpy as np
from silent import silence
from workloads import MODELS, batch, in_fsdpx

import fsdpx
from fsdpx import nn, optim

MOVING = ("GATHER", "FREE", "REDUCE", "SETTLE", "JOIN", "NORM", "MEAN", "SCALE")
"""Verbs that only ranks that speak with each other need; waiting counts too, in whichever verb."""


def chains(comm: Any, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Median step of each chain of `layers` x Linear(width, width), the rows dealt over the ranks."""
    return [_chain(comm, options, layers, width) for layers, width in product(options.layers, options.widths)]


def _chain(comm: Any, options: argparse.Namespace, layers: int, width: int) -> dict[str, Any]:
    trainer = fsdpx.distribute(
        nn.Chain(*(nn.Linear(width, width) for _ in range(layers))),
        loss=nn.MSE(),
        optimizer=optim.AdamW(lr=1e-3),
        strategy=options.strategy,
        comm=comm,
    )
    rows = max(options.rows // comm.size, 1)
    x, y = np.random.default_rng(comm.rank).normal(size=(2, rows, width)).astype(np.float32)
    count = _count(comm, trainer, x, y, options.seconds)
    seconds = statistics.median(_steps(trainer, x, y, count))
    units, parameters = len(trainer.placement.layout.units), trainer.placement.layout.size
    trainer.close()
    return {"layers": layers, "width": width, "parameters": parameters, "units": units, "seconds": seconds}


def share(comm: Any, options: argparse.Namespace) -> dict[str, Any]:
    """On and off in turns, step by step, each after a barrier; of each step the slowest rank counts."""
    model, loss = in_fsdpx(MODELS[options.model])
    optimizer, strategy = optim.AdamW(lr=1e-9), options.strategy  # parameters stay where they are, right or wrong
    trainer = model.as_distributed(
        loss=loss, optimizer=optimizer, strategy=strategy, comm=comm, group_bytes=options.group_bytes
    )
    x, y = batch(MODELS[options.model], comm.rank, comm.size)
    count = _count(comm, trainer, x, y, options.seconds)
    report = _reported(trainer, x, y, count)
    switch = silence(trainer)
    taken: dict[bool, list[float]] = {True: [], False: []}
    for step in range(2 * count):
        switch.on = True
        comm.barrier().wait()
        before, switch.on = switch.calls, step % 2 == 0
        taken[switch.on] += _steps(trainer, x, y, 1)
        if comm.size > 1 and switch.calls == before:
            raise RuntimeError("the engine speaks past the switch: its communicators have moved")
    slowest = {on: [max(s) for s in zip(*comm.all_gather_object(t), strict=True)] for on, t in taken.items()}
    return {
        "on": statistics.median(slowest[True]),
        "off": statistics.median(slowest[False]),
        "steps": count,
        "units": len(trainer.placement.layout.units),
        "reported": statistics.mean(comm.all_gather_object(report)),
    }


def _reported(trainer: Any, x: Any, y: Any, count: int) -> float:
    """The share of moving and waiting in the time that the engine's own clock saw."""
    trainer.reset()
    _steps(trainer, x, y, count)
    times = trainer.report().times
    total = sum(t[0] + t[1] for t in times.values())
    return (sum(times[op][0] for op in MOVING if op in times) + sum(t[1] for t in times.values())) / total


def _count(comm: Any, trainer: Any, x: Any, y: Any, seconds: float) -> int:
    """Warm up; how many steps fill `seconds`, alike on all ranks."""
    _steps(trainer, x, y, 2)
    once = max(comm.all_gather_object(min(_steps(trainer, x, y, 2))))
    return max(3, min(math.ceil(seconds / once), 200))


def _steps(trainer: Any, x: Any, y: Any, count: int) -> list[float]:
    taken = []
    for _ in range(count):
        begin = time.perf_counter()
        trainer.step(x, y)
        taken.append(time.perf_counter() - begin)
    return taken


def main() -> int:
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    p.add_argument("kind", choices=("chains", "share"))
    p.add_argument("--layers", type=int, nargs="+", default=[10])
    p.add_argument("--widths", type=int, nargs="+", default=[32])
    p.add_argument("--rows", type=int, default=64, help="over all ranks")
    p.add_argument("--threads", type=int, default=0, help="this many ranks as threads of one process")
    p.add_argument("--model", choices=MODELS, default="many")
    p.add_argument("--strategy", default="fsdp")
    p.add_argument("--group-bytes", type=int)
    p.add_argument("--seconds", type=float, default=1.0)
    options = p.parse_args()
    work = chains if options.kind == "chains" else share
    if options.threads:
        found, rank = fsdpx.spawn(work, options.threads, options)[0], 0
    else:
        comm = fsdpx.init()
        found, rank = work(comm, options), comm.rank
    if rank == 0:
        print(json.dumps({options.kind: found}), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
