"""A cache of a test's own, without compiling all kernels again for it."""

from pathlib import Path

import pytest

from fsdpx.core.base import environment


def set_own_cache(monkeypatch: pytest.MonkeyPatch, folder: Path) -> Path:
    """Let this process keep measurements in a new folder, and find machine code where all tests have it."""
    code = environment.read_environment().cache / "code"
    code.mkdir(parents=True, exist_ok=True)
    folder.mkdir()
    (folder / "code").symlink_to(code)
    monkeypatch.setenv("FSDPX_CACHE", str(folder))
    return folder
