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
from fsdpx.core.base.safe_files import belongs
from fsdpx.core.comm.default_communicator import running_mpi
from fsdpx.core.comm.mpi.start_watchdog import CAME, LATE, began, came

__all__ = ["PREFIX", "SHARED", "clear", "late", "left", "lives", "owner", "remove_left", "together", "waiting"]

SHARED = Path("/dev/shm")
NAMES = (
    "mpich_shm_*", "mpich_vci_*", "sm_segment.*", "vader_segment.*", "osc_sm.*", "osc_rdma.*",
    f"{safe_files.TEMPORARY}*",
)  # fmt: skip
"""Of MPICH; of Open MPI: messages, in versions 5 and 4, and windows; of fsdpx."""
_REMOVED = ("mpich_", safe_files.TEMPORARY)
"""How the names begin of what the next start removes. What may be another program's is only listed."""
SECONDS = 60.0
"""Files younger than this may belong to a job that is starting."""
_SESSION = "ompi."
"""How the folder of a session of Open MPI is called, before the number of the process that has made it."""
_SECONDS_TO_BEGIN = 600.0
"""Seconds after which a file can belong to no starting job, and may be removed."""


def left(folder: Path = SHARED, seconds: float = SECONDS) -> list[Path]:
    """Files of this user that belong to an MPI library or to a window, and that no process has mapped."""
    old = time.time() - seconds
    files_there = (path for name in NAMES for path in folder.glob(name) if not path.is_dir())
    found = sorted(path for path in files_there if belongs(path) and _changed(path) < old)
    used = _mapped(folder) if found else set()
    return [path for path in found if str(path) not in used]


def remove_left(folder: Path = SHARED, temporary: Path | None = None) -> None:
    """Remove what killed ranks and jobs of MPICH have left in `folder`, and those of Open MPI in `temporary` ($TMPDIR).
    Ranks map these files for as long as they live, and a job that has not begun after so long never will; where another
    container shares the folder, its ranks need the names no more."""
    for path in left(folder, _SECONDS_TO_BEGIN):
        if path.name.startswith(_REMOVED):
            with suppress(OSError):  # gone meanwhile, or a folder that cannot be written
                path.unlink()
    temporary = Path(tempfile.gettempdir()) if temporary is None else temporary
    clear(temporary.glob(f"{_SESSION}*"), _session_is_over)


def _session_is_over(folder: Path) -> bool:
    """Whether the process of Open MPI that has made the folder of a session has ended, and no rank maps its files."""
    process = folder.name.removeprefix(_SESSION)
    over = process.isdecimal() and _changed(folder) < time.time() - _SECONDS_TO_BEGIN and not lives(process)
    return over and not any(Path(path).is_relative_to(folder) for path in _mapped(folder.parent))


def _changed(path: Path) -> float:
    """When the file was last written; never before, if it is gone by now."""
    with suppress(FileNotFoundError):
        return path.lstat().st_mtime
    return math.inf


def _mapped(folder: Path) -> set[str]:
    """The files in `folder` that processes have mapped, as far as this process may see their maps."""
    found = set()
    for maps in Path("/proc").glob("[0-9]*/maps"):
        with suppress(OSError):  # it has ended, or is another user's
            for line in maps.read_text(errors="replace").splitlines():
                _, between, name = line.partition(f" {folder}/")
                if between:
                    found.add(f"{folder}/{name.removesuffix(' (deleted)')}")
    return found


PREFIX = "fsdpx-start-"
_inside: list[int] = []  # the rank of this process, while it waits


@contextmanager
def together() -> Iterator[None]:
    """Around the code that starts MPI and opens the world: if a rank does not come, or ends before, the others do not
    wait for ever. If MPI runs already there is no clock: then it is the script that knows when ranks come."""
    settings = environment.read()
    launcher = settings.launcher
    unheeded = running_mpi() is not None and settings.run is None
    if _inside or unheeded or launcher is None or launcher.rank is None or settings.expected_size == 1:
        yield
        return
    mark, clock = None, None
    try:
        job = _job(launcher)
        folder = _folder(settings, job)
        mine = folder / f"{CAME}{launcher.rank:05}.{owner()}.{launcher.local_rank}"
        mark = mine if safe_files.mark(mine) else None
        clock = _clock(folder, settings, job) if running_mpi() is None else None
    except safe_files.Untrusted as error:
        safe_files.passed_over(error)
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


def _folder(settings: environment.Environment, job: str) -> Path:
    """Where the ranks of this host leave marks, which no other user can enter; `Untrusted` if another one made it."""
    if settings.run is not None:
        return safe_files.folder(safe_files.folder(settings.run) / f"start-{platform.node()}")
    return safe_files.folder(Path(tempfile.gettempdir(), f"{PREFIX}{job or os.getpid()}"))


def waiting(run: Path) -> set[int]:
    """The ranks that wait in the start of the job whose FSDPX_RUN is `run`, as far as this host sees them."""
    return {found[0] for mark in run.glob(f"start-*/{CAME}*") if (found := came(mark.name)) is not None}


def late(run: Path) -> bool:
    """Whether the clock of a host has ended this start."""
    return any(run.glob(f"start-*/{LATE}"))


def clear(found: Iterable[Path], dead: Callable[[Path], bool]) -> None:
    """Remove those folders of this user that belong to killed jobs. Jobs end, and clear up, meanwhile: a folder that is
    gone is passed over."""
    for left in found:
        with suppress(FileNotFoundError):
            if safe_files.is_folder(left) and dead(left):
                safe_files.remove(left)


def owner() -> str:
    """This process, for `lives`: a number alone could be another's by then."""
    return f"{os.getpid()}-{began(os.getpid())}"


def lives(owner: str) -> bool:
    """Whether the process of this host that has called itself so is still there."""
    process, _, birth = owner.partition("-")
    if not process.isdecimal():
        return True  # unknown
    return began(int(process)) == birth if birth else began(int(process)) != ""


def _clock(folder: Path, settings: environment.Environment, job: str) -> subprocess.Popen[bytes] | None:
    """A Python without site-packages: 10 ms of a core. It outlives what the launcher kills, to clear up. None: another
    rank has one, or this system cannot wait for a pipe with a time limit."""
    if os.name != "posix":
        return None
    if not safe_files.mark(folder / "clock"):
        return None
    clear(Path(tempfile.gettempdir()).glob(f"{PREFIX}*"), lambda left: not lives(left.name.removeprefix(PREFIX)))
    remove_left()
    assert settings.launcher is not None
    known = (settings.start_timeout, job or 0, settings.expected_size or 0, settings.launcher.local_size or 0)
    words = [str(folder), *map(str, known), "keep" if settings.run else ""]
    command = [sys.executable, "-I", "-S", str(Path(__file__).with_name("start_watchdog.py")), *words]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, start_new_session=True)


def _job(launcher: environment.StartedBy) -> str:
    """An identifier that the ranks of this job share on this host, and no other process has: the launcher's process,
    the nearest ancestor of this process that is not itself part of a rank. "" where it cannot be seen."""
    process, variable = os.getppid(), f"{launcher.variable}=".encode()
    with suppress(OSError, ValueError, IndexError):
        while process > 1:
            words = Path(f"/proc/{process}/environ").read_bytes().split(b"\0")
            if not any(word.startswith(variable) for word in words):
                return f"{process}-{began(process)}"
            process = int(Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[1])
    return ""
