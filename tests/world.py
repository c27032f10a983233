"""Run the tests marked `world`: `mpiexec -n 3 python tests/world.py`. Rank 0 reports, the others only failures."""

import contextlib
import io
import sys
import tempfile
from pathlib import Path

import pytest
from mpi4py import MPI

rank, size = MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size
folder = str(Path(__file__).parent)
said = io.StringIO()
# a folder of its own for each rank: in a common one they remove each other's
with tempfile.TemporaryDirectory() as own, contextlib.redirect_stdout(said) if rank else contextlib.nullcontext():
    options = ["--with-mpi", "-m", "world", "-p", "no:cacheprovider", "--basetemp", f"{own}/tests"]
    status = int(pytest.main([*options, folder, *sys.argv[1:]]))
if rank and status:
    print(f"[rank {rank} of {size}]\n{said.getvalue()}", flush=True)
sys.exit(max(MPI.COMM_WORLD.allgather(status)))
