"""`info`: what fsdpx finds on this machine and in this Python."""

import importlib.metadata
import os
import platform
import sys
from typing import Any

from fsdpx import config, environment
from fsdpx.array import blas
from fsdpx.comm.opening import backend_name
from fsdpx.comm.place import place
from fsdpx.launch.left import left
from fsdpx.launch.library import library
from fsdpx.state.tables import bytes_text
from fsdpx.state.tuning import stored
from fsdpx.version import __version__

__all__ = ["info"]

LEFT = "python -m fsdpx info --left"


class Info(dict[str, Any]):
    """What was found, by name; as text, a table."""

    def __str__(self) -> str:
        width = max(map(len, self))
        return "\n".join(f"{name.ljust(width)}  {text}" for name, text in self.items())


def info() -> Info:
    """What this process is (rank, size, local_rank, world, backend, device), and what was found on this machine.

    Does not communicate. Loads MPI, in another process, to ask its name.

    Returns
    -------
    dict : name -> what was found; `print` shows a table. backend is that in use, or that which `init()` would open;
        device is "cuda" if there is a GPU that CuPy can use
    """
    cupy = _cupy()
    here: dict[str, Any] = place()._asdict()
    here |= {"backend": backend_name(), "device": "cuda" if cupy.endswith("GPUs") else "cpu"}
    python, numpy = f"{platform.python_version()} at {sys.executable}", f"{_version('numpy')}, BLAS {_blas()}"
    rows = [("fsdpx", __version__), ("Python", python), ("machine", _machine()), ("NumPy", numpy)]
    rows += [("Numba", _numba()), ("ml_dtypes", _version("ml_dtypes"))]
    rows += [("mpi4py", _version("mpi4py")), ("MPI library", _mpi()), ("launcher", _launcher())]
    rows += [("CuPy", cupy), ("PyTorch", _version("torch")), ("shared memory", _shared())]
    rows += [("left in /dev/shm", _left())]
    rows += [(f"BLAS {name}", where) for name, where in blas.available().items()]
    rows += [(f"bf16 by {name}", where) for name, where in blas.halves.available().items()]
    rows += [("BLAS in use", blas.chosen())]
    rows += [(f"{config.half_name(kind)} in use", _products(kind)) for kind in ("bfloat16", "float16")]
    rows += [("int8 in use", blas.integers.chosen() or "widened: no instructions, or no oneDNN"), *_tuned()]
    return Info(here | dict(rows))


def _products(kind: str) -> str:
    """What multiplies matrices of a 16-bit format, and by what."""
    able = " and ".join(blas.halves.instructions(kind)) or "no instructions of the processor: slower than float32"
    return f"{blas.halves.chosen(kind)} ({able})"


def _shared() -> str:
    """Free shared memory, for the windows of the ranks of this host."""
    if not os.path.isdir("/dev/shm"):
        return "no limit of its own"
    found = os.statvfs("/dev/shm")
    return f"{bytes_text(found.f_bavail * found.f_frsize)} free in /dev/shm"


def _left() -> str:
    """What killed jobs have left there that is MPI's; what is ours the next job removes."""
    found = left()
    if not found:
        return "nothing by killed MPI jobs"
    size = bytes_text(sum(path.stat().st_size for path in found))
    return f"{size} in {len(found)} files by killed MPI jobs; to remove them: {LEFT} | xargs rm"


def _tuned() -> list[tuple[str, str]]:
    """What earlier jobs measured on this machine."""
    rows: list[tuple[str, str]] = []
    for key, tuning, date in stored():
        when = f"{date[:16].replace('T', ' ')} UTC" if date else "at an unknown time"
        rows.append((f"tuned, {key['ranks']} ranks, {key['backend']}", f"{tuning}; measured {when}"))
        rows += [(f"  {name}", text) for name, text in tuning.measured.items()]
    return rows or [("tuned", f"nothing yet: the first job measures, and keeps it in {environment.read().cache}")]


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def _machine() -> str:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return f"{platform.system()} {platform.machine()}, {cores} cores for this process"


def _blas() -> str:
    import numpy as np

    config: Any = np.show_config(mode="dicts")
    blas = config["Build Dependencies"]["blas"]
    return f"{blas.get('name', '?')} {blas.get('version', '')}".strip()


def _numba() -> str:
    found = _version("numba")
    return found if found != "not installed" else "not installed: plain kernels are used"


def _mpi() -> str:
    loaded, reason = library()
    return loaded or f"none ({reason}); pip install 'fsdpx[mpich]'"


def _launcher() -> str:
    settings = environment.read()
    if settings.launcher is None:
        return "none: this process is alone"
    return f"{settings.launcher.name}, {settings.expected_size} ranks"


def _cupy() -> str:
    try:
        import cupy
    except ImportError:
        return "not installed: device='cuda' is not available"
    try:
        count = cupy.cuda.runtime.getDeviceCount()
    except Exception as error:
        return f"{cupy.__version__}, but no GPU ({type(error).__name__})"
    return f"{cupy.__version__}, {count} GPUs"
