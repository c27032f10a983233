"""Try learning rates side by side: the ranks of one job are split into groups that train at the same time.

    mpiexec -n 4 python -m fsdpx.examples.sweep --groups 2 --rates 3e-4 1e-3 3e-3 1e-2

Each group has its own mpi4py communicator, and distributes a model over it in the same way as over all ranks. Groups
wait for each other only at the end. Any other option of `distribute` can be varied in the same way."""

import argparse
import sys
from collections.abc import Sequence
from itertools import islice
from typing import Any

import numpy as np

import fsdpx
from fsdpx import data, nn, optim
from fsdpx.errors import ConfigError
from fsdpx.examples._cli import run_main


def train_at_rate(comm: Any, rate: float, args: argparse.Namespace) -> float:
    """Train a small GPT with the learning rate `rate`, and return its validation loss. Collective over the group of
    ranks."""
    model = nn.GPT(256, d_model=64, n_layers=2, n_heads=2, seq_len=32)
    options = {"loss": nn.CrossEntropyLoss(), "optimizer": optim.AdamW(lr=rate), "strategy": args.strategy}
    source = args.data or data.python_stdlib_folder()
    with model.as_distributed(comm=comm, **options) as trainer:
        texts = [data.TextDataset(source, 32, split=split) for split in ("train", "validation")]
        train, held = (data.DataLoader(text, args.batch, comm=trainer.data_group, shuffle=True) for text in texts)
        with train, held:
            for x, y in islice(train, args.steps):
                trainer.step(x, y)
            return float(np.mean([trainer.evaluate(x, y) for x, y in islice(held, 4)]))


def main(argv: Sequence[str] | None = None) -> int:
    """Train with each learning rate, and print the validation losses on rank 0. Return the exit status."""
    p = argparse.ArgumentParser(
        prog="python -m fsdpx.examples.sweep", description=__doc__.splitlines()[0], allow_abbrev=False
    )
    p.add_argument("--groups", type=int, default=2, help="of ranks that train at the same time")
    p.add_argument("--rates", type=float, nargs="+", default=[3e-4, 1e-3, 3e-3, 1e-2], help="learning rates to try")
    p.add_argument("--steps", type=int, default=100)
    p.add_argument("--batch", type=int, default=16, help="sequences of a group's global batch")
    p.add_argument("--strategy", default="fsdp")
    p.add_argument("--data", default=None, help="a file or folder of text (default: Python's standard library)")
    args = p.parse_args(argv)
    everyone = fsdpx.init()
    if not 1 <= args.groups <= everyone.size:
        raise ConfigError(f"--groups {args.groups} of {everyone.size} ranks: each group needs a rank")
    from mpi4py import MPI

    mine = everyone.rank * args.groups // everyone.size
    # do not use everyone.split: its groups must all allocate shared memory at the same time, but these groups create
    # trainers independently
    group = MPI.COMM_WORLD.Split(mine)
    found = {rate: train_at_rate(group, rate, args) for rate in args.rates[mine :: args.groups]}
    results = everyone.all_gather_value((mine, found))
    if everyone.rank == 0:
        print_results(args, results)
    return 0


def print_results(args: argparse.Namespace, results: list[tuple[int, dict[float, float]]]) -> None:
    """Print one line for each learning rate. `results` has an entry for each rank: the index of its group, and a dict
    that maps each learning rate of the group to its validation loss."""
    print(f"{args.groups} groups of {len(results)} ranks, {args.steps} steps each")
    print(f"{'rate':>8} {'group':>6} {'ranks':>10} {'validation loss':>16}")
    losses = {rate: loss for _, found in results for rate, loss in found.items()}
    for n, rate in enumerate(args.rates):
        group = n % args.groups
        ranks = ",".join(str(rank) for rank, (its, _) in enumerate(results) if its == group)
        print(f"{rate:>8g} {group:>6} {ranks:>10} {losses[rate]:>16.4f}")
    best = min(losses, key=losses.__getitem__)
    print(f"best: {best:g}, {losses[best]:.4f}", flush=True)


if __name__ == "__main__":
    sys.exit(run_main(main))
