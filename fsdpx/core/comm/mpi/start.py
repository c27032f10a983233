"""The start of MPI: a rank waits there for all others, without running Python, so another process keeps the time.

The ranks of a host that wait leave marks in a folder, which `fsdpx run` reads. The first one starts the clock
(`fsdpx/core/comm/mpi/start_watchdog.py`), which ends the job when the last one does not come. It also removes what
killed jobs have left in shared memory: MPI libraries do not, and memory is finite.
"""

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
from fsdpx.core.comm.mpi.start_watchdog import MARK_PREFIX, TIMED_OUT_MARK, get_process_birth, parse_mark

__all__ = [
    "FOLDER_PREFIX",
    "SHARED_MEMORY_FOLDER",
    "find_leftover_files",
    "find_waiting_ranks",
    "guard_mpi_start",
    "has_timed_out",
    "identify_process",
    "is_process_alive",
    "remove_dead_folders",
    "remove_leftovers",
]

SHARED_MEMORY_FOLDER = Path("/dev/shm")
LEFTOVER_PATTERNS = (
    "mpich_shm_*", "mpich_vci_*", "sm_segment.*", "vader_segment.*", "osc_sm.*", "osc_rdma.*",
    f"{safe_files.TEMPORARY}*",
)  # fmt: skip
"""Of MPICH; of Open MPI: messages, in versions 5 and 4, and windows; of fsdpx."""
_REMOVED = ("mpich_", safe_files.TEMPORARY)
"""How the names begin of what the next start removes. What may be another program's is only listed."""
LEFTOVER_AGE_SECONDS = 60.0
"""Files younger than this may belong to a job that is starting."""
_SESSION = "ompi."
"""How the folder of a session of Open MPI is called, before the number of the process that has made it."""
_SECONDS_TO_BEGIN = 600.0
"""Seconds after which a file can belong to no starting job, and may be removed."""


def find_leftover_files(folder: Path = SHARED_MEMORY_FOLDER, seconds: float = LEFTOVER_AGE_SECONDS) -> list[Path]:
    """Files of this user that belong to an MPI library or to a window, and that no process has mapped."""
    old = time.time() - seconds
    files_there = (path for name in LEFTOVER_PATTERNS for path in folder.glob(name) if not path.is_dir())
    stale_files = sorted(path for path in files_there if is_owned_by_user(path) and _get_write_time(path) < old)
    used = _find_mapped_files(folder) if stale_files else set()
    return [path for path in stale_files if str(path) not in used]


def remove_leftovers(folder: Path = SHARED_MEMORY_FOLDER, temporary: Path | None = None) -> None:
    """Remove what killed ranks and jobs of MPICH have left in `folder`, and those of Open MPI in `temporary` ($TMPDIR).
    Ranks map these files for as long as they live, and a job that has not begun after so long never will; where another
    container shares the folder, its ranks need the names no more."""
    for path in find_leftover_files(folder, _SECONDS_TO_BEGIN):
        if path.name.startswith(_REMOVED):
            with suppress(OSError):  # gone meanwhile, or a folder that cannot be written
                path.unlink()
    temporary = Path(tempfile.gettempdir()) if temporary is None else temporary
    remove_dead_folders(temporary.glob(f"{_SESSION}*"), _has_session_ended)


def _has_session_ended(folder: Path) -> bool:
    """Whether the process of Open MPI that has made the folder of a session has ended, and no rank maps its files."""
    process = folder.name.removeprefix(_SESSION)
    over = (
        process.isdecimal()
        and _get_write_time(folder) < time.time() - _SECONDS_TO_BEGIN
        and not is_process_alive(process)
    )
    return over and not any(Path(path).is_relative_to(folder) for path in _find_mapped_files(folder.parent))


def _get_write_time(path: Path) -> float:
    """When the file was last written; never before, if it is gone by now."""
    with suppress(FileNotFoundError):
        return path.lstat().st_mtime
    return math.inf


def _find_mapped_files(folder: Path) -> set[str]:
    """The files in `folder` that processes have mapped, as far as this process may see their maps."""
    mapped_paths = set()
    for maps in Path("/proc").glob("[0-9]*/maps"):
        with suppress(OSError):  # it has ended, or is another user's
            for line in maps.read_text(errors="replace").splitlines():
                _, between, name = line.partition(f" {folder}/")
                if between:
                    mapped_paths.add(f"{folder}/{name.removesuffix(' (deleted)')}")
    return mapped_paths


FOLDER_PREFIX = "fsdpx-start-"
_inside: list[int] = []  # the rank of this process, while it waits


@contextmanager
def guard_mpi_start() -> Iterator[None]:
    """Around the code that starts MPI and opens the world: if a rank does not come, or ends before, the others do not
    wait for ever. If MPI runs already there is no clock: then it is the script that knows when ranks come."""
    settings = environment.read_environment()
    launcher = settings.launcher
    unheeded = get_running_mpi() is not None and settings.run is None
    if _inside or unheeded or launcher is None or launcher.rank is None or settings.expected_size == 1:
        yield
        return
    mark, clock = None, None
    try:
        job = _identify_job(launcher)
        folder = _make_mark_folder(settings, job)
        own_mark = folder / f"{MARK_PREFIX}{launcher.rank:05}.{identify_process()}.{launcher.local_rank}"
        mark = own_mark if safe_files.create_marker(own_mark) else None
        clock = _start_watchdog(folder, settings, job) if get_running_mpi() is None else None
    except safe_files.Untrusted as error:
        safe_files.warn_ignored(error)
    except OSError:  # a folder that cannot be written: no clock
        pass
    _inside.append(launcher.rank)
    try:
        yield
    finally:
        _inside.clear()
        with suppress(OSError):  # the clock has cleared up
            if mark is not None:
                mark.unlink()
                mark.parent.rmdir()
        if clock is not None:
            clock.communicate(b"through")


def _make_mark_folder(settings: environment.Environment, job: str) -> Path:
    """Where the ranks of this host leave marks, which no other user can enter; `Untrusted` if another one made it."""
    if settings.run is not None:
        return safe_files.make_folder(safe_files.make_folder(settings.run) / f"start-{platform.node()}")
    return safe_files.make_folder(Path(tempfile.gettempdir(), f"{FOLDER_PREFIX}{job or os.getpid()}"))


def find_waiting_ranks(run: Path) -> set[int]:
    """The ranks that wait in the start of the job whose FSDPX_RUN is `run`, as far as this host sees them."""
    return {
        arrival[0] for mark in run.glob(f"start-*/{MARK_PREFIX}*") if (arrival := parse_mark(mark.name)) is not None
    }


def has_timed_out(run: Path) -> bool:
    """Whether the clock of a host has ended this start."""
    return any(run.glob(f"start-*/{TIMED_OUT_MARK}"))


def remove_dead_folders(found: Iterable[Path], dead: Callable[[Path], bool]) -> None:
    """Remove those folders of this user that belong to killed jobs. Jobs end, and clear up, meanwhile: a folder that is
    gone is passed over."""
    for left in found:
        with suppress(FileNotFoundError):
            if safe_files.is_folder(left) and dead(left):
                safe_files.remove_folder(left)


def identify_process() -> str:
    """This process, for `lives`: a number alone could be another's by then."""
    return f"{os.getpid()}-{get_process_birth(os.getpid())}"


def is_process_alive(owner: str) -> bool:
    """Whether the process of this host that has called itself so is still there."""
    process, _, birth = owner.partition("-")
    if not process.isdecimal():
        return True  # unknown
    return get_process_birth(int(process)) == birth if birth else get_process_birth(int(process)) != ""


def _start_watchdog(folder: Path, settings: environment.Environment, job: str) -> subprocess.Popen[bytes] | None:
    """A Python without site-packages: 10 ms of a core. It outlives what the launcher kills, to clear up. None: another
    rank has one, or this system cannot wait for a pipe with a time limit."""
    if os.name != "posix":
        return None
    if not safe_files.create_marker(folder / "clock"):
        return None
    remove_dead_folders(
        Path(tempfile.gettempdir()).glob(f"{FOLDER_PREFIX}*"),
        lambda left: not is_process_alive(left.name.removeprefix(FOLDER_PREFIX)),
    )
    remove_leftovers()
    assert settings.launcher is not None
    known = (settings.start_timeout, job or 0, settings.expected_size or 0, settings.launcher.local_size or 0)
    words = [str(folder), *map(str, known), "keep" if settings.run else ""]
    command = [sys.executable, "-I", "-S", str(Path(__file__).with_name("start_watchdog.py")), *words]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, start_new_session=True)


def _identify_job(launcher: environment.LauncherInfo) -> str:
    """An identifier that the ranks of this job share on this host, and no other process has: the launcher's process,
    the nearest ancestor of this process that is not itself part of a rank. "" where it cannot be seen."""
    process, variable = os.getppid(), f"{launcher.variable}=".encode()
    with suppress(OSError, ValueError, IndexError):
        while process > 1:
            words = Path(f"/proc/{process}/environ").read_bytes().split(b"\0")
            if not any(word.startswith(variable) for word in words):
                return f"{process}-{get_process_birth(process)}"
            process = int(Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[1])
    return ""
