"""The memory of a rank's process before there is a model: interpreter, libraries, compiled kernels and MPI.

Asked of a process that trains a tiny model, once per machine and set of libraries; then kept on disk."""

from __future__ import annotations

import json
import platform
import subprocess
import sys
from dataclasses import asdict, dataclass, fields
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from zlib import crc32

from fsdpx import environment
from fsdpx.errors import ConfigError
from fsdpx.files import typed
from fsdpx.native import image
from fsdpx.state import tuning
from fsdpx.version import __version__

__all__ = ["Baseline", "baseline"]

PATIENCE = 240.0
"""Seconds, of which compiling all kernels may take most."""

CODE = """
import json, sys
def kilobytes():
    lines = (line.split() for line in open("/proc/self/status"))
    found = {words[0]: int(words[1]) for words in lines if words[0].startswith("Rss")}
    return [1024 * found[name] for name in ("RssAnon:", "RssFile:", "RssShmem:")]
import numpy, fsdpx
from fsdpx import nn, optim
from fsdpx.array import blas, cores
backend, library, ranks = sys.argv[1:]
before = kilobytes()
if backend == "mpi":
    from mpi4py import MPI
between = kilobytes()
comm = fsdpx.init(backend)
cores.share_cores(int(ranks))
blas.choose(library)
trainer = nn.GPT(16, 16, 2, 2, 8).as_distributed(loss=nn.CrossEntropy(), optimizer=optim.AdamW(), tune=False)
x = numpy.zeros((2, 8), "int64")
for _ in range(3):
    trainer.step(x, x)
taken = kilobytes()
out, a, b = numpy.ones((3, 1024, 1024), "float32")
ready = kilobytes()
blas.gemm(out, a, b)
print(json.dumps([taken, [b - a for a, b in zip(before, between)], kilobytes()[0] - ready[0]]))
"""


@dataclass(frozen=True)
class Baseline:
    """Resident bytes, without those of MPI. own: of the process alone. files: of code and data that processes of a host
    share. mpi, mpi_files: what MPI adds to them, with what it shares with itself. workspace: of the BLAS library, for
    copies of large operands that it makes in an order of its own."""

    own: int
    files: int
    mpi: int = 0
    mpi_files: int = 0
    workspace: int = 0


_KINDS = dict.fromkeys((one.name for one in fields(Baseline)), int)


@cache
def baseline(mpi: bool, blas: str, ranks_here: int) -> Baseline:
    """Measured once, about three seconds. mpi: ranks are started by an MPI launcher; where MPI cannot be loaded it is
    left out. blas: library of matrix products. ConfigError if no process can be asked."""
    key = {"machine": platform.node(), "python": sys.version, "blas": blas, "mpi": mpi, "ranks here": ranks_here}
    key |= {"code": image.able(), "fsdpx": __version__, "asked": crc32(CODE.encode())} | {
        name: _version(name) for name in ("numpy", "numba", "mpi4py", "mkl")
    }
    known = tuning.read("process", key, lambda value: Baseline(**typed(value, _KINDS)), times=False)
    if known is not None:
        return known
    _ask(mpi, blas, ranks_here)  # compiles what is not compiled yet, which takes memory of its own
    found = _ask(mpi, blas, ranks_here)
    if isinstance(found, str) and mpi:
        return baseline(False, blas, ranks_here)
    if isinstance(found, str):
        raise ConfigError(f"the memory of a process cannot be measured here: {found}")
    tuning.write("process", key, asdict(found))
    return found


def _ask(mpi: bool, blas: str, ranks_here: int) -> Baseline | str:
    """The answer of a process, or the reason why it gives none."""
    command = [sys.executable, "-c", CODE, "mpi" if mpi else "local", blas, str(ranks_here)]
    try:
        done = subprocess.run(
            command, env=environment.alone(), capture_output=True, text=True, timeout=PATIENCE, stdin=subprocess.DEVNULL
        )
        (own, files, shared), mpi_adds, workspace = json.loads(done.stdout.strip().splitlines()[-1])
    except subprocess.TimeoutExpired:
        return f"no answer after {PATIENCE:.0f} s"
    except (OSError, ValueError, IndexError, TypeError) as error:
        return (done.stderr.strip().splitlines() or [str(error)])[-1]
    taken = max(mpi_adds[0], 0)
    return Baseline(own - taken, files - mpi_adds[1], taken + shared, mpi_adds[1], max(workspace, 0))


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""
