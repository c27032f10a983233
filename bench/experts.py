"""Experts on ranks: time of a step, memory and bytes of the same mixture of experts, by where its experts are.

    mpiexec -n 2 python bench/experts.py [--rounds 9]

A Llama of 8 layers whose MLPs are 8 experts, of which each position goes through 2, on all ranks with AdamW in float32
and a global batch of 8 texts of 128 tokens. The ways take turns; a time is the median of the rounds, memory that which
the report counts for rank 0, bytes those that it sends.
"""

import sys
from collections.abc import Iterator
from statistics import median
from time import perf_counter
from typing import Any

import numpy as np
from records import arguments, lines, save

import fsdpx
from fsdpx import Mesh, nn, optim

MIB = 1 << 20
TEXTS = 8


def ways(ranks: int) -> dict[str, dict[str, Any]]:
    """Name -> options of `as_distributed`."""
    mesh = Mesh(tensor=ranks, shard=1)
    return {
        "whole, ddp": {"strategy": "ddp"},
        "whole, fsdp": {"strategy": "fsdp"},
        "cut, samples": {"mesh": mesh, "sequence": "samples"},
        "cut, ring": {"mesh": mesh, "sequence": "ring"},
        "cut, parallel": {"mesh": mesh, "sequence": "parallel"},
        "cut, heads": {"mesh": mesh},
    }


def made(comm: Any, options: dict[str, Any], quick: bool) -> Any:
    d, layers = (32, 2) if quick else (256, 8)
    model = nn.Llama(512, d_model=d, n_layers=layers, n_heads=8, seq_len=128, experts=8, balance=0.01)
    adamw = optim.AdamW(lr=1e-4)
    return model.as_distributed(comm=comm, loss=nn.CrossEntropy(), optimizer=adamw, precision="float32", **options)


def measured(comm: Any, rounds: int, quick: bool) -> dict[str, dict[str, float]]:
    trainers = {way: made(comm, options, quick) for way, options in ways(comm.size).items()}
    times: dict[str, list[float]] = {way: [] for way in trainers}
    for turn in range(rounds + 1):
        texts = np.random.default_rng(turn).integers(0, 512, (TEXTS, 129))
        for way, trainer in trainers.items():
            rank, parts = trainer.data.rank, trainer.data.size
            mine = texts[TEXTS * rank // parts : TEXTS * (rank + 1) // parts]
            comm.barrier().wait()
            begin = perf_counter()
            trainer.step(mine[:, :-1], mine[:, 1:])
            times[way].append(perf_counter() - begin)
            if turn == 0:
                trainer.reset()
    return {way: _row(trainer, median(times[way][1:]), rounds) for way, trainer in trainers.items()}


def _row(trainer: Any, seconds: float, rounds: int) -> dict[str, float]:
    report, routing = trainer.report(), trainer.routing()
    return {
        "seconds": seconds,
        "memory": sum(report.memory.values()),
        "sent": sum(count.bytes for count in report.traffic.values()) / rounds,
        "busiest": max(one.busiest for one in routing.values()),
        "dropped": sum(one.dropped for one in routing.values()),
    }


def tables(found: dict[str, Any]) -> Iterator[tuple[str, str]]:
    first = found["ways"]["whole, fsdp"]["seconds"]
    rows = [
        [way, f"{1e3 * r['seconds']:.0f}", f"{r['seconds'] / first:.2f}", f"{r['memory'] / MIB:.1f}",
         f"{r['sent'] / MIB:.1f}", f"{r['busiest']:.2f}", f"{r['dropped']}"]
        for way, r in found["ways"].items()
    ]  # fmt: skip
    head = ["experts", "ms a step", "relative", "memory, MiB", "sent a step, MiB", "busiest/mean", "dropped"]
    yield "steps", lines(head, rows)


def main() -> int:
    options = arguments(__doc__, rounds=9).parse_args()
    comm = fsdpx.init()
    found = {"ranks": comm.size, "ways": measured(comm, 2 if options.quick else options.rounds, options.quick)}
    if comm.rank == 0:
        save("experts", options, found)
        for _, text in tables(found):
            print(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
