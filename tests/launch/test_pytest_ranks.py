"""`mpirun -n 3 pytest`: the tests of the world run together, rank 0 reports, and a failure of one is one of all."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from trials import MPIEXEC, ROOT, environment, none_left

pytestmark = pytest.mark.jobs

TESTS = """
import os, sys
import pytest
from mpi4py import MPI

@pytest.mark.world
def test_all_of_them(tmp_path):
    paths = MPI.COMM_WORLD.allgather(str(tmp_path))
    assert len(set(paths)) == 3

@pytest.mark.world
def test_one_of_them():
    assert not (os.environ.get("FAILS") and MPI.COMM_WORLD.rank == 1), "rank 1 has failed"

@pytest.mark.jobs
def test_a_job():
    raise AssertionError("not here")

def test_without_mpi():
    raise AssertionError("not here")
"""


def run(folder: Path, *options: str, **variables: str) -> subprocess.CompletedProcess[str]:
    shutil.copy(ROOT / "tests" / "conftest.py", folder)
    (folder / "test_some.py").write_text(TESTS)
    (folder / "pytest.ini").write_text("[pytest]\nmarkers =\n    world: all ranks\n    jobs: starts some\n")
    (folder / "tmp").mkdir()
    path = f"{ROOT}:{ROOT / 'tests'}:{ROOT / 'tests' / 'comm'}"
    done = subprocess.run(
        [str(MPIEXEC), "-n", "3", sys.executable, "-m", "pytest", *options],
        cwd=folder, env=environment(PYTHONPATH=path, TMPDIR=str(folder / "tmp"), **variables),
        capture_output=True, text=True, timeout=100,
    )  # fmt: skip
    assert none_left(folder)
    assert list((folder / "tmp").glob("rank-*")) == []
    return done


@pytest.mark.parametrize("options", [[], ["-m", "world", "--with-mpi"]])
def test_ranks_run_what_is_theirs(tmp_path: Path, options: list[str]) -> None:
    done = run(tmp_path, *options)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("2 passed") == 1
    assert ("1 skipped" in done.stdout) == ("-m" not in options)
    assert "not here" not in done.stdout


def test_a_failure_of_one_rank_is_one_of_all(tmp_path: Path) -> None:
    done = run(tmp_path, FAILS="1")
    assert done.returncode != 0
    assert "2 passed" in done.stdout  # of rank 0
    assert "[rank 1]" in done.stdout
    assert "rank 1 has failed" in done.stdout
    assert "[rank 2]" not in done.stdout
