"""A real process, killed by SIGKILL at random moments of saving, leaves the old or the new checkpoint."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.mpi_skip, pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")]


def test_killed_while_saving() -> None:
    """`python tests/checkpoint/kills.py 300` does more of them."""
    command = [sys.executable, "-W", "error", str(Path(__file__).parent / "kills.py"), "20"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    counted = re.search(r"20 kills in (\d+) saves", done.stdout)
    assert counted
    assert int(counted[1]) > 2
