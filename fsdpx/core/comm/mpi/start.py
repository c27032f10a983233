"""Protection against ranks that never arrive at the initialization of MPI. While MPI is being initialized, each rank
waits inside the library and cannot run Python code, so another process must enforce a time limit.

The waiting ranks of a host create marker files in a folder, which `fsdpx run` also reads. The first rank starts a
watchdog process (`fsdpx/core/comm/mpi/mpi_init_watchdog.py`) that ends the job if a rank does not arrive in time. The
first rank also removes files that killed jobs have left in shared memory, because MPI libraries do not remove them."""

from __future__ import annotations

import math
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from fsdpx.core.base import environment, safe_files
from fsdpx.core.base.safe_files import is_owned_by_user
from fsdpx.core.comm.default_communicator import get_running_mpi
from fsdpx.core.comm.mpi.mpi_init_watchdog import MARK_PREFIX, TIMED_OUT_MARK, get_process_start_time, parse_marker_name

__all__ = [
    "FOLDER_PREFIX", "SHARED_MEMORY_FOLDER", "find_leftover_files", "find_waiting_ranks", "guarding_mpi_start",
    "has_start_timed_out", "identify_process", "is_process_alive", "remove_dead_folders", "remove_leftover_files",
]  # fmt: skip

SHARED_MEMORY_FOLDER = Path("/dev/shm")
LEFTOVER_PATTERNS = (
    "mpich_shm_*", "mpich_vci_*", "sm_segment.*", "vader_segment.*", "osc_sm.*", "osc_rdma.*",
    f"{safe_files.TEMPORARY_PREFIX}*",
)  # fmt: skip
"""Patterns for the names of the shared-memory files that MPICH, Open MPI and fsdpx create. For Open MPI, they match the
files that versions 5 and 4 use for messages, and the files used for windows."""
_REMOVED = ("mpich_", safe_files.TEMPORARY_PREFIX)
"""Name prefixes of the leftover files that are removed. Other leftover files are only listed, because they may belong
to another program."""
LEFTOVER_AGE_SECONDS = 60.0
"""Files newer than this are not listed, because they may belong to a job that is just starting."""
_SESSION = "ompi."
"""Name prefix of Open MPI's session folders. The prefix is followed by the ID of the process that created the
folder."""
_SECONDS_TO_BEGIN = 600.0
"""Files older than this cannot belong to a job that is just starting, so they may be removed."""


def find_leftover_files(folder: Path = SHARED_MEMORY_FOLDER, seconds: float = LEFTOVER_AGE_SECONDS) -> list[Path]:
    """Return the leftover files in `folder` that belong to this user. A file is left over if an MPI library or fsdpx
    created it, no process maps it, and it was last written more than `seconds` seconds ago."""
    old = time.time() - seconds
    files_there = (path for name in LEFTOVER_PATTERNS for path in folder.glob(name) if not path.is_dir())
    stale_files = sorted(path for path in files_there if is_owned_by_user(path) and _get_write_time(path) < old)
    used = _find_files_mapped_by_processes(folder) if stale_files else set()
    return [path for path in stale_files if str(path) not in used]


def remove_leftover_files(folder: Path = SHARED_MEMORY_FOLDER, temporary: Path | None = None) -> None:
    """Remove files that killed jobs have left behind: fsdpx and MPICH files in `folder`, and Open MPI session folders
    in `temporary` (default: $TMPDIR).

    A rank maps its files until it ends. A file therefore counts as left over if no process maps it and it is older than
    _SECONDS_TO_BEGIN. This process cannot see processes in other containers, which may share the folder. Removing a
    file does not disturb them, because they have already opened all files of this age and no longer need their
    names."""
    for path in find_leftover_files(folder, _SECONDS_TO_BEGIN):
        if path.name.startswith(_REMOVED):
            with suppress(OSError):  # the file may be gone, or the folder may be read-only
                path.unlink()
    temporary = Path(tempfile.gettempdir()) if temporary is None else temporary
    remove_dead_folders(temporary.glob(f"{_SESSION}*"), _has_open_mpi_session_ended)


def _has_open_mpi_session_ended(folder: Path) -> bool:
    """Return True if an Open MPI session folder is no longer used: it is old, the process that created it has ended,
    and no rank maps files in it."""
    process = folder.name.removeprefix(_SESSION)
    over = (
        process.isdecimal()
        and _get_write_time(folder) < time.time() - _SECONDS_TO_BEGIN
        and not is_process_alive(process)
    )
    return over and not any(
        Path(path).is_relative_to(folder) for path in _find_files_mapped_by_processes(folder.parent)
    )


def _get_write_time(path: Path) -> float:
    """Return the time at which the file was last written, or infinity if it no longer exists."""
    with suppress(FileNotFoundError):
        return path.lstat().st_mtime
    return math.inf


def _find_files_mapped_by_processes(folder: Path) -> set[str]:
    """Return the files in `folder` that are mapped by running processes. A process is ignored if this process has no
    permission to read its memory map."""
    mapped_paths = set()
    for maps in Path("/proc").glob("[0-9]*/maps"):
        with suppress(OSError):  # the process may have ended, or belong to another user
            for line in maps.read_text(errors="replace").splitlines():
                _, between, name = line.partition(f" {folder}/")
                if between:
                    mapped_paths.add(f"{folder}/{name.removesuffix(' (deleted)')}")
    return mapped_paths


FOLDER_PREFIX = "fsdpx-start-"
_inside: list[int] = []  # holds the rank of this process while the process waits for MPI to start; otherwise empty


@contextmanager
def guarding_mpi_start() -> Iterator[None]:
    """Context manager for the initialization of MPI. If a rank does not arrive in time, the watchdog ends the job, so
    that the other ranks do not wait forever. If the user's script has already initialized MPI, no watchdog is started,
    because the ranks may then enter this context at very different times."""
    settings = environment.read_environment()
    launcher = settings.launcher
    unheeded = get_running_mpi() is not None and settings.run is None
    if _inside or unheeded or launcher is None or launcher.rank is None or settings.expected_size == 1:
        yield
        return
    mark, clock = None, None
    try:
        job = _identify_job(launcher)
        folder = _make_marker_folder(settings, job)
        own_mark = folder / f"{MARK_PREFIX}{launcher.rank:05}.{identify_process()}.{launcher.local_rank}"
        mark = own_mark if safe_files.try_create_marker(own_mark) else None
        clock = _start_mpi_init_watchdog(folder, settings, job) if get_running_mpi() is None else None
    except safe_files.Untrusted as error:
        safe_files.warn_file_ignored(error)
    except OSError:  # if the folder is read-only, continue without a watchdog
        pass
    _inside.append(launcher.rank)
    try:
        yield
    finally:
        _inside.clear()
        with suppress(OSError):  # the watchdog may have removed the marker file and the folder
            if mark is not None:
                mark.unlink()
                mark.parent.rmdir()
        if clock is not None:
            clock.communicate(b"through")


def _make_marker_folder(settings: environment.Environment, job: str) -> Path:
    """Create the private folder in which the waiting ranks of this host create marker files, and return its path.
    `job` is the result of `_identify_job`. Raise `Untrusted` if the folder belongs to another user."""
    if settings.run is not None:
        return safe_files.make_folder(safe_files.make_folder(settings.run) / f"start-{platform.node()}")
    return safe_files.make_folder(Path(tempfile.gettempdir(), f"{FOLDER_PREFIX}{job or os.getpid()}"))


def find_waiting_ranks(run: Path) -> set[int]:
    """Return the ranks of a job that are still waiting for the initialization of MPI. Only ranks whose marker files are
    visible from this host are found. `run` is the job's FSDPX_RUN folder."""
    return {
        arrival[0]
        for mark in run.glob(f"start-*/{MARK_PREFIX}*")
        if (arrival := parse_marker_name(mark.name)) is not None
    }


def has_start_timed_out(run: Path) -> bool:
    """Return True if the watchdog on any host has ended the job because a rank did not arrive. `run` is the job's
    FSDPX_RUN folder."""
    return any(run.glob(f"start-*/{TIMED_OUT_MARK}"))


def remove_dead_folders(folders: Iterable[Path], is_dead: Callable[[Path], bool]) -> None:
    """Remove every folder in `folders` that belongs to this user and for which `is_dead` returns True. Skip a folder if
    the job that created it removes it in the meantime."""
    for left in folders:
        with suppress(FileNotFoundError):
            if safe_files.is_user_owned_folder(left) and is_dead(left):
                safe_files.remove_user_owned_folder(left)


def identify_process() -> str:
    """Return an identifier for this process that no later process can have. The identifier contains the start time of
    the process, because process IDs may be reused."""
    return f"{os.getpid()}-{get_process_start_time(os.getpid())}"


def is_process_alive(owner: str) -> bool:
    """Return whether the process with the identifier `owner` (see `identify_process`) is still running on this host."""
    process, _, birth = owner.partition("-")
    if not process.isdecimal():
        return True  # `owner` does not identify a process; assume that its folder is still in use
    return get_process_start_time(int(process)) == birth if birth else get_process_start_time(int(process)) != ""


def _start_mpi_init_watchdog(
    folder: Path, settings: environment.Environment, job: str
) -> subprocess.Popen[bytes] | None:
    """Start the watchdog process. Return None if another rank has started it, or if the system is not POSIX. `job` is
    the result of `_identify_job`, and `folder` contains the marker files of the waiting ranks.

    The watchdog is a Python process without site-packages, so starting it takes only 10 ms of CPU time. If the launcher
    kills the ranks, the watchdog survives and can clean up after them."""
    if os.name != "posix":
        return None
    if not safe_files.try_create_marker(folder / "clock"):
        return None
    remove_dead_folders(
        Path(tempfile.gettempdir()).glob(f"{FOLDER_PREFIX}*"),
        lambda left: not is_process_alive(left.name.removeprefix(FOLDER_PREFIX)),
    )
    remove_leftover_files()
    assert settings.launcher is not None
    known = (settings.start_timeout, job or 0, settings.expected_size or 0, settings.launcher.local_size or 0)
    words = [str(folder), *map(str, known), "keep" if settings.run else ""]
    command = [sys.executable, "-I", "-S", str(Path(__file__).with_name("mpi_init_watchdog.py")), *words]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, start_new_session=True)


def _identify_job(launcher: environment.LauncherInfo) -> str:
    """Return a unique identifier of this job that is the same for all its ranks on this host. Return "" if the launcher
    cannot be found.

    The result identifies the launcher's process. This is the nearest ancestor process whose environment does not
    contain the variable that the launcher sets for its ranks.
    """
    process, variable = os.getppid(), f"{launcher.variable}=".encode()
    with suppress(OSError, ValueError, IndexError):
        while process > 1:
            words = Path(f"/proc/{process}/environ").read_bytes().split(b"\0")
            if not any(word.startswith(variable) for word in words):
                return f"{process}-{get_process_start_time(process)}"
            process = int(Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[1])
    return ""
