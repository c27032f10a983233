"""Which MPI library mpi4py loads. Asked in a process of its own: loading it here could spoil a later start of MPI."""

from __future__ import annotations

import subprocess
import sys

__all__ = ["library"]


def library() -> tuple[str, str]:
    """The library's own description, or "" and the reason why there is none."""
    code = "import mpi4py; mpi4py.rc.initialize = False; from mpi4py import MPI; print(MPI.Get_library_version())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, stdin=subprocess.DEVNULL)
    if done.returncode:
        return "", (done.stderr.strip().splitlines() or ["no reason given"])[-1]
    return " ".join(done.stdout.strip("\0\n ").split("\n")[0].strip("\0").split()), ""
