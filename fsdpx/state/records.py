"""What was measured on this machine, kept on disk: one file per kind and key, with the day on which it was."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from fsdpx import environment, files

__all__ = ["Measurement", "every", "read", "write"]


T = TypeVar("T")


class Measurement(NamedTuple):
    """key: all that the value depends on. date: when it was measured, in UTC."""

    key: dict[str, Any]
    value: dict[str, Any]
    date: str


def read(kind: str, key: dict[str, Any], made: Callable[[dict[str, Any]], T]) -> T | None:
    """The value, as `made` makes it; None if there is none, or, with one warning, if the file is not ours or damaged:
    then it is measured again. made: raises ValueError or TypeError for a value that it cannot be made of."""
    file = _file(kind, key)
    try:
        record = _of(file, kind)
        if record is None:
            return None
        if record.key != key:
            raise ValueError("it is the record of something else")
        return made(record.value)
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


def write(kind: str, key: dict[str, Any], value: dict[str, Any]) -> None:
    """Whole or not at all; a folder that cannot be written only means measuring again."""
    file, date = _file(kind, key), datetime.now(UTC).isoformat(timespec="minutes")
    text = json.dumps({"key": key, "date": date, kind: value}, indent=1)
    with suppress(OSError):
        files.folder(file.parent, private=False)
        files.write(file, text, files.READABLE)


def _of(file: Path, kind: str) -> Measurement | None:
    """None if it is not there or not ours; ValueError for anything but a record."""
    data = files.believed(file)
    if data is None:
        return None
    return Measurement(**files.typed(_renamed(files.parse_json(data), kind), {"key": dict, "value": dict, "date": str}))


def _renamed(found: Any, kind: str) -> Any:
    """The value under its own name in place of its kind's; without a date, one that is unknown."""
    if type(found) is not dict:
        return found
    return {"date": ""} | {"value" if name == kind else name: value for name, value in found.items()}


def _file(kind: str, key: dict[str, Any]) -> Path:
    digest = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:16]
    return environment.read().cache / f"{kind}-{digest}.json"
