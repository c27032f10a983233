"""Samples in tar files, as WebDataset lays them out: files with the same name before the first dot are one sample."""

from __future__ import annotations

import io
import json
import os
import tarfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fsdpx.data.windows import maps
from fsdpx.errors import ConfigError, DataError

__all__ = ["TarDataset"]

DECODERS: dict[str, Callable[[bytes], Any]] = {
    "npy": lambda raw: np.load(io.BytesIO(raw), allow_pickle=False),
    "json": json.loads,
    "txt": bytes.decode,
    "cls": lambda raw: int(raw),
    "bin": lambda raw: np.frombuffer(raw, np.uint8),
}
"""The decoder of a file's bytes, by what follows the first dot of its name."""


class TarDataset:
    """Samples of tar files that are not unpacked: `a/0001.npy` and `a/0001.cls` are two fields of one sample.

    When the dataset is made the headers are read, and then samples by number, in any order: ranks read what is theirs.
    Files must not be compressed.

    Parameters
    ----------
    paths : a tar file, a folder of them, or several; sorted by path
    fields : which fields a sample has, in this order: ("npy", "cls") gives (array, number)
    decoders : field -> function of bytes, beside npy, json, txt, cls (a number) and bin
    """

    def __init__(
        self,
        paths: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
        fields: Sequence[str],
        *,
        decoders: Mapping[str, Callable[[bytes], Any]] | None = None,
    ) -> None:
        known = {**DECODERS, **(decoders or {})}
        for field in fields:
            if field not in known:
                raise ConfigError(f"TarDataset: field {field!r} has no decoder; known are {', '.join(known)}")
        if not fields:
            raise ConfigError("TarDataset: fields names none")
        self.fields, self._decode = tuple(fields), [known[field] for field in fields]
        given = [paths] if isinstance(paths, str | os.PathLike) else paths
        self.files = [file for path in given for file in _tars(Path(path))]
        self._map = maps()
        self._places = [place for n, file in enumerate(self.files) for place in self._indexed(n, file)]
        if not self._places:
            raise DataError(f"TarDataset: no sample in {', '.join(map(str, given))}")

    def __len__(self) -> int:
        return len(self._places)

    def __getitem__(self, index: int) -> tuple[Any, ...]:
        number, key, places = self._places[index]
        whole, found = self._map(self.files[number]), []
        for field, decode, (start, size) in zip(self.fields, self._decode, places, strict=True):
            try:
                found.append(decode(whole[start : start + size].tobytes()))
            except (ValueError, OSError) as error:
                raise DataError(f"{self.files[number]}: {key}.{field} cannot be read: {error}") from error
        return tuple(found)

    def __repr__(self) -> str:
        return f"TarDataset({len(self.files)} files, {len(self):,} samples of {', '.join(self.fields)})"

    def _indexed(self, number: int, file: Path) -> Iterator[tuple[int, str, list[tuple[int, int]]]]:
        """Of each sample: the file, the name, and where its fields lie."""
        found: dict[str, dict[str, tuple[int, int]]] = {}
        try:
            with tarfile.open(file, "r:") as tar:
                for member in tar:
                    if member.isfile():
                        folder, _, name = member.name.rpartition("/")
                        key, _, field = name.partition(".")
                        places = found.setdefault(f"{folder}/{key}".lstrip("/"), {})
                        places[field] = member.offset_data, member.size
        except (OSError, tarfile.TarError) as error:
            raise DataError(f"TarDataset: {file}: {error}") from error
        for key, places in found.items():
            missing = [field for field in self.fields if field not in places]
            if missing:
                raise DataError(f"{file}: sample {key} has no {', '.join(missing)}; it has {', '.join(places)}")
            yield number, key, [places[field] for field in self.fields]


def _tars(path: Path) -> list[Path]:
    if not path.exists():
        raise DataError(f"TarDataset: {path} does not exist (looked from {Path.cwd()})")
    found = sorted(path.glob("*.tar")) if path.is_dir() else [path]
    if not found:
        raise DataError(f"TarDataset: no *.tar in {path}")
    return found
