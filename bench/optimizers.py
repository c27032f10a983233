"""Steps and loss of every optimiser beside AdamW's: the main job with the settings that each is recommended with.

    python bench/optimizers.py [--seeds 0 1 2] [--ranks 1] [--steps 150] [--batch 8] [--size tiny] [--quick]

The model, the text and all other options are those of `make train`; AdamW has its schedule. Each optimiser is validated
every few steps, where it is meant to be evaluated. Losses do not depend on what else the machine does.
"""

import json
import os
import sys
from collections.abc import Callable
from statistics import mean
from typing import Any

import trainings
from records import lines

__all__ = ["tables"]


def recommended(steps: int) -> dict[str, Callable[[], Any]]:
    """By name, AdamW first: as `make train` has it. The other as its paper says, with the same warm-up and the same
    share of weight decay."""
    from fsdpx import optim
    from fsdpx.examples import gpt

    warm, same = max(min(steps // 10, 100), 1), gpt.optimizer(1e-3, steps)
    decay = {"weight_decay": same.weight_decay, "groups": same.groups}

    def falling(lr: float) -> Any:
        return optim.schedules.WarmUp(warm, optim.schedules.Cosine(lr, max(steps - warm, 1)))

    return {
        "AdamW": lambda: same,
        "Muon": lambda: optim.Muon(lr=falling(2e-3), others=optim.AdamW(betas=same.betas), **decay),
    }


def main() -> int:
    if (this := trainings.job()) is not None:
        return job(*this)
    p = trainings.parser(__doc__, "--optimizers", recommended(1), steps=150)
    p.add_argument("--every", type=int, default=15, help="steps from one validation to the next")
    p.add_argument("--size", default="tiny", help="of the model, as in `make train`")
    p.add_argument("--batch", type=int, default=8, help="sequences of the global batch")
    p.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="trainings at a time, of one core for a rank")
    options = p.parse_args()
    asked = {name: getattr(options, name) for name in ("steps", "every", "size", "batch")}
    return trainings.compare(
        __file__, "optimizer", options, asked | ({"steps": 20} if options.quick else {}), tables, options.jobs
    )


def job(name: str, asked: dict[str, Any]) -> int:
    """The main job with another optimiser; rank 0 prints its losses."""
    from fsdpx import nn
    from fsdpx.examples import gpt
    from fsdpx.nn.models import gpt as model

    steps, every = asked["steps"], asked["every"]
    words = [word for key in ("seed", "size", "batch", "steps") for word in (f"--{key}", str(asked[key]))]
    args = gpt.parser().parse_args([*words, "--no-save"])
    trainer = model(args.size, 0.0).as_distributed(
        loss=nn.CrossEntropy(), optimizer=recommended(steps)[name](), clip_norm=args.clip, seed=args.seed
    )
    loader, validation = gpt.loaders(args, trainer.data, prints=False)
    seen = []
    with loader:
        epochs = iter(loader)
        for step in range(1, steps + 1):
            trainer.step(*next(epochs))
            if step % every == 0 or step == steps:
                seen.append((step, mean(trainer.evaluate(*batch) for batch in validation)))
    report = trainer.report()
    if trainer.rank == 0:
        print(json.dumps({"validation": seen, "state": report.memory["optimiser"], "seconds": report.seconds}))
    return 0


def tables(found: dict[str, Any]) -> list[tuple[str, str]]:
    rows = [row for row in found["rows"] if "failed" not in row]
    ends = {(row["optimizer"], row["seed"]): row["validation"][-1][1] for row in rows}
    seeds = sorted({row["seed"] for row in rows})
    base, text = "AdamW", []
    for name in dict.fromkeys(row["optimizer"] for row in rows):
        mine = [row for row in rows if row["optimizer"] == name and (base, row["seed"]) in ends]
        if not mine:
            continue
        last = [row["validation"][-1][1] for row in mine]
        goals = [ends[base, row["seed"]] for row in mine]
        pairs = zip(mine, goals, strict=True)
        first = [next((step for step, loss in row["validation"] if loss <= goal), None) for row, goal in pairs]
        steps = ", ".join(str(step) if step else f"> {found['steps']}" for step in first)
        apart = f"{100 * (sum(last) / sum(goals) - 1):+.2f} %"
        found_of = {row["seed"]: f"{loss:.4f}" for row, loss in zip(mine, last, strict=True)}
        losses = [found_of.get(seed, "") for seed in seeds]
        text.append([name, *losses, apart, steps, f"{mine[0]['state'] / 2**20:.2f} MiB"])
    head = ["optimiser", *(f"seed {seed}" for seed in seeds), f"to {base}", f"steps to {base}'s loss", "state"]
    return [("validation loss", lines(head, text))]


if __name__ == "__main__":
    sys.exit(main())
