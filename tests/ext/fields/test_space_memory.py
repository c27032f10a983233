"""Memory of fields over ranks: it falls with their number, and what one rank has no memory for trains on two."""

from collections.abc import Sequence
from math import prod
from pathlib import Path
from typing import Any

import pytest
from trials import job

import fsdpx
from fsdpx import nn, optim

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
    one, two = (job(tmp_path, JOB, ranks=n, OPENBLAS_NUM_THREADS="1", MKL_NUM_THREADS="1") for n in (1, 2))
    assert (one.status, two.status) == (0, 0), one.err + two.err
    assert "rank 0: rank 0 of 1 has too little memory: Unable to allocate" in one.out
    assert sorted(two.out.split("\n")[:-1]) == ["rank 0 trains", "rank 1 trains"]
