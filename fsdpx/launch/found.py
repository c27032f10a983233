"""Facts about this machine and this Python, as text, which `info` and `doctor` print."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import sys
from pathlib import Path
from typing import Any

from fsdpx import environment
from fsdpx.array.cores import cores
from fsdpx.comm.mpi.start import left
from fsdpx.launch.library import library
from fsdpx.state.tables import bytes_text

__all__ = [
    "LEFT", "blas_of_numpy", "cupy", "first_line", "free_shared", "launcher", "leftovers", "machine", "mpi", "python",
    "shared", "version",
]  # fmt: skip

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
