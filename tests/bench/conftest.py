"""The benchmarks are scripts, not a package: their tests import them from where they lie."""

from pathlib import Path

import pytest

BENCH = str(Path(__file__).parents[2] / "bench")


@pytest.fixture(autouse=True)
def _scripts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(BENCH)
