"""The lines for Slurm in the documentation, with stand-ins for srun and scontrol."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from trials import MPIEXEC, ROOT, TRAINER, environment, none_left

TRAIN = """
from fsdpx.watch.preempt import Preemption
def endless():
    while True:
        if trainer.steps == 3: open(f"ready-{comm.rank}", "w").close()
        time.sleep(0.01)
        yield batches[0][0][mine], batches[0][1][mine]
trainer.fit(endless(), preempt=Preemption(save=lambda: open(f"saved-{comm.rank}", "w").close()), progress=False)
"""


def script() -> str:
    (block,) = re.findall(r"^```bash\n(.*?)^```", (ROOT / "docs" / "resilience.md").read_text(), re.S | re.M)
    return block


def command(folder: Path, name: str, text: str) -> None:
    (folder / name).write_text(f"#!/bin/sh\n{text}\n")
    (folder / name).chmod(0o755)


@pytest.mark.jobs
def test_the_time_limit_comes_near(tmp_path: Path) -> None:
    bin_ = tmp_path / "bin"
    bin_.mkdir()
    command(bin_, "srun", f'shift 2; exec {MPIEXEC} "$@"')
    command(bin_, "scontrol", f'echo "$@" > {tmp_path}/said')
    command(bin_, "python", f'exec {sys.executable} "$@"')
    (tmp_path / "tmp").mkdir()
    (tmp_path / "train.py").write_text(TRAINER + TRAIN)
    slurm = {"SLURM_NTASKS": "3", "SLURM_JOB_ID": "17", "PATH": f"{bin_}:{os.environ['PATH']}"}
    job = subprocess.Popen(
        ["bash", "-c", script()], cwd=tmp_path, env=environment(TMPDIR=str(tmp_path / "tmp"), **slurm),
        stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    while job.poll() is None and not (tmp_path / "ready-1").exists():
        time.sleep(0.02)
    os.kill(job.pid, signal.SIGUSR1)
    _, err = job.communicate(timeout=60)
    assert job.returncode == 85, err
    assert (tmp_path / "said").read_text() == "requeue 17\n"
    assert len(list(tmp_path.glob("saved-*"))) == 3
    assert none_left(tmp_path)
