"""The few calls to the operating system that checkpoints are made of; tests let them fail."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from fsdpx.errors import CheckpointError

__all__ = ["create", "opened", "read_at", "sync", "sync_folder", "will_read", "write_at"]

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
    fd = os.open(path, (os.O_WRONLY if writing else os.O_RDONLY) | BINARY | AT_ONCE)
    try:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise CheckpointError(f"{path}: this is a folder, a pipe or a device where a file should be")
        yield fd
    finally:
        os.close(fd)


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
