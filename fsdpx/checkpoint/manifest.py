"""The manifest: which files a checkpoint consists of, their sizes and digests. Its presence makes a folder one."""

from __future__ import annotations

import json
import re
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fsdpx.checkpoint import digest
from fsdpx.checkpoint.files import WRITTEN, FileLayout
from fsdpx.checkpoint.format import Contents
from fsdpx.errors import CheckpointError
from fsdpx.files import parse_json

__all__ = ["MANIFEST", "OWN", "SUMS", "FileRecord", "Manifest", "is_checkpoint"]

MANIFEST = "manifest.json"
VERSION = 1
OWN = re.compile(r"(model(-\d{5,}-of-\d{5,})?|state)\.safetensors|(model\.safetensors\.index|manifest|written)\.json")
"""Names of the files that a checkpoint can have."""

SUMS = ".sums-"
"""Before the rank, the name of what it has written so far that the others should know: in a folder not yet whole."""


@dataclass(frozen=True)
class FileRecord:
    """One file. head: CRC-32 of its header, or of all of it if it is a text. tensors: name -> CRC-32 of its bytes."""

    size: int
    head: int
    tensors: dict[str, int]

    @property
    def sound(self) -> bool:
        """Whether all of them are whole numbers that can be."""
        sums = [self.head, *self.tensors.values()]
        return _whole(self.size, 1 << 63) and all(_whole(value, 1 << 32) for value in sums)


@dataclass(frozen=True)
class Manifest:
    files: dict[str, FileRecord]

    @classmethod
    def of(cls, plan: FileLayout, sums: Sequence[int]) -> Manifest:
        """sums: of all ranks together, in the order of `plan.tensors()`."""
        made = {name: FileRecord(c.size, zlib.crc32(c.header), {}) for name, c in plan.files.items()}
        for (file, name, entry), value in zip(plan.tensors(), sums, strict=True):
            made[file].tensors[name] = digest.whole(int(value), entry.nbytes)
        made |= {name: FileRecord(len(text), zlib.crc32(text), {}) for name, text in plan.texts.items()}
        return cls(made)

    def text(self) -> bytes:
        """Canonical JSON, closed by the CRC-32 of what is before."""
        files = {
            name: {"bytes": r.size, "head": r.head, "tensors": dict(sorted(r.tensors.items()))}
            for name, r in sorted(self.files.items())
        }
        table: dict[str, Any] = {"checkpoint": VERSION, "files": files}
        return _dump(table | {"crc32": zlib.crc32(_dump(table))})

    @classmethod
    def parse(cls, data: bytes, where: str) -> Manifest:
        """CheckpointError for anything but what `text` gives, to the last byte."""
        try:
            table = parse_json(data)
            version = table["checkpoint"]
            files = {n: FileRecord(f["bytes"], f["head"], dict(f["tensors"])) for n, f in table["files"].items()}
            if not all(record.sound for record in files.values()):
                raise ValueError("numbers of another type or out of range")
            made = cls(files)
            intact = made.text() == data
        except (ValueError, KeyError, TypeError, AttributeError):
            raise CheckpointError(f"{where}: damaged: this is no manifest of a checkpoint") from None
        if version != VERSION:
            raise CheckpointError(f"{where}: format {version!r} of checkpoints; this fsdpx reads format {VERSION}")
        if not intact:
            raise CheckpointError(f"{where}: damaged: its digest does not fit")
        if not all(OWN.fullmatch(name) and name not in (MANIFEST, WRITTEN) for name in files):
            raise CheckpointError(f"{where}: names files that a checkpoint does not have: {', '.join(files)}")
        return made

    def demand(self, name: str, head: bytes, size: int, tensors: Iterable[str], where: str) -> None:
        """A file has the size, the header and the tensors that it was written with."""
        record = self.files[name]
        if size != record.size:
            kind = "truncated" if size < record.size else "longer than written"
            raise CheckpointError(f"{where}: {kind}: {size} bytes instead of {record.size}")
        if zlib.crc32(head) != record.head:
            raise CheckpointError(f"{where}: damaged: the digest of the header does not fit")
        if differ := sorted(record.tensors.keys() ^ set(tensors)):
            raise CheckpointError(f"{where}: damaged: {differ[0]!r} is in the file or in {MANIFEST}, but not in both")

    def wrong(self, files: Mapping[str, Contents], sums: Sequence[int]) -> list[str]:
        """Names of the tensors whose bytes are not those that were written."""
        found = []
        for (file, name, entry), value in zip(FileLayout(dict(files)).tensors(), sums, strict=True):
            if self.files[file].tensors.get(name) != digest.whole(int(value), entry.nbytes):
                found.append(name)
        return found


def is_checkpoint(folder: Path) -> bool:
    return (folder / MANIFEST).exists()


def _whole(value: Any, limit: int) -> bool:
    return type(value) is int and 0 <= value < limit


def _dump(table: Any) -> bytes:
    return (json.dumps(table, ensure_ascii=False, indent=1) + "\n").encode()
