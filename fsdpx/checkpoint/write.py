"""Writing: every rank puts its own bytes where they belong and sums them up."""

from __future__ import annotations

import platform
from collections.abc import Iterable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from fsdpx.array.namespace import to_host
from fsdpx.checkpoint.digest import Sum
from fsdpx.checkpoint.disk import opened, sync, write_at
from fsdpx.checkpoint.files import FileLayout
from fsdpx.checkpoint.format import TensorEntry, array_type
from fsdpx.checkpoint.pieces import BLOCK, TensorPiece
from fsdpx.checkpoint.rounding import rounded
from fsdpx.checkpoint.worker import Worker
from fsdpx.errors import CheckpointError

__all__ = ["write"]

LATER = 64 << 20
"""Bytes after which the disk is asked to take what is there, while more is written: systems wait for much more."""

SHORT = 1 << 16
"""Bytes that are written and summed up sooner than another thread wakes up."""


def write(folder: Path, plan: FileLayout, pieces: Iterable[TensorPiece]) -> np.ndarray:
    """Write `pieces` into the files of `plan`, all there already, and wait for the disk.

    Returns what they add to the CRC of each tensor, uint64 in the order of `plan.tensors()`. Extra memory: two blocks.
    While a block is summed up, a thread writes it; another has the disk take those before."""
    if not folder.exists():
        raise CheckpointError(
            f"{platform.node()} does not see {folder}, made by rank 0: all hosts must share the disk of checkpoints"
        )
    sums: dict[str, int] = {}
    with ExitStack() as stack, Worker("fsdpx write") as writer, Worker("fsdpx sync") as syncer:
        files: dict[str, int] = {}
        waiting = 0
        for piece in pieces:
            name, entry = plan.places[piece.name]
            if name not in files:
                files[name] = stack.enter_context(opened(folder / name, writing=True))
            sums[piece.name] = sums.get(piece.name, 0) ^ _write_piece(files[name], piece, entry, writer)
            waiting += int(piece.array.size) * entry.itemsize
            if waiting > LATER and syncer.free:
                syncer.begin(partial(_keep, tuple(files.values())))
                waiting = 0
        syncer.end()
        _keep(files.values())
    return np.array([sums.get(name, 0) for _, name, _ in plan.tensors()], np.uint64)


def _keep(files: Iterable[int]) -> None:
    for fd in files:
        sync(fd)


def _write_piece(fd: int, piece: TensorPiece, entry: TensorEntry, writer: Worker) -> int:
    """Blocks are converted whole; each run of elements that lie together in the file is one write."""
    total, size = Sum(), entry.itemsize
    for block in piece.blocks(BLOCK // max(size, piece.array.dtype.itemsize)):
        data, at = _bytes(block.array, entry), 0
        aside = len(block.runs) == 1 and len(data) > SHORT  # threads that alternate all the time only wait
        for start, stop in block.runs:
            part = data[at : at + (stop - start) * size]
            task = partial(write_at, fd, part, entry.start + start * size)
            if aside:
                writer.begin(task)
            else:
                task()
            total.add(start * size, part)
            at += len(part)
        writer.end()
        assert at == len(data), f"{piece.name}: runs and elements differ"
    return total.of(entry.nbytes)


def _bytes(array: Any, entry: TensorEntry) -> memoryview:
    host = np.ascontiguousarray(rounded(to_host(array), array_type(entry.code)))
    return host.view(np.uint8).data
