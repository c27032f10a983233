"""Real processes, killed by SIGKILL at random moments of saving, leave the old or the new checkpoint."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.jobs, pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")]


@pytest.mark.parametrize(("script", "kills"), [("kills.py", 20), ("kills_ranks.py", 3)])
def test_killed_while_saving(script: str, kills: int) -> None:
    """`make thorough` does more of them. kills.py: one process. kills_ranks.py: one of three ranks under mpiexec."""
    command = [sys.executable, "-W", "error", str(Path(__file__).parent / script), str(kills)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    counted = re.search(rf"{kills} kills in (\d+) saves", done.stdout)
    assert counted
    assert int(counted[1]) > 2
