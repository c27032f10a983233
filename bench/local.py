"""Local training beside synchronous: validation losses of the main job at equal steps, and the bytes that ranks send.

    python bench/local.py [--ranks 4] [--steps 1000] [--batch 32] [--seeds 0 1 2] [--quick]

The model, the text, the global batch, the inner optimiser and its learning rate are those of `make train`. Losses and
bytes do not depend on what else the machine does.
"""

import json
import sys
from itertools import product
from pathlib import Path
from typing import Any

from jobs import environ, finish, mpiexec, start
from records import arguments, lines, save

__all__ = ["tables"]

OUTER = {"lr": 0.7, "momentum": 0.9, "nesterov": True}
STRATEGIES: dict[str, dict[str, Any] | None] = {
    "synchronous": None,
    "local SGD, H = 8": {"every": 8, "outer": {"lr": 1.0}},
    "local SGD, H = 50": {"every": 50, "outer": {"lr": 1.0}},
    "DiLoCo, H = 10": {"every": 10, "outer": OUTER},
    "DiLoCo, H = 50": {"every": 50, "outer": OUTER},
    "DiLoCo, H = 50, int8": {"every": 50, "outer": OUTER, "codec": "int8"},
    "DiLoCo, H = 50, 2 fragments, delay 2": {"every": 50, "outer": OUTER, "fragments": 2, "delay": 2, "mix": 0.5},
}
"""What is compared, as options of `fsdpx.Local`; all with the first."""


def main() -> int:
    if sys.argv[1:2] == ["job"]:
        return job(sys.argv[2], *map(int, sys.argv[3:]))
    p = arguments(__doc__, rounds=1)
    p.add_argument("--seeds", nargs="+", type=int, default=[0])
    p.add_argument("--ranks", type=int, default=4)
    p.add_argument("--steps", type=int, default=1000, help="a multiple of 50; the learning rate's schedule follows")
    p.add_argument("--batch", type=int, default=32, help="sequences of the global batch")
    p.add_argument("--strategies", nargs="+", default=list(STRATEGIES), choices=STRATEGIES)
    options = p.parse_args()
    steps, batch = (50, 4) if options.quick else (options.steps, options.batch)
    seeds = options.seeds[:1] if options.quick else options.seeds
    found: dict[str, Any] = {"steps": steps, "ranks": options.ranks, "batch": batch, "rows": []}
    for seed, name in product(seeds, options.strategies):
        command = [*mpiexec(options.ranks), str(Path(__file__)), "job", name, str(seed), str(steps), str(batch)]
        ran = finish(start(command, environ()), patience=7200)
        found["rows"].append({"strategy": name, "seed": seed, **ran})
        print(json.dumps(found["rows"][-1]), flush=True)
        save("local", options, found)
    for title, text in tables(found):
        print(f"{title}\n{text}\n", flush=True)
    return 0


def job(name: str, seed: int, steps: int, batch: int) -> int:
    """The main job; rank 0 prints its last losses, and the bytes that it sent over the replicas in a step."""
    import fsdpx
    from fsdpx import optim
    from fsdpx.examples import gpt

    args = gpt.parser().parse_args(["--seed", str(seed), "--steps", str(steps), "--batch", str(batch), "--no-save"])
    args.strategy = "ddp"
    if (chosen := STRATEGIES[name]) is not None:
        args.strategy = fsdpx.Local(**{**chosen, "outer": optim.SGD(**chosen["outer"])})
    trainer = gpt.distributed(args)
    loader, validation = gpt.loaders(args, trainer.data, prints=False)
    trainer.reset()
    with loader:
        history = trainer.fit(loader, epochs=None, steps=steps)
    sent = sum(count.bytes for (axis, _), count in trainer.report().traffic.items() if axis == "replica")
    losses = [trainer.evaluate(x, y) for x, y in validation]
    if trainer.rank == 0:
        found = {"validation": sum(losses) / len(losses), "bytes": sent / steps, "seconds": history.seconds / steps}
        print(json.dumps(found))
    return 0


def tables(found: dict[str, Any]) -> list[tuple[str, str]]:
    rows = [row for row in found["rows"] if "failed" not in row]
    seeds, text = sorted({row["seed"] for row in rows}), []
    known = {(row["strategy"], row["seed"]): row for row in rows}
    for name in STRATEGIES:
        pairs = [
            (known[name, s], known["synchronous", s]) for s in seeds if {(name, s), ("synchronous", s)} <= set(known)
        ]
        if not pairs:
            continue
        mine, base = ([pair[i] for pair in pairs] for i in (0, 1))
        loss, wanted = (sum(row["validation"] for row in some) / len(some) for some in (mine, base))
        fewer = base[0]["bytes"] / mine[0]["bytes"] if mine[0]["bytes"] else float("nan")
        text.append(
            [name, f"{loss:.4f}", f"{100 * (loss / wanted - 1):+.2f} %", f"{mine[0]['bytes']:,.0f}", f"{fewer:.1f}"]
        )
    head = ["strategy", "validation loss", "to synchronous", "bytes per step", "times fewer"]
    return [("validation loss and bytes", lines(head, text))]


if __name__ == "__main__":
    sys.exit(main())
