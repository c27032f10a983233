"""What all tests share: tests import their neighbours by name."""

import os
import sys
from pathlib import Path

from hypothesis import settings

for folder in ("program", "engine", "comm"):
    sys.path.insert(0, str(Path(__file__).parent / folder))

settings.register_profile("suite", max_examples=60, derandomize=True, database=None, deadline=None)
settings.register_profile("thorough", max_examples=3000, database=None, deadline=None)
settings.load_profile("suite")

os.environ.setdefault("FSDPX_TUNE", "0")  # measurements belong to the tests that are about them
os.environ.pop("PYTHONUNBUFFERED", None)  # with it a print is several writes, and lines of the ranks of a job mix
