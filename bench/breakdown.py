"""Where does a training step go: products at the speed of the library itself, kernels, the optimiser, Python?

    python bench/breakdown.py [--models small tiny] [--precisions float32 bf16] [--rounds 4] [--quick]

One process, one thread. Every call of a product, a kernel and the optimiser is clocked, calls inside calls taken off.
Then each product is repeated alone, on copies of the arrays of its first call: the library's own speed at that shape.
Attention multiplies tiles inside one compiled function, which cannot be clocked from outside: its products count at the
speed of such a tile alone, and what it takes beyond that is its own.
"""

import sys
from typing import Any

from jobs import BENCH, environ, finish, start
from records import arguments, lines, save
from workloads import MODELS

__all__ = ["tables"]


def taken_apart(model: str, precision: str, rounds: int, seconds: float) -> dict[str, Any]:
    often = ["--rounds", str(rounds), "--seconds", str(seconds)]
    command = [sys.executable, str(BENCH / "inside.py"), model, "--precision", precision, *often]
    said = finish(start(command, environ()), 240.0)
    return {**said, "model": model if precision == "float32" else f"{model} in {precision}"}


def tables(found: dict[str, Any]) -> list[tuple[str, str]]:
    """One table per model, and how much of each step is products."""
    made = [(f"step of {m['model']}", _table(m)) for m in found["models"]]
    head = ["model", "BLAS", "ms per step", "clocked", "inside products", "of it at the library's own speed"]
    return [*made, ("products", lines(head, [_summary(m) for m in found["models"]], left=2))]


def _summary(m: dict[str, Any]) -> list[str]:
    if "failed" in m:
        return [m["model"], m["failed"], "", "", "", ""]
    products = [r for r in m["rows"] if "alone" in r]
    shares = [f"{100 * sum(r[key] for r in products) / m['step']:.1f} %" for key in ("seconds", "alone")]
    return [m["model"], m["blas"], *(f"{1e3 * m[key]:.1f}" for key in ("bare", "step")), *shares]


def _table(m: dict[str, Any], shown: int = 16) -> str:
    if "failed" in m:
        return str(m["failed"])
    head = ["part", "calls", "ms", "share", "GFLOP/s", "alone"]
    rows = [_cells(r, m["step"]) for r in m["rows"][:shown]]
    others = m["rows"][shown:]
    if others:
        seconds = sum(r["seconds"] for r in others)
        rows.append([f"{len(others)} more", "", f"{1e3 * seconds:.2f}", f"{100 * seconds / m['step']:.1f} %", "", ""])
    return lines(head, rows)


def _cells(r: dict[str, Any], step: float) -> list[str]:
    work = r.get("flops")
    rates = [f"{work / r[key] / 1e9:.0f}" if work else "" for key in ("seconds", "alone")] if work else ["", ""]
    calls = f"{r['calls']:g}" if r["calls"] else ""
    return [r["part"], calls, f"{1e3 * r['seconds']:.2f}", f"{100 * r['seconds'] / step:.1f} %", *rates]


def main() -> int:
    p = arguments(__doc__, rounds=4)
    p.add_argument("--models", nargs="+", default=["small", "tiny", "mlp", "many"], choices=MODELS)
    p.add_argument("--precisions", nargs="+", default=["float32", "bf16"], choices=("float32", "bf16"))
    options = p.parse_args()
    rounds, seconds = (1, 0.02) if options.quick else (options.rounds, 0.3)
    each = [(name, precision) for name in options.models for precision in options.precisions]
    found = {"models": [taken_apart(*one, rounds, seconds) for one in each]}
    save("breakdown", options, found)
    for title, text in tables(found):
        print(f"\n{title}\n{text}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
