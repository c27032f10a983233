"""Inspect, compare and convert checkpoints and safetensors files in a single process, without a trainer. Tensors are
read block by block."""

from __future__ import annotations

import math
import os
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from fsdpx.core.array.namespace import parse_dtype
from fsdpx.core.base.dataclass import dataclass, replace
from fsdpx.core.base.messages import ProgressCallback, reporting_if_slow
from fsdpx.core.base.safe_files import open_file
from fsdpx.core.checkpoint.atomic_commit import SaveTarget
from fsdpx.core.checkpoint.format import (
    STATE_FILE_NAME,
    STATE_KEY,
    FileLayout,
    code_to_dtype,
    dtype_to_code,
    lay_out_files,
)
from fsdpx.core.checkpoint.load import FLOATS, list_damaged_tensors
from fsdpx.core.checkpoint.local_shards import BLOCK_BYTES, LocalShard
from fsdpx.core.checkpoint.read import CheckpointSource, open_checkpoint, open_weights
from fsdpx.core.checkpoint.save import read_run_description
from fsdpx.core.checkpoint.scalars import CheckpointScalars
from fsdpx.core.checkpoint.write import Manifest, write_tensor_shards
from fsdpx.errors import CheckpointError
from fsdpx.nn.layer import ParameterSpec

__all__ = [
    "TensorDifference",
    "compare_sources",
    "convert_weights",
    "open_and_list_damaged_tensors",
    "open_checkpoint_source",
    "read_state",
    "read_state_text",
]


@dataclass(frozen=True)
class TensorDifference:
    """How a tensor differs between two checkpoints.

    Attributes
    ----------
    what : description of the difference
    largest : largest absolute difference between corresponding elements; nan if an element is NaN in only one of the
        tensors; None if the tensors cannot be compared
    """

    name: str
    what: str
    largest: float | None = None


def open_checkpoint_source(path: Path) -> CheckpointSource:
    """Open a checkpoint (weights and training state) or safetensors files from elsewhere (only weights). Check the
    headers of all files."""
    source = open_weights(path)
    return source if source.manifest is None else open_checkpoint(path)


def read_state_text(source: CheckpointSource) -> str | None:
    """Return the scalar training state (steps, seed, ...) of a checkpoint as JSON, or None if there are only
    weights."""
    return source.files[STATE_FILE_NAME].metadata.get(STATE_KEY) if STATE_FILE_NAME in source.files else None


def read_state(source: CheckpointSource) -> dict[str, Any]:
    """Return the scalar training state as a dict of the fields of `CheckpointScalars`, or an empty dict if there are
    only weights. Raise CheckpointError if the state cannot be parsed."""
    text = read_state_text(source)
    return {} if text is None else vars(CheckpointScalars.from_json(text, str(source.folder / STATE_FILE_NAME)))


def open_and_list_damaged_tensors(path: Path) -> tuple[CheckpointSource, list[str]]:
    """Open a checkpoint or other safetensors files. Return the opened files, and a list of the names of the tensors
    whose checksums do not match. The list is empty for files without a manifest, because they have no checksums."""
    source = open_checkpoint_source(path)
    if source.manifest is None:
        return source, []
    with reporting_if_slow(True, f"checking blocks of {path}", None) as count:
        return source, list_damaged_tensors(source, count)


def compare_sources(a: CheckpointSource, b: CheckpointSource) -> Iterator[TensorDifference]:
    """Yield a `TensorDifference` for each tensor that differs between two checkpoints, sorted by name."""
    names = sorted(a.locations.keys() | b.locations.keys())
    with reporting_if_slow(True, "comparing tensors", None) as count:
        for done, name in enumerate(names):
            count(done, len(names))
            if name not in a.locations or name not in b.locations:
                yield TensorDifference(name, f"only in {(a if name in a.locations else b).folder}")
                continue
            first, second = a.locations[name][1], b.locations[name][1]
            if first.shape != second.shape:
                yield TensorDifference(name, f"shape {list(first.shape)} and {list(second.shape)}")
                continue
            largest = _compute_largest_difference(_memory_map_tensor(a, name), _memory_map_tensor(b, name))
            if first.code != second.code:
                yield TensorDifference(name, f"{first.code} and {second.code}", largest)
            elif largest != 0 or any(
                (x.view(np.uint8) != y.view(np.uint8)).any()
                for x, y in _iterate_block_pairs(_memory_map_tensor(a, name), _memory_map_tensor(b, name))
            ):
                yield TensorDifference(name, first.code, largest)


def convert_weights(source: Path, target: Path, dtype: str | None, shard_bytes: int | None) -> FileLayout:
    """Write the weights in `source` into the folder `target`, with another dtype or other file sizes. Return the layout
    of the new files.

    Optimizer state and scalars of a checkpoint are copied unchanged. `dtype` is the name of the new dtype; None keeps
    the old one. `shard_bytes` is the maximum number of bytes per weights file; None means one file. Raise
    CheckpointError if a checksum of the source does not match. Also raise it if `target` is the source itself, because
    the original weights would be lost."""
    verified, wrong = open_and_list_damaged_tensors(source)
    if target.exists() and any(
        os.path.samefile(target, place) for place in (source, verified.folder) if place.exists()
    ):
        raise CheckpointError(f"{target}: source and target are the same, which would be lost: name another folder")
    if wrong:
        raise CheckpointError(f"{verified.folder}: damaged: the digest of {', '.join(wrong[:5])} does not fit")
    text = read_state_text(verified)
    code = None if dtype is None else dtype_to_code(parse_dtype(dtype))
    floats, rest = (
        verified.select_state_or_weights(state=False).locations,
        verified.select_state_or_weights(state=True).locations,
    )
    layout = lay_out_files(
        {n: (code if code and e.code in FLOATS else e.code, e.shape) for n, (_, e) in floats.items()},
        {n: (e.code, e.shape) for n, (_, e) in rest.items()},
        text,
        shard_bytes,
    )
    layout = replace(layout, note=read_run_description(verified))
    opened = SaveTarget.lock_and_create_files(target, secrets.token_hex(4), layout)
    try:
        with reporting_if_slow(True, "writing tensors", None) as count:
            sums = write_tensor_shards(opened.partial, layout, _iterate_shards(verified, count))
        opened.commit(layout, Manifest.from_layout(layout, sums.tolist()))
    except BaseException:
        opened.abandon()
        raise
    return layout


def _iterate_shards(source: CheckpointSource, count: ProgressCallback) -> Iterator[LocalShard]:
    for done, (name, (_, entry)) in enumerate(source.locations.items()):
        count(done, len(source.locations))
        yield LocalShard(name, _memory_map_tensor(source, name), 0, ParameterSpec(entry.shape), 0, 1)


def _memory_map_tensor(source: CheckpointSource, name: str) -> np.ndarray:
    """Return a tensor as a flat memory-mapped array. Only elements that are accessed are read from disk."""
    file, entry = source.locations[name]
    dtype = code_to_dtype(entry.code)
    if entry.elements == 0:
        return np.empty(0, dtype)
    with open_file(source.folder / file, ours=False) as opened:
        return np.memmap(opened, dtype, "r", entry.start, (entry.elements,))


def _compute_largest_difference(a: np.ndarray, b: np.ndarray) -> float:
    """Return the largest absolute difference between corresponding elements, computed in float64. Two NaNs count as
    equal. If an element is NaN in only one of the arrays, return nan."""
    largest = 0.0
    for x, y in _iterate_block_pairs(a, b):
        x64, y64 = x.astype(np.float64), y.astype(np.float64)
        with np.errstate(invalid="ignore", over="ignore"):
            apart = np.abs(x64 - y64)
        alike = (x64 == y64) | (np.isnan(x64) & np.isnan(y64))
        largest_difference = float(np.where(alike, 0.0, apart).max())
        if math.isnan(largest_difference):
            return largest_difference
        largest = max(largest, largest_difference)
    return largest


def _iterate_block_pairs(a: np.ndarray, b: np.ndarray) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    step = BLOCK_BYTES // 8
    for offset in range(0, a.size, step):
        yield a[offset : offset + step], b[offset : offset + step]
