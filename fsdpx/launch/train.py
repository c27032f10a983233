"""`train`: the job that a run file describes, with a folder for its results."""

import argparse
from itertools import islice
from pathlib import Path

from fsdpx.facade.builder import ModelBuilder
from fsdpx.facade.functional import init
from fsdpx.facade.outcome import keep, result
from fsdpx.observe.folder import choose
from fsdpx.trainer.series import Checkpoints

__all__ = ["train"]


def train(args: argparse.Namespace) -> int:
    """Train, validate and keep; the exit status. Collective."""
    builder = ModelBuilder.read(args.file, args.changes)
    options, comm = builder.fit_options(), init()
    batches, unit = options.pop("validation_batches", None), options.get("unit", "samples")
    folder, _ = choose(Path(args.file).stem, args.run, args.resume, comm)
    trainer = builder.build(comm)
    train_on, held_out = builder.loaders(trainer)
    if held_out is not None:
        with held_out:
            options["validation"] = list(islice(held_out, batches)) if batches else held_out
    if trainer.host.rank == 0:
        folder.begin(dict(builder.plan), comm.size)
        placed = trainer.inspect.placement
        size, chosen = placed.layout.size, placed.tuning
        print(f"{args.file}: {size:,} parameters on {comm.size} ranks; chosen: {chosen}", flush=True)
    trainer.inspect.reset()  # the report is of training
    checkpoints = Checkpoints(folder.checkpoints, every=options.get("every", 50), keep=2)
    with train_on:
        history = trainer.fit(train_on, **{"log": folder.path, "checkpoints": checkpoints, **options})
    summary = trainer.inspect.summary()
    if trainer.host.rank == 0:
        print(f"\n{result(history, unit)}", flush=True)
    keep(trainer, history, folder, summary, f"fsdpx train {args.file} --resume, with more steps")
    return 0
