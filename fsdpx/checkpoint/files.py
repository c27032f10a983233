"""The files of a checkpoint before they are written: their headers and sizes, the same on every rank."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property

from fsdpx.checkpoint.format import SIZES, Contents, TensorEntry, lay

__all__ = ["INDEX", "STATE", "STATE_KEY", "WEIGHTS", "WRITTEN", "FileLayout", "Tensors", "index_of", "lay_out", "split"]

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
STATE = "state.safetensors"
WRITTEN = "written.json"
STATE_KEY = "fsdpx"
"""Where in the metadata of STATE the rest of the state stands, as JSON."""

Tensors = dict[str, tuple[str, tuple[int, ...]]]
"""Name -> (format, shape)."""


@dataclass(frozen=True)
class FileLayout:
    """files: name -> contents. texts: small files that are written as they are. note: says what wrote them; it is in
    no digest, and may differ where all else is the same."""

    files: dict[str, Contents]
    texts: dict[str, bytes] = field(default_factory=dict)
    note: bytes | None = None

    @cached_property
    def places(self) -> dict[str, tuple[str, TensorEntry]]:
        """Tensor -> its file, and where it lies there."""
        return {name: (file, entry) for file, name, entry in self.tensors()}

    def tensors(self) -> Iterator[tuple[str, str, TensorEntry]]:
        """(file, tensor, entry), in the order in which sums over tensors are listed."""
        for file, contents in self.files.items():
            for name, entry in contents.tensors.items():
                yield file, name, entry


def lay_out(weights: Tensors, slots: Tensors | None, state: str | None, shard_bytes: int | None) -> FileLayout:
    """weights: in the order of the model. slots, state: of the second file, if there is a state.
    shard_bytes: the most bytes of tensors in one file of weights (a larger tensor has a file of its own); None: one
    file."""
    groups = [weights] if shard_bytes is None else split(weights, shard_bytes)
    count = len(groups)
    names = [WEIGHTS] if count == 1 else [f"model-{i:05d}-of-{count:05d}.safetensors" for i in range(1, count + 1)]
    files = {name: lay(group) for name, group in zip(names, groups, strict=True)}
    texts = {INDEX: index_of(files)} if len(files) > 1 else {}
    if state is not None:
        files[STATE] = lay(slots or {}, {STATE_KEY: state})
    return FileLayout(files, texts)


def split(tensors: Tensors, most: int) -> list[Tensors]:
    """Consecutive tensors of up to `most` bytes together."""
    groups: list[Tensors] = [{}]
    left = most
    for name, (code, shape) in tensors.items():
        nbytes = SIZES[code] * math.prod(shape)
        if groups[-1] and nbytes > left:
            groups.append({})
            left = most
        groups[-1][name] = (code, shape)
        left -= nbytes
    return groups


def index_of(files: Mapping[str, Contents]) -> bytes:
    """As Hugging Face writes it."""
    total = sum(entry.nbytes for contents in files.values() for entry in contents.tensors.values())
    weights = {name: file for file, contents in files.items() for name in contents.tensors}
    table = {"metadata": {"total_size": total}, "weight_map": weights}
    return (json.dumps(table, indent=2, sort_keys=True, ensure_ascii=False) + "\n").encode()
