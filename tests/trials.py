"""Real MPI jobs in which a rank misbehaves at a chosen place."""

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

ROOT = Path(__file__).parents[1]
MPIEXEC = shutil.which("mpiexec", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")

TRAINER = """
import os, signal, sys, time
import numpy as np
import fsdpx
from fsdpx import nn, optim

comm = fsdpx.init()
model = nn.Sequential(nn.Linear(6, 16), nn.GELU(), nn.Linear(16, 3))
trainer = model.as_distributed(
    loss=nn.CrossEntropyLoss(), optimizer=optim.AdamW(lr=0.01), strategy="fsdp", group_bytes=0, comm=comm
)
rng = np.random.default_rng(0)
batches = [(rng.standard_normal((6, 6)).astype(np.float32), rng.integers(0, 3, 6)) for _ in range(20)]
mine = slice(2 * comm.rank, 2 * comm.rank + 2)
"""
STEPS = """
for step, (x, y) in enumerate(batches[:6]):
    outside(step)
    trainer.step(x[mine], y[mine])
if comm.rank == 0: print("ended well", trainer.inspect.compute_fingerprint(), flush=True)
else: trainer.inspect.compute_fingerprint()
"""

ENDLESS = """
from fsdpx.ext.watch.preempt import Preemption

def save():
    open(f"saved-{comm.rank}", "w").write(str(trainer.global_step))

def endless():
    while True:
        if trainer.global_step == 3: open(f"ready-{comm.rank}", "w").close()
        time.sleep(0.01)
        yield batches[trainer.global_step % 20][0][mine], batches[trainer.global_step % 20][1][mine]

open(f"pid-{comm.rank}", "w").write(str(os.getpid()))
trainer.fit(endless(), preempt=Preemption(save=save), progress=False)
"""
"""Trains until it is asked to stop; a file `ready-RANK` says that it has made three steps."""


@dataclass(frozen=True)
class Done:
    status: int
    out: str
    err: str
    seconds: float


OPEN_MPI = {
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
    "PRTE_MCA_hwloc_default_binding_policy": "none",
}
"""What Open MPI needs to start more ranks than there are cores, as anybody; others do not read it."""


def environment(**variables: str) -> dict[str, str]:
    kept = {key: value for key, value in os.environ.items() if not key.startswith(("PMI", "OMPI_", "FSDPX_"))}
    return {**kept, **OPEN_MPI, "PYTHONPATH": str(ROOT), "FSDPX_TUNE": "0", **variables}


def job(folder: Path, program: str, *, ranks: int = 3, args: tuple[str, ...] = (), **variables: str) -> Done:
    """Run `program` on MPI ranks until the end; what temporary files it makes are in folder/tmp.

    Open MPI's launcher (5.0.11) now and then crashes by itself after it has told how a job ended. What status it would
    have had is lost, so the job is run once more."""
    done = _job(folder, program, ranks, args, variables)
    crashed = done.status == -signal.SIGSEGV and "prterun has exited" in done.err
    return _job(folder, program, ranks, args, variables) if crashed and none_left(folder) else done


def _job(folder: Path, program: str, ranks: int, args: tuple[str, ...], variables: dict[str, str]) -> Done:
    (folder / "tmp").mkdir(exist_ok=True)
    (folder / "job.py").write_text(program)
    begin = time.monotonic()
    done = subprocess.run(
        [str(MPIEXEC), "-n", str(ranks), sys.executable, "job.py", *args],
        cwd=folder, env=environment(TMPDIR=str(folder / "tmp"), **variables), stdin=subprocess.DEVNULL,
        capture_output=True, text=True, timeout=100,
    )  # fmt: skip
    return Done(done.returncode, done.stdout, done.stderr, time.monotonic() - begin)


def alive_in(folder: Path) -> list[int]:
    """Processes that still have `folder` as working directory."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdecimal() and (entry / "cwd").resolve(strict=True) == folder.resolve():
                found.append(int(entry.name))
        except OSError:
            continue
    return found


def none_left(folder: Path, seconds: float = 20.0) -> bool:
    """Whether all processes of a job end within `seconds`."""
    deadline = time.monotonic() + seconds
    while alive_in(folder):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


def heed(number: int) -> None:
    """As a job begins: nohup, and shells that start something with &, have it ignore signals, and its children too."""
    signal.signal(number, signal.SIG_DFL)


def asked_to_stop(
    folder: Path, command: Sequence[str], number: int, rank: int | None = None, ranks: int = 3, **variables: str
) -> tuple[int, str]:
    """Status and errors of a job that gets a signal once a file `ready-*` of each of its ranks is there. rank: to which
    rank the signal goes, instead of to the process that was started."""
    with subprocess.Popen(
        command, cwd=folder, env=environment(**variables), stderr=subprocess.PIPE, stdin=subprocess.DEVNULL, text=True,
        preexec_fn=partial(heed, number),
    ) as job:  # fmt: skip
        while job.poll() is None and len(list(folder.glob("ready-*"))) < ranks:
            time.sleep(0.02)
        os.kill(job.pid if rank is None else int((folder / f"pid-{rank}").read_text()), number)
        _, err = job.communicate(timeout=60)
    assert none_left(folder)
    return job.returncode, err
