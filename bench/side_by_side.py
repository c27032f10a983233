"""How fast, how large and how soon is training beside PyTorch on the same cores? Tables, a JSON file and plots.

    python bench/side_by_side.py [--models tiny small mlp many] [--rounds 2] [--seconds 3] [--quick]

Every competitor is a job of its own, started as users start it: one rank as a plain process, several by mpiexec or
torchrun. Jobs take turns, round by round, so that all see the same machine; a rate is the median over rounds of the
median step. A job that takes more than a minute has one turn, and so have those, shorter ones, of which nothing is
promised. One that fails, or gives no result in time, has a row with the reason.
"""

import argparse
import importlib.util
import statistics
import sys
import time
from typing import Any

import plots
from goals import AGAINST, verdicts
from jobs import Job, run
from records import arguments, lines, save
from workloads import MODELS

__all__ = ["JOBS", "tables"]

STRATEGIES = ("ddp", "zero1", "zero2", "fsdp")
LONG = 60.0
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
    Job("torch", "zero1", 2, once=True),
    Job("fsdpx", "zero1", 2, once=True),
    Job("fsdpx", "zero2", 2, once=True),
    *(Job("fsdpx", strategy, 1, threads, once=True) for threads in (1, 2) for strategy in STRATEGIES[1:]),
    *(Job("torch", "compile", 1, threads, once=True) for threads in (1, 2)),
]
"""Rivals stand side by side: the machine changes least between them. What nothing is promised of runs once."""


def turns(model: str, jobs: list[Job], options: argparse.Namespace) -> dict[Job, list[dict[str, Any]]]:
    """All jobs of a model in turns."""
    results: dict[Job, list[dict[str, Any]]] = {job: [] for job in jobs}
    tired: set[Job] = set()
    for turn in range(options.rounds):
        for job in jobs:
            if job in tired or (job.once and turn):
                continue
            print(f"{model}, round {turn + 1} of {options.rounds}: {job.name}", file=sys.stderr, flush=True)
            begin = time.monotonic()
            seconds = min(options.seconds, 1.0) if job.once else options.seconds
            results[job].append(run(job, model, seconds, patience(job, options.quick)))
            if time.monotonic() - begin > LONG or "failed" in results[job][-1]:
                tired.add(job)
    return results


def patience(job: Job, quick: bool) -> float:
    return 60.0 if quick else PATIENCE.get(job.strategy, 300.0)


def row(model: str, job: Job, rounds: list[dict[str, Any]]) -> dict[str, Any]:
    """The figures of one job: medians over its rounds; the launch is the best of them, when caches are warm."""
    found: dict[str, Any] = {"model": model, "job": job.name, "library": job.library, "unit": MODELS[model].unit}
    good = [r for r in rounds if "failed" not in r]
    reasons = [r["failed"] for r in rounds if "failed" in r]
    found["note"] = reasons[0] if reasons else ""
    if not good:
        return found
    rates = [MODELS[model].per_step / statistics.median(r["seconds"]) for r in good]
    shares = [sum(r["pss"]) for r in good if None not in r["pss"]]
    return found | {
        "rate": statistics.median(rates),
        "rates": rates,
        "steps": [len(r["seconds"]) for r in good],
        "rss": statistics.median(sum(r["rss"]) for r in good),
        "pss": statistics.median(shares) if shares else None,
        "first": min(r["first"] for r in good),
        "firsts": [r["first"] for r in good],
    }


def rows_of(model: str, results: dict[Job, list[dict[str, Any]]]) -> list[dict[str, Any]]:
    rows = [row(model, job, rounds) for job, rounds in results.items() if rounds]
    rates = {r["job"]: r.get("rate") for r in rows}
    for r in rows:
        rival = AGAINST.get(r["job"])
        if r.get("rate") and rates.get(rival):
            r["against"], r["ratio"] = rival, r["rate"] / rates[rival]
    return rows


def tables(found: dict[str, Any]) -> list[tuple[str, str]]:
    """The tables of a result: one per model, and what was promised."""
    models = list(dict.fromkeys(r["model"] for r in found["rows"]))
    made = [(model, _table([r for r in found["rows"] if r["model"] == model])) for model in models]
    return [*made, ("promised", _promised(found["goals"]))]


def _table(rows: list[dict[str, Any]]) -> str:
    head = ["job", "", rows[0]["unit"], "from", "to", "ratio", "RSS MiB", "PSS MiB", "first step s", ""]
    return lines(head, [_cells(r) for r in rows], left=2).replace("  \n", "\n")


def _cells(r: dict[str, Any]) -> list[str]:
    name = [r["job"].rpartition(" ")[0], r["job"].rpartition(" ")[2]]
    if "rate" not in r:
        return [*name, *[""] * 7, r["note"]]
    ratio = f"{r['ratio']:.2f}" if "ratio" in r else ""
    sizes = [f"{r[kind] / 2**20:,.0f}" if r[kind] else "" for kind in ("rss", "pss")]
    rates = [f"{rate:,.{0 if rate >= 100 else 1}f}" for rate in (r["rate"], min(r["rates"]), max(r["rates"]))]
    return [*name, *rates, ratio, *sizes, f"{r['first']:.1f}", r["note"]]


def _promised(goals: list[dict[str, Any]]) -> str:
    names = {"rate": "rate", "pss": "PSS of all ranks", "first": "launch to first step"}
    rows = []
    for g in goals:
        bound = f">= {g['least']:g}" if g["least"] is not None else f"<= {g['most']:.2f}"
        ratio = "" if g["ratio"] is None else f"{g['ratio']:.2f}"
        reached = {True: "yes", False: "no", None: "no figure"}[g["reached"]]
        rows.append([g["model"], names[g["figure"]], g["ours"], g["theirs"], bound, ratio, reached])
    return lines(["model", "figure", "of", "over", "promised", "ratio", "reached"], rows, left=4)


def draw(found: dict[str, Any], folder: Any) -> None:
    for figure, unit, scale, title in (
        ("rate", "", 1.0, "Training rate, higher is better"),
        ("pss", "MiB", 2**20, "Peak memory of all ranks (sum of PSS), lower is better"),
        ("first", "s", 1.0, "Launch to the end of the first step, lower is better"),
    ):
        panels = {}
        for r in found["rows"]:
            if r.get(figure):
                label = f"{r['model']} ({unit or r['unit']})"
                panels.setdefault(label, []).append((r["job"], r[figure] / scale, r["library"] == "fsdpx"))
        plots.bars(folder / f"side_by_side_{figure}.png", title, panels)


def main() -> int:
    p = arguments(__doc__, rounds=2)
    p.add_argument("--models", nargs="+", default=list(MODELS), choices=MODELS)
    p.add_argument("--seconds", type=float, default=3.0, help="timed steps of each job last about so long")
    p.add_argument("--only", default="", help="jobs whose name contains this")
    options = p.parse_args()
    if options.quick:
        options.rounds, options.seconds = 1, 0.5
    jobs = [j for j in JOBS if options.only in j.name and (j.library == "fsdpx" or importlib.util.find_spec("torch"))]
    found: dict[str, Any] = {"rounds": options.rounds, "rows": [], "goals": []}
    for model in options.models:
        run(Job("fsdpx", "ddp", 1), model, 0.1, LONG)  # fills the caches of compiled code, after changes to it
        found["rows"] += rows_of(model, turns(model, jobs, options))
        found["goals"] = verdicts(found["rows"])
        folder = save("side_by_side", options, found)
        print(f"\n{model}\n{dict(tables(found))[model]}", flush=True)
    print(f"\n{dict(tables(found))['promised']}")
    draw(found, folder)
    return 0


if __name__ == "__main__":
    sys.exit(main())
