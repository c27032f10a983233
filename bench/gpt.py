"""Workers of the side-by-side benchmark: the same GPT in fsdpx and in PyTorch, timed step by step.

Each worker trains on random tokens and prints one line of JSON on rank 0: seconds per step, peak memory of every rank,
and seconds from the start of the process to the end of the first step.
"""

import argparse
import json
import os
import resource
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np

START = float(os.environ.get("BENCH_START", time.time()))  # when the driver started this job
VOCAB, TIME = 256, 256
MODELS = {"tiny": (256, 4, 4), "small": (512, 8, 8)}  # width, blocks, heads


def batch(rows: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    text = np.random.default_rng(seed).integers(0, VOCAB, (rows, TIME + 1))
    return text[:, :-1].copy(), text[:, 1:].copy()


def measure(step: Callable[[], float], warm: int, steps: int) -> tuple[list[float], float]:
    step()
    first = time.time() - START
    for _ in range(warm):
        step()
    seconds = []
    for _ in range(steps):
        begin = time.perf_counter()
        step()
        seconds.append(time.perf_counter() - begin)
    return seconds, first


def peak() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def by_fsdpx(args: argparse.Namespace) -> dict[str, Any] | None:
    import fsdpx
    from fsdpx import nn, optim

    comm = fsdpx.init()
    width, blocks, heads = MODELS[args.model]
    trainer = nn.GPT(VOCAB, width, blocks, heads, TIME).as_distributed(
        loss=nn.CrossEntropy(), optimizer=optim.AdamW(lr=3e-4), strategy=args.strategy
    )
    x, y = batch(args.batch // comm.size, comm.rank)
    seconds, first = measure(lambda: trainer.step(x, y), args.warm, args.steps)
    peaks = comm.all_gather_object(peak())
    return {"seconds": seconds, "peaks": peaks, "first": first} if comm.rank == 0 else None


def by_torch(args: argparse.Namespace) -> dict[str, Any] | None:
    import torch
    import torch.distributed as dist

    size, rank = int(os.environ.get("WORLD_SIZE", "1")), int(os.environ.get("RANK", "0"))
    torch.set_num_threads(args.threads)
    if args.strategy != "single":
        dist.init_process_group("gloo", rank=rank, world_size=size)
    torch.manual_seed(0)
    model: Any = torch_gpt(*MODELS[args.model])
    if args.strategy == "ddp":
        model = torch.nn.parallel.DistributedDataParallel(model)
    elif args.strategy == "fsdp":
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        mesh = init_device_mesh("cpu", (size,))
        for block in model.blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
    adamw = torch.optim.AdamW(model.parameters(), lr=3e-4, fused=args.strategy != "fsdp")
    x, y = (torch.from_numpy(a) for a in batch(args.batch // size, rank))

    def step() -> float:
        adamw.zero_grad()
        loss = torch.nn.functional.cross_entropy(model(x).reshape(-1, VOCAB), y.reshape(-1))
        loss.backward()
        adamw.step()
        return float(loss.detach())

    seconds, first = measure(step, args.warm, args.steps)
    peaks: list[Any] = [peak()]
    if args.strategy != "single":
        peaks = [None] * size
        dist.all_gather_object(peaks, peak())
    return {"seconds": seconds, "peaks": peaks, "first": first} if rank == 0 else None


def torch_gpt(width: int, blocks: int, heads: int) -> Any:
    import torch
    from torch import nn

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
            self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
            self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

        def forward(self, x: Any) -> Any:
            n, t, _ = x.shape
            q, k, v = (a.view(n, t, heads, -1).transpose(1, 2) for a in self.qkv(self.norm1(x)).split(width, 2))
            o = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
            x = x + self.out(o.transpose(1, 2).reshape(n, t, width))
            return x + self.down(nn.functional.gelu(self.up(self.norm2(x))))

    class Gpt(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.position = nn.Embedding(VOCAB, width), nn.Embedding(TIME, width)
            self.blocks, self.norm = nn.ModuleList(Block() for _ in range(blocks)), nn.LayerNorm(width)

        def forward(self, x: Any) -> Any:
            h = self.embed(x) + self.position(torch.arange(x.shape[1]))
            for block in self.blocks:
                h = block(h)
            return nn.functional.linear(self.norm(h), self.embed.weight)

    return Gpt()


def main() -> int:
    p = argparse.ArgumentParser()
    p.add_argument("library", choices=("fsdpx", "torch"))
    p.add_argument("--model", choices=MODELS, default="tiny")
    p.add_argument("--strategy", default="ddp")
    p.add_argument("--batch", type=int, default=8)
    p.add_argument("--threads", type=int, default=1)
    p.add_argument("--warm", type=int, default=2)
    p.add_argument("--steps", type=int, default=8)
    args = p.parse_args()
    result = by_fsdpx(args) if args.library == "fsdpx" else by_torch(args)
    if result is not None:
        print(json.dumps(result), flush=True)
    if args.library == "torch":
        os._exit(0)  # its process group now and then aborts while the interpreter ends
    return 0


if __name__ == "__main__":
    sys.exit(main())
