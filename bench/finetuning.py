"""Fine-tuning by LoRA beside training all weights: time of a step, memory and bytes on the wire.

    mpiexec -n 2 python bench/finetuning.py [--rounds 5]

A Llama of some 30 million parameters on all ranks under `fsdp`, AdamW, adapters of rank 8 beside all matrices of the
blocks. The ways take turns; a time is the median of the rounds, and memory that which the report counts for a rank.
"""

import sys
from collections.abc import Iterator
from statistics import median
from time import perf_counter
from typing import Any

import numpy as np
from records import arguments, lines, save

import fsdpx
from fsdpx import Precision, nn, optim

MIB = 1 << 20
RANK = 8
WAYS: dict[str, tuple[bool, Precision]] = {
    "all weights, float32": (False, Precision()),
    "all weights, bf16": (False, Precision("bf16")),
    "LoRA, float32": (True, Precision()),
    "LoRA, bf16": (True, Precision("bf16")),
}
"""Name -> whether adapters are trained, and the formats."""


def made(comm: Any, way: str, quick: bool) -> Any:
    adapted, precision = WAYS[way]
    d, layers = (64, 2) if quick else (512, 8)
    model: Any = nn.Llama(4096 // (8 if quick else 1), d_model=d, n_layers=layers, n_heads=8, seq_len=128, kv_heads=4)
    if adapted:
        model = nn.lora(model, RANK, targets="blocks.*")
    return model.as_distributed(
        comm=comm, loss=nn.CrossEntropy(), optimizer=optim.AdamW(lr=1e-4), strategy="fsdp", precision=precision
    )


def measured(comm: Any, rounds: int, quick: bool) -> dict[str, dict[str, float]]:
    tokens = np.random.default_rng(comm.rank).integers(0, 512, (4, 129))
    x, y = tokens[:, :-1], tokens[:, 1:]
    trainers = {way: made(comm, way, quick) for way in WAYS}
    times: dict[str, list[float]] = {way: [] for way in WAYS}
    for trainer in trainers.values():
        trainer.step(x, y)
        trainer.reset()
    for _ in range(rounds):
        for way, trainer in trainers.items():
            comm.barrier().wait()
            begin = perf_counter()
            trainer.step(x, y)
            times[way].append(perf_counter() - begin)
    found = {}
    for way, trainer in trainers.items():
        report = trainer.report()
        sent = sum(count.bytes for count in report.traffic.values()) / rounds
        found[way] = {
            "seconds": median(times[way]), "memory": sum(report.memory.values()), "sent": sent,
            "parameters": report.memory["parameters"],
        }  # fmt: skip
    return found


def tables(found: dict[str, Any]) -> Iterator[tuple[str, str]]:
    whole = found["ways"]["all weights, float32"]["seconds"]
    rows = [
        [way, f"{1e3 * r['seconds']:.0f}", f"{r['seconds'] / whole:.2f}",
         *(f"{r[name] / MIB:.1f}" for name in ("parameters", "memory", "sent"))]
        for way, r in found["ways"].items()
    ]  # fmt: skip
    head = ["", "ms a step", "relative", "parameters, MiB", "counted memory, MiB", "sent a step, MiB"]
    yield "steps", lines(head, rows)


def main() -> int:
    options = arguments(__doc__, rounds=5).parse_args()
    comm = fsdpx.init()
    found = {"ranks": comm.size, "ways": measured(comm, 2 if options.quick else options.rounds, options.quick)}
    if comm.rank == 0:
        save("finetuning", options, found)
        for _, text in tables(found):
            print(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
