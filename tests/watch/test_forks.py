"""Children that a rank forks are no ranks: what befalls them ends no job."""

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.jobs


def test_what_befalls_forked_children_does_not_concern_the_job() -> None:
    script = Path(__file__).with_name("forks.py")
    words = [sys.executable, "-W", "ignore", "-m", "fsdpx", "run", "-n", "2", "--max-restarts", "0", str(script)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=100)
    assert "[0, 1] 1 0 -15\n" in done.stdout, done
    assert done.stdout.count("2 ranks go on") == 2, done
    assert done.stderr.count("ValueError: of a child") == 3, done
    assert "rank 0/" not in done.stderr, done
    assert done.returncode == 0, done
