"""Programs on solvers of others train in place, on any number of ranks in any order, and go on with another number."""

import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from commands import start
from trials import ROOT

pytestmark = [pytest.mark.mpi_skip, pytest.mark.jobs]
PROGRAMS = {"dmda": "petsc4py", "devito_heat": "devito", "pypde_heat": "pde", "dolfinx_heat": "dolfinx"}
"""By the library that a program needs."""
ORDERED = """
import sys
from pathlib import Path
from mpi4py import MPI
sys.path.insert(0, sys.argv[1])
program = __import__(sys.argv[2])
comm = MPI.COMM_WORLD
program.main(comm.Split(0, int(sys.argv[4].split(",")[comm.rank])), Path(sys.argv[3]))
"""


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_on_a_solver_trains_in_place(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same losses on 1, 2 and 4 ranks, and on 4 in another order; then on 3 what 2 and 4 would go on with."""
    if importlib.util.find_spec(PROGRAMS[name]) is None:  # dolfinx cannot be imported before MPI
        pytest.skip(f"could not import {PROGRAMS[name]!r}")
    if name == "devito_heat" and not (shutil.which("mpicc") or (Path(sys.executable).parent / "mpicc").exists()):
        pytest.skip("Devito compiles by mpicc")
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    (tmp_path / "ordered.py").write_text(ORDERED)

    def losses(ranks: int, folder: str, order: str = "0,1,2,3") -> str:
        where = str(ROOT / "docs" / "solvers"), name, str(tmp_path / folder), order
        done = start(ranks, str(tmp_path / "ordered.py"), *where)
        assert done.returncode == 0, done.stderr
        return done.stdout.splitlines()[-1]

    first = [losses(1, "1"), losses(2, "2"), losses(4, "4"), losses(4, "other", "3,1,0,2")]
    assert len(set(first)) == 1, first
    found = first[0].split()
    assert len(found) == 10
    assert float(found[-1]) < 0.5 * float(found[0])
    later = [losses(3, "2"), losses(3, "4", "2,0,1"), losses(1, "other")]
    assert len(set(later)) == 1, later
    assert float(later[0].split()[0]) < float(found[-1])


def test_a_solver_in_fortran_sends_its_field_to_a_trainer(tmp_path: Path) -> None:
    """Heat and losses are equal on 1 and 3 solver ranks, and the heat equals NumPy's."""
    compiler = shutil.which("gfortran")
    if compiler is None:
        pytest.skip("no gfortran")
    folder, library = ROOT / "docs" / "solvers", str(tmp_path / "heat.so")
    subprocess.run([compiler, "-O2", "-shared", "-fPIC", "-o", library, str(folder / "heat.f90")], check=True)
    shown = [start(ranks, str(folder / "fortran_heat.py"), library) for ranks in (2, 4)]
    assert [done.returncode for done in shown] == [0, 0], shown
    one, other = (done.stdout for done in shown)
    assert one == other
    u = np.sin(np.arange(16)[:, None]) * np.cos(np.arange(12)) + 1
    for _ in range(30):
        wide = np.pad(u, 1, mode="edge")
        u = u + 0.2 * (wide[:-2, 1:-1] + wide[2:, 1:-1] + wide[1:-1, :-2] + wide[1:-1, 2:] - 4 * u)
    words = one.split()
    assert float(words[1].rstrip(";")) == pytest.approx(u.sum(), abs=1e-4)
    assert float(words[-3]) < 1e-3 * float(words[3])
