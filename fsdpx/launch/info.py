"""`info`: what fsdpx finds on this machine and in this Python."""

from typing import Any

from fsdpx import config, environment
from fsdpx.array import blas
from fsdpx.comm.default import place
from fsdpx.comm.opening import backend_name
from fsdpx.launch import deaths
from fsdpx.state.tuning import BUSY, stored
from fsdpx.version import __version__

__all__ = ["info"]


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
    cupy, gpus = deaths.cupy()
    here: dict[str, Any] = place()._asdict()
    here |= {"backend": backend_name(), "device": "cuda" if gpus else "cpu"}
    numpy = f"{deaths.version('numpy')}, BLAS {deaths.blas_of_numpy()}"
    rows = [("fsdpx", __version__), ("Python", deaths.python()), ("machine", deaths.machine()), ("NumPy", numpy)]
    rows += [("Numba", _numba()), ("ml_dtypes", deaths.version("ml_dtypes"))]
    rows += [("mpi4py", deaths.version("mpi4py")), ("MPI library", deaths.mpi()), ("launcher", deaths.launcher())]
    rows += [("CuPy", cupy), ("PyTorch", deaths.version("torch")), ("shared memory", deaths.shared())]
    rows += [("left in /dev/shm", deaths.leftovers())]
    rows += [(f"BLAS {name}", where) for name, where in blas.available().items()]
    rows += [(f"bf16 by {name}", where) for name, where in blas.halves.available().items()]
    rows += [("BLAS in use", blas.chosen())]
    rows += [(f"{config.half_name(kind)} in use", _products(kind)) for kind in ("bfloat16", "float16")]
    rows += _tuned()
    return Info(here | dict(rows))


def _products(kind: str) -> str:
    """The library that multiplies matrices of a 16-bit format, and the instructions it uses."""
    able = " and ".join(blas.halves.instructions(kind)) or "no instructions of the processor: slower than float32"
    return f"{blas.halves.chosen(kind)} ({able})"


def _tuned() -> list[tuple[str, str]]:
    """Measurements of earlier jobs on this machine."""
    rows: list[tuple[str, str]] = []
    for key, tuning, record in stored():
        when = f"{record.date[:16].replace('T', ' ')} UTC" if record.date else "at an unknown time"
        rows.append((f"tuned, {key['ranks']} ranks, {key['backend']}", f"{tuning}; measured {when}"))
        rows += [(f"  {name}", text) for name, text in tuning.measured.items()]
        if record.load >= BUSY:
            rows.append(("  load", f"{record.load:.1f} per core: measured again when the machine is calm"))
    return rows or [("tuned", f"nothing yet: the first job measures, and keeps it in {environment.read().cache}")]


def _numba() -> str:
    version = deaths.version("numba")
    return version if version != "not installed" else "not installed: plain kernels are used"
