"""Freed memory stays with the process."""

import subprocess
import sys

import pytest
from amount import in_full

PROGRAM = """
import resource
import numpy as np
from fsdpx.array.arena import keep_pages

def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(20):
        np.ones(1 << 20)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

assert keep_pages()
faults()
print(faults())
"""


@in_full
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="glibc only")
def test_arrays_come_back_without_page_faults() -> None:
    """In a process of its own: the setting cannot be undone."""
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True, timeout=120)
    assert int(done.stdout) < 100  # 40,960 pages of 4 KiB were written
