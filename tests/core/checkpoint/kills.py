"""Processes killed while they save: afterwards the old or the new checkpoint loads. `python kills.py 300`.

One process holds a trainer; its forks save without end and are killed after a random time. The loop of
docs/checkpoints.md goes on after each kill, at the newest checkpoint.
"""

import os
import random
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from fsdpx import Trainer, latest_checkpoint, nn, optim, spawn
from fsdpx.core.comm import Communicator


def small(comm: Communicator | None = None) -> Trainer:
    model = nn.Sequential(nn.Linear(60, 200), nn.Tanh(), nn.Linear(200, 60))
    comm = comm or spawn(lambda comm: comm, 1)[0]
    return model.as_distributed(
        loss=nn.MSELoss(), optimizer=optim.Adam(), comm=comm, precision="float32", strategy="fsdp"
    )


def save_without_end(trainer: Trainer, folder: Path, first: int) -> None:
    """Checkpoint n has weights that are all n: one at the same place, and numbered ones of which two stay."""
    for n in range(first, first + 1_000_000):
        fill(trainer, n)
        trainer.save(folder / "latest", background=n % 3 == 0)
        trainer.save(folder / f"step-{n}", keep=2, shard_bytes=30_000 if n % 2 else None)


def fill(trainer: Trainer, n: int) -> None:
    trainer.inspect.engine.state.steps = n
    for _, array in trainer.inspect.engine.state.ledger.iterate_saved_rows():
        array[...] = n


def found(trainer: Trainer, path: Path) -> int:
    """The number of the checkpoint at `path`; all of it is of that one."""
    fill(trainer, -1)
    trainer.load(path)
    n = trainer.global_step
    assert all((array == n).all() for _, array in trainer.inspect.engine.state.ledger.iterate_saved_rows())
    return n


PATIENCE = 60.0
Kill = Callable[[Trainer, int, random.Random], None]
"""Starts a job that saves from this number on without end, kills it, and returns when nothing of it is left."""


def run(folder: Path, kills: int, kill: Kill, seed: int = 0) -> list[int]:
    """The newest number after each kill; they never go back."""
    trainer, chance, numbers = small(), random.Random(seed), []
    fill(trainer, 0)
    trainer.save(folder / "latest")
    trainer.save(folder / "step-0", keep=2)
    last = done = 0
    for _ in range(kills):
        kill(trainer, done + 1, chance)
        here = found(trainer, folder / "latest")
        steps = sorted(int(p.name.removeprefix("step-")) for p in folder.glob("step-*"))
        newest = latest_checkpoint(folder)
        assert newest is not None
        assert found(trainer, newest) == steps[-1]
        assert [found(trainer, folder / f"step-{n}") for n in steps] == steps
        assert here in (steps[-1], steps[-1] + 1)
        assert here >= last
        assert steps[-1] >= done
        last, done = here, steps[-1]
        numbers.append(here)
    return numbers


def forked(folder: Path) -> Kill:
    """One process with one rank: a fork of this one."""

    def kill(trainer: Trainer, first: int, chance: random.Random) -> None:
        begin = time.perf_counter()
        trainer.save(folder / "clock")
        seconds = time.perf_counter() - begin
        child = os.fork()
        if child == 0:
            try:
                save_without_end(trainer, folder, first)
            finally:
                os._exit(1)
        wait_for_saves(folder, first, chance, seconds)
        os.kill(child, signal.SIGKILL)
        assert os.WIFSIGNALED(os.waitpid(child, 0)[1]), "the fork ended by itself"

    return kill


def wait_for_saves(folder: Path, first: int, chance: random.Random, seconds: float) -> None:
    """Return at a random moment of one of the first saves after checkpoint `first` is there, on any machine. seconds:
    how long a save takes."""
    last, end = first + chance.randrange(3), time.monotonic() + PATIENCE
    while max((int(p.name.removeprefix("step-")) for p in folder.glob("step-*")), default=-1) < last:
        assert time.monotonic() < end, f"no checkpoint {last} in {PATIENCE:.0f} s"
        time.sleep(0.001)
    time.sleep(chance.random() * 4 * seconds)


def in_words(numbers: list[int]) -> str:
    return f"{len(numbers)} kills in {numbers[-1]} saves: the old or the new checkpoint was whole each time"


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as place:
        print(in_words(run(Path(place), int(sys.argv[1]), forked(Path(place)))))
