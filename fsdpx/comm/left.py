"""Files that killed jobs left in MPI libraries' shared memory. No library removes them, and memory is finite."""

from __future__ import annotations

import math
import time
from contextlib import suppress
from pathlib import Path

from fsdpx.files import belongs

__all__ = ["SHARED", "left", "remove_left"]

SHARED = Path("/dev/shm")
NAMES = ("mpich_shm_*", "mpich_vci_*", "sm_segment.*", "vader_segment.*", "osc_sm.*", "osc_rdma.*")
"""Of MPICH; of Open MPI: messages, in versions 5 and 4, and windows."""
SECONDS = 60.0
"""Files younger than this may belong to a job that is starting."""
_SECONDS_TO_BEGIN = 600.0
"""The same for files that are removed."""


def left(folder: Path = SHARED, seconds: float = SECONDS) -> list[Path]:
    """Files of this user that belong to an MPI library and that no process has mapped."""
    old = time.time() - seconds
    found = sorted(path for name in NAMES for path in folder.glob(name) if belongs(path) and _changed(path) < old)
    used = _mapped(folder) if found else set()
    return [path for path in found if str(path) not in used]


def remove_left(folder: Path = SHARED) -> None:
    """Remove what MPICH's jobs have left. Ranks map these files for as long as they live, and a job that has not begun
    after so long never will; where another container shares the folder, its ranks need the names no more."""
    for path in left(folder, _SECONDS_TO_BEGIN):
        if path.name.startswith("mpich_"):
            with suppress(OSError):  # gone meanwhile, or a folder that cannot be written
                path.unlink()


def _changed(path: Path) -> float:
    """When the file was last written; never before, if it is gone by now."""
    with suppress(FileNotFoundError):
        return path.lstat().st_mtime
    return math.inf


def _mapped(folder: Path) -> set[str]:
    """Files in `folder` that processes have mapped, of those that this process may see."""
    found = set()
    for maps in Path("/proc").glob("[0-9]*/maps"):
        with suppress(OSError):  # it has ended, or is another user's
            for line in maps.read_text(errors="replace").splitlines():
                _, between, name = line.partition(f" {folder}/")
                if between:
                    found.add(f"{folder}/{name.removesuffix(' (deleted)')}")
    return found
