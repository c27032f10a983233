"""`info`: what fsdpx finds on this machine and in this Python."""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

from fsdpx.core.array import blas
from fsdpx.core.array.cores import cores
from fsdpx.core.base import config, environment
from fsdpx.core.base.messages import bytes_text
from fsdpx.core.base.version import __version__
from fsdpx.core.comm.default_communicator import place
from fsdpx.core.comm.init import backend_name, first_line
from fsdpx.core.comm.mpi.start import left
from fsdpx.core.state.tuning import stored
from fsdpx.errors import install_hint

__all__ = ["LEFT", "cupy", "free_shared", "info", "launcher", "library", "mpi", "shared", "text", "version"]

LEFT = "python -m fsdpx info --left"


class Info(dict[str, Any]):
    """The findings by name; as text, a table."""

    def __str__(self) -> str:
        width = max(map(len, self))
        return "\n".join(f"{name.ljust(width)}  {text}" for name, text in self.items())


def info() -> Info:
    """The place of this process (rank, size, local_rank, world, backend, device), and what was found on this machine.

    Does not communicate. Loads MPI, in another process, to ask its name.

    Returns
    -------
    dict : name -> what was found; `print` shows a table. backend is that in use, or that which `init()` would open;
        device is "cuda" if there is a GPU that CuPy can use
    """
    gpu_library, gpus = cupy()
    here: dict[str, Any] = place()._asdict()
    here |= {"backend": backend_name(), "device": "cuda" if gpus else "cpu"}
    numpy = f"{version('numpy')}, BLAS {blas_of_numpy()}"
    rows = [("fsdpx", __version__), ("Python", python()), ("machine", machine()), ("NumPy", numpy)]
    rows += [("Numba", version("numba", ": plain kernels are used")), ("ml_dtypes", version("ml_dtypes"))]
    rows += [("mpi4py", version("mpi4py")), ("MPI library", mpi()), ("launcher", launcher())]
    rows += [("CuPy", gpu_library), ("PyTorch", version("torch")), ("shared memory", shared())]
    rows += [("left in /dev/shm", leftovers())]
    rows += [(f"BLAS {name}", where) for name, where in blas.available().items()]
    rows += [(f"bf16 by {name}", where) for name, where in blas.halves().available().items()]
    rows += [("BLAS in use", blas.chosen())]
    rows += [(f"{config.half_name(kind)} in use", _products(kind)) for kind in ("bfloat16", "float16")]
    rows += _tuned()
    return Info(here | dict(rows))


def text(args: argparse.Namespace) -> str:
    """What the command prints."""
    return "\n".join(map(str, left())) if args.left else str(info())


def _products(kind: str) -> str:
    """The library that multiplies matrices of a 16-bit format, and the instructions it uses."""
    able = " and ".join(blas.halves().instructions(kind)) or "no instructions of the processor: slower than float32"
    return f"{blas.halves().chosen(kind)} ({able})"


def _tuned() -> list[tuple[str, str]]:
    """What earlier jobs have measured on this machine."""
    found = stored()
    if found is None:
        return [("tuned", f"nothing yet: the first job measures, and keeps it in {environment.read().cache}")]
    when = f"{found.date[:16].replace('T', ' ')} UTC"
    rates = ", ".join(f"{name} {rate:.0f}" for name, rate in found.value["rates"].items())
    return [("tuned", f"BLAS {found.value['library']}; measured {when}"), ("  GFLOP/s per thread", rates)]


def library() -> tuple[str, str]:
    """The library's own description, or "" and the reason why there is none."""
    code = "import mpi4py; mpi4py.rc.initialize = False; from mpi4py import MPI; print(MPI.Get_library_version())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, stdin=subprocess.DEVNULL)
    if done.returncode:
        return "", (done.stderr.strip().splitlines() or ["no reason given"])[-1]
    return first_line(done.stdout), ""


def version(package: str, without: str = "") -> str:
    """without: what it means that it is not installed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return f"not installed{without}"


def python() -> str:
    return f"{platform.python_version()} at {sys.executable}"


def machine() -> str:
    return f"{platform.system()} {platform.machine()}, {cores()} cores for this process"


def mpi() -> str:
    """The library that Python would load."""
    loaded, reason = library()
    return loaded or f"none ({reason}); {install_hint('mpich')}"


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
    """The files of MPI and of windows that killed jobs have left there."""
    found = left()
    if not found:
        return "nothing by killed jobs"
    size = bytes_text(sum(path.stat().st_size for path in found if path.exists()))
    return f"{size} in {len(found)} files by killed jobs; to remove them: {LEFT} | xargs rm"


def blas_of_numpy() -> str:
    import numpy as np

    try:
        config: Any = np.show_config(mode="dicts")
    except TypeError:  # before NumPy 1.26
        of_old: Any = np.__config__
        built = filter(None, map(of_old.get_info, ("blas_ilp64_opt", "blas_opt")))
        return str(next(built, {"libraries": ["?"]})["libraries"][0])
    found = config["Build Dependencies"]["blas"]
    return f"{found.get('name', '?')} {found.get('version', '')}".strip()
