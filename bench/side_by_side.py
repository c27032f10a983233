"""How fast, how large and how soon is training beside PyTorch on the same cores? Tables and a JSON file.

    python bench/side_by_side.py [--models tiny small mlp many cnn] [--rounds 6] [--seconds 1] [--quick]

Every competitor is a job of its own, started as users start it: one rank as a plain process, several by mpiexec or
torchrun. First each runs by itself, which shows memory and the launch. Then the main rivals take turns of a
second or some steps, one stopped while the other runs: the ratio is the median over `--rounds` turns. A job that fails,
or gives no result in time, has a row with the reason. A run of some models or jobs only writes to build/bench.
"""

import argparse
import importlib.util
import statistics
import sys
from collections.abc import Callable, Sequence
from typing import Any

from duel import duel, outcome
from jobs import Job, run
from records import QUICK, arguments, folder_of, lines, save
from workloads import MODELS

__all__ = ["AGAINST", "JOBS", "compare", "tables"]

STRATEGIES = ("ddp", "zero1", "zero2", "fsdp")
PATIENCE = {"compile": 180.0}
"""Seconds that a job may take, by strategy; five minutes if it is not here."""

JOBS = [
    Job("torch", "single", 1),
    Job("fsdpx", "ddp", 1),
    Job("torch", "single", 1, 2),
    Job("fsdpx", "ddp", 1, 2),
    Job("torch", "ddp", 2),
    Job("fsdpx", "ddp", 2),
    Job("torch", "fsdp", 2),
    Job("fsdpx", "fsdp", 2),
    Job("torch", "zero1", 2),
    Job("fsdpx", "zero1", 2),
    Job("fsdpx", "zero2", 2),
    *(Job("fsdpx", strategy, 1, threads) for threads in (1, 2) for strategy in STRATEGIES[1:]),
    *(Job("torch", "compile", 1, threads) for threads in (1, 2)),
]
"""Rivals stand side by side: the machine changes least between them."""
AGAINST = {
    "fsdpx ddp 1x1": "torch single 1x1",
    "fsdpx zero1 1x1": "torch single 1x1",
    "fsdpx zero2 1x1": "torch single 1x1",
    "fsdpx fsdp 1x1": "torch single 1x1",
    "fsdpx ddp 1x2": "torch single 1x2",
    "fsdpx zero1 1x2": "torch single 1x2",
    "fsdpx zero2 1x2": "torch single 1x2",
    "fsdpx fsdp 1x2": "torch single 1x2",
    "fsdpx ddp 2x1": "torch ddp 2x1",
    "fsdpx-parts ddp 2x1": "torch single 1x2",
    "fsdpx zero1 2x1": "torch zero1 2x1",
    "fsdpx zero2 2x1": "torch zero1 2x1",  # nearest: PyTorch has no ZeRO-2 of its own
    "fsdpx fsdp 2x1": "torch fsdp 2x1",
    "torch compile 1x1": "torch single 1x1",
    "torch compile 1x2": "torch single 1x2",
    "fsdpx-module ddp 1x1": "torch single 1x1",
    "fsdpx-module ddp 2x1": "torch ddp 2x1",
    "fsdpx-module fsdp 2x1": "torch fsdp 2x1",
    "fsdpx-bf16 ddp 1x1": "torch-bf16 single 1x1",
    "fsdpx-bf16 ddp 2x1": "torch-bf16 ddp 2x1",
    "fsdpx-bf16 fsdp 2x1": "torch-bf16 fsdp 2x1",
    "fsdpx-bf16-sums fsdp 2x1": "torch-bf16-sums fsdp 2x1",
}
"""Whom each job is compared with."""
DUELS = (
    "fsdpx ddp 1x1", "fsdpx ddp 1x2", "fsdpx ddp 2x1", "fsdpx fsdp 2x1", "fsdpx-bf16 ddp 1x1", "fsdpx-bf16 ddp 2x1",
    "fsdpx-bf16 fsdp 2x1", "fsdpx-bf16-sums fsdp 2x1", "fsdpx-module ddp 2x1",
    "fsdpx-module fsdp 2x1", "fsdpx-parts ddp 2x1",
)  # fmt: skip
"""Who takes turns with whom it is compared with."""


def alone(model: str, jobs: list[Job], options: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """What each job prints, by its name."""
    said = {}
    for job in jobs:
        print(f"{model}: {job.name}", file=sys.stderr, flush=True)
        said[job.name] = run(job, model, options.seconds, patience(job, options.quick))
    return said


def together(model: str, jobs: list[Job], options: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """What rivals print who take turns, by the name of ours and then of each."""
    named = {job.name: job for job in jobs}
    said = {}
    for ours in DUELS:
        pair = [named.get(ours), named.get(AGAINST[ours])]
        if None not in pair:
            print(f"{model}: {ours} against {AGAINST[ours]}", file=sys.stderr, flush=True)
            found = duel(pair, model, options.rounds, patience(pair[1], options.quick))
            said[ours] = dict(zip((ours, AGAINST[ours]), found, strict=True))
    return said


def patience(job: Job, quick: bool) -> float:
    return 60.0 if quick else PATIENCE.get(job.strategy, 300.0)


def row(model: str, name: str, said: dict[str, Any]) -> dict[str, Any]:
    """The figures of one job that ran by itself."""
    kind = {"model": model, "job": name, "library": name.partition(" ")[0], "unit": MODELS[model].unit}
    if "failed" in said:
        return kind | {"note": said["failed"]}
    return kind | {
        "note": "",
        "rate": MODELS[model].per_step / statistics.median(said["seconds"]),
        "rss": sum(said["rss"]),
        "pss": None if None in said["pss"] else sum(said["pss"]),
        "first": said["first"],
    }


def rows_of(
    model: str, by_itself: dict[str, dict[str, Any]], duels: dict[str, dict[str, dict[str, Any]]]
) -> list[dict[str, Any]]:
    """A row per job. Rates and ratios are those of the duel where there was one; of its launches the best counts."""
    rows = {name: row(model, name, said) for name, said in by_itself.items()}
    firsts = {name: [r["first"]] for name, r in rows.items() if "first" in r}
    for ours, both in duels.items():
        reasons = [said["failed"] for said in both.values() if "failed" in said]
        if reasons and not rows[ours]["note"]:
            rows[ours]["note"] = f"in turns: {reasons[0]}"
        if reasons or any("failed" in by_itself[name] for name in both):
            continue
        for name, said in both.items():
            firsts.setdefault(name, []).append(said["first"])
        _fought(model, ours, both, rows)
    for name, found in firsts.items():
        rows[name] |= {"first": min(found), "firsts": found}
    for name, r in rows.items():
        rival = AGAINST.get(name, "")
        if "ratio" not in r and r.get("rate") and rows.get(rival, {}).get("rate"):
            r |= {"against": rival, "ratio": r["rate"] / rows[rival]["rate"], "ratios": []}
    return list(rows.values())


def _fought(model: str, ours: str, both: dict[str, dict[str, Any]], rows: dict[str, dict[str, Any]]) -> None:
    """Enter what became of a duel."""
    steps = {name: outcome(said) for name, said in both.items()}
    theirs = AGAINST[ours]
    ratios = [b / a for a, b in zip(steps[ours], steps[theirs], strict=True) if a and b]
    if not ratios:
        return
    for name, taken in steps.items():
        rows[name]["rate"] = MODELS[model].per_step / statistics.median(s for s in taken if s)
    rows[ours] |= {"against": theirs, "ratio": statistics.median(ratios), "ratios": ratios}


def tables(found: dict[str, Any]) -> list[tuple[str, str]]:
    """The tables of a result: one per model."""
    models = list(dict.fromkeys(r["model"] for r in found["rows"]))
    return [(model, _table([r for r in found["rows"] if r["model"] == model])) for model in models]


def _table(rows: list[dict[str, Any]]) -> str:
    head = ["job", "", rows[0]["unit"], "ratio", "from", "to", "RSS MiB", "PSS MiB", "first step s", ""]
    return lines(head, [_cells(r) for r in rows], left=2).replace("  \n", "\n")


def _cells(r: dict[str, Any]) -> list[str]:
    name = [r["job"].rpartition(" ")[0], r["job"].rpartition(" ")[2]]
    if "rate" not in r:
        return [*name, *[""] * 7, r["note"]]
    ratios = [f"{r['ratio']:.2f}" if "ratio" in r else ""]
    ratios += [f"{edge(r['ratios']):.2f}" if r.get("ratios") else "" for edge in (min, max)]
    sizes = [f"{r[kind] / 2**20:,.0f}" if r[kind] else "" for kind in ("rss", "pss")]
    rate = f"{r['rate']:,.{0 if r['rate'] >= 100 else 1}f}"
    return [*name, rate, *ratios, *sizes, f"{r['first']:.1f}", r["note"]]


def main() -> int:
    return compare(__doc__, "side_by_side", JOBS)


def compare(
    doc: str, name: str, jobs: Sequence[Job], also: Callable[[dict[str, Any]], str] | None = None,
    models: Sequence[str] = tuple(name for name, model in MODELS.items() if not model.dims),
) -> int:  # fmt: skip
    """Run these jobs as the options of the command line say. name: of the results. also: a text to print at the end.
    models: unless others are asked for."""
    p = arguments(doc, rounds=6)
    p.add_argument("--models", nargs="+", default=list(models), choices=MODELS)
    p.add_argument("--seconds", type=float, default=1.0, help="timed steps of a job by itself last about so long")
    p.add_argument("--only", default="", help="jobs whose name contains this")
    options = p.parse_args()
    if options.quick:
        options.rounds, options.seconds = 2, 0.2
    rivals = importlib.util.find_spec("torch") is not None
    chosen = [j for j in jobs if options.only in j.name and (j.library.startswith("fsdpx") or rivals)]
    if options.only or not set(models) <= set(options.models):
        options.out = options.out or QUICK  # a part does not replace the results of a full run
    found: dict[str, Any] = {"rounds": options.rounds, "rows": []}
    for model in options.models:
        run(Job("fsdpx", "ddp", 1), model, 0.1, 60.0)  # fills the caches of compiled code, after changes to it
        found["rows"] += rows_of(model, alone(model, chosen, options), together(model, chosen, options))
        save(name, options, found)
        print(f"\n{model}\n{dict(tables(found))[model]}", flush=True)
    if also is not None:
        print(f"\n{also(found)}")
        save(name, options, found)
    print(f"\nwritten to {folder_of(options) / name}.json")
    return 0


if __name__ == "__main__":
    sys.exit(main())
