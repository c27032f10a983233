"""What does each mesh axis cost and save: rate, memory of a rank and bytes by axis, the same training on many meshes?

    python bench/axes.py [--rounds 3] [--seconds 3] [--quick]

GPTs in float32 with AdamW, one thread per rank, the same global batch on every mesh of a table. Meshes take turns,
round by round; a rate is the median over rounds of the median step. With more ranks than cores a rate compares meshes
with each other: none can be faster than one process there.
"""

import argparse
import os
import statistics
import sys
import time
from dataclasses import dataclass
from typing import Any

from jobs import BENCH, environ, finish, mpiexec, start
from records import arguments, lines, save

__all__ = ["CASES", "Case", "tables"]

LONG = 60.0
AXES = ("shard", "replica", "pipe", "peers", "tensor")


@dataclass(frozen=True)
class Case:
    """table: what it is compared with. options: those of `meshed.py`, mesh and strategy apart."""

    table: str
    ranks: int
    strategy: str
    mesh: str
    options: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        words = [word for flag, word in zip(self.options[::2], self.options[1::2], strict=True) if flag in SAID]
        return " ".join([self.strategy, self.mesh, *words])


SAID = ("--schedule", "--sequence", "--recompute")
PIPE = ("--microbatches", "8")
MODELS = {"tiny": (), "small": (), "long": ("--model", "tiny", "--rows", "2", "--time", "2048")}
"""What is trained, in each table; by default the model of that name on 8 x 256 tokens."""


def _plain(model: str, ranks: int) -> list[Case]:
    """Every axis alone, and two at a time. The 7 layers of tiny are too few for the 8 stages of interleaved on 4."""
    schedules = ["1f1b", "zb-h1"] if model == "tiny" and ranks == 4 else ["1f1b", "interleaved", "zb-h1"]
    cases = [
        Case(model, ranks, "fsdp", f"shard={ranks}"),
        Case(model, ranks, "fsdp", f"shard={ranks}", ("--recompute", "all")),
        Case(model, ranks, "ddp", f"replica={ranks}"),
        *(Case(model, ranks, "fsdp", f"pipe={ranks}", (*PIPE, "--schedule", name)) for name in schedules),
        Case(model, ranks, "fsdp", f"tensor={ranks}"),
    ]
    if ranks == 4:
        cases += [Case(model, 4, "fsdp", "tensor=2,shard=2"), Case(model, 4, "fsdp", "pipe=2,tensor=2", PIPE)]
    return cases


CASES = [
    *(Case(model, 1, "ddp", "shard=1") for model in MODELS),
    *(case for model in ("tiny", "small") for ranks in (2, 4) for case in _plain(model, ranks)),
    Case("long", 2, "fsdp", "shard=2"),
    Case("long", 2, "fsdp", "shard=2", ("--recompute", "all")),
    Case("long", 2, "fsdp", "tensor=2"),
    *(Case("long", 2, "fsdp", "tensor=2", ("--sequence", name)) for name in ("parallel", "ulysses", "ring")),
    *(Case("long", 4, "fsdp", "tensor=2,shard=2", ("--sequence", name)) for name in ("parallel", "ulysses", "ring")),
]
"""Rivals stand side by side: the machine changes least between them."""


def run(case: Case, seconds: float, patience: float) -> dict[str, Any]:
    """One job from launch to end: what rank 0 printed, or {"failed": reason}."""
    work = [str(BENCH / "meshed.py"), *(MODELS[case.table] or ("--model", case.table)), "--strategy", case.strategy]
    work += ["--mesh", case.mesh, *case.options, "--seconds", str(seconds)]
    return finish(start([*(mpiexec(case.ranks) if case.ranks > 1 else [sys.executable]), *work], environ()), patience)


def turns(cases: list[Case], options: argparse.Namespace) -> dict[Case, list[dict[str, Any]]]:
    """All cases in turns; those that take long, or fail, have one."""
    results: dict[Case, list[dict[str, Any]]] = {case: [] for case in cases}
    tired: set[Case] = set()
    for turn in range(options.rounds):
        for case in cases:
            if case in tired:
                continue
            name = f"{case.table}, {case.ranks} ranks, {case.name}"
            print(f"round {turn + 1} of {options.rounds}: {name}", file=sys.stderr, flush=True)
            begin = time.monotonic()
            results[case].append(run(case, options.seconds, 120.0 if options.quick else 300.0))
            if time.monotonic() - begin > LONG or "failed" in results[case][-1]:
                tired.add(case)
    return results


def row(case: Case, rounds: list[dict[str, Any]]) -> dict[str, Any]:
    """The figures of one case; memory is that of the rank that has most."""
    found: dict[str, Any] = {"model": case.table, "ranks": case.ranks, "case": case.name}
    good = [r for r in rounds if "failed" not in r]
    found["note"] = next((r["failed"] for r in rounds if "failed" in r), "")
    if not good:
        return found
    tokens = 2 * 2048 if case.table == "long" else 8 * 256
    shares = [max(r["pss"]) for r in good if None not in r["pss"]]
    return found | {
        "rate": statistics.median(tokens / statistics.median(r["seconds"]) for r in good),
        "pss": statistics.median(shares) if shares else None,
        "rss": statistics.median(max(r["rss"]) for r in good),
        "moved": good[0]["moved"],
    }


def tables(found: dict[str, Any]) -> list[tuple[str, str]]:
    """One per model."""
    rows, head = found["rows"], ["ranks", "on", "tokens/s", "PSS MiB", "RSS MiB", *(f"{a} MiB" for a in AXES), ""]
    note = f"{found['cores']} cores: with more ranks they take turns. Memory and bytes per step: the rank with most."
    made = []
    for model in dict.fromkeys(r["model"] for r in rows):
        body = [_cells(r) for r in rows if r["model"] == model]
        made.append((model, f"{lines(head, body, left=2)}\n{note}"))
    return made


def _cells(r: dict[str, Any]) -> list[str]:
    if "rate" not in r:
        return [str(r["ranks"]), r["case"], *[""] * (3 + len(AXES)), r["note"]]
    moved = [r["moved"].get(axis, 0) for axis in AXES]
    sizes = [f"{n / 2**20:,.1f}" if n else "" for n in moved]
    memory = [f"{n / 2**20:,.0f}" if n else "" for n in (r["pss"], r["rss"])]
    return [str(r["ranks"]), r["case"], f"{r['rate']:,.0f}", *memory, *sizes, ""]


def main() -> int:
    p = arguments(__doc__, rounds=3)
    p.add_argument("--seconds", type=float, default=3.0, help="of timed steps in each job")
    p.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    options = p.parse_args()
    cases = [case for case in CASES if case.table in options.models]
    if options.quick:
        options.rounds, options.seconds = 1, 0.1
        cases = [case for case in cases if case.table != "small"][::4]
    results = turns(cases, options)
    rows = [row(case, results[case]) for case in cases]
    found = {"rounds": options.rounds, "seconds": options.seconds, "cores": os.cpu_count(), "rows": rows}
    save("axes", options, found)
    for title, text in tables(found):
        print(f"\n{title}\n{text}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
