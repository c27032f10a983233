"""Where tensors are read from: a checkpoint, or any safetensors files in the manner of Hugging Face."""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from fsdpx.checkpoint.commit import current
from fsdpx.checkpoint.disk import opened, read_at
from fsdpx.checkpoint.files import INDEX, STATE, WEIGHTS, FileLayout, Tensors
from fsdpx.checkpoint.format import Contents, TensorEntry, parse
from fsdpx.checkpoint.manifest import MANIFEST, Manifest, is_checkpoint
from fsdpx.errors import CheckpointError
from fsdpx.files import parse_json

__all__ = ["Source", "checkpoint", "weights"]

LARGEST_TEXT = 100_000_000


@dataclass(frozen=True)
class Source:
    """files: name -> contents, of files in `folder`, all headers checked. manifest: if it is a checkpoint."""

    folder: Path
    files: dict[str, Contents]
    manifest: Manifest | None = None

    @cached_property
    def places(self) -> dict[str, tuple[str, TensorEntry]]:
        """Tensor -> its file, and where it lies there."""
        return FileLayout(self.files).places

    @property
    def tensors(self) -> Tensors:
        """In the order of the files."""
        return {name: (entry.code, entry.shape) for name, (_, entry) in self.places.items()}

    def only(self, state: bool) -> Source:
        """The file of the state, or all others."""
        return Source(self.folder, {n: c for n, c in self.files.items() if (n == STATE) is state}, self.manifest)


def checkpoint(path: Path) -> Source:
    """The checkpoint in the folder `path`, or the one before it that a killed job left; headers checked."""
    folder = current(path)
    if not folder.is_dir():
        raise CheckpointError(f"{path}: there is no checkpoint" + _near(path))
    if not is_checkpoint(folder):
        raise CheckpointError(
            f"{folder} is no checkpoint: it has no {MANIFEST}. For safetensors files from elsewhere: load_weights"
        )
    manifest = Manifest.parse(_text(folder / MANIFEST), str(folder / MANIFEST))
    files = {}
    for name in manifest.files:
        where = folder / name
        if name.endswith(".json"):
            text = _text(where)
            manifest.demand(name, text, len(text), (), str(where))
            continue
        files[name] = contents(where)
        manifest.demand(name, files[name].header, files[name].size, files[name].tensors, str(where))
    made = Source(folder, files, manifest)
    _demand_once(made)
    return made


def weights(path: Path) -> Source:
    """The weights of a checkpoint, of one safetensors file, or of a folder with such a file or several and an index."""
    folder = current(path)
    if folder.exists() and not folder.is_dir():
        return _indexed(folder) if folder.suffix == ".json" else Source(folder.parent, {folder.name: contents(folder)})
    if not folder.is_dir():
        raise CheckpointError(f"{path}: there is no such file or folder" + _near(path))
    if is_checkpoint(folder):
        return checkpoint(folder).only(state=False)
    if (folder / INDEX).exists():
        return _indexed(folder / INDEX)
    if (folder / WEIGHTS).exists():
        return Source(folder, {WEIGHTS: contents(folder / WEIGHTS)})
    raise CheckpointError(f"{folder}: no {MANIFEST}, {INDEX} or {WEIGHTS} in it, but {_names(folder)}")


def contents(path: Path) -> Contents:
    """The checked header of a file; CheckpointError also if it cannot be read."""
    try:
        with opened(path) as fd:

            def read(count: int) -> bytes:
                data = bytearray(count)
                read_at(fd, data, 0)
                return bytes(data)

            return parse(read, os.fstat(fd).st_size, str(path))
    except FileNotFoundError:
        raise CheckpointError(f"{path}: the file is missing") from None


def _indexed(path: Path) -> Source:
    """An index says which tensor is in which file; files and index must say the same."""
    try:
        table = parse_json(_text(path))
        names = table["weight_map"]
        if not all(isinstance(k, str) and isinstance(v, str) for k, v in names.items()):
            raise ValueError("weight_map must map texts to texts")
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{path}: this is no index of safetensors files: {error}") from None
    files = {}
    for file in sorted(set(names.values())):
        if Path(file).name != file or file in ("", ".", "..") or "\0" in file or "\\" in file:
            raise CheckpointError(f"{path}: {file!r} is no name of a file beside it")
        files[file] = contents(path.parent / file)
    made = Source(path.parent, files)
    _demand_once(made)
    for name in names.keys() ^ made.places.keys():
        raise CheckpointError(f"{path}: tensor {name!r} is in the index or in a file, but not in both")
    for name, (file, _) in made.places.items():
        if names[name] != file:
            raise CheckpointError(f"{path}: tensor {name!r} is in {file}, the index says {names[name]}")
    return made


def _demand_once(source: Source) -> None:
    seen: dict[str, str] = {}
    for file, name, _ in FileLayout(source.files).tensors():
        if name in seen:
            raise CheckpointError(f"{source.folder}: tensor {name!r} is in {seen[name]} and in {file}")
        seen[name] = file


def _text(path: Path) -> bytes:
    try:
        with opened(path) as fd:
            data = bytearray(min(os.fstat(fd).st_size, LARGEST_TEXT))
            read_at(fd, data, 0)
            return bytes(data)
    except FileNotFoundError:
        raise CheckpointError(f"{path}: the file is missing") from None


def _near(path: Path) -> str:
    return f"; in {path.parent} there is {_names(path.parent)}" if path.parent.is_dir() else ""


def _names(folder: Path) -> str:
    names = sorted(os.listdir(folder))
    return (", ".join(names[:8]) + (" ..." if len(names) > 8 else "")) or "nothing"
