"""Run the tests marked `world`: `mpiexec -n 3 python tests/world.py`. Rank 0 reports, the others only failures."""

import contextlib
import io
import sys
from pathlib import Path

import pytest
from mpi4py import MPI

rank, size = MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size
folder = str(Path(__file__).parent)
arguments = ["--with-mpi", "-m", "world", "-p", "no:cacheprovider", folder, *sys.argv[1:]]
said = io.StringIO()
with contextlib.redirect_stdout(said) if rank else contextlib.nullcontext():
    status = int(pytest.main(arguments))
if rank and status:
    print(f"[rank {rank} of {size}]\n{said.getvalue()}", flush=True)
sys.exit(max(MPI.COMM_WORLD.allgather(status)))
