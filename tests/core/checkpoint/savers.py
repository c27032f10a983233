"""What the tests of checkpoints share: runs on any mesh, and what is on disk."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from models import KNOWN, make, part

from fsdpx import Mesh, Trainer, data, spawn
from fsdpx.core.checkpoint.format import NOTE_FILE_NAME
from fsdpx.core.comm import Communicator
from fsdpx.errors import CheckpointError

MESHES = {
    "one": (1, Mesh(shard=1), "ddp"),
    "ddp 2": (2, None, "ddp"),
    "zero1 2": (2, None, "zero1"),
    "fsdp 3": (3, None, "fsdp"),
    "zero2 4": (4, None, "zero2"),
    "hybrid 4": (4, None, "hybrid"),
    "fsdp 5": (5, None, "fsdp"),
    "pipe 4": (4, Mesh(shard=2, pipe=2), "zero1"),
    "fsdp 8": (8, None, "fsdp"),
}
"""Where chunks end with the same bits: the tensor axis is left out."""

CUT = {
    "tensor 2": (2, Mesh(shard=1, tensor=2), "ddp"),
    "tensor 3 shard 2": (6, Mesh(shard=2, tensor=3), "fsdp"),
    "3D": (8, Mesh(shard=2, pipe=2, tensor=2), "fsdp"),
    "3D replicas": (8, Mesh(replica=2, shard=1, pipe=2, tensor=2), "ddp"),
}
ALL = MESHES | CUT


def build(comm: Communicator, name: str, case: str = "wide", **options: Any) -> Trainer:
    _, mesh, strategy = ALL[name]
    return make(comm, case, strategy, **{"mesh": mesh, "group_bytes": 600, **options})


def steps(trainer: Trainer, case: str, first: int, last: int, rows: int = 8) -> list[float]:
    """Train on global batches `first` to `last`, the same on any mesh."""
    losses = []
    for k in range(first, last):
        x, y = KNOWN[case].batch(np.random.default_rng(k), rows)
        mine = part(trainer.data_group, rows, trainer.inspect.placement.options.reproducible_chunks)
        losses.append(trainer.step(x[mine], y[mine]))
    return losses


def everywhere(name: str, body: Any, *args: Any) -> list[Any]:
    return spawn(body, ALL[name][0], *args)


def loader(trainer: Trainer, rows: int = 100) -> data.DataLoader:
    dataset = data.ArrayDataset(*KNOWN["wide"].batch(np.random.default_rng(0), rows))
    return data.DataLoader(dataset, 12, comm=trainer.data_group, shuffle=True, seed=3, reproducible_chunks=4)


def refused(ranks: int, body: Any, *args: Any) -> str:
    """The text of the error that all ranks raise."""

    def attempt(comm: Communicator) -> str:
        with pytest.raises(CheckpointError) as caught:
            body(comm, *args)
        return str(caught.value)

    (text,) = set(spawn(attempt, ranks))
    return text


def contents(folder: Path) -> dict[str, bytes]:
    """All but the note of what wrote it, which tells the mesh."""
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir()) if path.name != NOTE_FILE_NAME}
