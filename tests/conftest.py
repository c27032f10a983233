"""What all tests share: tests import their neighbours by name."""

import os
import sys
from pathlib import Path

for folder in ("program", "engine", "comm"):
    sys.path.insert(0, str(Path(__file__).parent / folder))

os.environ.setdefault("FSDPX_TUNE", "0")  # measurements belong to the tests that are about them
