"""`info`: describe this machine and its Python installation as fsdpx sees them."""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import platform
import subprocess
import sys
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

from fsdpx.core.array import blas
from fsdpx.core.array.cores import count_usable_cores
from fsdpx.core.base import config, environment
from fsdpx.core.base.messages import format_bytes, format_count
from fsdpx.core.base.safe_files import can_write_folder
from fsdpx.core.base.version import __version__
from fsdpx.core.comm.default_communicator import get_rank_info
from fsdpx.core.comm.init import get_backend_name, parse_mpi_library_name
from fsdpx.core.comm.mpi.start import find_leftover_files
from fsdpx.core.state.tuning import load_blas_measurement
from fsdpx.errors import install_hint

__all__ = [
    "LEFTOVERS_COMMAND",
    "describe_cupy_and_count_gpus",
    "describe_launcher",
    "describe_mpi",
    "describe_package_version",
    "describe_shared_memory",
    "format_info_or_leftovers",
    "get_free_shared_memory_bytes",
    "info",
    "probe_mpi_library",
]

LEFTOVERS_COMMAND = "python -m fsdpx info --left"


class Info(dict[str, Any]):
    """The findings of `info`: a dict from name to value, which `print` shows as a table."""

    def __str__(self) -> str:
        width = max(map(len, self))
        return "\n".join(f"{name.ljust(width)}  {text}" for name, text in self.items())


def info() -> Info:
    """Return the rank and device of this process (rank, size, local_rank, world, backend, device), and a description
    of the machine and its Python installation.

    This function does not communicate. It loads MPI only in a child process, to find the name of the MPI library.

    Returns
    -------
    dict : maps property names to values; `print` shows the dict as a table. `backend` is the backend in use, or the one
        that `init()` would open; `device` is "cuda" if CuPy can use a GPU
    """
    gpu_library, gpus = describe_cupy_and_count_gpus()
    here: dict[str, Any] = get_rank_info()._asdict()
    here |= {"backend": get_backend_name(), "device": "cuda" if gpus else "cpu"}
    numpy = f"{describe_package_version('numpy')}, BLAS {describe_numpy_blas()}"
    rows = [("fsdpx", __version__), ("Python", describe_python()), ("machine", describe_machine()), ("NumPy", numpy)]
    rows += [
        ("Numba", describe_package_version("numba", ": plain kernels are used")),
        ("ml_dtypes", describe_package_version("ml_dtypes")),
    ]
    rows += [
        ("mpi4py", describe_package_version("mpi4py")),
        ("MPI library", describe_mpi()),
        ("launcher", describe_launcher()),
    ]
    rows += [
        ("CuPy", gpu_library),
        ("PyTorch", describe_package_version("torch")),
        ("shared memory", describe_shared_memory()),
    ]
    rows += [("left in /dev/shm", describe_leftover_shared_memory()), ("cache", _describe_cache())]
    rows += [(f"BLAS {name}", where) for name, where in blas.list_available_blas_libraries().items()]
    rows += [
        (f"bf16 by {name}", where) for name, where in blas.load_half_matmul().list_16bit_matmul_libraries().items()
    ]
    rows += [("BLAS in use", blas.get_selected_library())]
    rows += [
        (f"{config.normalize_half_name(kind)} in use", _describe_half_matmul(kind)) for kind in ("bfloat16", "float16")
    ]
    rows += _list_blas_rate_rows()
    return Info(dict(rows) | here)


def format_info_or_leftovers(args: argparse.Namespace) -> str:
    """Return what the command prints: the table of `info` or, with --left, a list of the files in /dev/shm that killed
    jobs left behind."""
    return "\n".join(map(str, find_leftover_files())) if args.left else str(info())


def _describe_half_matmul(dtype_name: str) -> str:
    """Describe which library and which CPU instructions compute matrix products in a 16-bit dtype."""
    able = (
        " and ".join(blas.load_half_matmul().list_half_instructions(dtype_name))
        or "no instructions of the processor: slower than float32"
    )
    return f"{blas.load_half_matmul().get_selected_library(dtype_name)} ({able})"


def _describe_cache() -> str:
    """Describe the cache folder: its path, the number and size of its files, and whether it can be written."""
    folder = environment.read_environment().cache
    sizes = _list_file_sizes(Path(at, name) for at, _, names in os.walk(folder) for name in names)
    unwritable = "" if can_write_folder(folder) else ", which this user cannot write"
    return f"{folder}{unwritable}; {format_count(len(sizes), 'file')}, {format_bytes(sum(sizes))}"


def _list_file_sizes(paths: Iterable[Path]) -> list[int]:
    """Return the size in bytes of each file. Files that another process has removed in the meantime are left out."""
    sizes = []
    for path in paths:
        with suppress(FileNotFoundError):
            sizes.append(path.lstat().st_size)
    return sizes


def _list_blas_rate_rows() -> list[tuple[str, str]]:
    """Return (name, text) rows with the BLAS speeds that an earlier job measured on this machine."""
    found = load_blas_measurement()
    if found is None:
        return [("tuned", "nothing yet: the first job measures, and keeps it in the cache")]
    when = f"{found.date[:16].replace('T', ' ')} UTC"
    rates = ", ".join(f"{name} {rate:.0f}" for name, rate in found.value["rates"].items())
    return [("tuned", f"BLAS {found.value['library']}; measured {when}"), ("  GFLOP/s per thread", rates)]


def probe_mpi_library() -> tuple[str, str]:
    """Return two texts: the name and version of the MPI library that mpi4py loads, and the reason why no library can be
    loaded. One of them is ""."""
    code = "import mpi4py; mpi4py.rc.initialize = False; from mpi4py import MPI; print(MPI.Get_library_version())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, stdin=subprocess.DEVNULL)
    if done.returncode:
        return "", (done.stderr.strip().splitlines() or ["no reason given"])[-1]
    return parse_mpi_library_name(done.stdout), ""


def describe_package_version(package: str, without: str = "") -> str:
    """Return the version of a package or, if it is not installed, "not installed" followed by `without`, which says
    what happens without the package."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return f"not installed{without}"


def describe_python() -> str:
    return f"{platform.python_version()} at {sys.executable}"


def describe_machine() -> str:
    return f"{platform.system()} {platform.machine()}, {format_count(count_usable_cores(), 'core')} for this process"


def describe_mpi() -> str:
    """Return the name of the MPI library that mpi4py would load, or the reason why there is none."""
    loaded, reason = probe_mpi_library()
    return loaded or f"none ({reason}); load the module of your site's MPI, or {install_hint('mpich')}"


def describe_launcher() -> str:
    settings = environment.read_environment()
    if settings.launcher is None:
        return "none: this process is alone"
    meet = "" if settings.launcher.mpi else f", who meet at {settings.launcher.store}"
    return f"{settings.launcher.name}, {format_count(settings.expected_size or 1, 'rank')}{meet}"


def describe_cupy_and_count_gpus() -> tuple[str, int]:
    """Return (text, number of GPUs that CuPy sees). The text is the version of CuPy, or the reason why it cannot be
    used."""
    try:
        import cupy
    except ImportError:
        return "not installed: device='cuda' is not available", 0
    try:
        count = int(cupy.cuda.runtime.getDeviceCount())
    except Exception as error:
        return f"{cupy.__version__}, but no GPU ({type(error).__name__})", 0
    return f"{cupy.__version__}, {format_count(count, 'GPU')}", count


def get_free_shared_memory_bytes() -> int | None:
    """Return the free bytes of shared memory (/dev/shm) on this host. Return None if there is no separate limit on
    shared memory."""
    if not Path("/dev/shm").is_dir():
        return None
    found = os.statvfs("/dev/shm")
    return found.f_bavail * found.f_frsize


def describe_shared_memory() -> str:
    free = get_free_shared_memory_bytes()
    return "no limit of its own" if free is None else f"{format_bytes(free)} free in /dev/shm"


def describe_leftover_shared_memory() -> str:
    """Describe the size and number of the files in /dev/shm that killed jobs left behind, and how to remove them."""
    found = find_leftover_files()
    if not found:
        return "nothing of killed jobs"
    size = format_bytes(sum(_list_file_sizes(found)))
    files = format_count(len(found), "file")
    return f"{size} in {files} of killed jobs; to remove them: {LEFTOVERS_COMMAND} | xargs -r rm"


def describe_numpy_blas() -> str:
    import numpy as np

    try:
        config: Any = np.show_config(mode="dicts")
    except TypeError:  # NumPy before 1.26 has no argument `mode`
        of_old: Any = np.__config__
        built = filter(None, map(of_old.get_info, ("blas_ilp64_opt", "blas_opt")))
        return str(next(built, {"libraries": ["?"]})["libraries"][0])
    found = config["Build Dependencies"]["blas"]
    return f"{found.get('name', '?')} {found.get('version', '')}".strip()
