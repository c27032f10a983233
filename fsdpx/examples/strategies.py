"""Train one small model with any strategy or mesh axis, and show what a rank holds and sends.

    mpiexec -n 4 python -m fsdpx.examples.strategies --strategy zero2

A table on the documentation page "strategies" says what each strategy is good for, and what to watch out for."""

import argparse
import shutil
import sys
import tempfile
from collections.abc import Sequence
from typing import Any

import numpy as np

import fsdpx
from fsdpx import Mesh, nn, optim
from fsdpx.examples._cli import run_main

VOCABULARY, LENGTH, SAMPLES = 61, 16, 16

STRATEGIES: dict[str, dict[str, Any]] = {
    "ddp": {"strategy": "ddp"},
    "zero1": {"strategy": "zero1"},
    "zero2": {"strategy": "zero2"},
    "zero3": {"strategy": "zero3"},
    "fsdp": {"strategy": "fsdp"},
    "hybrid": {"strategy": "hybrid"},
    "pipe": {"mesh": Mesh(pipe=2), "schedule": "zb-h1"},
    "tensor": {"mesh": Mesh(tensor=2)},
    "sequence": {"mesh": Mesh(tensor=2), "sequence": "parallel"},
    "ulysses": {"mesh": Mesh(tensor=2), "sequence": "ulysses"},
    "ring": {"mesh": Mesh(tensor=2), "sequence": "ring"},
    "experts": {"mesh": Mesh(tensor=2), "sequence": "samples"},
    "3d": {"mesh": Mesh(pipe=2, tensor=2), "strategy": "zero1", "sequence": "parallel"},
    "async": {"strategy": fsdpx.AsyncSGD(staleness=4)},
    "gossip": {"strategy": "gossip"},
    "local_sgd": {"strategy": "local_sgd"},
    "diloco": {"strategy": fsdpx.LocalSGD(sync_every=10)},
    "offload": {"offload": "a folder"},
    "auto": {"strategy": "auto", "batch": (((SAMPLES, LENGTH), "int64"),) * 2},
}
"""Maps names to options of `as_distributed`."""


def train_and_evaluate(comm: Any, name: str, steps: int = 40, folder: str = "") -> tuple[float, float, Any]:
    """Train for `steps` steps. Return the loss before training, the loss after training, and this rank's report of
    memory and traffic. Collective.

    `folder` is the folder for offloaded state, used only by the strategy "offload"."""
    options = dict(STRATEGIES[name])
    if "offload" in options:
        options["offload"] = fsdpx.OffloadConfig(folder, what=("optimizer", "parameters"))
    model: nn.Layer = nn.GPT(VOCABULARY, d_model=32, n_layers=4, n_heads=4, seq_len=LENGTH)
    if name == "experts":
        model = nn.Llama(VOCABULARY, d_model=32, n_layers=4, n_heads=4, seq_len=LENGTH, experts=4, balance=0.01)
    made = model.as_distributed(
        loss=nn.CrossEntropyLoss(), optimizer=optim.AdamW(lr=3e-3), group_bytes=0, tune=False, comm=comm, **options
    )
    with made as trainer:
        tokens = 7 * np.arange(SAMPLES)[:, None] + 3 * np.arange(LENGTH + 1) ** 2
        # ranks that differ only on the pipeline or tensor axis need the same samples
        rank, size = trainer.data_group.rank, trainer.data_group.size
        mine = tokens[SAMPLES * rank // size : SAMPLES * (rank + 1) // size] % VOCABULARY
        x, y = mine[:, :-1], mine[:, 1:]
        before = trainer.evaluate(x, y)
        trainer.inspect.reset_counters()  # the report should count only the training steps
        for _ in range(steps):
            trainer.step(x, y)
        report = trainer.report()
        trainer.call_runner.wait_for_last_step()  # with asynchronous strategies, other ranks may still be training
        return before, trainer.evaluate(x, y), report


def main(argv: Sequence[str] | None = None) -> int:
    """Train the model, and print the losses and rank 0's memory and traffic. Return the exit status."""
    p = argparse.ArgumentParser(
        prog="python -m fsdpx.examples.strategies", description=__doc__.splitlines()[0], allow_abbrev=False
    )
    p.add_argument("--strategy", choices=STRATEGIES, default="fsdp", help="or the axis")
    p.add_argument("--steps", type=int, default=40)
    args = p.parse_args(argv)
    comm = fsdpx.init()
    made = tempfile.mkdtemp(prefix="fsdpx-offload-") if comm.rank == 0 else ""
    before, after, report = train_and_evaluate(comm, args.strategy, args.steps, comm.all_gather_value(made)[0])
    comm.barrier().wait()
    if comm.rank == 0:
        shutil.rmtree(made)
        moved: dict[str, float] = {}
        for (axis, _), count in report.traffic.items():
            moved[axis] = moved.get(axis, 0.0) + count.bytes / args.steps / 1024
        held, disk = (sum(some.values()) / 1024 for some in (report.memory, report.disk))
        print(f"{args.strategy} on {comm.size} ranks: loss {before:.3f}, after {args.steps} steps {after:.3f}")
        print(f"rank 0 holds {held:,.0f} KiB in memory, {disk:,.0f} on disk")
        if report.planned:
            print(f"planned: {report.planned}")
        print("and moves per step:", ", ".join(f"{axis} {kib:,.1f} KiB" for axis, kib in moved.items()) or "nothing")
        for table in report.routing_text:
            print(table)
    return 0


if __name__ == "__main__":
    sys.exit(run_main(main))
