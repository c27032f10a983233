"""The memory of a rank that trains a model of 7 billion parameters, by strategy, from dry runs: nothing is measured.

    python bench/seven.py

Of Llama 2's sizes, 6.74 billion parameters, with AdamW and one sample of 2,048 tokens per rank; each rank is the only
one of its host. GiB of what fsdpx keeps; Python, MPI and libraries come beside it.
"""

import argparse
import sys
from collections.abc import Sequence
from typing import Any

from records import arguments, lines, save

import fsdpx
from fsdpx import nn, optim

__all__ = ["rows", "tables"]

RANKS = (4, 64)
STRATEGIES = {"fsdp": "full sharding", "zero2": "sharded gradients", "hybrid": "hybrid", "ddp": "data parallel"}
TOKENS = ((1, 2048), "int64")
WAYS = {"": ("float32", None), "recompute": ("float32", "all"), "bf16, recompute": ("bf16", "all")}
HEAD = ("", "parameters", "with AdamW", "in a step", "recompute", "AdamW, bf16", "bf16, recompute")


def rows(ranks: int, strategies: Sequence[str] = tuple(STRATEGIES)) -> list[dict[str, Any]]:
    """Bytes of rank 0: its parameters, all that it keeps for AdamW, and that with what a step holds."""
    model = nn.Llama(32000, d_model=4096, n_layers=32, n_heads=32, seq_len=2048, hidden=11008)
    found = []
    for strategy in strategies:
        row: dict[str, Any] = {"ranks": ranks, "strategy": strategy}
        for way, (precision, recompute) in WAYS.items():
            run = fsdpx.dry_run(
                model, TOKENS, TOKENS, ranks=ranks, loss=nn.CrossEntropy(), optimizer=optim.AdamW(), strategy=strategy,
                precision=precision, recompute=recompute, tune=False,
            )  # fmt: skip
            memory = run.report.memory
            row |= {f"parameters {way}": memory["parameters"], f"kept {way}": sum(memory.values())}
            row[f"step {way}"] = row[f"kept {way}"] + run.activations
        found.append(row)
    return found


def tables(found: dict[str, Any]) -> list[tuple[str, str]]:
    shown = ("parameters ", "kept ", "step ", "step recompute", "kept bf16, recompute", "step bf16, recompute")
    return [
        (
            f"{ranks} ranks",
            lines(
                HEAD,
                [
                    (STRATEGIES[row["strategy"]], *(f"{row[name] / 2**30:.2f}" for name in shown))
                    for row in found["rows"]
                    if row["ranks"] == ranks
                ],
            ),
        )
        for ranks in RANKS
    ]


def main(argv: Sequence[str] | None = None) -> int:
    options: argparse.Namespace = arguments(__doc__, 1).parse_args(argv)
    found = {"rows": [row for ranks in RANKS for row in rows(ranks)]}
    save("seven", options, found)
    for title, text in tables(found):
        print(f"{title}\n{text}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
