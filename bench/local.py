"""Local training beside synchronous: validation losses at equal steps and samples, and the bytes that ranks send.

    python bench/local.py [--ranks 4] [--warm 2000] [--steps 1000] [--batch 32] [--seeds 0 1] [--quick]

A toy GPT on the text of `make train`. As in DiLoCo's paper, training begins synchronously: all go on from the same
weights after `--warm` steps, with a new inner optimiser and a schedule of its own. From there each makes `--steps`
steps of the same global batch, cut over the ranks. Losses and bytes do not depend on what else the machine does.
"""

import json
import sys
from statistics import mean
from typing import Any

import trainings
from records import QUICK, lines

__all__ = ["tables"]

WIDTH, BLOCKS, HEADS, CONTEXT = 64, 2, 2, 64
WARM_RATE, RATE = 3e-3, 1.5e-3
"""Largest learning rates of the synchronous steps that all begin with, and of what is compared."""
PAPER, SHORT = ({"lr": 0.7, "momentum": momentum, "nesterov": True} for momentum in (0.9, 0.6))
"""The outer optimiser of the paper, for hundreds of rounds; and with less momentum, for tens of them."""
BEGIN = "(where all begin)"
STRATEGIES: dict[str, dict[str, Any] | None] = {
    "synchronous": None,
    "local SGD, H = 8": {"every": 8, "outer": {"lr": 1.0}},
    "local SGD, H = 50": {"every": 50, "outer": {"lr": 1.0}},
    "DiLoCo, H = 50": {"every": 50, "outer": SHORT},
    "DiLoCo, H = 50, momentum 0.9": {"every": 50, "outer": PAPER},
    "DiLoCo, H = 50, int8": {"every": 50, "outer": SHORT, "codec": "int8"},
    "DiLoCo, H = 50, 2 fragments, delay 2": {"every": 50, "outer": SHORT, "fragments": 2, "delay": 2, "mix": 0.5},
}
"""What is compared, as options of `fsdpx.Local`; all with the first."""


def main() -> int:
    if (this := trainings.job()) is not None:
        return job(*this)
    p = trainings.parser(__doc__, "--strategies", STRATEGIES, seeds=[0, 1], ranks=4, steps=1000)
    p.add_argument("--warm", type=int, default=2000, help="synchronous steps that all begin with")
    p.add_argument("--batch", type=int, default=32, help="sequences of the global batch")
    options = p.parse_args()
    asked = {name: 50 if options.quick else getattr(options, name) for name in ("warm", "steps")}
    options.variants = [BEGIN, *options.variants]
    return trainings.compare(__file__, "strategy", options, asked | {"batch": options.batch}, tables)


def job(name: str, asked: dict[str, Any]) -> int:
    """One training; rank 0 prints its last loss, and the bytes that it sent over the replicas in a step."""
    import fsdpx
    from fsdpx import data, nn, optim
    from fsdpx.nn.models import BYTES

    begins = name == BEGIN
    steps, batch, weights = asked["warm" if begins else "steps"], asked["batch"], QUICK / f"local-{asked['seed']}"
    rise = min(50, steps // 2)
    rate = optim.schedules.Cosine(WARM_RATE if begins else RATE, steps - rise)
    inner = optim.AdamW(
        lr=optim.schedules.WarmUp(rise, rate), betas=(0.9, 0.98), weight_decay=0.1, groups=optim.no_decay
    )
    strategy: Any = "ddp"
    if not begins and (chosen := STRATEGIES[name]) is not None:
        strategy = fsdpx.Local(**{**chosen, "outer": optim.SGD(**chosen["outer"])})
    trainer = nn.GPT(BYTES, WIDTH, BLOCKS, HEADS, CONTEXT, tie=True).as_distributed(
        loss=nn.CrossEntropy(), optimizer=inner, clip_norm=1.0, strategy=strategy, seed=asked["seed"],
        group_bytes="64KiB",  # several pages, of which fragments are made
    )  # fmt: skip
    if not begins:
        trainer.load_weights(weights)
    text = {split: data.TextDataset(data.stdlib_sources(), CONTEXT, split=split) for split in ("train", "validation")}
    order = asked["seed"] + (0 if begins else 1000)  # other batches than before
    loader = data.DataLoader(text["train"], batch, comm=trainer.data, shuffle=True, seed=order, drop_last=True)
    check = data.DataLoader(text["validation"], 8 * batch, comm=trainer.data, shuffle=True, seed=1, drop_last=True)
    with check:
        validation = [one for one, _ in zip(check, range(8), strict=False)]
    trainer.reset()
    with loader:
        history = trainer.fit(loader, epochs=None, steps=steps, progress=False)
    sent = sum(count.bytes for (axis, _), count in trainer.report().traffic.items() if axis == "replica")
    losses = [trainer.evaluate(x, y) for x, y in validation]
    if begins:
        trainer.save(weights)
    if trainer.rank == 0:
        print(json.dumps({"validation": mean(losses), "bytes": sent / steps, "seconds": history.seconds / steps}))
    return 0


def tables(found: dict[str, Any]) -> list[tuple[str, str]]:
    rows = [row for row in found["rows"] if "failed" not in row]
    seeds, text = sorted({row["seed"] for row in rows}), []
    known = {(row["strategy"], row["seed"]): row for row in rows}
    for name in (BEGIN, *STRATEGIES):
        pairs = [
            (known[name, s], known["synchronous", s]) for s in seeds if {(name, s), ("synchronous", s)} <= set(known)
        ]
        if not pairs:
            continue
        mine, base = ([pair[i] for pair in pairs] for i in (0, 1))
        loss, wanted = (sum(row["validation"] for row in some) / len(some) for some in (mine, base))
        fewer = base[0]["bytes"] / mine[0]["bytes"] if mine[0]["bytes"] else float("nan")
        compared = [f"{100 * (loss / wanted - 1):+.2f} %", f"{mine[0]['bytes']:,.0f}", f"{fewer:.1f}"]
        text.append([name, f"{loss:.4f}", *(compared if name != BEGIN else [""] * 3)])
    head = ["strategy", "validation loss", "to synchronous", "bytes per step", "times fewer"]
    return [("validation loss and bytes", lines(head, text))]


if __name__ == "__main__":
    sys.exit(main())
