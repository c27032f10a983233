"""One-sided memory of the processes of one machine: a file in memory that all map, and locks that the kernel frees when
their holder dies."""

from __future__ import annotations

import fcntl
import mmap
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import accumulate

import numpy as np

from fsdpx.comm.communicator import Communicator
from fsdpx.comm.window import SharedParts
from fsdpx.errors import ConfigError

__all__ = ["MappedWindow"]

FOLDER = "/dev/shm"
"""Where Linux keeps files in memory."""


class MappedWindow(SharedParts):
    """A part of each rank of `comm`, all of which run on this machine. Collective. The file has no name any more once
    all have mapped it, so nothing is left behind however they end.

    Byte r of the file is the lock of the part of rank r, and byte size + r is held by rank r as long as it lives."""

    def __init__(self, comm: Communicator, nbytes: int, timeout: float) -> None:
        sizes = [-(-n // mmap.PAGESIZE) * mmap.PAGESIZE for n in comm.all_gather_object(max(nbytes, 1))]
        self._file, path = _shared_file(comm, sum(sizes))
        self._map = mmap.mmap(self._file, sum(sizes))
        memory = np.frombuffer(self._map, np.uint8)
        starts = [0, *accumulate(sizes)]
        self.parts = [memory[start : start + n] for start, n in zip(starts, sizes, strict=False)]
        super().__init__(comm.rank, comm.size, self.parts[comm.rank], timeout)
        fcntl.lockf(self._file, fcntl.LOCK_EX, 1, self.size + self.rank)
        comm.all_gather_object(None)  # all have it, and say that they live
        if comm.rank == 0:
            os.unlink(path)

    @contextmanager
    def lock(self, rank: int, write: bool) -> Iterator[None]:
        fcntl.lockf(self._file, fcntl.LOCK_EX if write else fcntl.LOCK_SH, 1, rank)
        try:
            yield
        finally:
            fcntl.lockf(self._file, fcntl.LOCK_UN, 1, rank)

    def gone(self, rank: int) -> bool:
        if rank == self.rank:
            return False
        try:
            fcntl.lockf(self._file, fcntl.LOCK_SH | fcntl.LOCK_NB, 1, self.size + rank)
        except OSError:  # held
            return False
        fcntl.lockf(self._file, fcntl.LOCK_UN, 1, self.size + rank)
        return True

    def close(self) -> None:
        """The memory is unmapped when the last view of it is gone."""
        self.parts = []
        self.own = np.empty(0, np.uint8)
        os.close(self._file)


def _shared_file(comm: Communicator, nbytes: int) -> tuple[int, str]:
    """A new file, open on all ranks; ConfigError on all of them if there is no room."""
    file, path, problem = -1, "", ""
    folder = FOLDER if os.path.isdir(FOLDER) else tempfile.gettempdir()
    if comm.rank == 0:
        try:
            file, path = tempfile.mkstemp(prefix="fsdpx-", dir=folder)
            os.posix_fallocate(file, 0, nbytes)
        except OSError as error:
            problem = f"{nbytes} bytes of shared memory for a window: {folder}: {error.strerror}"
            if path:
                os.unlink(path)
    path, problem = comm.all_gather_object((path, problem))[0]
    if problem:
        raise ConfigError(f"{problem}; give it more room (containers: docker run --shm-size=4g)")
    return (file if comm.rank == 0 else os.open(path, os.O_RDWR)), path
