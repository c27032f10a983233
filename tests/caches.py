"""Folders of measurements for tests about them."""

import shutil
from contextlib import suppress
from pathlib import Path

from fsdpx import environment


def unmeasured(folder: Path) -> str:
    """A new cache, for FSDPX_CACHE, in which nothing has been measured, but kernels are compiled as far as they are in
    the user's: each process would compile its own again, for seconds."""
    compiled = environment.read().cache / "code"
    if compiled.is_dir():
        with suppress(shutil.Error):  # some go meanwhile: other tests compile
            shutil.copytree(compiled, folder / "code")
    return str(folder)
