"""What does a step cost as layers, ranks and parameters grow, and how much of it is communication?

    python bench/scaling.py [--rounds 1] [--quick]

Chains of square linear layers, 64 samples per step over all ranks, AdamW in float32, strategy fsdp, one thread per
rank. The share of communication: the same job takes steps with communication switched on and off in turns (off, every
rank computes on with stale data), and beside it what the engine's own clock says.
"""

import sys
from pathlib import Path
from typing import Any

import plots
from jobs import BENCH, environ, finish, mpiexec, start
from records import arguments, lines, save

LAYERS = (10, 30, 100, 300, 1000)
WIDTHS = (64, 128, 256, 512, 1024)
RANKS = (1, 2, 3, 4)
SHARES = {
    "small": ["--model", "small"],
    "many": ["--model", "many"],
    "many, each layer alone": ["--model", "many", "--group-bytes", "0"],
}

GROUPED, ALONE = list(SHARES)[1:]
GAIN = 10.0
"""So many times as long at least takes a step whose layers are units by themselves: what grouping them is promised to
save where there are many small ones."""

Point = dict[str, Any]


def job(ranks: int, work: list[str], threads: bool = False) -> dict[str, Any]:
    """What a job of `sweep.py` found; {"failed": reason}."""
    command = [sys.executable, str(BENCH / "sweep.py"), *work]
    if threads:
        command += ["--threads", str(ranks)]
    elif ranks > 1:
        command = [*mpiexec(ranks), *command[1:]]
    print(" ".join(command[-len(work) - 2 :]), file=sys.stderr, flush=True)
    return finish(start(command, environ()), 240.0)


def best(found: list[dict[str, Any]]) -> tuple[list[Point], str]:
    """Of each chain the round with the smallest median; or the reason why there is none."""
    rounds = [f["chains"] for f in found if "chains" in f]
    points = [min(same, key=lambda p: p["seconds"]) for same in zip(*rounds, strict=True)]
    return points, "" if rounds else found[0]["failed"]


def sweeps(rounds: int, quick: bool) -> dict[str, list[Point]]:
    """Three sweeps, their points with the number and kind of ranks."""
    fast = ["--seconds", "0.05" if quick else "1.0"]
    thin = slice(None, None, 2) if quick else slice(None)
    layers = ["chains", "--layers", *map(str, LAYERS[thin]), *fast]
    widths = ["chains", "--layers", "8", "--widths", *map(str, WIDTHS[thin]), *fast]
    ranks = ["chains", "--layers", "100", *fast]
    plans = {
        "layers": [(n, "MPI", layers) for n in (1, 2)],
        "parameters": [(n, "MPI", widths) for n in (1, 2)],
        "ranks": [(n, kind, ranks) for kind in ("MPI", "thread") for n in RANKS[thin]],
    }
    found: dict[str, list[Point]] = {}
    for name, plan in plans.items():
        for n, kind, work in plan:
            points, note = best([job(n, work, kind == "thread") for _ in range(rounds)])
            found.setdefault(name, []).extend({**p, "ranks": n, "kind": kind} for p in points)
            if note:
                found[name].append({"ranks": n, "kind": kind, "note": note})
    return found


def shares(quick: bool) -> list[Point]:
    fast = ["--seconds", "0.2" if quick else "6"]
    found = []
    for name, work in SHARES.items():
        said = job(2, ["share", *work, *fast])
        found.append({"model": name, **said.get("share", {}), "note": said.get("failed", "")})
    return found


def tables(found: dict[str, Any]) -> list[tuple[str, str]]:
    """One table per sweep, the share of communication, and what grouping layers saves."""
    made = [(name, _sweep(points)) for name, points in found["sweeps"].items()]
    return [*made, ("communication", _shares(found["shares"])), ("grouping", _grouping(found["shares"]))]


def _sweep(points: list[Point]) -> str:
    head = ["ranks", "layers", "width", "parameters", "units", "ms per step", "us per layer", ""]
    rows = []
    for p in points:
        ranks = f"{p['ranks']} {p['kind']}"
        if "seconds" in p:
            sizes = [f"{p[key]:,}" for key in ("layers", "width", "parameters", "units")]
            rows.append([ranks, *sizes, f"{1e3 * p['seconds']:.2f}", f"{1e6 * p['seconds'] / p['layers']:.1f}", ""])
        else:
            rows.append([ranks, *[""] * 6, p["note"]])
    return lines(head, rows)


def _shares(points: list[Point]) -> str:
    head = ["model", "units", "on ms", "off ms", "share by switching off", "share by the clock", ""]
    rows = []
    for p in points:
        if "on" not in p:
            rows.append([p["model"], *[""] * 5, p["note"]])
            continue
        off = f"{100 * (1 - p['off'] / p['on']):.1f} %"
        times = [f"{1e3 * p[key]:.1f}" for key in ("on", "off")]
        rows.append([p["model"], f"{p['units']:,}", *times, off, f"{100 * p['reported']:.1f} %", ""])
    return lines(head, rows)


def _grouping(points: list[Point]) -> str:
    by = {p["model"]: p for p in points if "on" in p}
    if not {GROUPED, ALONE} <= by.keys():
        return "not measured"
    grouped, alone = by[GROUPED], by[ALONE]
    gain = alone["on"] / grouped["on"]
    rows = [["ms per step", f"{1e3 * grouped['on']:.1f}", f"{1e3 * alone['on']:.1f}", f"{gain:.0f} times",
             f"at least {GAIN:.0f} times", "yes" if gain >= GAIN else "no"]]  # fmt: skip
    over = [1e3 * (p["on"] - p["off"]) for p in (grouped, alone)]
    rows.append(["ms of communication", *(f"{ms:.1f}" for ms in over), f"{over[1] / over[0]:.0f} times", "", ""])
    units = [grouped["units"], alone["units"]]
    rows.append(["units", *(f"{count:,}" for count in units), f"{units[1] / units[0]:,.0f} times", "", ""])
    return lines(["", "grouped", "each layer alone", "saved", "promised", "reached"], rows)


def draw(found: dict[str, Any], folder: Path) -> None:
    for name, x in (("layers", "layers"), ("parameters", "parameters"), ("ranks", "ranks")):
        curves: dict[str, list[tuple[float, float]]] = {}
        for p in found["sweeps"].get(name, []):
            label = f"{p['kind']} ranks" if name == "ranks" else f"{p['ranks']} {p['kind']} ranks"
            if "seconds" in p:
                curves.setdefault(label, []).append((p[x], 1e3 * p["seconds"]))
        log = "" if name == "ranks" else "xy"
        plots.curves(folder / f"scaling_{name}.png", f"Step against {x}", {"": curves}, x=x, y="ms per step", log=log)


def main() -> int:
    options = arguments(__doc__, rounds=1).parse_args()
    rounds = 1 if options.quick else options.rounds
    found = {"rounds": rounds, "shares": shares(options.quick), "sweeps": sweeps(rounds, options.quick)}
    folder = save("scaling", options, found)
    for title, text in tables(found):
        print(f"\n{title}\n{text}")
    draw(found, folder)
    return 0


if __name__ == "__main__":
    sys.exit(main())
