"""How fast does a model write: tokens per second with a key/value cache, beside PyTorch's eager mode with one?

    python bench/generation.py [--model small] [--texts 1 8] [--rounds 3] [--quick]

One thread per rank, float32, greedy, 32 tokens of prompt and 96 new ones. PyTorch runs the same model, written as its
users do, with preallocated keys and values, under `torch.inference_mode`. Jobs take turns; medians.
"""

import argparse
import json
import sys
import time
from statistics import median
from typing import Any

import numpy as np
from jobs import environ, finish, mpiexec, start
from records import arguments, lines, save
from workloads import MODELS, TIME, VOCAB, gpt_in_torch, in_fsdpx

__all__ = ["tables"]

PROMPT, NEW = 32, 96
KINDS = {"torch": 1, "fsdpx": 1, "fsdpx tensor=2": 2}
"""Ranks of each job."""


def prompts(texts: int) -> np.ndarray:
    return np.random.default_rng(0).integers(0, VOCAB, (texts, PROMPT))


def by_fsdpx(model: str, texts: int, new: int) -> float | None:
    """Seconds; None on ranks that have nothing to say."""
    import fsdpx
    from fsdpx import optim

    comm = fsdpx.init()
    gpt, loss = in_fsdpx(MODELS[model])
    trainer = gpt.as_distributed(
        loss=loss, optimizer=optim.SGD(lr=0.0), strategy="ddp", mesh=fsdpx.Mesh(tensor=comm.size), comm=comm
    )
    given = list(prompts(texts))
    trainer.generate(given, 4)
    begin = time.perf_counter()
    trainer.generate(given, new)
    return time.perf_counter() - begin if comm.rank == 0 else None


def by_torch(model: str, texts: int, new: int) -> float:
    import torch

    torch.set_num_threads(1)
    size = MODELS[model]
    gpt = gpt_in_torch(VOCAB, size.width, size.layers, size.heads, TIME)
    given = torch.from_numpy(prompts(texts))
    _written(gpt, given, 4, size)
    begin = time.perf_counter()
    _written(gpt, given, new, size)
    return time.perf_counter() - begin


def _written(gpt: Any, tokens: Any, new: int, size: Any) -> None:
    """Greedy tokens with keys and values of all before kept."""
    import torch
    from torch.nn.functional import gelu, linear, scaled_dot_product_attention

    texts, width, heads = len(tokens), size.width, size.heads
    held = torch.empty(size.layers, 2, texts, heads, TIME, width // heads)
    done = 0
    with torch.inference_mode():
        for _ in range(new):
            count = tokens.shape[1]
            h = gpt.embed(tokens) + gpt.position(torch.arange(done, done + count))
            for block, (keys, values) in zip(gpt.blocks, held, strict=True):
                q, k, v = (
                    a.view(texts, count, heads, -1).transpose(1, 2) for a in block.qkv(block.norm1(h)).split(width, 2)
                )
                keys[:, :, done : done + count], values[:, :, done : done + count] = k, v
                seen = slice(0, done + count)
                o = scaled_dot_product_attention(q, keys[:, :, seen], values[:, :, seen], is_causal=done == 0)
                h = h + block.out(o.transpose(1, 2).reshape(texts, count, width))
                h = h + block.down(gelu(block.up(block.norm2(h))))
            done += count
            tokens = linear(gpt.norm(h[:, -1:]), gpt.embed.weight).argmax(-1)


def rate(kind: str, model: str, texts: int, new: int) -> dict[str, Any]:
    """What a job said."""
    work = [__file__, "--job", kind.split()[0], "--model", model, "--texts", str(texts), "--new", str(new)]
    launcher = [sys.executable] if KINDS[kind] == 1 else mpiexec(KINDS[kind])
    return finish(start([*launcher, *work], environ()), 240.0)


def tables(found: dict[str, Any]) -> list[tuple[str, str]]:
    made = []
    for texts in dict.fromkeys(row["texts"] for row in found["rows"]):
        rates = {row["kind"]: row.get("rate") for row in found["rows"] if row["texts"] == texts}
        figures = [f"{rates[kind]:,.0f}" if rates[kind] else "failed" for kind in KINDS]
        torch, one, two = (rates[kind] for kind in KINDS)
        ratios = ["" if not (a and b) else f"{a / b:.2f}" for a, b in ((one, torch), (two, one))]
        made.append([str(texts), *figures, *ratios])
    return [("rates", lines(["texts", *KINDS, "fsdpx/torch", "2 ranks/1"], made, left=0))]


def main() -> int:
    p = arguments(__doc__, rounds=3)
    p.add_argument("--model", default="small", choices=[name for name, one in MODELS.items() if one.heads])
    p.add_argument("--texts", nargs="+", type=int, default=[1, 8])
    p.add_argument("--new", type=int, default=NEW, help=argparse.SUPPRESS)
    p.add_argument("--job", help=argparse.SUPPRESS)
    options = p.parse_args()
    if options.job:
        seconds = (by_torch if options.job == "torch" else by_fsdpx)(options.model, options.texts[0], options.new)
        if seconds is not None:
            print(json.dumps({"rate": options.texts[0] * options.new / seconds}), flush=True)
        return 0
    rounds, new = (1, 8) if options.quick else (options.rounds, options.new)
    told: dict[tuple[int, str], list[dict[str, Any]]] = {}
    for _ in range(rounds):
        for texts in options.texts:
            for kind in KINDS:
                told.setdefault((texts, kind), []).append(rate(kind, options.model, texts, new))
    rows = []
    for (texts, kind), jobs in told.items():
        rates = [job["rate"] for job in jobs if "rate" in job]
        rows.append({"texts": texts, "kind": kind, **({"rate": median(rates)} if rates else jobs[0])})
    found = {"model": options.model, "rows": rows}
    save("generation", options, found)
    print("\n".join(text for _, text in tables(found)), *(row for row in rows if "failed" in row), sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
