"""What all tests share: tests import their neighbours by name."""

import sys
from pathlib import Path

for folder in ("program", "engine", "comm"):
    sys.path.insert(0, str(Path(__file__).parent / folder))
