"""What do N ranks get done, beside N processes that train by themselves on the same cores?

    python bench/efficiency.py [--models tiny small mlp] [--ranks 1 2 4] [--rounds 3] [--seconds 2] [--quick]

Strong: the global batch of `workloads.py`, cut over the ranks; weak: that batch on every rank. Strategy fsdp, AdamW in
float32, one thread per rank. The reference is the same number of processes at the same time, each with a model of its
own and a rank's batch: what the cores can do at most, however many there are and whatever they share. Both take turns;
medians over all steps of all rounds.
"""

import sys
from statistics import median
from typing import Any

from jobs import Job, command, environ, finish, start
from records import arguments, lines, save
from workloads import MODELS

__all__ = ["tables"]

KINDS = ("strong", "weak")
LEAST = {2: 0.7, 4: 0.5}
"""The efficiency that is promised, by ranks. Sharding that gathers and reduces layer by layer, and waits for each, is
at 36 % with four."""


def jobs(ranks: int, apart: bool, model: str, rows: int, seconds: float) -> list[dict[str, Any]]:
    """What each job said: one of `ranks` ranks, or `ranks` processes by themselves, each with its part of the rows."""
    one, often = Job("fsdpx", "fsdp", 1 if apart else ranks), ("--seconds", str(seconds))
    rows = rows // ranks if apart else rows
    line = command(one, model, "--rows", str(rows), *often)
    started = [start(line, environ()) for _ in range(ranks if apart else 1)]
    return [finish(process, 240.0) for process in started]


def rate(found: list[dict[str, Any]], rows: int) -> float:
    """Rows per second of all jobs together; each has its share of them in a step."""
    return sum(rows / len(found) / median(one["seconds"]) for one in found)


def compared(model: str, kind: str, ranks: int, rounds: int, seconds: float) -> dict[str, Any]:
    rows = MODELS[model].rows * (ranks if kind == "weak" else 1)
    rates: dict[bool, list[float]] = {False: [], True: []}
    for turn in range(rounds):
        for apart in (False, True) if turn % 2 else (True, False):
            found = jobs(ranks, apart, model, rows, seconds)
            failed = [one["failed"] for one in found if "failed" in one]
            if failed:
                return {"model": model, "kind": kind, "ranks": ranks, "failed": failed[0]}
            rates[apart].append(rate(found, rows))
    print(f"{model} {kind} {ranks}", file=sys.stderr, flush=True)
    together, by_themselves = median(rates[False]), median(rates[True])
    unit = MODELS[model].per_step / MODELS[model].rows
    return {
        "model": model, "kind": kind, "ranks": ranks, "rate": together * unit, "apart": by_themselves * unit,
        "efficiency": together / by_themselves,
    }  # fmt: skip


def tables(found: dict[str, Any]) -> list[tuple[str, str]]:
    by_kind = [(kind, _table([row for row in found["rows"] if row["kind"] == kind])) for kind in KINDS]
    return [*by_kind, ("promised", _promised(found["rows"]))]


def _table(rows: list[dict[str, Any]]) -> str:
    made = []
    for row in rows:
        if "failed" in row:
            made.append([row["model"], str(row["ranks"]), "", "", "", row["failed"]])
            continue
        one = next((r["rate"] for r in rows if r["model"] == row["model"] and r["ranks"] == 1), None)
        speedup = "" if one is None else f"{row['rate'] / one:.2f}"
        rates = (f"{row['rate']:,.0f} {MODELS[row['model']].unit}", f"{row['apart']:,.0f}")
        made.append([row["model"], str(row["ranks"]), *rates, f"{row['efficiency']:.0%}", speedup])
    return lines(["model", "ranks", "together", "by themselves", "efficiency", "times one rank"], made)


def _promised(rows: list[dict[str, Any]]) -> str:
    """Per model and number of ranks the worse of strong and weak."""
    made = []
    for model, ranks in dict.fromkeys((row["model"], row["ranks"]) for row in rows if row["ranks"] in LEAST):
        same = [row for row in rows if (row["model"], row["ranks"]) == (model, ranks)]
        found = [row.get("efficiency", 0.0) for row in same]
        reached = "yes" if min(found) >= LEAST[ranks] else "no"
        made.append([model, str(ranks), f"at least {LEAST[ranks]:.0%}", f"{min(found):.0%}", reached])
    return lines(["model", "ranks", "promised", "worst", "reached"], made)


def main() -> int:
    p = arguments(__doc__, rounds=3)
    p.add_argument("--models", nargs="+", default=["tiny", "small", "mlp"], choices=[*MODELS])
    p.add_argument("--ranks", nargs="+", type=int, default=[1, 2, 4])
    p.add_argument("--seconds", type=float, default=2.0)
    options = p.parse_args()
    models, ranks = (["tiny"], [1, 2]) if options.quick else (options.models, options.ranks)
    rounds, seconds = (1, 0.2) if options.quick else (options.rounds, options.seconds)
    rows = [compared(m, kind, n, rounds, seconds) for m in models for kind in KINDS for n in ranks]
    found = {"rows": rows}
    save("efficiency", options, found)
    for title, text in tables(found):
        print(f"\n{title}\n{text}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
