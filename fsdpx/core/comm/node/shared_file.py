"""An in-memory file that all ranks of a host map. The operating system frees it when the last of these ranks has
ended."""

from __future__ import annotations

import errno
import mmap
import os
from collections.abc import Callable
from contextlib import suppress
from typing import TypeVar

from fsdpx.core.base import safe_files
from fsdpx.core.base.dataclass import dataclass
from fsdpx.core.comm.communicator import Communicator
from fsdpx.errors import ConfigError

__all__ = ["create_and_map_shared_file"]

try:
    import fcntl
except ImportError:  # Microsoft Windows has no fcntl; MPI provides shared memory on this platform
    fcntl = None  # type: ignore[assignment]

T = TypeVar("T")


def create_and_map_shared_file(
    comm: Communicator, nbytes: int, folder: str, preallocate: bool
) -> tuple[int, mmap.mmap]:
    """Create a file in `folder` on rank 0, and map and lock it on all ranks of `comm`. All these ranks must run on one
    host. Collective.

    A file with a name would keep its memory if the ranks were killed. Therefore, rank 0 creates a file without a name,
    and the other ranks open it through /proc. If access is denied, for example because containers cannot see each
    other's processes, the file gets a temporary name. In this case, it stays empty until all ranks have opened it and
    the name has been removed, so that a killed job cannot leave a file that occupies memory.

    Parameters
    ----------
    comm : communicator of ranks on this host
    nbytes : size of the file in bytes
    folder : folder in an in-memory file system
    preallocate : whether to allocate the memory now; otherwise each memory page is allocated when it is first accessed

    Returns
    -------
    tuple
        file descriptor, and memory map of the entire file

    Raises
    ------
    ConfigError
        on all ranks, if any rank fails"""
    opening = _SharedFileOpening(comm, nbytes, folder)
    try:
        if not opening.try_share_unnamed_file():
            opening.share_named_file()
        return opening.file, opening.map_memory_and_hold_liveness_lock(preallocate)
    except BaseException:
        opening.close()
        raise


@dataclass
class _SharedFileOpening:
    """The steps in which the ranks of a host open a shared file together. `file` is the file descriptor on this rank,
    or -1 if the file is not open."""

    comm: Communicator
    nbytes: int
    folder: str
    file: int = -1

    def try_share_unnamed_file(self) -> bool:
        """Create the file on rank 0, and open it on the other ranks. Return whether all ranks could open it.
        Collective."""
        where = self._run_and_gather_results(self._make_unnamed_file)[0]
        if self.comm.rank:
            self.file = _open_descriptor_of_process(*where)
        return all(self.comm.all_gather_value(self.file >= 0))

    def share_named_file(self) -> None:
        self.close()
        path = self._run_and_gather_results(self._make_named_file)[0]
        try:
            self._run_and_gather_results(lambda: self._open_named_file(path))
        finally:
            if self.comm.rank == 0:
                os.unlink(path)
        # wait until rank 0 has removed the name: a killed job must not leave a file that occupies memory
        self.comm.all_gather_value(None)

    def map_memory_and_hold_liveness_lock(self, preallocate: bool) -> mmap.mmap:
        """Map the file, and lock one byte to show that this rank is alive. If `preallocate` is true, rank 0 allocates
        all of the memory. Collective."""

        def map_and_lock() -> None:
            if preallocate and self.comm.rank == 0:
                os.posix_fallocate(self.file, 0, self.nbytes)
            memory = mmap.mmap(self.file, self.nbytes)
            fcntl.lockf(self.file, fcntl.LOCK_EX, 1, self.comm.size + self.comm.rank)
            maps.append(memory)

        maps: list[mmap.mmap] = []
        self._run_and_gather_results(map_and_lock)
        return maps[0]

    def close(self) -> None:
        file, self.file = self.file, -1
        if file >= 0:
            os.close(file)

    def _make_unnamed_file(self) -> tuple[int, ...]:
        """Create the file if this is rank 0. Return (process ID, descriptor, device, inode) on rank 0, and () on other
        ranks."""
        if self.comm.rank:
            return ()
        self.file = safe_files.open_self_deleting_file(self.folder)
        os.truncate(self.file, self.nbytes)
        return os.getpid(), self.file, *_get_device_and_inode(os.fstat(self.file))

    def _make_named_file(self) -> str:
        if self.comm.rank:
            return ""
        path = safe_files.make_temporary_path(self.folder)
        self.file = safe_files.create_file(path)
        return str(path)

    def _open_named_file(self, path: str) -> None:
        if self.comm.rank:
            self.file = os.open(path, os.O_RDWR)
        else:
            os.truncate(self.file, self.nbytes)

    def _run_and_gather_results(self, body: Callable[[], T]) -> list[T]:
        """Call `body()` on each rank, and return the results of all ranks. If `body` raises OSError on any rank, raise
        ConfigError on all ranks. Collective."""
        value, problem = None, ""
        try:
            value = body()
        except OSError as error:
            problem = self._format_error_with_remedy(error)
        everyone = self.comm.all_gather_value((value, problem))
        for rank, (_, text) in enumerate(everyone):
            if text:
                raise ConfigError(text if rank == 0 else f"rank {rank}: {text}")
        return [value for value, _ in everyone]

    def _format_error_with_remedy(self, error: OSError) -> str:
        remedy = "give it more room (containers: docker run --shm-size=4g)"
        if error.errno in (errno.EMFILE, errno.ENFILE):
            remedy = (
                "close() trainers that are no longer used, or create them with `with model.as_distributed(...) as t:`; "
                "or allow more files (ulimit -n)"
            )
        return f"{self.nbytes} bytes of shared memory for a window: {self.folder}: {error.strerror}; {remedy}"


def _open_descriptor_of_process(process: int, number: int, *identity: int) -> int:
    """Open the file that another process has open as descriptor `number`. Return -1 if access is denied, or if the file
    does not have the given `identity` (device, inode). This check is needed because containers may have their own
    process IDs. The same ID may then belong to a process with a different file."""
    name = f"/proc/{process}/fd/{number}"
    with suppress(OSError):
        if _get_device_and_inode(os.stat(name)) == identity:
            return os.open(name, os.O_RDWR)
    return -1


def _get_device_and_inode(found: os.stat_result) -> tuple[int, int]:
    return found.st_dev, found.st_ino
