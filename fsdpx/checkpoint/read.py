"""Reading: digests first, by all ranks together; then every rank takes what it holds and nothing else."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack
from typing import Any

import numpy as np

from fsdpx.array.namespace import from_host
from fsdpx.checkpoint.digest import Sum
from fsdpx.checkpoint.disk import opened, read_at, will_read
from fsdpx.checkpoint.files import FileLayout
from fsdpx.checkpoint.format import TensorEntry, array_type
from fsdpx.checkpoint.pieces import BLOCK, Held, Run
from fsdpx.checkpoint.rounding import rounded
from fsdpx.checkpoint.source import Source
from fsdpx.errors import CheckpointError
from fsdpx.layout.ranges import Range, overlap

__all__ = ["elements", "read", "sums", "take"]

SPARSE = 8
"""Runs are read together, with what lies between them, as long as that is at most this many times as much."""


def sums(source: Source, rank: int, ranks: int) -> np.ndarray:
    """What this rank's even part of all bytes adds to the CRC of each tensor, uint64 in the order of
    `FileLayout.tensors`."""
    tensors = list(FileLayout(source.files).tensors())
    found = np.zeros(len(tensors), np.uint64)
    ends = np.cumsum([0, *(entry.nbytes for _, _, entry in tensors)]).tolist()
    everything = [Range(a, b) for a, b in zip(ends, ends[1:], strict=False)]
    mine = Range(ends[-1] * rank // ranks, ends[-1] * (rank + 1) // ranks)
    buffer = bytearray(min(BLOCK, max(mine.size, 1)))
    with Files(source) as files:
        for piece in overlap(everything, [mine]):
            file, _, entry = tensors[piece.have]
            total, first = Sum(), ends[piece.have]
            for at in range(piece.start, piece.stop, BLOCK):
                part = memoryview(buffer)[: min(BLOCK, piece.stop - at)]
                will_read(files[file], entry.start + at - first + len(part), 2 * BLOCK)  # while this part is summed up
                _read_at(source, files, file, part, entry.start + at - first)
                total.add(at - first, part)
            found[piece.have] = total.of(entry.nbytes)
    return found


def read(source: Source, pieces: Iterable[Held], xp: Any) -> None:
    """Fill the arrays of `pieces`, each in its own format, with its part of the tensor of its name."""
    with Files(source) as files:
        for piece in pieces:
            file, entry = source.places[piece.name]
            dtype = array_type(entry.code)
            for block in piece.blocks(BLOCK // max(dtype.itemsize, piece.array.dtype.itemsize)):
                host = _readable(block.array, dtype)
                data, at = host.view(np.uint8).data, 0
                for runs in _near(block.runs, BLOCK // dtype.itemsize):
                    at += _read_runs(source, files, file, entry, runs, data[at:])
                assert at == len(data), f"{piece.name}: runs and elements differ"
                if host is not block.array:
                    block.array[...] = from_host(xp, rounded(host, np.dtype(block.array.dtype)))


def elements(source: Source, name: str, runs: Iterable[Run]) -> np.ndarray:
    """These runs of elements of a tensor, one after the other, in its own format. No byte beside them is read."""
    file, entry = source.places[name]
    chosen, dtype = list(runs), array_type(entry.code)
    host = np.empty(sum(stop - start for start, stop in chosen), dtype)
    data, at = host.view(np.uint8).data, 0
    with Files(source) as files:
        for run in chosen:
            at += _read_runs(source, files, file, entry, [run], data[at:])
    return host


def take(arrays: Mapping[str, np.ndarray], pieces: Iterable[Held], xp: Any) -> None:
    """The same from whole arrays in memory."""
    for piece in pieces:
        whole = arrays[piece.name].reshape(-1)
        for block in piece.blocks(BLOCK // max(whole.itemsize, piece.array.dtype.itemsize)):
            host = np.concatenate([whole[start:stop] for start, stop in block.runs])
            block.array[...] = from_host(xp, rounded(host, np.dtype(block.array.dtype)))


def _readable(array: Any, dtype: np.dtype) -> np.ndarray:
    """An array to read bytes of a file into: `array` itself if it has their format, else a new one of its size."""
    if isinstance(array, np.ndarray) and array.dtype == dtype and array.flags.c_contiguous:
        return array
    return np.empty(array.size, dtype)


def _read_runs(source: Source, files: Files, file: str, entry: TensorEntry, runs: list[Run], data: memoryview) -> int:
    """Fill the start of `data` with some runs of a tensor, in one read. Returns how many bytes they are."""
    size, first, last = entry.itemsize, runs[0][0], runs[-1][1]
    if len(runs) == 1:
        part = data[: (last - first) * size]
        _read_at(source, files, file, part, entry.start + first * size)
        return len(part)
    span = memoryview(bytearray((last - first) * size))
    _read_at(source, files, file, span, entry.start + first * size)
    at = 0
    for start, stop in runs:
        count = (stop - start) * size
        data[at : at + count] = span[(start - first) * size : (stop - first) * size]
        at += count
    return at


def _near(runs: tuple[Run, ...], most: int) -> Iterator[list[Run]]:
    """Runs in groups that span up to `most` elements and are not too sparse."""
    group: list[Run] = []
    inside = 0
    for run in runs:
        span = run[1] - (group or [run])[0][0]
        if group and (span > most or span > SPARSE * (inside + run[1] - run[0])):
            yield group
            group, inside = [], 0
        group.append(run)
        inside += run[1] - run[0]
    if group:
        yield group


def _read_at(source: Source, files: Files, file: str, data: memoryview, offset: int) -> None:
    try:
        read_at(files[file], data, offset)
    except CheckpointError as error:
        raise CheckpointError(f"{source.folder / file}: {error}") from None


class Files(ExitStack):
    """The files of a source, opened when first used; CheckpointError if one has another size than its header says."""

    def __init__(self, source: Source) -> None:
        super().__init__()
        self._source = source
        self._open: dict[str, int] = {}

    def __getitem__(self, name: str) -> int:
        if name not in self._open:
            path, wanted = self._source.folder / name, self._source.files[name].size
            fd = self._open[name] = self.enter_context(opened(path))
            if (size := os.fstat(fd).st_size) != wanted:
                raise CheckpointError(f"{path}: {size} bytes here, {wanted} where its header was read")
        return self._open[name]
