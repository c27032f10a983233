"""How fast are checkpoints beside plain files, and how long does training wait for one that is saved in the background?

    python bench/checkpoints.py [--rounds 5] [--gib 1] [--folder build/bench] [--quick]

Strategy fsdp, AdamW in float32. Bandwidth: of weights and moments together, beside one process that writes and reads
as many bytes in the same folder, in blocks of the same size, and waits for the disk as `save` does. Files are not in
memory when they are read. Stall: `small` takes a few steps beside a save and as many without one, in turns; what they
take longer is a share of 100 steps.
"""

import argparse
import statistics
import sys
from pathlib import Path
from typing import Any

from jobs import BENCH, environ, finish, mpiexec, start
from records import QUICK, arguments, lines, save

__all__ = ["rows", "tables"]

RANKS = (1, 2, 4)
STALLED = (1, 2)  # as many as there are cores
EVERY = 100
FAST, STILL = 0.8, 0.01
"""Promised: saving at this share of plain writing at least, waiting this share of the time at most."""


def job(what: str, ranks: int, folder: Path, *options: object) -> dict[str, Any]:
    """What a job of `saving.py` found; {"failed": reason}."""
    work = [str(BENCH / "saving.py"), what, "--folder", str(folder), *map(str, options)]
    print(f"{what} of {ranks} ranks", file=sys.stderr, flush=True)
    return finish(start([*(mpiexec(ranks) if ranks > 1 else [sys.executable]), *work], environ()), 600.0)


def measured(options: argparse.Namespace) -> dict[str, Any]:
    """Each job twice, the second time when all others had their turn."""
    rounds = max(options.rounds // 2, 1)
    wide = ("--gib", options.gib, "--rounds", rounds, "--width", 256 if options.quick else 2048)
    steps = ("--model", options.model, "--rounds", 2 * rounds, "--window", options.window)
    found: dict[str, list[list[dict[str, Any]]]] = {"bandwidth": [[] for _ in RANKS], "stall": [[] for _ in STALLED]}
    for _ in range(min(options.rounds, 2)):
        for ranks, jobs in zip(RANKS, found["bandwidth"], strict=True):
            jobs.append(job("bandwidth", ranks, options.folder, *wide))
        for ranks, jobs in zip(STALLED, found["stall"], strict=True):
            jobs.append(job("stall", ranks, options.folder, *steps))
    return rows(found, options.model)


def rows(found: dict[str, list[list[dict[str, Any]]]], model: str) -> dict[str, Any]:
    """The figures: medians of all rounds of a job."""
    return {
        "bandwidth": [_moved(ranks, jobs) for ranks, jobs in zip(RANKS, found["bandwidth"], strict=True)],
        "stall": [{"model": model} | _stalled(r, jobs) for r, jobs in zip(STALLED, found["stall"], strict=True)],
    }


def _moved(ranks: int, jobs: list[dict[str, Any]]) -> dict[str, Any]:
    """MB/s. The two ratios: medians of those of each round."""
    if why := _failed(jobs):
        return {"ranks": ranks, "note": why}
    every = {name: [s for job in jobs for s in job[name]] for name in ("plain", "save", "read", "load")}
    size = jobs[0]["bytes"]
    rates = {name: size / statistics.median(seconds) / 1e6 for name, seconds in every.items()}
    saving = statistics.median(a / b for a, b in zip(every["plain"], every["save"], strict=True))
    loading = statistics.median(a / b for a, b in zip(every["read"], every["load"], strict=True))
    return {"ranks": ranks, "bytes": size, "saving": saving, "loading": loading, "seconds": every, **rates}


def _stalled(ranks: int, jobs: list[dict[str, Any]]) -> dict[str, Any]:
    """Seconds: of a step, of the call of `save`, and by how much a save makes its window longer."""
    if why := _failed(jobs):
        return {"ranks": ranks, "note": why}
    pairs = [pair for job in jobs for pair in zip(job["with"], job["without"], strict=True)]
    step = statistics.median(without for _, without in pairs) / jobs[0]["window"]
    longer = statistics.median(beside - without for beside, without in pairs)
    call, wait = (statistics.median(s for job in jobs for s in job[name]) for name in ("call", "wait"))
    return {
        "ranks": ranks, "bytes": jobs[0]["bytes"], "step": step, "call": call, "wait": wait, "longer": longer,
        "share": longer / (EVERY * step), "pairs": pairs,
    }  # fmt: skip


def _failed(jobs: list[dict[str, Any]]) -> str:
    return next((job["failed"] for job in jobs if "failed" in job), "")


def tables(found: dict[str, Any]) -> list[tuple[str, str]]:
    """Bandwidth and stall, each with what is promised."""
    head = ["ranks", "GiB", "save MB/s", "plain MB/s", "ratio", ">= 0.8", "load MB/s", "plain MB/s", "ratio", ""]
    wide = lines(head, [_bandwidth(r) for r in found["bandwidth"]])
    head = ["ranks", "model", "MiB", "step s", "call of save s", "longer by s", f"of {EVERY} steps", "<= 1 %", ""]
    return [("bandwidth", wide), ("stall", lines(head, [_stall(r) for r in found["stall"]], left=2))]


def _bandwidth(r: dict[str, Any]) -> list[str]:
    if "note" in r:
        return [str(r["ranks"]), *[""] * 8, r["note"]]
    saved = [f"{r['save']:,.0f}", f"{r['plain']:,.0f}", f"{r['saving']:.2f}", _verdict(r["saving"] >= FAST)]
    loaded = [f"{r['load']:,.0f}", f"{r['read']:,.0f}", f"{r['loading']:.2f}"]
    return [str(r["ranks"]), f"{r['bytes'] / 2**30:.2f}", *saved, *loaded, ""]


def _stall(r: dict[str, Any]) -> list[str]:
    if "note" in r:
        return [str(r["ranks"]), r["model"], *[""] * 6, r["note"]]
    seconds = [f"{r[name]:.2f}" for name in ("step", "call", "longer")]
    share = [f"{100 * r['share']:.2f} %", _verdict(r["share"] <= STILL)]
    return [str(r["ranks"]), r["model"], f"{r['bytes'] / 2**20:,.0f}", *seconds, *share, ""]


def _verdict(reached: bool) -> str:
    return "yes" if reached else "no"


def main() -> int:
    p = arguments(__doc__, rounds=6)
    p.add_argument("--gib", type=float, default=1.0, help="of weights and moments, for bandwidth")
    p.add_argument("--model", default="small", help="that trains while it is saved")
    p.add_argument("--window", type=int, default=4, help="steps that a save is beside of")
    p.add_argument("--folder", type=Path, default=QUICK, help="where to write: on the disk that is asked about")
    options = p.parse_args()
    if options.quick:
        options.rounds, options.gib, options.model, options.window = 1, 0.01, "tiny", 2
    options.folder.mkdir(parents=True, exist_ok=True)
    found = measured(options)
    save("checkpoints", options, found)
    for title, text in tables(found):
        print(f"\n{title}\n{text}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
