"""What was measured on this machine, kept on disk: one file per kind and key, with the day on which it was."""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

from fsdpx import environment

__all__ = ["Measurement", "every", "read", "write"]


class Measurement(NamedTuple):
    """key: all that the value depends on. date: when it was measured, in UTC."""

    key: dict[str, Any]
    value: dict[str, Any]
    date: str


def read(kind: str, key: dict[str, Any]) -> Measurement | None:
    """The record; None if there is none or the file is damaged: then it is measured again."""
    return _of(_file(kind, key), kind)


def every(kind: str) -> Iterator[Measurement]:
    """All records of a kind, those of other machines as well."""
    for file in sorted(environment.read().cache.glob(f"{kind}-*.json")):
        record = _of(file, kind)
        if record is not None:
            yield record


def write(kind: str, key: dict[str, Any], value: dict[str, Any]) -> None:
    """Whole or not at all; a folder that cannot be written only means measuring again."""
    file, date = _file(kind, key), datetime.now(UTC).isoformat(timespec="minutes")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=file.parent, delete=False) as out:
            json.dump({"key": key, "date": date, kind: value}, out, indent=1)
        os.replace(out.name, file)
    except OSError:
        return


def _of(file: Path, kind: str) -> Measurement | None:
    try:
        found = json.loads(file.read_text())
        return Measurement(dict(found["key"]), dict(found[kind]), str(found.get("date", "")))
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _file(kind: str, key: dict[str, Any]) -> Path:
    digest = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:16]
    return environment.read().cache / f"{kind}-{digest}.json"
