"""One-sided memory of the processes of one machine: a file in memory that all map, and locks that the kernel frees when
their holder dies."""

from __future__ import annotations

import errno
import mmap
import os
import platform
import tempfile
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from itertools import accumulate
from pathlib import Path

import numpy as np

from fsdpx.comm.communicator import Communicator
from fsdpx.comm.window import SharedParts
from fsdpx.errors import ConfigError

try:
    import fcntl
except ImportError:  # Windows: windows are MPI's there
    fcntl = None  # type: ignore[assignment]

__all__ = ["FOLDER", "LOCKS", "MappedWindow", "Mapping", "memory_here"]

LOCKS = fcntl is not None
"""Whether processes can lock parts of a file here."""

FOLDER = "/dev/shm"
"""Where Linux keeps files in memory."""


class Mapping:
    """Memory with a part of each rank of `comm`, all of which run on this machine: a file in memory that all map.
    Collective. It has no name any more once all have mapped it, so nothing is left behind however they end; and a rank
    that forgets it, without `close`, gives its own part in it back.

    at_once: the memory is taken now, with ConfigError on all ranks if there is too little; else as it is touched. Byte
    size + r of `file` is locked by rank r as long as it lives."""

    def __init__(self, comm: Communicator, nbytes: int, at_once: bool = True) -> None:
        sizes = comm.all_gather_plain(max(nbytes, 1))
        starts = [0, *accumulate(-(-n // mmap.PAGESIZE) * mmap.PAGESIZE for n in sizes)]
        self.file, memory = _mapped(comm, starts[-1], at_once)
        self._end = weakref.finalize(self, os.close, self.file)
        self._end.atexit = False  # the system closes it
        self.parts = [np.frombuffer(memory, np.uint8, n, start) for start, n in zip(starts, sizes, strict=False)]

    def close(self) -> None:
        """The memory is unmapped when the last view of it is gone."""
        self.parts = []
        self._end()


class MappedWindow(SharedParts):
    """A part of each rank of `comm`, all of which run on this machine. Collective. Byte r of the file is the lock of
    the part of rank r."""

    def __init__(self, comm: Communicator, nbytes: int, timeout: float) -> None:
        self._mapping = Mapping(comm, nbytes)
        self._file, self.parts = self._mapping.file, self._mapping.parts
        super().__init__(comm.rank, comm.size, self.parts[comm.rank], timeout)

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
        self.parts = []
        self.own = np.empty(0, np.uint8)
        self._mapping.close()


def memory_here() -> str:
    """A name that is the same for all processes that can share memory with this one: those of one machine, but not of
    containers with shared memory of their own."""
    with suppress(OSError):
        return f"{Path('/proc/sys/kernel/random/boot_id').read_text().strip()} {os.stat(_folder()).st_dev}"
    return f"{platform.node()} {_folder()}"


def _folder() -> str:
    return FOLDER if os.path.isdir(FOLDER) else tempfile.gettempdir()


def _mapped(comm: Communicator, nbytes: int, at_once: bool) -> tuple[int, mmap.mmap]:
    """A new file, open, locked and mapped on all ranks; ConfigError on all of them if one cannot do it."""
    file, path, memory, problem = -1, "", None, ""
    folder = _folder()
    try:
        if comm.rank == 0:
            file, path = tempfile.mkstemp(prefix="fsdpx-", dir=folder)
            if at_once:
                os.posix_fallocate(file, 0, nbytes)
            else:
                os.truncate(file, nbytes)
    except OSError as error:
        problem = _problem(error, nbytes, folder)
    path, failed = comm.all_gather_plain((path, problem))[0]
    try:
        if not failed:
            file = file if comm.rank == 0 else os.open(path, os.O_RDWR)
            memory = mmap.mmap(file, nbytes)
            fcntl.lockf(file, fcntl.LOCK_EX, 1, comm.size + comm.rank)
    except OSError as error:
        problem = f"rank {comm.rank}: {_problem(error, nbytes, folder)}"
    problems = [failed] if failed else comm.all_gather_plain(problem)  # all have it, and say that they live
    if comm.rank == 0 and path:
        os.unlink(path)
    if memory is None or any(problems):
        if file >= 0:
            os.close(file)
        raise ConfigError(next(filter(None, problems)))
    return file, memory


def _problem(error: OSError, nbytes: int, folder: str) -> str:
    remedy = "give it more room (containers: docker run --shm-size=4g)"
    if error.errno in (errno.EMFILE, errno.ENFILE):
        remedy = (
            "close() trainers that are not used any more, or make them by `with model.as_distributed(...) as t:`; "
            "or allow more files (ulimit -n)"
        )
    return f"{nbytes} bytes of shared memory for a window: {folder}: {error.strerror}; {remedy}"
