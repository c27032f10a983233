"""Where training in 16 bits ends: validation losses of the main job in other formats beside float32's, at equal steps.

    python bench/convergence.py [--seeds 0 1 2] [--ranks 1] [--steps 300] [--quick]

The model, the text and all options are those of `make train`. Losses do not depend on what else the machine does.
"""

import argparse
import json
import sys
from itertools import product
from typing import Any

from jobs import environ, finish, mpiexec, start
from records import arguments, lines, save

__all__ = ["compare", "parser", "tables"]

FORMATS: dict[str, dict[str, Any]] = {
    "float32": {},
    "bf16": {"compute": "bf16"},
    "bf16, reduced in bf16": {"compute": "bf16", "reduce": "bf16"},
    "bf16 alone, stochastic": {"compute": "bf16", "master": "bf16"},
    "bf16 alone, kahan": {"compute": "bf16", "master": "bf16", "rounding": "kahan"},
}
"""What is compared, as options of `fsdpx.Precision`; all with the first."""


def main() -> int:
    if sys.argv[1:2] == ["job"]:  # a rank of a training: the format, and what it is asked for
        return job(sys.argv[2], json.loads(sys.argv[3]))
    return compare(__file__, parser().parse_args())


def parser() -> argparse.ArgumentParser:
    p = arguments(__doc__, rounds=1)
    p.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    p.add_argument("--ranks", type=int, default=1)
    p.add_argument("--steps", type=int, default=300, help="of each training; schedules of learning rates follow")
    p.add_argument("--formats", nargs="+", default=[*FORMATS], choices=[*FORMATS])
    return p


def compare(script: str, options: argparse.Namespace) -> int:
    """Every format and seed is a job of its own, and a row of the results."""
    steps = 20 if options.quick else options.steps
    found: dict[str, Any] = {"steps": steps, "ranks": options.ranks, "rows": []}
    here = [sys.executable] if options.ranks == 1 else mpiexec(options.ranks)
    for seed, name in product(options.seeds[:1] if options.quick else options.seeds, options.formats):
        words = [*here, script, "job", name, json.dumps({"steps": steps, "seed": seed})]
        found["rows"].append({"format": name, "seed": seed, **finish(start(words, environ()), patience=7200)})
        print(json.dumps(found["rows"][-1]), flush=True)
        save("convergence", options, found)
    for title, text in tables(found):
        print(f"{title}\n{text}\n", flush=True)
    return 0


def job(name: str, asked: dict[str, Any]) -> int:
    """The main job with another format; rank 0 prints its last losses."""
    import fsdpx
    from fsdpx.examples import gpt

    steps = asked["steps"]
    args = gpt.parser().parse_args(["--seed", str(asked["seed"]), "--steps", str(steps), "--no-save"])
    args.dtype = fsdpx.Precision(**FORMATS[name])
    trainer = gpt.distributed(args)
    loader, validation = gpt.loaders(args, trainer.data, prints=False)
    with loader:
        history = trainer.fit(loader, epochs=None, steps=steps, validation=validation, every=steps)
    if trainer.host.rank == 0:
        loss, seconds = history.validation[-1][1], history.seconds / steps
        print(json.dumps({"validation": loss, "training": history.losses[-1], "seconds": seconds}))
    return 0


def tables(found: dict[str, Any]) -> list[tuple[str, str]]:
    rows = [row for row in found["rows"] if "failed" not in row]
    seeds = sorted({row["seed"] for row in rows})
    losses = {(row["format"], row["seed"]): row["validation"] for row in rows}
    first = next(iter(FORMATS))
    text = []
    for name in FORMATS:
        pairs = [(losses[name, s], losses[first, s]) for s in seeds if (name, s) in losses and (first, s) in losses]
        if pairs:
            apart = [f"{100 * (loss / base - 1):+.2f} %" for loss, base in pairs]
            mean = 100 * (sum(loss for loss, _ in pairs) / sum(base for _, base in pairs) - 1)
            text.append([name, *(f"{loss:.4f}" for loss, _ in pairs), *apart, f"{mean:+.2f} %"])
    head = ["format", *(f"seed {s}" for s in seeds), *(f"to {first}, {s}" for s in seeds), "mean"]
    return [("validation loss", lines(head, text))]


if __name__ == "__main__":
    sys.exit(main())
