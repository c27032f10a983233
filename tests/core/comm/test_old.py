"""Older versions of mpi4py and NumPy, imitated by the installed ones: `make test-oldest` has the real ones."""

from pathlib import Path

import pytest
from trials import job

OLD = """
import fsdpx
from mpi4py import MPI  # as before version 4, which knows no deaths

for name in ("ERR_PROC_FAILED", "ERR_PROC_FAILED_PENDING", "ERR_REVOKED"):
    if hasattr(MPI, name):
        delattr(MPI, name)

from fsdpx import nn, optim
from fsdpx.errors import ConfigError

made = dict(loss=nn.MSELoss(), optimizer=optim.SGD(lr=0.1))
with fsdpx.init() as comm:
    total = fsdpx.all_reduce(1.0)
    try:
        nn.Linear(2, 2).as_distributed(**made, elastic=True)
    except ConfigError as error:
        print(total, error)
"""


@pytest.mark.jobs
@pytest.mark.parametrize("survives", [False, True])
def test_an_mpi4py_without_deaths_carries_all_but_them(tmp_path: Path, survives: bool) -> None:
    done = job(tmp_path, OLD, ranks=2, **({"OMPI_MCA_mpi_ft_enable": "1"} if survives else {}))
    assert done.status == 0, done.err
    said = "2.0 ranks that outlive others (mpiexec --with-ft ulfm) need mpi4py 4.0 or newer, and this is "
    assert [line.startswith(said) for line in done.out.splitlines()] == [True, True] * survives
