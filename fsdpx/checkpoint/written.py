"""What wrote a checkpoint: versions, ranks, mesh, strategy, precision. Told to people; loading never needs it."""

from __future__ import annotations

import json
import os
import platform
import sys
from dataclasses import replace
from typing import Any

import numpy as np

from fsdpx.checkpoint.disk import opened, read_at
from fsdpx.checkpoint.files import WRITTEN
from fsdpx.checkpoint.source import Source
from fsdpx.config import PRECISIONS, PRESETS, Precision, Sharding
from fsdpx.config import sharding as sharding_of
from fsdpx.errors import CheckpointError
from fsdpx.files import parse_json
from fsdpx.state.placement import Placement
from fsdpx.version import __version__

__all__ = ["note_of", "read_note", "words"]

LARGEST = 1 << 20
UNKNOWN = "unknown: an earlier version, or other software"


def note_of(placement: Placement) -> bytes:
    """The note of this run, as JSON."""
    options, axes = placement.options, placement.axes
    found = {
        "strategy": _strategy(placement.sharding),
        "local training": None if options.local is None else f"rounds of {options.local.every} steps",
        "mesh": str(axes.mesh),
        "ranks": axes.world.size,
        "precision": _precision(placement.formats.precision),
        "chunks": options.chunks,
        "schedule": options.schedule if axes.pipe.size > 1 else None,
        "fsdpx": __version__,
        "Python": platform.python_version(),
        "NumPy": np.__version__,
        "MPI": _mpi(),
        "machine": f"{platform.system()} {platform.machine()}",
    }
    known = {name: value for name, value in found.items() if value is not None}
    return (json.dumps(known, ensure_ascii=False, indent=1) + "\n").encode()


def read_note(source: Source) -> bytes | None:
    """The note beside the files of `source` as it is there, if it can be read."""
    if source.manifest is None:
        return None
    try:
        with opened(source.folder / WRITTEN) as fd:
            data = bytearray(min(LARGEST, os.fstat(fd).st_size))
            read_at(fd, data, 0)
    except (OSError, CheckpointError):
        return None
    return bytes(data)


def words(note: bytes | None) -> str:
    """A note in one line; whatever is in the file, no error: it is information only."""
    if note is None:
        return UNKNOWN
    try:
        table = parse_json(note)
        return ", ".join(f"{name} {value}" for name, value in table.items())
    except (ValueError, AttributeError):
        return f"{WRITTEN} cannot be read"


def _strategy(sharding: Sharding) -> str:
    """Its name, if it has one."""
    ranks = (sharding.replica or 1) * (sharding.shard or 1)
    for name in ("ddp", "zero1", "zero2", "fsdp", "hybrid"):
        if replace(sharding_of(PRESETS[name], ranks), ahead=sharding.ahead) == sharding:
            return name
    return str(sharding)


def _precision(precision: Precision) -> str:
    return next((name for name, known in PRECISIONS.items() if known == precision), str(precision))


def _mpi() -> str | None:
    """The library, if this process has loaded one."""
    loaded: Any = sys.modules.get("mpi4py.MPI")
    return None if loaded is None else " ".join(loaded.Get_library_version().strip("\0\n ").split("\n")[0].split())
