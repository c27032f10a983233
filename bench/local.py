"""Local training beside synchronous: validation losses of the main job at equal steps, and the bytes that ranks send.

    python bench/local.py [--ranks 4] [--steps 1000] [--batch 32] [--seeds 0 1 2] [--quick]

The model, the text, the global batch, the inner optimiser and its learning rate are those of `make train`. Steps are a
multiple of 50. Losses and bytes do not depend on what else the machine does.
"""

import json
import sys
from typing import Any

import trainings
from records import lines

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
    if (this := trainings.job()) is not None:
        return job(*this)
    p = trainings.parser(__doc__, "--strategies", STRATEGIES, seeds=[0], ranks=4, steps=1000)
    p.add_argument("--batch", type=int, default=32, help="sequences of the global batch")
    options = p.parse_args()
    steps, batch = (50, 4) if options.quick else (options.steps, options.batch)
    return trainings.compare(__file__, "strategy", options, {"steps": steps, "batch": batch}, tables)


def job(name: str, asked: dict[str, Any]) -> int:
    """The main job; rank 0 prints its last losses, and the bytes that it sent over the replicas in a step."""
    import fsdpx
    from fsdpx import optim
    from fsdpx.examples import gpt

    steps = asked["steps"]
    words = [word for key in ("seed", "steps", "batch") for word in (f"--{key}", str(asked[key]))]
    args = gpt.parser().parse_args([*words, "--no-save"])
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
