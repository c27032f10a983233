"""One job of the side-by-side benchmark: a model trained by fsdpx or by PyTorch, timed step by step.

    python bench/worker.py fsdpx|torch|... --model tiny --strategy fsdp [--seconds 3 | --steps 8 | --turns
    FOLDER]

fsdpx-module trains the `torch.nn.Module` that torch trains. fsdpx-bf16 and torch-bf16 compute in bfloat16 beside
float32 masters; with -sums they reduce gradients in it as well.

Rank 0 prints one line of JSON: seconds of each timed step, seconds from the start of the job to the end of the first
step, and for every rank the peak RSS of its life and the peak PSS of some steps that follow the timed ones.
"""

import argparse
import json
import math
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from memory import PeakPss, peak_rss
from workloads import MODELS, batch, in_fsdpx, in_torch

LIBRARIES = (
    "fsdpx", "torch", "fsdpx-parts", "fsdpx-module", "fsdpx-bf16", "torch-bf16", "fsdpx-bf16-sums", "torch-bf16-sums",
)  # fmt: skip

START = float(os.environ.get("BENCH_START", time.time()))  # when the driver started this job
TURN = 1.0  # seconds of whole steps, at least
SLOW, SLOWEST = 1.0, 3.0  # seconds: slow steps are warmed up once, the slowest timed only twice


@dataclass(frozen=True)
class Training:
    """step: one whole step. everyone: a value of every rank, by rank."""

    step: Callable[[], float]
    everyone: Callable[[Any], list[Any]]
    rank: int


def by_fsdpx(args: argparse.Namespace) -> Training:
    import fsdpx
    from fsdpx import optim

    comm = fsdpx.init(args.backend)
    model, loss = by_module(args) if args.library == "fsdpx-module" else in_fsdpx(args.model)
    sums = "bf16" if args.library.endswith("-sums") else "float32"
    precision = fsdpx.Precision("bf16", reduce=sums) if half(args) else "float32"
    adamw = optim.AdamW(lr=3e-4)
    x, y = batch(args.model, comm.rank, comm.size)
    more = {}
    if cells := args.model.dims:
        layout = "cyx" if cells == 2 else "czyx"
        more["domain"] = fsdpx.Grid(comm, x.shape[2:], dims=(comm.size, 1, 1)[:cells], layout=layout)
    trainer = model.as_distributed(loss=loss, optimizer=adamw, strategy=args.strategy, precision=precision, **more)
    return Training(lambda: trainer.step(x, y), comm.all_gather_object, comm.rank)


def by_module(args: argparse.Namespace) -> tuple[Any, Any]:
    """PyTorch's model as layers, and our loss: what a user of PyTorch's models has."""
    import torch

    from fsdpx import nn
    from fsdpx.ext.interop.torch import from_torch

    torch.set_num_threads(args.threads)
    module, _, _ = in_torch(args.model)
    x, _ = batch(args.model)
    return from_torch(module, x[:2]), nn.CrossEntropyLoss()


def by_torch(args: argparse.Namespace) -> Training:
    import torch
    import torch.distributed as dist

    size, rank = int(os.environ.get("WORLD_SIZE", "1")), int(os.environ.get("RANK", "0"))
    torch.set_num_threads(args.threads)
    torch.set_flush_denormal(args.flush)
    if size > 1:
        dist.init_process_group("gloo", rank=rank, world_size=size)
    torch.manual_seed(0)
    model, loss_of, parts = in_torch(args.model)
    model = spread(model, parts, args.strategy, size, args.library)
    adamw = adamw_of(model, args.strategy)
    x, y = (torch.from_numpy(a) for a in batch(args.model, rank, size))

    def step() -> float:
        adamw.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=half(args) and args.strategy != "fsdp"):
            loss = loss_of(model(x), y)
        loss.backward()
        adamw.step()
        return float(loss.detach())

    def everyone(value: Any) -> list[Any]:
        values: list[Any] = [value] * size
        if size > 1:
            dist.all_gather_object(values, value)
        return values

    return Training(step, everyone, rank)


def half(args: argparse.Namespace) -> bool:
    """Whether layers compute in bfloat16: PyTorch's by autocast, or as FSDP2's policy says."""
    return "-bf16" in args.library


def spread(model: Any, parts: list[Any], strategy: str, size: int, library: str) -> Any:
    """The model as PyTorch users write each strategy."""
    import torch

    if strategy == "compile":
        return torch.compile(model)
    if strategy in ("ddp", "zero1"):
        return torch.nn.parallel.DistributedDataParallel(model)
    if strategy == "fsdp":
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

        sums = torch.bfloat16 if library.endswith("-sums") else torch.float32
        policy = MixedPrecisionPolicy(torch.bfloat16, sums) if "-bf16" in library else MixedPrecisionPolicy()
        mesh = init_device_mesh("cpu", (size,))
        for part in [*parts, model]:
            fully_shard(part, mesh=mesh, mp_policy=policy)
    return model


def adamw_of(model: Any, strategy: str) -> Any:
    import torch

    if strategy == "zero1":
        from torch.distributed.optim import ZeroRedundancyOptimizer

        return ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=3e-4, fused=True)
    return torch.optim.AdamW(model.parameters(), lr=3e-4, fused=True)


def warmed(training: Training) -> tuple[float, float]:
    """Seconds from the launch to the end of the first step, and of a step after some to warm up, on all ranks alike."""
    training.step()
    first = time.time() - START
    alike = max(training.everyone(clocked(training.step)))  # ranks must agree on how many steps there are
    for _ in range(2 if alike < SLOW else 0):
        alike = max(training.everyone(clocked(training.step)))
    return first, alike


def in_turns(training: Training, folder: Path) -> dict[str, Any]:
    """Steps until there is a file `stop`. Whoever started this stops it and lets it go on after `ready`, which says how
    many seconds a turn should last: a step that it ends in, and some whole ones."""
    first, alike = warmed(training)
    steps = max(math.ceil(TURN / alike), 2)
    begun, taken = [], []
    if training.rank == 0:
        (folder / "new").write_text(str((steps + 1) * alike))
        (folder / "new").rename(folder / "ready")
    while not any(training.everyone((folder / "stop").exists())):
        for _ in range(steps):
            begun.append(time.time())
            taken.append(clocked(training.step))
    return {"begun": begun, "seconds": taken, "first": first}


def measure(training: Training, seconds: float, steps: int | None) -> dict[str, Any]:
    """Warm up, time steps for about `seconds` (at least 3, or 2 of the slowest) or exactly `steps`, look at memory."""
    first, alike = warmed(training)
    count = steps or max(math.ceil(min(seconds / alike, 500)), 3 if alike < SLOWEST else 2)
    taken = [clocked(training.step) for _ in range(count)]
    with PeakPss() as watched:
        for _ in range(max(math.ceil(min(1.0 / alike, 100)), 2 if alike < SLOW else 1)):
            training.step()
    return {
        "seconds": taken,
        "first": first,
        "rss": training.everyone(peak_rss()),
        "pss": training.everyone(watched.peak),
    }


def clocked(step: Callable[[], float]) -> float:
    begin = time.perf_counter()
    step()
    return time.perf_counter() - begin


def main() -> int:
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    p.add_argument("library", choices=LIBRARIES)
    p.add_argument("--model", choices=MODELS, default="tiny")
    p.add_argument("--strategy", default="ddp", help="fsdpx: any; torch: single, compile, ddp, zero1, fsdp")
    p.add_argument("--threads", type=int, default=1)
    p.add_argument("--seconds", type=float, default=3.0)
    p.add_argument("--steps", type=int, help="this many timed steps, whatever they take")
    p.add_argument(
        "--turns", type=Path, metavar="FOLDER", help="take turns with another job, see duel.py"
    )
    p.add_argument("--backend", help="of fsdpx.init")
    p.add_argument("--flush", action="store_true", help="have PyTorch take denormals for 0")
    p.add_argument("--rows", type=int, help="of the global batch (default: the model's)")
    args = p.parse_args()
    args.model = replace(MODELS[args.model], **({"rows": args.rows} if args.rows else {}))
    training = by_fsdpx(args) if args.library.startswith("fsdpx") else by_torch(args)
    result = in_turns(training, args.turns) if args.turns else measure(training, args.seconds, args.steps)
    if training.rank == 0:
        print(json.dumps(result), flush=True)
    if args.library.startswith("torch"):
        os._exit(0)  # its process group now and then aborts while the interpreter ends
    return 0


if __name__ == "__main__":
    sys.exit(main())
