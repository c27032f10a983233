"""Memory of fields over ranks: it falls with their number, and what one rank has no memory for trains on two."""

import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from math import prod
from pathlib import Path
from typing import Any

import pytest

import fsdpx
from fsdpx import nn, optim

ROOT = Path(__file__).parents[3]
MPIEXEC = shutil.which("mpiexec", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")

JOB = """
import resource
import numpy as np
import fsdpx
from fsdpx import nn, optim

N, comm, options = 64, fsdpx.init(), {"loss": nn.MSELoss(), "optimizer": optim.SGD(lr=0.1)}

def begun(n):
    grid = fsdpx.Grid(comm, (n // comm.size, n, n), dims=(comm.size, 1, 1))
    trainer = nn.UNet(1, 1, 3, 8, 2).as_distributed(domain=grid, comm=comm, **options)
    return trainer, np.ones((n // comm.size, n, n, 1), np.float32)

trainer, u = begun(16)
trainer.step(u, u)  # kernels and libraries are loaded
trainer.close()
trainer, u = begun(N)
whole = (1, N, N, N, 1), "float32"
even = fsdpx.Grid.from_shape((N, N, N), (1, 1, 1))
need = fsdpx.dry_run(nn.UNet(1, 1, 3, 8, 2), whole, whole, ranks=1, domain=even, **options).peak_heap_bytes
data = next(int(line.split()[1]) << 10 for line in open("/proc/self/status") if line.startswith("VmData"))
resource.setrlimit(resource.RLIMIT_DATA, (data + need * 3 // 5,) * 2)
try:
    trainer.step(u, u)
    print(f"rank {comm.rank} trains\\n", end="", flush=True)
except fsdpx.errors.OutOfMemory as error:
    print(f"rank {comm.rank}: {str(error).splitlines()[0]}", flush=True)
"""


def peak(dims: Sequence[int], cells: Sequence[int]) -> int:
    """Most bytes that a step has beside parameters, on the rank with the largest part."""
    grid = fsdpx.Grid.from_shape(cells, dims, prod(dims) - 1)
    part = (1, *grid.parts.local_shape(grid.coords), 3), "float32"
    options: dict[str, Any] = {"loss": nn.RelativeL2(), "optimizer": optim.AdamW(lr=1e-3), "domain": grid}
    return fsdpx.dry_run(
        nn.UNet(3, 3, 3, 8, 4), part, part, ranks=prod(dims), rank=prod(dims) - 1, **options
    ).peak_heap_bytes


def test_four_ranks_have_a_quarter_of_the_peak_and_halos() -> None:
    whole = peak((1, 1, 1), (64, 64, 64))
    for dims in ((4, 1, 1), (2, 2, 1)):
        assert peak(dims, (64, 64, 64)) < 0.30 * whole, dims


@pytest.mark.mpi_skip
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="limits of memory are set from what /proc says")
def test_a_field_that_one_rank_has_no_memory_for_trains_on_two(tmp_path: Path) -> None:
    """Each rank may have three fifths of what the step takes on one."""
    script = tmp_path / "job.py"
    script.write_text(JOB)
    environ = {k: v for k, v in os.environ.items() if not k.startswith(("PMI", "OMPI_", "FSDPX_"))}
    environ |= {"PYTHONPATH": str(ROOT), "FSDPX_TUNE": "0", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}

    def ran(command: list[str]) -> str:
        done = subprocess.run(
            [*command, sys.executable, str(script)], cwd=tmp_path, env=environ, capture_output=True, text=True,
            timeout=300, stdin=subprocess.DEVNULL,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        return done.stdout

    assert "rank 0: rank 0 of 1 has too little memory: Unable to allocate" in ran([])
    assert MPIEXEC is not None
    assert sorted(ran([MPIEXEC, "-n", "2"]).split("\n")[:-1]) == ["rank 0 trains", "rank 1 trains"]
