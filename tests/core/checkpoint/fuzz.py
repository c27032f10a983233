"""Damaged checkpoints by the thousand: each is refused, or gives the bits that were saved. `python fuzz.py 10000`."""

import random
import shutil
import sys
import tempfile
from pathlib import Path

import numpy as np

from fsdpx import Trainer, nn, optim, spawn
from fsdpx.errors import CheckpointError

FILES = ("manifest.json", "model.safetensors", "state.safetensors")


def small(seed: int = 0) -> Trainer:
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm(4), nn.Tanh(), nn.Linear(4, 2))
    comm = spawn(lambda comm: comm, 1)[0]
    return model.as_distributed(
        loss=nn.MSELoss(), optimizer=optim.Adam(), comm=comm, seed=seed, precision="float32", strategy="ddp"
    )


def held(trainer: Trainer) -> list[bytes]:
    """What this rank has of all that is saved."""
    return [array.tobytes() for _, array in trainer.inspect.engine.state.ledger.iterate_saved_rows()]


def damaged(data: bytes, chance: random.Random) -> bytes:
    """One of the ways in which files go bad."""
    at, other = chance.randrange(len(data)), chance.randrange(len(data))
    first, last = min(at, other), max(at, other)
    digit = chance.choice([i for i, byte in enumerate(data[:2000]) if 48 <= byte < 58] or [at])
    ways = [
        (at, at + 1, bytes([data[at] ^ 1 << chance.randrange(8)])),
        (at, len(data), b""),
        (len(data), len(data), chance.randbytes(chance.randrange(1, 20))),
        (first, last, b""),
        (first, last, bytes(last - first)),
        (at, at, chance.randbytes(chance.randrange(1, 9))),
        (last, last, data[first:last]),
        (digit, digit + 1, str(chance.randrange(10)).encode()),
    ]
    start, stop, new = chance.choice(ways)
    return data[:start] + new + data[stop:]


class Fuzz:
    """A good checkpoint, and how one that was mutated by `seed` is taken."""

    def __init__(self, folder: Path) -> None:
        self.good, self.bad = folder / "good", folder / "bad"
        trainer = small()
        trainer.step(np.ones((4, 3)), np.ones((4, 2)))
        trainer.save(self.good)
        self.contents = {name: (self.good / name).read_bytes() for name in FILES}
        self.saved = held(trainer)
        self.other = small(1)
        self.before = held(self.other)
        shutil.copytree(self.good, self.bad)

    def refused(self, seed: int) -> bool:
        """Whether a mutation is refused; AssertionError if it is neither refused nor harmless."""
        chance = random.Random(seed)
        name = chance.choice(FILES)
        data = damaged(self.contents[name], chance)
        (self.bad / name).write_bytes(data)
        try:
            return self._load(data != self.contents[name])
        finally:
            (self.bad / name).write_bytes(self.contents[name])

    def _load(self, changed: bool) -> bool:
        try:
            self.other.load(self.bad)
        except CheckpointError:
            assert held(self.other) == self.before
            self._load_weights()
            return True
        assert not changed
        assert held(self.other) == self.saved
        self.other = small(1)
        return False

    def _load_weights(self) -> None:
        """Without a manifest nobody knows what was written; but it ends, one way or the other."""
        (self.bad / "manifest.json").rename(self.bad / "manifest")
        try:
            self.other.load_parameters(self.bad)
            self.other = small(1)
        except CheckpointError:
            assert held(self.other) == self.before
        finally:
            (self.bad / "manifest").rename(self.bad / "manifest.json")


if __name__ == "__main__":
    wanted = int(sys.argv[1])
    with tempfile.TemporaryDirectory() as folder:
        fuzz = Fuzz(Path(folder))
        print(f"{sum(map(fuzz.refused, range(wanted)))} of {wanted} refused, the others had the same bits")
