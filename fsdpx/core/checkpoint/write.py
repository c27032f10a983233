"""Write checkpoints: the manifest, which contains the checksums, and the threads that write and flush shards."""

from __future__ import annotations

import json
import platform
import re
import threading
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from types import TracebackType
from typing import Any

import numpy as np

from fsdpx.core.array.namespace import to_host
from fsdpx.core.base.dataclass import dataclass
from fsdpx.core.base.safe_files import parse_json
from fsdpx.core.checkpoint import format
from fsdpx.core.checkpoint.format import (
    NOTE_FILE_NAME,
    FileHeader,
    FileLayout,
    PartialCrc,
    TensorEntry,
    cast_array,
    code_to_dtype,
    open_regular_file,
    sync_file,
    write_at,
)
from fsdpx.core.checkpoint.local_shards import TensorPiece, iterate_blocks
from fsdpx.errors import CheckpointError

__all__ = [
    "CHECKSUM_PREFIX",
    "MANIFEST_NAME",
    "OWN_FILE_PATTERN",
    "FileRecord",
    "Manifest",
    "Worker",
    "is_checkpoint",
    "write_tensor_shards",
]

MANIFEST_NAME = "manifest.json"
FORMAT_VERSION = 1
OWN_FILE_PATTERN = re.compile(
    r"(model(-\d{5,}-of-\d{5,})?|state)\.safetensors|(model\.safetensors\.index|manifest|written)\.json"
)
"""Pattern that matches the names of all files that a checkpoint can contain."""

CHECKSUM_PREFIX = ".sums-"
"""In a background save (`BackgroundSave`), each rank except rank 0 writes its checksums to a file in the temporary
folder. The name of this file is the prefix, followed by the rank number."""


@dataclass(frozen=True)
class FileRecord:
    """A file's entry in the manifest of a checkpoint.

    Attributes
    ----------
    size : size in bytes
    header_crc : CRC-32 of the header, or of the full contents of a text file
    tensors : CRC-32 of each tensor's bytes, keyed by tensor name
    """

    size: int
    header_crc: int
    tensors: dict[str, int]

    @property
    def is_valid(self) -> bool:
        """True if the size and all checksums are integers in the valid range."""
        sums = [self.header_crc, *self.tensors.values()]
        return _is_count(self.size, 1 << 63) and all(_is_count(value, 1 << 32) for value in sums)


@dataclass(frozen=True)
class Manifest:
    files: dict[str, FileRecord]

    @classmethod
    def from_layout(cls, layout: FileLayout, sums: Sequence[int]) -> Manifest:
        """Make the manifest of a checkpoint that has these files. `sums` is the elementwise xor of the partial CRCs of
        all ranks, in the order of `layout.iterate_tensors()`."""
        records = {name: FileRecord(c.size, zlib.crc32(c.header), {}) for name, c in layout.files.items()}
        for (file, name, entry), value in zip(layout.iterate_tensors(), sums, strict=True):
            records[file].tensors[name] = format.compute_crc_from_xor(int(value), entry.nbytes)
        records |= {name: FileRecord(len(text), zlib.crc32(text), {}) for name, text in layout.texts.items()}
        return cls(records)

    def to_json(self) -> bytes:
        """Return the manifest as canonical JSON. Its last entry is the CRC-32 of the JSON text of the other entries."""
        files = {
            name: {"bytes": r.size, "head": r.header_crc, "tensors": dict(sorted(r.tensors.items()))}
            for name, r in sorted(self.files.items())
        }
        table: dict[str, Any] = {"checkpoint": FORMAT_VERSION, "files": files}
        return _dump_json(table | {"crc32": zlib.crc32(_dump_json(table))})

    @classmethod
    def parse(cls, data: bytes, where: str) -> Manifest:
        """Parse a manifest. Raise CheckpointError unless `data` is exactly what `to_json` would return. `where` names
        the file in error messages."""
        try:
            table = parse_json(data)
            version = table["checkpoint"]
            files = {n: FileRecord(f["bytes"], f["head"], dict(f["tensors"])) for n, f in table["files"].items()}
            if not all(record.is_valid for record in files.values()):
                raise ValueError("numbers of another type or out of range")
            manifest = cls(files)
            intact = manifest.to_json() == data
        except (ValueError, KeyError, TypeError, AttributeError):
            raise CheckpointError(f"{where}: damaged: this is no manifest of a checkpoint") from None
        if version != FORMAT_VERSION:
            raise CheckpointError(
                f"{where}: format {version!r} of checkpoints; this fsdpx reads format {FORMAT_VERSION}"
            )
        if not intact:
            raise CheckpointError(f"{where}: damaged: its digest does not fit")
        if not all(OWN_FILE_PATTERN.fullmatch(name) and name not in (MANIFEST_NAME, NOTE_FILE_NAME) for name in files):
            raise CheckpointError(f"{where}: names files that a checkpoint does not have: {', '.join(files)}")
        return manifest

    def require_file_match(self, name: str, header: bytes, size: int, tensors: Iterable[str], where: str) -> None:
        """Raise CheckpointError unless the file `name` has the size, header and tensors that the manifest records. For
        a text file, `header` is its full contents. `where` names the file in error messages."""
        record = self.files[name]
        if size != record.size:
            kind = "truncated" if size < record.size else "longer than written"
            raise CheckpointError(f"{where}: {kind}: {size} bytes instead of {record.size}")
        if zlib.crc32(header) != record.header_crc:
            raise CheckpointError(f"{where}: damaged: the digest of the header does not fit")
        if differ := sorted(record.tensors.keys() ^ set(tensors)):
            raise CheckpointError(
                f"{where}: damaged: {differ[0]!r} is in the file or in {MANIFEST_NAME}, but not in both"
            )

    def list_damaged_tensors(self, files: Mapping[str, FileHeader], sums: Sequence[int]) -> list[str]:
        """Return the names of the tensors whose CRC-32 differs from the one in the manifest. `sums` is the elementwise
        xor of the partial CRCs of all ranks, in the order of `FileLayout.iterate_tensors`."""
        problems = []
        for (file, name, entry), value in zip(FileLayout(dict(files)).iterate_tensors(), sums, strict=True):
            if self.files[file].tensors.get(name) != format.compute_crc_from_xor(int(value), entry.nbytes):
                problems.append(name)
        return problems


def is_checkpoint(folder: Path) -> bool:
    return (folder / MANIFEST_NAME).exists()


def _is_count(value: Any, limit: int) -> bool:
    return type(value) is int and 0 <= value < limit


def _dump_json(table: Any) -> bytes:
    return (json.dumps(table, ensure_ascii=False, indent=1) + "\n").encode()


Task = Callable[[], object]


class Worker:
    """A thread that runs one task at a time. `begin_task(task)` starts a task; `wait_for_task_end()` waits until it
    ends, and raises its error if it failed. Use a `Worker` in a `with` block, which starts and ends the thread.

    An executor of `concurrent.futures` is not suitable: it refuses tasks after the main program has ended, when a
    background save may still be running."""

    def __init__(self, name: str) -> None:
        self._tasks: SimpleQueue[Task | None] = SimpleQueue()
        self._ends: SimpleQueue[BaseException | None] = SimpleQueue()
        self._begun = False
        self._thread = threading.Thread(target=self._run_tasks, name=name, daemon=True)

    @property
    def is_free(self) -> bool:
        """True if no task is running, so that `begin_task` would not have to wait."""
        return not self._begun or not self._ends.empty()

    def begin_task(self, task: Task) -> None:
        """Wait for the previous task to end. If it failed, raise its error; otherwise start `task`."""
        self.wait_for_task_end()
        self._begun = True
        self._tasks.put(task)

    def wait_for_task_end(self) -> None:
        if self._begun:
            self._begun = False
            error = self._ends.get()
            if error is not None:
                raise error

    def __enter__(self) -> Worker:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._tasks.put(None)
        self._thread.join()

    def _run_tasks(self) -> None:
        while (task := self._tasks.get()) is not None:
            try:
                task()
                self._ends.put(None)
            except BaseException as error:
                self._ends.put(error)
            del task  # free the arrays that the task refers to, instead of keeping them until the next task


FLUSH_BYTES = 64 << 20
"""Whenever this many more bytes have been written, they are flushed to disk while writing continues. By itself, the
operating system would begin to flush much later."""

INLINE_WRITE_BYTES = 1 << 16
"""Blocks of at most this many bytes are not written by a separate thread, because waking the thread takes longer than
writing such a block and computing its CRC."""


def write_tensor_shards(folder: Path, layout: FileLayout, pieces: Iterable[TensorPiece]) -> np.ndarray:
    """Write the shards in `pieces` to the files of `layout`, which must already exist in `folder`, and flush them to
    disk. Return this rank's contribution to the CRC-32 of each tensor as a uint64 array, in the order of
    `layout.iterate_tensors()`.

    Writing needs extra memory for two blocks. While this thread computes the CRC of a block, a second thread writes
    that block and a third one flushes earlier blocks."""
    if not folder.exists():
        raise CheckpointError(
            f"{platform.node()} does not see {folder}, made by rank 0: all hosts must share the disk of checkpoints"
        )
    sums: dict[str, int] = {}
    with ExitStack() as stack, Worker("fsdpx write") as writer, Worker("fsdpx sync") as syncer:
        files: dict[str, int] = {}
        waiting = 0
        for piece in pieces:
            name, entry = layout.locations[piece.name]
            if name not in files:
                files[name] = stack.enter_context(open_regular_file(folder / name, writing=True))
            sums[piece.name] = sums.get(piece.name, 0) ^ _write_tensor_piece(files[name], piece, entry, writer)
            waiting += int(piece.array.size) * entry.itemsize
            if waiting > FLUSH_BYTES and syncer.is_free:
                syncer.begin_task(partial(_sync_files, tuple(files.values())))
                waiting = 0
        syncer.wait_for_task_end()
        _sync_files(files.values())
    return np.array([sums.get(name, 0) for _, name, _ in layout.iterate_tensors()], np.uint64)


def _sync_files(files: Iterable[int]) -> None:
    for fd in files:
        sync_file(fd)


def _write_tensor_piece(fd: int, piece: TensorPiece, entry: TensorEntry, writer: Worker) -> int:
    """Write a shard to an open file, and return its contribution to the CRC-32 of the tensor.

    Each block of the shard is converted in one operation. Within a block, each run of elements that are consecutive in
    the file is written in one operation."""
    total, size = PartialCrc(), entry.itemsize
    for block in iterate_blocks(piece, size):
        data, offset = _to_bytes(block.array, entry), 0
        # this thread does small writes itself, because handing them to another thread would take longer
        aside = len(block.runs) == 1 and len(data) > INLINE_WRITE_BYTES
        for start, stop in block.runs:
            part = data[offset : offset + (stop - start) * size]
            task = partial(write_at, fd, part, entry.start + start * size)
            if aside:
                writer.begin_task(task)
            else:
                task()
            total.add_bytes(start * size, part)
            offset += len(part)
        writer.wait_for_task_end()
        assert offset == len(data), f"{piece.name}: runs and elements differ"
    return total.get_crc_share(entry.nbytes)


def _to_bytes(array: Any, entry: TensorEntry) -> memoryview:
    host = np.ascontiguousarray(cast_array(to_host(array), code_to_dtype(entry.code)))
    return host.view(np.uint8).data
