"""What does it cost to keep state on disk: step time against memory, and the disk's rate against plain sequential I/O?

    python bench/offload.py [--layers 24] [--width 2048] [--folder /local/disk] [--rounds 3] [--quick]

Each way trains the same chain of square layers with AdamW on one rank, in processes that take turns. The update reads
and writes what it needs: its rate is that of its bytes over its time. Plain I/O is one loop that reads
a file of that size from its begin to its end, and writes it, past the page cache.
"""

import argparse
import json
import mmap
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import numpy as np
from memory import peak_rss
from records import arguments, lines, save

import fsdpx
from fsdpx import Offload, nn, optim

__all__ = ["WAYS", "plain", "tables", "train"]

WAYS: dict[str, tuple[str, ...]] = {
    "in memory": (),
    "optimizer on disk": ("optimizer",),
    "and parameters": ("optimizer", "parameters"),
    "and activations": ("optimizer", "parameters", "activations"),
    "and gradients": ("optimizer", "parameters", "activations", "gradients"),
}
BLOCK = 8 << 20


def train(way: str, layers: int, width: int, rows: int, steps: int, folder: Path) -> dict[str, Any]:
    """Seconds of a step, and of an update alone with its bytes; what lies where."""
    model = nn.Chain(*(nn.Linear(width, width, bias=False) for _ in range(layers)))
    options: dict[str, Any] = {"loss": nn.MSE(), "optimizer": optim.AdamW(lr=1e-4), "backend": "local"}
    offload = Offload(folder, WAYS[way]) if WAYS[way] else None
    x = np.random.default_rng(0).standard_normal((rows, width), np.float32)
    whole, updates = [], []
    with model.as_distributed(**options, offload=offload, clip_norm=1.0) as trainer:
        trainer.step(x, x)
        for _ in range(steps):
            begin = perf_counter()
            trainer.step(x, x)
            whole.append(perf_counter() - begin)
        trainer.accumulate(x, x)
        trainer.update()
        moved = 0
        for _ in range(steps):
            trainer.accumulate(x, x)
            trainer.reset()
            begin = perf_counter()
            trainer.update()
            updates.append(perf_counter() - begin)
            moved = sum(count.bytes for (axis, _), count in trainer.report().traffic.items() if axis == "disk")
        report = trainer.report()
    return {
        "step": median(whole), "update": median(updates), "moved": moved, "memory": sum(report.memory.values()),
        "disk": sum(report.disk.values()), "rss": peak_rss(), "parameters": report.parameters,
    }  # fmt: skip


def plain(folder: Path, nbytes: int) -> float:
    """Seconds to read a file of so many bytes and to write it, block by block."""
    memory = memoryview(mmap.mmap(-1, BLOCK))
    memory[:] = bytes(os.urandom(1 << 10)) * (BLOCK >> 10)
    size = -(-nbytes // BLOCK) * BLOCK
    with tempfile.NamedTemporaryFile(dir=folder) as file:
        fd = os.open(file.name, os.O_RDWR | getattr(os, "O_DIRECT", 0))
        try:
            _each(size, lambda at: os.pwrite(fd, memory, at))  # the first time a disk sets blocks aside
            return _each(size, lambda at: os.preadv(fd, [memory], at)) + _each(
                size, lambda at: os.pwrite(fd, memory, at)
            )
        finally:
            os.close(fd)


def _each(size: int, move: Any) -> float:
    begin = perf_counter()
    for at in range(0, size, BLOCK):
        done = move(at)
        assert done == BLOCK, f"{done} bytes of {BLOCK}"
    return perf_counter() - begin


def tables(found: dict[str, Any]) -> list[tuple[str, str]]:
    rows = [
        [
            row["way"], f"{row['memory'] / 2**20:,.0f}", f"{row['rss'] / 2**20:,.0f}", f"{row['disk'] / 2**20:,.0f}",
            f"{row['step']:.2f}", f"{row['step'] / found['rows'][0]['step']:.2f}",
        ]
        for row in found["rows"]
    ]  # fmt: skip
    head = ["state", "arena MiB", "peak RSS MiB", "on disk MiB", "s per step", "ratio"]
    rates = [
        [
            row["way"], f"{row['moved'] / 2**20:,.0f}", f"{row['update']:.2f}", f"{row['plain']:.2f}",
            f"{row['moved'] / row['update'] / 1e6:,.0f}", f"{row['moved'] / row['plain'] / 1e6:,.0f}",
            f"{100 * row['plain'] / row['update']:.0f} %",
        ]
        for row in found["rows"]
        if row["moved"]
    ]  # fmt: skip
    disk = ["state", "MiB per update", "s", "plain s", "MB/s", "plain MB/s", "share"]
    return [("memory and time", lines(head, rows)), ("rate of the disk", lines(disk, rates))]


def _job(options: argparse.Namespace, way: str) -> dict[str, Any]:
    """One way in a process of its own, then plain I/O of the same bytes."""
    sizes = [str(n) for n in (options.layers, options.width, options.rows, options.steps)]
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        command = [sys.executable, __file__, "--job", way, *sizes, folder]
        out = subprocess.run(command, capture_output=True, text=True, check=True, env=os.environ).stdout
        found: dict[str, Any] = json.loads(out.splitlines()[-1])
        found["plain"] = plain(Path(folder), found["moved"] // 2) if found["moved"] else 0.0
    return found


def _row(way: str, rounds: list[dict[str, Any]]) -> dict[str, Any]:
    return {"way": way, **{name: median(one[name] for one in rounds) for name in rounds[0]}}


def main() -> int:
    if sys.argv[1:2] == ["--job"]:
        way, *sizes, folder = sys.argv[2:]
        layers, width, rows, steps = map(int, sizes)
        print(json.dumps(train(way, layers, width, rows, steps, Path(folder))))
        return 0
    p = arguments(__doc__ or "", rounds=3)
    p.add_argument("--layers", type=int, default=24)
    p.add_argument("--width", type=int, default=2048)
    p.add_argument("--rows", type=int, default=256, help="samples of a batch")
    p.add_argument("--steps", type=int, default=5)
    p.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()), help="on the disk that is meant")
    options = p.parse_args()
    if options.quick:
        options.layers, options.width, options.rows, options.steps, options.rounds = 6, 1024, 32, 2, 1
    rounds = [{way: _job(options, way) for way in WAYS} for _ in range(options.rounds)]
    found = {
        "layers": options.layers, "width": options.width, "rows_of_a_batch": options.rows,
        "rows": [_row(way, [one[way] for one in rounds]) for way in WAYS], "version": fsdpx.__version__,
    }  # fmt: skip
    save("offload", options, found)
    for title, text in tables(found):
        print(f"{title}\n{text}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
