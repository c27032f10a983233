"""Files and folders of a checkpoint."""

from __future__ import annotations

import json
import math
import os
import stat
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from fsdpx.checkpoint.format import SIZES, Contents, TensorEntry, lay
from fsdpx.errors import CheckpointError

__all__ = [
    "INDEX", "STATE", "STATE_KEY", "WEIGHTS", "WRITTEN", "FileLayout", "Tensors", "create", "index_of", "lay_out",
    "opened", "read_at", "split", "sync", "sync_folder", "will_read", "write_at",
]  # fmt: skip

BINARY = getattr(os, "O_BINARY", 0)
AT_ONCE = getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_NOCTTY", 0)
"""Opening a pipe would wait for its other end."""


def write_at(fd: int, data: Any, offset: int) -> None:
    """All of `data`, from byte `offset` of the file on."""
    view = memoryview(data).cast("B")
    while len(view):
        done = _write(fd, view, offset)
        view, offset = view[done:], offset + done


def read_at(fd: int, data: Any, offset: int) -> None:
    """Fill `data` from byte `offset` of the file on; CheckpointError where the file ends before."""
    view = memoryview(data).cast("B")
    while len(view):
        done = _read(fd, view, offset)
        if done == 0:
            raise CheckpointError(f"truncated: the file ends at byte {offset}, {len(view)} more are needed")
        view, offset = view[done:], offset + done


def will_read(fd: int, offset: int, count: int) -> None:
    """These bytes are read next: have the disk begin, where the system can be told so."""
    if hasattr(os, "posix_fadvise"):
        os.posix_fadvise(fd, offset, count, os.POSIX_FADV_WILLNEED)


def _write(fd: int, view: memoryview, offset: int) -> int:
    if hasattr(os, "pwrite"):
        return os.pwrite(fd, view, offset)
    os.lseek(fd, offset, os.SEEK_SET)
    return os.write(fd, view)


def _read(fd: int, view: memoryview, offset: int) -> int:
    if hasattr(os, "preadv"):
        return os.preadv(fd, [view], offset)
    os.lseek(fd, offset, os.SEEK_SET)
    data = os.read(fd, len(view))
    view[: len(data)] = data
    return len(data)


@contextmanager
def opened(path: Path, writing: bool = False) -> Iterator[int]:
    """A file, open; CheckpointError for a folder, a pipe or a device in its place."""
    _demand_file(path, os.stat(path))  # opening a device can do something by itself
    fd = os.open(path, (os.O_WRONLY if writing else os.O_RDONLY) | BINARY | AT_ONCE)
    try:
        _demand_file(path, os.fstat(fd))
        yield fd
    finally:
        os.close(fd)


def _demand_file(path: Path, found: os.stat_result) -> None:
    if not stat.S_ISREG(found.st_mode):
        raise CheckpointError(f"{path}: this is a folder, a pipe or a device where a file should be")


def create(path: Path, size: int) -> None:
    """A new file of zeros."""
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | BINARY, 0o666)
    try:
        os.ftruncate(fd, size)
    finally:
        os.close(fd)


def sync(fd: int) -> None:
    """Return when what was written is on the disk."""
    os.fsync(fd)


def sync_folder(path: Path) -> None:
    """The same of the names in a folder; systems that cannot open folders do it by themselves."""
    if os.name == "posix":
        fd = os.open(path, os.O_RDONLY)
        try:
            sync(fd)
        finally:
            os.close(fd)


WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
STATE = "state.safetensors"
WRITTEN = "written.json"
STATE_KEY = "fsdpx"
"""Where in the metadata of STATE the rest of the state stands, as JSON."""

Tensors = dict[str, tuple[str, tuple[int, ...]]]
"""Name -> (format, shape)."""


@dataclass(frozen=True)
class FileLayout:
    """files: name -> contents. texts: small files that are written as they are. note: says what wrote them; it is in
    no digest, and may differ where all else is the same."""

    files: dict[str, Contents]
    texts: dict[str, bytes] = field(default_factory=dict)
    note: bytes | None = None

    @cached_property
    def places(self) -> dict[str, tuple[str, TensorEntry]]:
        """Tensor -> its file, and where it lies there."""
        return {name: (file, entry) for file, name, entry in self.tensors()}

    def tensors(self) -> Iterator[tuple[str, str, TensorEntry]]:
        """(file, tensor, entry), in the order in which sums over tensors are listed."""
        for file, contents in self.files.items():
            for name, entry in contents.tensors.items():
                yield file, name, entry


def lay_out(weights: Tensors, slots: Tensors | None, state: str | None, shard_bytes: int | None) -> FileLayout:
    """weights: in the order of the model. slots, state: of the second file, if there is a state.
    shard_bytes: the most bytes of tensors in one file of weights (a larger tensor has a file of its own); None: one
    file."""
    groups = [weights] if shard_bytes is None else split(weights, shard_bytes)
    count = len(groups)
    names = [WEIGHTS] if count == 1 else [f"model-{i:05d}-of-{count:05d}.safetensors" for i in range(1, count + 1)]
    files = {name: lay(group) for name, group in zip(names, groups, strict=True)}
    texts = {INDEX: index_of(files)} if len(files) > 1 else {}
    if state is not None:
        files[STATE] = lay(slots or {}, {STATE_KEY: state})
    return FileLayout(files, texts)


def split(tensors: Tensors, most: int) -> list[Tensors]:
    """Consecutive tensors of up to `most` bytes together."""
    groups: list[Tensors] = [{}]
    left = most
    for name, (code, shape) in tensors.items():
        nbytes = SIZES[code] * math.prod(shape)
        if groups[-1] and nbytes > left:
            groups.append({})
            left = most
        groups[-1][name] = (code, shape)
        left -= nbytes
    return groups


def index_of(files: Mapping[str, Contents]) -> bytes:
    """As Hugging Face writes it."""
    total = sum(entry.nbytes for contents in files.values() for entry in contents.tensors.values())
    weights = {name: file for file, contents in files.items() for name in contents.tensors}
    table = {"metadata": {"total_size": total}, "weight_map": weights}
    return (json.dumps(table, indent=2, sort_keys=True, ensure_ascii=False) + "\n").encode()
