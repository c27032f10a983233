"""Where does training end with each codec, beside plain training of as many steps?

    python bench/lossy.py [--steps 150] [--seeds 0] [--ranks 2] [--jobs 1] [--quick]

Data parallelism, with the settings that docs/compression.md recommends: first by AdamW, then by SGD. Losses do not
depend on what else the machine does.
"""

import json
import sys
from collections.abc import Callable
from statistics import mean
from typing import Any

import numpy as np
import trainings
from records import lines

__all__ = ["tables"]

RATES = {"digits": (4e-3, 0.05), "tiny": (1e-3, 0.3)}
"""Of each task the largest rates of AdamW, and of SGD with momentum 0.9."""


TIMES = 4
"""Steps of digits for one of `tiny`: they are learnt to the end."""


def variants(steps: int, adam: float, sgd: float) -> dict[str, Callable[[], dict[str, Any]]]:
    """Optimiser and codec by name; each plain one is what those after it are compared with. Without momentum the rate
    of SGD is five times as high: its steps are half as long."""
    import fsdpx
    from fsdpx import optim

    def rate(lr: float) -> Any:
        return optim.schedules.WarmUp(max(steps // 10, 1), optim.schedules.Cosine(lr, steps))

    adamw = optim.AdamW(lr=rate(adam))
    momentum, none = optim.SGD(lr=rate(sgd), momentum=0.9), optim.SGD(lr=rate(5 * sgd))
    warmup = max(steps // 2, 1)
    return {
        "plain": lambda: {"optimizer": adamw, "codec": "plain"},
        "bf16": lambda: {"optimizer": adamw, "codec": "bf16"},
        "int8": lambda: {"optimizer": adamw, "codec": "int8"},
        "plain sgd": lambda: {"optimizer": momentum, "codec": "plain"},
        "powersgd 4": lambda: {"optimizer": momentum, "codec": fsdpx.PowerSGD(4)},
        "top 1 %": lambda: {"optimizer": none, "codec": fsdpx.TopK(0.01, warmup=warmup)},
    }


def main() -> int:
    if (this := trainings.job()) is not None:
        return job(*this)
    p = trainings.parser(__doc__, "--codecs", variants(1, 1.0, 1.0), seeds=[0], ranks=2, steps=150)
    p.add_argument("--batch", type=int, default=4, help="sequences of the global batch of `tiny`")
    p.add_argument("--jobs", type=int, default=1, help="trainings at a time")
    options = p.parse_args()
    asked = {"steps": 20 if options.quick else options.steps, "batch": options.batch}
    return trainings.compare(__file__, "codec", options, asked, tables, options.jobs)


def job(name: str, asked: dict[str, Any]) -> int:
    """One training of each task; rank 0 prints where they end."""
    import fsdpx

    comm = fsdpx.init()
    found = {}
    for task, train in TASKS.items():
        steps = asked["steps"] * (TIMES if task == "digits" else 1)
        found[task] = train(comm, variants(steps, *RATES[task])[name](), asked)
    if comm.rank == 0:
        print(json.dumps(found))
    return 0


def digits(comm: Any, options: dict[str, Any], asked: dict[str, Any]) -> float:
    """Which share of new digits the example's network names right, after four times as many steps."""
    from fsdpx import nn
    from fsdpx.examples.digits import draw
    from fsdpx.nn.models import digits as network

    images, labels = draw(4096, seed=1)
    held = draw(1024, seed=2)
    trainer = network().as_distributed(
        loss=nn.CrossEntropy(), strategy="ddp", comm=comm, seed=2 + asked["seed"], **options
    )
    for step in range(TIMES * asked["steps"]):
        rows = (np.arange(64) + 64 * step) % len(labels)
        mine = rows[64 * comm.rank // comm.size : 64 * (comm.rank + 1) // comm.size]
        trainer.step(images[mine], labels[mine])
    own = slice(1024 * comm.rank // comm.size, 1024 * (comm.rank + 1) // comm.size)
    right = int((trainer.predict(held[0][own]).argmax(axis=1) == held[1][own]).sum())
    return sum(comm.all_gather_object(right)) / 1024


def tiny(comm: Any, options: dict[str, Any], asked: dict[str, Any]) -> float:
    """The validation loss of the main job."""
    from fsdpx import nn
    from fsdpx.examples import gpt
    from fsdpx.nn.models import gpt as model

    words = [word for key in ("seed", "steps", "batch") for word in (f"--{key}", str(asked[key]))]
    args = gpt.parser().parse_args([*words, "--no-save"])
    options = {"clip_norm": args.clip, **options}
    trainer = model("tiny").as_distributed(loss=nn.CrossEntropy(), strategy="ddp", comm=comm, seed=args.seed, **options)
    loader, validation = gpt.loaders(args, trainer.data, prints=False)
    with loader:
        trainer.fit(loader, epochs=None, steps=args.steps, progress=False)
    return mean(trainer.evaluate(*batch) for batch in validation)


TASKS = {"digits": digits, "tiny": tiny}


def tables(found: dict[str, Any]) -> list[tuple[str, str]]:
    rows = [row for row in found["rows"] if "failed" not in row]
    text, base = [], dict[str, float]()
    for name in dict.fromkeys(row["codec"] for row in rows):
        mine = {task: mean(row[task] for row in rows if row["codec"] == name) for task in TASKS}
        base = mine if name.startswith("plain") else base
        compared = base and base is not mine
        right = [f"{100 * mine['digits']:.1f} %", f"{100 * (mine['digits'] - base['digits']):+.1f}" if compared else ""]
        loss = [f"{mine['tiny']:.4f}", f"{100 * (mine['tiny'] / base['tiny'] - 1):+.1f} %" if compared else ""]
        text.append([name, *right, *loss])
    return [("losses", lines(["codec", "digits right", "to plain", "loss of tiny", "to plain"], text))]


if __name__ == "__main__":
    sys.exit(main())
