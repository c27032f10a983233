"""Reading: where tensors of a checkpoint lie, and their parts."""

from __future__ import annotations

import os
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from fsdpx.core.array.namespace import from_host
from fsdpx.core.base.safe_files import parse_json
from fsdpx.core.checkpoint.atomic_commit import current
from fsdpx.core.checkpoint.format import (
    INDEX,
    LARGEST_TEXT,
    STATE,
    WEIGHTS,
    Contents,
    FileLayout,
    Sum,
    TensorEntry,
    Tensors,
    array_type,
    opened,
    parse,
    read_at,
    rounded,
    will_read,
)
from fsdpx.core.checkpoint.local_shards import BLOCK, Block, Held, in_blocks
from fsdpx.core.checkpoint.newest import newest
from fsdpx.core.checkpoint.write import MANIFEST, Manifest, is_checkpoint
from fsdpx.core.state.flat_parameters import Range, Run, near, overlap
from fsdpx.errors import CheckpointError

__all__ = ["Source", "checkpoint", "elements", "parts", "read", "spans", "sums", "take", "weights"]


@dataclass(frozen=True)
class Source:
    """files: name -> contents, of files in `folder`, all headers checked. manifest: if it is a checkpoint."""

    folder: Path
    files: dict[str, Contents]
    manifest: Manifest | None = None

    @cached_property
    def places(self) -> dict[str, tuple[str, TensorEntry]]:
        """Tensor -> its file, and where it lies there."""
        return FileLayout(self.files).places

    @property
    def tensors(self) -> Tensors:
        """In the order of the files."""
        return {name: (entry.code, entry.shape) for name, (_, entry) in self.places.items()}

    def only(self, state: bool) -> Source:
        """The file of the state, or all others."""
        return Source(self.folder, {n: c for n, c in self.files.items() if (n == STATE) is state}, self.manifest)


def checkpoint(path: Path) -> Source:
    """The checkpoint in the folder `path`, or the one before it that a killed job left; headers checked."""
    folder = current(path)
    if not folder.is_dir():
        raise CheckpointError(f"{path}: there is no checkpoint" + _near(path))
    if not is_checkpoint(folder):
        raise CheckpointError(
            f"{folder} is no checkpoint: it has no {MANIFEST}"
            + (_newest(folder) or ". For safetensors files from elsewhere: load_weights")
        )
    manifest = Manifest.parse(_text(folder / MANIFEST), str(folder / MANIFEST))
    files = {}
    for name in manifest.files:
        where = folder / name
        if name.endswith(".json"):
            text = _text(where)
            manifest.demand(name, text, len(text), (), str(where))
            continue
        files[name] = contents(where)
        manifest.demand(name, files[name].header, files[name].size, files[name].tensors, str(where))
    made = Source(folder, files, manifest)
    _demand_once(made)
    return made


def weights(path: Path) -> Source:
    """The weights of a checkpoint, of one safetensors file, or of a folder with such a file or several and an index."""
    folder = current(path)
    if folder.exists() and not folder.is_dir():
        return _indexed(folder) if folder.suffix == ".json" else Source(folder.parent, {folder.name: contents(folder)})
    if not folder.is_dir():
        raise CheckpointError(f"{path}: there is no such file or folder" + _near(path))
    if is_checkpoint(folder):
        return checkpoint(folder).only(state=False)
    if (folder / INDEX).exists():
        return _indexed(folder / INDEX)
    if (folder / WEIGHTS).exists():
        return Source(folder, {WEIGHTS: contents(folder / WEIGHTS)})
    raise CheckpointError(f"{folder}: no {MANIFEST}, {INDEX} or {WEIGHTS} in it, but {_names(folder)}")


def contents(path: Path) -> Contents:
    """The checked header of a file; CheckpointError also if it cannot be read."""
    try:
        with opened(path) as fd:

            def read(count: int) -> bytes:
                data = bytearray(count)
                read_at(fd, data, 0)
                return bytes(data)

            return parse(read, os.fstat(fd).st_size, str(path))
    except FileNotFoundError:
        raise CheckpointError(f"{path}: the file is missing") from None


def _indexed(path: Path) -> Source:
    """An index says which tensor is in which file; files and index must say the same."""
    try:
        table = parse_json(_text(path))
        names = table["weight_map"]
        if not all(isinstance(k, str) and isinstance(v, str) for k, v in names.items()):
            raise ValueError("weight_map must map texts to texts")
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{path}: this is no index of safetensors files: {error}") from None
    files = {}
    for file in sorted(set(names.values())):
        if Path(file).name != file or file in ("", ".", "..") or "\0" in file or "\\" in file:
            raise CheckpointError(f"{path}: {file!r} is no name of a file beside it")
        files[file] = contents(path.parent / file)
    made = Source(path.parent, files)
    _demand_once(made)
    for name in names.keys() ^ made.places.keys():
        raise CheckpointError(f"{path}: tensor {name!r} is in the index or in a file, but not in both")
    for name, (file, _) in made.places.items():
        if names[name] != file:
            raise CheckpointError(f"{path}: tensor {name!r} is in {file}, the index says {names[name]}")
    return made


def _demand_once(source: Source) -> None:
    seen: dict[str, str] = {}
    for file, name, _ in FileLayout(source.files).tensors():
        if name in seen:
            raise CheckpointError(f"{source.folder}: tensor {name!r} is in {seen[name]} and in {file}")
        seen[name] = file


def _text(path: Path) -> bytes:
    try:
        with opened(path) as fd:
            data = bytearray(min(os.fstat(fd).st_size, LARGEST_TEXT))
            read_at(fd, data, 0)
            return bytes(data)
    except FileNotFoundError:
        raise CheckpointError(f"{path}: the file is missing") from None


def _near(path: Path) -> str:
    """What there is instead, in the nearest folder that is there, as the end of a sentence."""
    folder = next(folder for folder in path.absolute().parents if folder.is_dir())
    return _newest(folder) or f"; in {folder} there is {_names(folder)}"


def _newest(folder: Path) -> str:
    """The newest checkpoint, as the end of a sentence; nothing if there is none, or it has no number to tell it by."""
    found = newest(folder)
    return "" if found is None or not re.search("[0-9]", found.name) else f"; the newest in {folder} is {found.name}"


def _names(folder: Path) -> str:
    names = sorted(os.listdir(folder))
    return (", ".join(names[:8]) + (" ..." if len(names) > 8 else "")) or "nothing"


SPARSE = 8
"""Runs are read together, with what lies between them, as long as that is at most this many times as much."""


def parts(sizes: Sequence[int], rank: int, ranks: int) -> Iterator[tuple[int, int, int]]:
    """Of tensors of so many bytes, in order, this rank's even part of all bytes, as much as is read at a time: the
    number of a tensor, the first of its bytes, how many."""
    ends = np.cumsum([0, *sizes]).tolist()
    everything = [Range(a, b) for a, b in zip(ends, ends[1:], strict=False)]
    mine = Range(ends[-1] * rank // ranks, ends[-1] * (rank + 1) // ranks)
    for piece in overlap(everything, [mine]):
        for at in range(piece.start, piece.stop, BLOCK):
            yield piece.have, at - ends[piece.have], min(BLOCK, piece.stop - at)


def sums(source: Source, rank: int, ranks: int) -> np.ndarray:
    """What this rank's even part of all bytes adds to the CRC of each tensor, uint64 in the order of
    `FileLayout.tensors`."""
    tensors = list(FileLayout(source.files).tensors())
    totals: dict[int, Sum] = defaultdict(Sum)
    buffer = memoryview(bytearray(BLOCK))
    with Files(source) as files:
        for number, first, count in parts([entry.nbytes for _, _, entry in tensors], rank, ranks):
            (file, _, entry), part = tensors[number], buffer[:count]
            will_read(files[file], entry.start + first + count, 2 * BLOCK)  # while this part is summed up
            _read_at(source, files, file, part, entry.start + first)
            totals[number].add(first, part)
    found = [totals[n].of(entry.nbytes) if n in totals else 0 for n, (_, _, entry) in enumerate(tensors)]
    return np.array(found, np.uint64)


def spans(piece: Held, entry: TensorEntry) -> Iterator[tuple[Block, Iterator[list[Run]]]]:
    """Block by block, the runs that are read together, with what lies between them."""
    for block in in_blocks(piece, entry.itemsize):
        yield block, near(block.runs, BLOCK // entry.itemsize, SPARSE)


def read(source: Source, pieces: Iterable[Held], xp: Any) -> None:
    """Fill the arrays of `pieces`, each in its own format, with its part of the tensor of its name."""
    with Files(source) as files:
        for piece in pieces:
            file, entry = source.places[piece.name]
            dtype = array_type(entry.code)
            for block, together in spans(piece, entry):
                host = _readable(block.array, dtype)
                data, at = host.view(np.uint8).data, 0
                for runs in together:
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
        for block in in_blocks(piece, whole.itemsize):
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
