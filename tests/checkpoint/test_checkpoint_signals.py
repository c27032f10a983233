"""A real job that is asked to stop while it trains: it saves, ends with its status, and goes on to the same bits."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from stopped import READY, train

from fsdpx import spawn
from fsdpx.watch.preempt import PREEMPTED

sys.path.insert(0, str(Path(__file__).parents[1] / "watch"))
from trials import MPIEXEC, environment, none_left

pytestmark = pytest.mark.jobs


@pytest.mark.parametrize(("name", "whom"), [("SIGUSR1", "launcher"), ("SIGTERM", "ranks"), ("SIGINT", "all")])
def test_stopped_by_a_signal_and_resumed(name: str, whom: str, tmp_path: Path) -> None:
    """On three ranks, then on two; the bits are those of one rank that nobody disturbed. Ctrl-C on a terminal is a
    SIGINT to launcher and ranks alike."""
    script = Path(__file__).parent / "stopped.py"
    with subprocess.Popen(
        [str(MPIEXEC), "-n", "3", sys.executable, str(script), str(tmp_path)], cwd=tmp_path, env=environment(),
        stdin=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, start_new_session=True,
    ) as job:  # fmt: skip
        while job.poll() is None and not (tmp_path / READY).exists():
            time.sleep(0.01)
        pids = json.loads((tmp_path / READY).read_text()) if job.poll() is None else []
        for pid in {"launcher": [job.pid], "ranks": pids, "all": [*pids, job.pid]}[whom]:
            os.kill(pid, getattr(signal, name))
        _, complaint = job.communicate(timeout=60)
    assert job.returncode == PREEMPTED, complaint
    assert f"was asked to stop by {name}; all ranks ended together after step " in complaint
    own = [
        line for line in complaint.splitlines() if line.strip() and not re.match(r"\[mpiexec|fsdpx: compiling", line)
    ]
    assert len(own) == 1, complaint
    assert none_left(tmp_path)
    (saved,) = (tmp_path / "run").iterdir()
    step = int(saved.name.removeprefix("step-"))
    assert step >= 7
    whole = spawn(train, 1, None, step + 8)
    assert set(spawn(train, 2, tmp_path, step + 8)) == set(whole)
