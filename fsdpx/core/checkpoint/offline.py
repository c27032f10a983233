"""Checkpoints and safetensors files without a trainer: looked at, compared and converted by one process, in blocks."""

from __future__ import annotations

import math
import os
import secrets
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from fsdpx.core.array.namespace import dtype as dtype_of
from fsdpx.core.base.safe_files import open_file
from fsdpx.core.checkpoint.atomic_commit import Target
from fsdpx.core.checkpoint.format import STATE, STATE_KEY, FileLayout, array_type, code_of, lay_out
from fsdpx.core.checkpoint.load import FLOATS, damaged
from fsdpx.core.checkpoint.local_shards import BLOCK, Held
from fsdpx.core.checkpoint.read import Source, checkpoint, weights
from fsdpx.core.checkpoint.save import read_note
from fsdpx.core.checkpoint.scalars import Scalars
from fsdpx.core.checkpoint.write import Manifest, write
from fsdpx.errors import CheckpointError
from fsdpx.nn.layer import Spec

__all__ = ["Difference", "compare", "convert", "find", "state", "state_text", "verify"]


@dataclass(frozen=True)
class Difference:
    """One tensor of two sources. what: as text. largest: absolute difference of two elements, nan where one is NaN
    and the other is not; None if they cannot be compared."""

    name: str
    what: str
    largest: float | None = None


def find(path: Path) -> Source:
    """A checkpoint with its state, or weights from anywhere; headers checked."""
    found = weights(path)
    return found if found.manifest is None else checkpoint(path)


def state_text(source: Source) -> str | None:
    """The state as JSON, of a checkpoint that has one."""
    return source.files[STATE].metadata.get(STATE_KEY) if STATE in source.files else None


def state(source: Source) -> dict[str, Any]:
    """The state by name, empty where there is none; CheckpointError if it cannot be read."""
    text = state_text(source)
    return {} if text is None else vars(Scalars.parse(text, str(source.folder / STATE)))


def verify(path: Path) -> tuple[Source, list[str]]:
    """The source, and the tensors in it whose bytes are not as written; without a manifest that is unknown."""
    source = find(path)
    return source, damaged(source) if source.manifest is not None else []


def compare(a: Source, b: Source) -> Iterator[Difference]:
    """Every tensor that is not the same in both, by name."""
    for name in sorted(a.places.keys() | b.places.keys()):
        if name not in a.places or name not in b.places:
            yield Difference(name, f"only in {(a if name in a.places else b).folder}")
            continue
        first, second = a.places[name][1], b.places[name][1]
        if first.shape != second.shape:
            yield Difference(name, f"shape {list(first.shape)} and {list(second.shape)}")
            continue
        largest = _largest(_array(a, name), _array(b, name))
        if first.code != second.code:
            yield Difference(name, f"{first.code} and {second.code}", largest)
        elif largest != 0 or any(
            (x.view(np.uint8) != y.view(np.uint8)).any() for x, y in _blocks(_array(a, name), _array(b, name))
        ):
            yield Difference(name, first.code, largest)


def convert(source: Path, target: Path, dtype: str | None, shard_bytes: int | None) -> FileLayout:
    """Write the weights of `source` in another format, in one file or several of up to `shard_bytes`, into the folder
    `target`. What else a checkpoint holds comes along unchanged. Digests of the source are checked before.
    CheckpointError if `target` is where the source lies: once rounded, it could not be restored."""
    found, wrong = verify(source)
    if target.exists() and any(os.path.samefile(target, place) for place in (source, found.folder) if place.exists()):
        raise CheckpointError(f"{target}: source and target are the same, which would be lost: name another folder")
    if wrong:
        raise CheckpointError(f"{found.folder}: damaged: the digest of {', '.join(wrong[:5])} does not fit")
    text = state_text(found)
    code = None if dtype is None else code_of(dtype_of(dtype))
    floats, rest = found.only(state=False).places, found.only(state=True).places
    made = lay_out(
        {n: (code if code and e.code in FLOATS else e.code, e.shape) for n, (_, e) in floats.items()},
        {n: (e.code, e.shape) for n, (_, e) in rest.items()},
        text,
        shard_bytes,
    )
    made = replace(made, note=read_note(found))
    opened = Target.open(target, secrets.token_hex(4), made)
    try:
        sums = write(opened.partial, made, _pieces(found))
        opened.commit(made, Manifest.of(made, sums.tolist()))
    except BaseException:
        opened.abandon()
        raise
    return made


def _pieces(source: Source) -> Iterator[Held]:
    for name, (_, entry) in source.places.items():
        yield Held(name, _array(source, name), 0, Spec(entry.shape), 0, 1)


def _array(source: Source, name: str) -> np.ndarray:
    """The flat tensor, mapped: read where it is looked at."""
    file, entry = source.places[name]
    dtype = array_type(entry.code)
    if entry.elements == 0:
        return np.empty(0, dtype)
    with open_file(source.folder / file, ours=False) as opened:
        return np.memmap(opened, dtype, "r", entry.start, (entry.elements,))


def _largest(a: np.ndarray, b: np.ndarray) -> float:
    """Of absolute differences; both NaN is none."""
    largest = 0.0
    for x, y in _blocks(a, b):
        x64, y64 = x.astype(np.float64), y.astype(np.float64)
        with np.errstate(invalid="ignore", over="ignore"):
            apart = np.abs(x64 - y64)
        alike = (x64 == y64) | (np.isnan(x64) & np.isnan(y64))
        found = float(np.where(alike, 0.0, apart).max())
        if math.isnan(found):
            return found
        largest = max(largest, found)
    return largest


def _blocks(a: np.ndarray, b: np.ndarray) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    step = BLOCK // 8
    for at in range(0, a.size, step):
        yield a[at : at + step], b[at : at + step]
