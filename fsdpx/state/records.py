"""What was measured on this machine, kept on disk: one file per kind and key, with the day on which it was, and how
busy the machine was then."""

from __future__ import annotations

import hashlib
import json
import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from fsdpx import environment, files

__all__ = ["BUSY", "Measurement", "every", "kept", "load", "read", "write"]


T = TypeVar("T")
_KINDS = {"key": dict, "value": dict, "date": str, "load": (int, float)}
_refused: set[Path] = set()
"""Folders that could not be written."""


BUSY = 0.5
"""Processes that want to run, per core: from there on times are not those of the machine."""


class Measurement(NamedTuple):
    """key: all that the value depends on. date: when it was measured, in UTC. load: how busy the machine was."""

    key: dict[str, Any]
    value: dict[str, Any]
    date: str
    load: float


def load() -> float:
    """How many processes of the machine want to run, per core, in the last minute; 0 where the system does not say."""
    return os.getloadavg()[0] / (os.cpu_count() or 1) if hasattr(os, "getloadavg") else 0.0


def read(kind: str, key: dict[str, Any], made: Callable[[dict[str, Any]], T], times: bool = True) -> T | None:
    """The value, as `made` makes it; None if there is none, if the machine was busy when it was measured and is calm
    now, or, with one warning, if the file is not ours or damaged: then it is measured again.

    made: raises ValueError or TypeError for a value that it cannot be made of. times: whether other processes change
    it."""
    file = _file(kind, key)
    try:
        record = _of(file, kind)
        if record is None:
            return None
        if record.key != key:
            raise ValueError("it is the record of something else")
        return None if times and load() < BUSY <= record.load else made(record.value)
    except (ValueError, TypeError) as error:
        files.passed_over(error, file)
    return None


def every(kind: str) -> Iterator[Measurement]:
    """All records of a kind, those of other machines as well."""
    for file in sorted(environment.read().cache.glob(f"{kind}-*.json")):
        with suppress(ValueError):
            record = _of(file, kind)
            if record is not None:
                yield record


def write(kind: str, key: dict[str, Any], value: dict[str, Any], busy: float = 0.0) -> None:
    """Whole or not at all. A folder that cannot be written only means measuring again, as one warning says.

    busy: the load when it was measured."""
    file, date = _file(kind, key), datetime.now(UTC).isoformat(timespec="minutes")
    text = json.dumps({"key": key, "date": date, "load": round(busy, 2), kind: value}, indent=1)
    try:
        files.folder(file.parent, private=False)
        files.write(file, text, files.READABLE)
    except OSError as error:
        _refuse(file.parent, error)


def kept() -> str:
    """Where measurements are kept, as the end of a line; nothing if they cannot be, as a warning has said."""
    folder = environment.read().cache
    return "" if folder in _refused else f"; what came of it is kept in {folder}"


def _refuse(folder: Path, error: OSError) -> None:
    if folder not in _refused:
        _refused.add(folder)
        warnings.warn(
            f"fsdpx: measurements cannot be kept in {folder} ({error.strerror or error}), so every start measures "
            "again: set FSDPX_CACHE to a folder that can be written",
            RuntimeWarning,
            stacklevel=3,
        )


def _of(file: Path, kind: str) -> Measurement | None:
    """None if it is not there or not ours; ValueError for anything but a record."""
    data = files.believed(file)
    if data is None:
        return None
    return Measurement(**files.typed(_renamed(files.parse_json(data), kind), _KINDS))


def _renamed(found: Any, kind: str) -> Any:
    """The value under its own name in place of its kind's; without a date or load, one that is unknown."""
    if type(found) is not dict:
        return found
    return {"date": "", "load": 0.0} | {"value" if name == kind else name: value for name, value in found.items()}


def _file(kind: str, key: dict[str, Any]) -> Path:
    digest = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:16]
    return environment.read().cache / f"{kind}-{digest}.json"
