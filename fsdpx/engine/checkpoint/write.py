"""Writing: every rank puts its own bytes where they belong and sums them up."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np

from fsdpx.array.namespace import to_host
from fsdpx.engine.checkpoint.digest import Sum
from fsdpx.engine.checkpoint.disk import opened, sync, write_at
from fsdpx.engine.checkpoint.format import Entry, array_type
from fsdpx.engine.checkpoint.pieces import BLOCK, Held
from fsdpx.engine.checkpoint.plan import Plan
from fsdpx.engine.checkpoint.rounding import rounded

__all__ = ["write"]


def write(folder: Path, plan: Plan, pieces: Iterable[Held]) -> np.ndarray:
    """Write `pieces` into the files of `plan`, all there already, and wait for the disk.

    Returns what they add to the CRC of each tensor, uint64 in the order of `plan.tensors()`. Extra memory: two blocks.
    """
    sums: dict[str, int] = {}
    with ExitStack() as stack:
        files: dict[str, int] = {}
        for piece in pieces:
            name, entry = plan.places[piece.name]
            if name not in files:
                files[name] = stack.enter_context(opened(folder / name, writing=True))
            sums[piece.name] = sums.get(piece.name, 0) ^ _write_piece(files[name], piece, entry)
        for fd in files.values():
            sync(fd)
    return np.array([sums.get(name, 0) for _, name, _ in plan.tensors()], np.uint64)


def _write_piece(fd: int, piece: Held, entry: Entry) -> int:
    """Blocks are converted whole; each run of elements that lie together in the file is one write."""
    total, size = Sum(), entry.itemsize
    for block in piece.blocks(BLOCK // max(size, piece.array.dtype.itemsize)):
        data, at = _bytes(block.array, entry), 0
        for start, stop in block.runs:
            part = data[at : at + (stop - start) * size]
            write_at(fd, part, entry.start + start * size)
            total.add(start * size, part)
            at += len(part)
        assert at == len(data), f"{piece.name}: runs and elements differ"
    return total.of(entry.nbytes)


def _bytes(array: Any, entry: Entry) -> memoryview:
    host = np.ascontiguousarray(rounded(to_host(array), array_type(entry.code)))
    return host.view(np.uint8).data
