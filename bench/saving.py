"""One training that saves and loads, timed: a job of `checkpoints.py`.

    mpiexec -n 2 python bench/saving.py bandwidth --gib 1 [--rounds 3] [--folder build/bench]
    mpiexec -n 2 python bench/saving.py stall --model small [--rounds 6] [--window 4]

Rank 0 prints one line of JSON with the seconds of every round. `bandwidth`: rank 0 alone writes a checkpoint's bytes
one after the other, while the others wait; all save; and both read, the files no longer in memory. `stall`: steps
beside a save in the background, and as many without one.
"""

import argparse
import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from workloads import MODELS, batch, in_fsdpx

import fsdpx
from fsdpx import nn, optim
from fsdpx.core.checkpoint.local_shards import BLOCK_BYTES
from fsdpx.core.comm import Communicator

__all__ = ["bandwidth", "stall"]

FILES = ("model.safetensors", "state.safetensors")


def bandwidth(comm: Communicator, gib: float, width: int, rounds: int, place: Path) -> dict[str, Any]:
    """Seconds of plain writing, saving, plain reading and loading, by round. gib: of weights and AdamW's moments."""
    layers = max(round(gib * 2**30 / (12 * width * width)), 1)
    chain = nn.Sequential(*(nn.Linear(width, width) for _ in range(layers)))
    trainer = chain.as_distributed(loss=nn.MSELoss(), optimizer=optim.AdamW(), strategy="fsdp", comm=comm)
    rng = np.random.default_rng(comm.rank)
    for _, array in trainer.inspect.engine.state.ledger.iterate_saved_rows():
        array[...] = rng.random(array.shape, np.float32)
    found: dict[str, Any] = {"plain": [], "save": [], "read": [], "load": [], "bytes": 0}
    noise = rng.integers(0, 255, 16 * BLOCK_BYTES, np.uint8).data
    with common(comm, place) as folder:
        trainer.save(folder / "save")  # says how much there is to write
        sizes = [(folder / "save" / name).stat().st_size for name in FILES]
        found["bytes"] = sum(sizes)
        if comm.rank == 0:
            write_plainly(folder / "plain", sizes, noise)  # the first large file on a disk at rest takes longest
        writes = {
            "plain": lambda: write_plainly(folder / "plain", sizes, noise) if comm.rank == 0 else None,
            "save": lambda: trainer.save(folder / "save"),
        }
        reads = {
            "read": lambda: read_plainly(folder / "save") if comm.rank == 0 else None,
            "load": lambda: trainer.load(folder / "save"),
        }
        for turn in range(rounds):
            for name in sorted(writes, reverse=turn % 2 == 1):
                clear(comm, folder / name)
                found[name].append(clocked(comm, writes[name]))
            for name in sorted(reads, reverse=turn % 2 == 1):
                forget(comm, folder / "save")
                found[name].append(clocked(comm, reads[name]))
    trainer.close()
    return found


def stall(comm: Communicator, model: str, rounds: int, window: int, place: Path) -> dict[str, Any]:
    """Seconds of `window` steps with a save in the background and without, of the call of `save` alone, of waiting for
    its end after those steps (it should have come before), by round; and the bytes that are saved."""
    layers, loss = in_fsdpx(MODELS[model])
    trainer = layers.as_distributed(loss=loss, optimizer=optim.AdamW(lr=3e-4), strategy="fsdp", comm=comm)
    x, y = batch(MODELS[model], comm.rank, comm.size)
    found: dict[str, Any] = {"with": [], "without": [], "call": [], "wait": [], "window": window}

    def steps() -> None:
        for _ in range(window):
            trainer.step(x, y)

    with common(comm, place) as folder:

        def saving() -> None:
            begin = time.perf_counter()
            trainer.save(folder / "a", background=True)
            found["call"].append(time.perf_counter() - begin)
            steps()
            begin = time.perf_counter()
            trainer.call_runner.wait_for_background_save()
            found["wait"].append(time.perf_counter() - begin)

        saving()
        found |= {"call": [], "wait": []}
        found["bytes"] = sum((folder / "a" / name).stat().st_size for name in FILES)
        kinds = {"with": saving, "without": steps}
        for turn in range(rounds):
            for name in sorted(kinds, reverse=turn % 2 == 1):
                clear(comm)
                found[name].append(clocked(comm, kinds[name]))
    trainer.close()
    return found


def clocked(comm: Communicator, body: Callable[[], Any]) -> float:
    """Seconds until all ranks are through."""
    comm.barrier().wait()
    begin = time.perf_counter()
    body()
    comm.barrier().wait()
    return time.perf_counter() - begin


@contextmanager
def common(comm: Communicator, place: Path) -> Iterator[Path]:
    """A new folder in `place`, known to all ranks."""
    made = tempfile.mkdtemp(dir=place) if comm.rank == 0 else ""
    folder = Path(comm.all_gather_object(made)[0])
    yield folder
    comm.barrier().wait()
    if comm.rank == 0:
        shutil.rmtree(folder)


def clear(comm: Communicator, folder: Path | None = None) -> None:
    """Remove what an earlier round wrote, and let the disk come to rest: neither is part of what is clocked."""
    if comm.rank == 0:
        if folder is not None:
            shutil.rmtree(folder, ignore_errors=True)
        os.sync()
    comm.barrier().wait()


def forget(comm: Communicator, folder: Path) -> None:
    """Have the system drop files from its memory, where it can be asked to."""
    if comm.rank == 0 and hasattr(os, "posix_fadvise"):
        for path in folder.iterdir():
            fd = os.open(path, os.O_RDONLY)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(fd)
    comm.barrier().wait()


def write_plainly(folder: Path, sizes: list[int], noise: memoryview) -> None:
    """Files of these sizes, a block of `noise` after the other, each waited for as a checkpoint is."""
    assert len(noise) % BLOCK_BYTES == 0
    folder.mkdir()
    for number, size in enumerate(sizes):
        fd = os.open(folder / f"{number}", os.O_WRONLY | os.O_CREAT)
        for at in range(0, size, BLOCK_BYTES):
            start = at % len(noise)
            os.write(fd, noise[start : start + min(BLOCK_BYTES, size - at)])
        os.fsync(fd)
        os.close(fd)


def read_plainly(folder: Path) -> None:
    buffer = bytearray(BLOCK_BYTES)
    for name in FILES:
        fd = os.open(folder / name, os.O_RDONLY)
        while os.readv(fd, [buffer]):
            pass
        os.close(fd)


def main() -> int:
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    p.add_argument("what", choices=("bandwidth", "stall"))
    p.add_argument("--gib", type=float, default=1.0)
    p.add_argument("--width", type=int, default=2048)
    p.add_argument("--model", choices=MODELS, default="small")
    p.add_argument("--rounds", type=int, default=3)
    p.add_argument("--window", type=int, default=4)
    p.add_argument("--folder", type=Path, default=Path.cwd())
    args = p.parse_args()
    comm = fsdpx.init()
    if args.what == "bandwidth":
        found = bandwidth(comm, args.gib, args.width, args.rounds, args.folder)
    else:
        found = stall(comm, args.model, args.rounds, args.window, args.folder)
    if comm.rank == 0:
        print(json.dumps(found), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
