"""One training on a mesh, timed: a job of `axes.py`.

    mpiexec -n 4 python bench/meshed.py --model small --mesh pipe=2,tensor=2 [--schedule zb-h1] [--sequence ring]

Rank 0 prints one line of JSON: what `worker.py` measures, and the bytes of a step by mesh axis, of the rank that moves
most over that axis.
"""

import argparse
import json
import sys
from collections import Counter
from dataclasses import replace

import numpy as np
from worker import Training, measure
from workloads import MODELS, VOCAB, Model

import fsdpx
from fsdpx import nn, optim


def training(args: argparse.Namespace) -> tuple[fsdpx.Trainer, Training]:
    comm, model = fsdpx.init(), replace(MODELS[args.model], rows=args.rows)
    trainer = nn.GPT(VOCAB, model.width, model.layers, model.heads, args.time).as_distributed(
        loss=nn.CrossEntropy(),
        optimizer=optim.AdamW(lr=3e-4),
        strategy=args.strategy,
        mesh=fsdpx.Mesh.parse(args.mesh) if args.mesh else None,
        microbatches=args.microbatches,
        schedule=args.schedule,
        sequence=args.sequence,
        recompute=args.recompute,
    )
    x, y = tokens(model, args.time, trainer.data.rank, trainer.data.size)
    return trainer, Training(lambda: trainer.step(x, y), comm.all_gather_object, comm.rank)


def tokens(model: Model, time: int, rank: int, size: int) -> tuple[np.ndarray, np.ndarray]:
    """This data rank's rows of the global batch."""
    text = np.random.default_rng(0).integers(0, VOCAB, (model.rows, time + 1))
    mine = text[model.rows * rank // size : model.rows * (rank + 1) // size]
    return mine[:, :-1].copy(), mine[:, 1:].copy()


def bytes_by_axis(trainer: fsdpx.Trainer, timed: Training) -> dict[str, int]:
    """Of one more step, on the rank that moves most over the axis; messages of control are left out."""
    trainer.reset()
    timed.step()
    mine = Counter[str]()
    for (axis, _), count in trainer.report().traffic.items():
        mine[axis] += count.bytes
    del mine["world"]
    found = timed.everyone(dict(mine))
    axes = sorted({axis for rank in found for axis in rank})
    return {axis: max(rank.get(axis, 0) for rank in found) for axis in axes}


def main() -> int:
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    p.add_argument("--model", choices=MODELS, default="tiny")
    p.add_argument("--rows", type=int, default=8, help="sequences of the global batch")
    p.add_argument("--time", type=int, default=256, help="tokens of a sequence")
    p.add_argument("--strategy", default="fsdp")
    p.add_argument("--mesh")
    p.add_argument("--microbatches", type=int)
    p.add_argument("--schedule", default="1f1b")
    p.add_argument("--sequence")
    p.add_argument("--recompute")
    p.add_argument("--seconds", type=float, default=3.0)
    args = p.parse_args()
    trainer, timed = training(args)
    result = measure(timed, args.seconds, None)
    result["moved"] = bytes_by_axis(trainer, timed)
    if timed.rank == 0:
        print(json.dumps(result), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
