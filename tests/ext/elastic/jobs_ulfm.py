"""Real jobs whose ranks are killed and whose others live on: Open MPI 5 with user-level failure mitigation."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

__all__ = ["Done", "job", "unable"]

ROOT = Path(__file__).parents[3]
MPIEXEC = shutil.which("mpiexec", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
_NOISE = re.compile(r"^(NBC_Progress: an error .*|Error in NBC_Start_round.*)?\n", re.MULTILINE)


@dataclass(frozen=True)
class Done:
    status: int
    out: str
    err: str

    def lines(self, begin: str) -> list[str]:
        """What follows `begin` in each line of the output that begins with it."""
        return [line.removeprefix(begin).strip() for line in self.out.splitlines() if line.startswith(begin)]


@cache
def unable() -> str | None:
    """Why ranks of this interpreter do not survive each other; None if they do."""
    if MPIEXEC is None:
        return "there is no mpiexec"
    said = _output([MPIEXEC, "--version"])
    found = re.search(r"\(Open MPI\) (\d+)", said)
    if found is None or int(found[1]) < 5:
        return f"mpiexec is not of Open MPI 5 or later: {said.splitlines()[0] if said else 'it says nothing'}"
    library = _output([sys.executable, "-c", "from mpi4py import MPI; print(MPI.Get_library_version())"])
    return None if "Open MPI" in library else f"mpi4py loads another MPI than that of mpiexec: {library[:60]}"


def job(folder: Path, program: str, ranks: int, *args: str, seconds: float = 180.0, **variables: str) -> Done:
    """Run `program` on ranks that survive each other, until all have ended; subprocess.TimeoutExpired if they hang.
    A test is skipped where ranks cannot survive."""
    if reason := unable():
        pytest.skip(reason)
    (folder / "job.py").write_text(program)
    command = [
        str(MPIEXEC), "--with-ft", "ulfm", "--map-by", ":OVERSUBSCRIBE", "--bind-to", "none", "-n", str(ranks),
        sys.executable, "job.py", *args,
    ]  # fmt: skip
    with subprocess.Popen(
        command, cwd=folder, env=_environment(**variables), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
        stderr=subprocess.PIPE, text=True,
    ) as process:  # fmt: skip
        try:
            out, err = process.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            process.terminate()  # not kill: mpiexec ends its ranks
            process.communicate()
            raise
    return Done(process.returncode, out, _NOISE.sub("", err))


def _output(command: list[str]) -> str:
    return subprocess.run(command, env=_environment(), capture_output=True, text=True, timeout=60).stdout


def _environment(**variables: str) -> dict[str, str]:
    kept = {key: value for key, value in os.environ.items() if not key.startswith(("PMI", "OMPI_", "PRTE_", "FSDPX_"))}
    root = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    threads = {"OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    return {**kept, **root, **threads, "PYTHONPATH": str(ROOT), "FSDPX_TUNE": "0", **variables}
