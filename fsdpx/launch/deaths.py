"""Why a rank ended: what is found, and what it means."""

from __future__ import annotations

import importlib.metadata
import math
import os
import platform
import select
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

from fsdpx import environment
from fsdpx.array.cores import cores
from fsdpx.comm.mpi.start import left, waiting
from fsdpx.launch.notes import open_lifeline, read_notes
from fsdpx.state.tuning import bytes_text

__all__ = [
    "LEFT", "Deaths", "blas_of_numpy", "cupy", "first_line", "free_shared", "launcher", "leftovers", "library",
    "machine", "mpi", "python", "shared", "version",
]  # fmt: skip

def library() -> tuple[str, str]:
    """The library's own description, or "" and the reason why there is none."""
    code = "import mpi4py; mpi4py.rc.initialize = False; from mpi4py import MPI; print(MPI.Get_library_version())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, stdin=subprocess.DEVNULL)
    if done.returncode:
        return "", (done.stderr.strip().splitlines() or ["no reason given"])[-1]
    return " ".join(done.stdout.strip("\0\n ").split("\n")[0].strip("\0").split()), ""


LEFT = "python -m fsdpx info --left"


def version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def python() -> str:
    return f"{platform.python_version()} at {sys.executable}"


def machine() -> str:
    return f"{platform.system()} {platform.machine()}, {cores()} cores for this process"


def mpi() -> str:
    """The library that Python would load."""
    loaded, reason = library()
    return loaded or f"none ({reason}); pip install 'fsdpx[mpich]'"


def first_line(text: str) -> str:
    """The name that an MPI library gives itself."""
    return " ".join(text.strip("\0\n ").split("\n")[0].strip("\0").split())


def launcher() -> str:
    settings = environment.read()
    if settings.launcher is None:
        return "none: this process is alone"
    meet = "" if settings.launcher.mpi else f", who meet at {settings.launcher.store}"
    return f"{settings.launcher.name}, {settings.expected_size} ranks{meet}"


def cupy() -> tuple[str, int]:
    """As text, and how many GPUs it can use."""
    try:
        import cupy
    except ImportError:
        return "not installed: device='cuda' is not available", 0
    try:
        count = int(cupy.cuda.runtime.getDeviceCount())
    except Exception as error:
        return f"{cupy.__version__}, but no GPU ({type(error).__name__})", 0
    return f"{cupy.__version__}, {count} GPUs", count


def free_shared() -> int | None:
    """Free bytes of shared memory, for the windows of the ranks of this host; None: no limit of its own."""
    if not Path("/dev/shm").is_dir():
        return None
    found = os.statvfs("/dev/shm")
    return found.f_bavail * found.f_frsize


def shared() -> str:
    free = free_shared()
    return "no limit of its own" if free is None else f"{bytes_text(free)} free in /dev/shm"


def leftovers() -> str:
    """MPI's files that killed jobs have left there; the next job removes those of fsdpx."""
    found = left()
    if not found:
        return "nothing by killed MPI jobs"
    size = bytes_text(sum(path.stat().st_size for path in found))
    return f"{size} in {len(found)} files by killed MPI jobs; to remove them: {LEFT} | xargs rm"


def blas_of_numpy() -> str:
    import numpy as np

    config: Any = np.show_config(mode="dicts")
    found = config["Build Dependencies"]["blas"]
    return f"{found.get('name', '?')} {found.get('version', '')}".strip()


_SECONDS_IN_VAIN = 2.0
"""Seconds that ranks may wait in MPI's start for one that has ended before the job is ended."""


class Deaths:
    """A thread that records in which order the ranks of this host end: the first one makes the others fail.

    It need not be quick: epoll returns descriptors in the order in which they became ready. A rank's lifeline is ready
    before a launcher can know of its death and kill the others. The process itself, which is ready only afterwards, is
    looked at too: where there are no named pipes, or a child of the rank has kept one open.

    Attributes
    ----------
    order: the ranks that have ended.
    missed: those that had ended before they were looked at.
    in_vain: set when others wait in MPI's start for one that has ended."""

    def __init__(self, folder: Path, ranks: int) -> None:
        self.order: list[int] = []
        self.missed: list[int] = []
        self.in_vain = threading.Event()
        self._folder, self._ranks, self._host = folder, ranks, platform.node()
        self._stop = threading.Event()
        self._living: dict[int, int] = {}  # descriptor of a process or of its lifeline -> rank
        self._thread = threading.Thread(target=self._run, name="fsdpx run", daemon=True)
        if hasattr(os, "pidfd_open") and hasattr(select, "epoll"):
            self._thread.start()

    def close(self) -> None:
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join()

    def _run(self) -> None:
        known: set[int] = set()
        since = math.inf  # when a rank was first seen to wait in vain
        with select.epoll() as deaths:
            while not self._stop.is_set():
                notes = read_notes(self._folder) if len(known) < self._ranks and not self.order else {}
                for rank in notes.keys() - known:
                    known.add(rank)
                    if notes[rank].host == self._host:
                        self._look_at(rank, notes[rank].process, deaths)
                for descriptor, _ in deaths.poll(0.1):
                    deaths.unregister(descriptor)
                    rank = self._living.pop(descriptor)
                    os.close(descriptor)
                    if rank not in self.order:
                        self.order.append(rank)
                now = time.monotonic()
                since = min(since, now) if (self.order or self.missed) and waiting(self._folder) else math.inf
                if now - since >= _SECONDS_IN_VAIN:
                    self.in_vain.set()
        for descriptor in self._living:
            os.close(descriptor)

    def _look_at(self, rank: int, process: int, deaths: select.epoll) -> None:
        try:
            descriptor = os.pidfd_open(process)
        except OSError:
            self.missed.append(rank)
            return
        for ready in (descriptor, open_lifeline(self._folder, rank)):
            if ready is not None:
                self._living[ready] = rank
                deaths.register(ready, select.EPOLLIN)
