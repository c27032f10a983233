"""The benchmarks are scripts, not a package: their tests import them from where they lie."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[2] / "bench"))
