"""Search a folder for the newest checkpoint that training can resume from."""

from __future__ import annotations

import re
from pathlib import Path

from fsdpx.core.base import safe_files
from fsdpx.core.checkpoint.atomic_commit import find_committed_folder, get_checkpoint_name_of_folder
from fsdpx.core.checkpoint.format import MAX_TEXT_BYTES, STATE_FILE_NAME
from fsdpx.core.checkpoint.write import MANIFEST_NAME, Manifest, is_checkpoint
from fsdpx.errors import CheckpointError, warn

__all__ = ["find_newest_checkpoint"]


def find_newest_checkpoint(folder: Path) -> Path | None:
    """Return the path of the newest complete checkpoint in a folder, or None if there is none. The path can be passed
    to `load`.

    The newest checkpoint is the one with the largest numbers in its name. If names have equal numbers or no numbers, it
    is the checkpoint written last. A checkpoint is complete if its manifest is intact and all its files exist and have
    the right size. An incomplete checkpoint is skipped with a warning. A checkpoint that has only weights is skipped
    silently."""
    entries = folder.iterdir() if folder.exists() else ()
    names = {name for path in entries if (name := get_checkpoint_name_of_folder(path.name))}
    steps_by_folder = {folder / name: find_committed_folder(folder / name) for name in names}
    ages = {path: _get_recency_key(path.name, place) for path, place in steps_by_folder.items() if is_checkpoint(place)}
    newest_first = sorted(ages, key=ages.__getitem__, reverse=True)
    return next((path for path in newest_first if _can_resume_or_warn(steps_by_folder[path])), None)


def _get_recency_key(name: str, folder: Path) -> tuple[tuple[int, ...], int]:
    """Return a sort key that is larger for newer checkpoints: (numbers in `name`, time of writing)."""
    return tuple(map(int, re.findall("[0-9]+", name))), (folder / MANIFEST_NAME).stat().st_mtime_ns


def _can_resume_or_warn(folder: Path) -> bool:
    try:
        manifest = Manifest.parse(
            safe_files.read_file(folder / MANIFEST_NAME, MAX_TEXT_BYTES, ours=False), str(folder / MANIFEST_NAME)
        )
        for name, record in manifest.files.items():
            if (size := (folder / name).stat().st_size) != record.size:
                raise CheckpointError(f"{folder / name} has {size:,} bytes, and had {record.size:,}")
    except (CheckpointError, FileNotFoundError) as error:
        warn(f"fsdpx: a damaged checkpoint is skipped: {error}")
        return False
    return STATE_FILE_NAME in manifest.files
