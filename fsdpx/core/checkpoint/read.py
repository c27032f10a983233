"""Open and check checkpoints and other safetensors files, and read shards of their tensors."""

from __future__ import annotations

import os
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from fsdpx.core.array.namespace import from_host
from fsdpx.core.base.dataclass import dataclass
from fsdpx.core.base.messages import ProgressCallback
from fsdpx.core.base.safe_files import parse_json
from fsdpx.core.checkpoint.atomic_commit import find_committed_folder
from fsdpx.core.checkpoint.format import (
    INDEX_FILE_NAME,
    LENGTH_BYTES,
    MAX_TEXT_BYTES,
    STATE_FILE_NAME,
    WEIGHTS_FILE_NAME,
    FileHeader,
    FileLayout,
    PartialCrc,
    TensorEntry,
    Tensors,
    advise_read_ahead,
    cast_array,
    code_to_dtype,
    identify_other_format,
    open_regular_file,
    parse_header,
    read_at,
)
from fsdpx.core.checkpoint.local_shards import BLOCK_BYTES, ByteCounter, LocalShard, ShardBlock, iterate_blocks
from fsdpx.core.checkpoint.newest import find_newest_checkpoint
from fsdpx.core.checkpoint.write import MANIFEST_NAME, Manifest, is_checkpoint
from fsdpx.core.state.flat_parameters import ElementRange, Interval, group_nearby_runs, intersect_ranges
from fsdpx.errors import CheckpointError

__all__ = [
    "CheckpointSource",
    "compute_partial_crcs",
    "fill_shards_from_arrays",
    "iterate_block_reads",
    "iterate_byte_ranges_of_rank",
    "open_checkpoint",
    "open_weights",
    "read_elements",
    "read_shards",
]


@dataclass(frozen=True)
class CheckpointSource:
    """Safetensors files in a folder. Their headers have been read and checked.

    Attributes
    ----------
    folder : the folder
    files : the header of each file, keyed by file name
    manifest : list of files with sizes and checksums; None if the files were not written by fsdpx as a checkpoint
    """

    folder: Path
    files: dict[str, FileHeader]
    manifest: Manifest | None = None

    @cached_property
    def locations(self) -> dict[str, tuple[str, TensorEntry]]:
        """The (file name, entry) of each tensor, keyed by tensor name."""
        return FileLayout(self.files).locations

    @property
    def tensors(self) -> Tensors:
        """The (dtype code, shape) of each tensor, keyed by name, in the order in which the tensors are stored."""
        return {name: (entry.code, entry.shape) for name, (_, entry) in self.locations.items()}

    def select_state_or_weights(self, state: bool) -> CheckpointSource:
        """Return a source that has only the training state (`state=True`) or only the weights (`state=False`)."""
        return CheckpointSource(
            self.folder, {n: c for n, c in self.files.items() if (n == STATE_FILE_NAME) is state}, self.manifest
        )


def open_checkpoint(path: Path) -> CheckpointSource:
    """Open the checkpoint `path`. If a job was killed after it had renamed the previous version but before it had given
    the new version the name `path`, open the previous version.

    Only headers and text files are read. Raise CheckpointError if there is no checkpoint, or if its files do not match
    its manifest."""
    folder = find_committed_folder(path)
    if folder.is_file():
        read_header(folder)
        raise CheckpointError(f"{path}: this is a safetensors file, but a checkpoint is a folder; use load_parameters")
    if not folder.is_dir():
        raise CheckpointError(f"{path}: there is no checkpoint" + _describe_nearest_folder(path))
    if not is_checkpoint(folder):
        raise CheckpointError(
            f"{folder} is no checkpoint: it has no {MANIFEST_NAME}"
            + (_describe_newest_checkpoint(folder) or ". For safetensors files from elsewhere: load_parameters")
        )
    manifest = Manifest.parse(_read_small_file(folder / MANIFEST_NAME), str(folder / MANIFEST_NAME))
    files = {}
    for name in manifest.files:
        where = folder / name
        if name.endswith(".json"):
            text = _read_small_file(where)
            manifest.require_file_match(name, text, len(text), (), str(where))
            continue
        files[name] = read_header(where)
        manifest.require_file_match(name, files[name].header, files[name].size, files[name].tensors, str(where))
    source = CheckpointSource(folder, files, manifest)
    _require_unique_tensor_names(source)
    return source


def open_weights(path: Path) -> CheckpointSource:
    """Open the weights at `path`: a checkpoint, a safetensors file, an index of several safetensors files, or a folder
    that contains such an index or a `model.safetensors`.

    Raise CheckpointError if there are no weights, or if a header or the index is invalid."""
    folder = find_committed_folder(path)
    if folder.exists() and not folder.is_dir():
        return (
            _open_indexed_files(folder)
            if folder.suffix == ".json"
            else CheckpointSource(folder.parent, {folder.name: read_header(folder)})
        )
    if not folder.is_dir():
        raise CheckpointError(f"{path}: there is no such file or folder" + _describe_nearest_folder(path))
    if is_checkpoint(folder):
        return open_checkpoint(folder).select_state_or_weights(state=False)
    if (folder / INDEX_FILE_NAME).exists():
        return _open_indexed_files(folder / INDEX_FILE_NAME)
    if (folder / WEIGHTS_FILE_NAME).exists():
        return CheckpointSource(folder, {WEIGHTS_FILE_NAME: read_header(folder / WEIGHTS_FILE_NAME)})
    raise CheckpointError(
        f"{folder}: no {MANIFEST_NAME}, {INDEX_FILE_NAME} or {WEIGHTS_FILE_NAME} in it, but {_join_file_names(folder)}"
        + _describe_file_of_other_format(folder)
    )


def read_header(path: Path) -> FileHeader:
    """Read and check the header of a safetensors file. Raise CheckpointError if the header is invalid or the file is
    missing."""
    try:
        with open_regular_file(path) as fd:

            def read_start(count: int) -> bytes:
                data = bytearray(count)
                read_at(fd, data, 0)
                return bytes(data)

            return parse_header(read_start, os.fstat(fd).st_size, str(path))
    except FileNotFoundError:
        raise CheckpointError(f"{path}: the file is missing") from None


def _open_indexed_files(path: Path) -> CheckpointSource:
    """Open the safetensors files that an index file lists. Raise CheckpointError unless the index lists exactly the
    tensors that the files contain."""
    try:
        table = parse_json(_read_small_file(path))
        names = table["weight_map"]
        if not all(isinstance(k, str) and isinstance(v, str) for k, v in names.items()):
            raise ValueError("weight_map must map texts to texts")
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{path}: this is no index of safetensors files: {error}") from None
    files = {}
    for file in sorted(set(names.values())):
        if Path(file).name != file or file in ("", ".", "..") or "\0" in file or "\\" in file:
            raise CheckpointError(f"{path}: {file!r} is no name of a file in the same folder")
        files[file] = read_header(path.parent / file)
    source = CheckpointSource(path.parent, files)
    _require_unique_tensor_names(source)
    for name in names.keys() ^ source.locations.keys():
        raise CheckpointError(f"{path}: tensor {name!r} is in the index or in a file, but not in both")
    for name, (file, _) in source.locations.items():
        if names[name] != file:
            raise CheckpointError(f"{path}: tensor {name!r} is in {file}, the index says {names[name]}")
    return source


def _require_unique_tensor_names(source: CheckpointSource) -> None:
    seen: dict[str, str] = {}
    for file, name, _ in FileLayout(source.files).iterate_tensors():
        if name in seen:
            raise CheckpointError(f"{source.folder}: tensor {name!r} is in {seen[name]} and in {file}")
        seen[name] = file


def _read_small_file(path: Path) -> bytes:
    try:
        with open_regular_file(path) as fd:
            data = bytearray(min(os.fstat(fd).st_size, MAX_TEXT_BYTES))
            read_at(fd, data, 0)
            return bytes(data)
    except FileNotFoundError:
        raise CheckpointError(f"{path}: the file is missing") from None


def _describe_nearest_folder(path: Path) -> str:
    """Return a phrase to append to the error message about a missing path. The phrase names the newest checkpoint in
    the nearest parent folder that exists. If no such checkpoint is found, the phrase lists the folder's contents."""
    folder = next(folder for folder in path.absolute().parents if folder.is_dir())
    return _describe_newest_checkpoint(folder) or f"; in {folder} there is {_join_file_names(folder)}"


def _describe_newest_checkpoint(folder: Path) -> str:
    """Return a phrase that names the newest checkpoint in a folder, to append to an error message. Return "" if there
    is no checkpoint, or if the name of the newest one contains no number."""
    newest_folder = find_newest_checkpoint(folder)
    return (
        ""
        if newest_folder is None or not re.search("[0-9]", newest_folder.name)
        else f"; the newest in {folder} is {newest_folder.name}"
    )


def _join_file_names(folder: Path) -> str:
    names = sorted(os.listdir(folder))
    return (", ".join(names[:8]) + (" ..." if len(names) > 8 else "")) or "nothing"


def _describe_file_of_other_format(folder: Path) -> str:
    """Return a phrase that describes the first file of another known format in a folder, to append to an error message.
    Return "" if there is no such file."""
    for path in sorted(folder.iterdir()):
        if path.is_file():
            with open_regular_file(path) as fd:
                if other := identify_other_format(os.read(fd, LENGTH_BYTES)):
                    return f"; {path.name} is {other}"
    return ""


MAX_GAP_FACTOR = 8
"""Several runs (ranges of elements in a file) are read in one operation, together with the gaps between them, only if
the full range is at most this many times as long as all the runs together."""


def iterate_byte_ranges_of_rank(sizes: Sequence[int], rank: int, ranks: int) -> Iterator[tuple[int, int, int]]:
    """Split the bytes of all tensors evenly among `ranks` ranks, and yield the byte ranges of rank `rank` as (index of
    the tensor, first byte, number of bytes).

    `sizes` holds the number of bytes of each tensor. No range is longer than `BLOCK_BYTES`, so that each can be read
    in one operation."""
    ends = np.cumsum([0, *sizes]).tolist()
    everything = [ElementRange(a, b) for a, b in zip(ends, ends[1:], strict=False)]
    own_range = ElementRange(ends[-1] * rank // ranks, ends[-1] * (rank + 1) // ranks)
    for piece in intersect_ranges(everything, [own_range]):
        for offset in range(piece.start, piece.stop, BLOCK_BYTES):
            yield piece.have, offset - ends[piece.have], min(BLOCK_BYTES, piece.stop - offset)


def compute_partial_crcs(
    source: CheckpointSource,
    rank: int,
    ranks: int,
    progress: ProgressCallback = lambda done, total: None,
    count: ByteCounter | None = None,
) -> np.ndarray:
    """Read this rank's share of the bytes of all tensors, and return this share's contribution to the CRC-32 of each
    tensor.

    The result is a uint64 array in the order of `FileLayout.iterate_tensors`. The elementwise xor of the results of all
    ranks is the input to `compute_crc_from_xor`. `progress` is a callback (done, total). The number of bytes read is
    added to `count`."""
    tensors = list(FileLayout(source.files).iterate_tensors())
    totals: dict[int, PartialCrc] = defaultdict(PartialCrc)
    buffer = memoryview(bytearray(BLOCK_BYTES))
    with SourceFiles(source, count) as files:
        ranges = list(iterate_byte_ranges_of_rank([entry.nbytes for _, _, entry in tensors], rank, ranks))
        for done, (number, first, size) in enumerate(ranges):
            progress(done, len(ranges))
            (file, _, entry), part = tensors[number], buffer[:size]
            # ask the operating system to read the next blocks while the CRC of this block is computed
            advise_read_ahead(files[file], entry.start + first + size, 2 * BLOCK_BYTES)
            files.read_at(file, part, entry.start + first)
            totals[number].add_bytes(first, part)
    checksums = [totals[n].get_crc_share(entry.nbytes) if n in totals else 0 for n, (_, _, entry) in enumerate(tensors)]
    return np.array(checksums, np.uint64)


def iterate_block_reads(piece: LocalShard, entry: TensorEntry) -> Iterator[tuple[ShardBlock, Iterator[list[Interval]]]]:
    """Yield (block, groups of runs) for each block of a shard. A run is a range of elements in the file. All runs in
    one group are read in one operation, together with the gaps between them."""
    for block in iterate_blocks(piece, entry.itemsize):
        yield block, group_nearby_runs(block.runs, BLOCK_BYTES // entry.itemsize, MAX_GAP_FACTOR)


def read_shards(
    source: CheckpointSource, pieces: Iterable[LocalShard], xp: Any, count: ByteCounter | None = None
) -> None:
    """Fill each shard in `pieces` with elements of the tensor of the same name, converted to the dtype of the shard's
    array. `xp` is the array module of the shards. The number of bytes read is added to `count`."""
    with SourceFiles(source, count) as files:
        for piece in pieces:
            file, entry = source.locations[piece.name]
            dtype = code_to_dtype(entry.code)
            for block, together in iterate_block_reads(piece, entry):
                host = _reuse_or_allocate_read_buffer(block.array, dtype)
                data, offset = host.view(np.uint8).data, 0
                for runs in together:
                    offset += _read_runs_into(files, file, entry, runs, data[offset:])
                assert offset == len(data), f"{piece.name}: runs and elements differ"
                if host is not block.array:
                    block.array[...] = from_host(xp, cast_array(host, np.dtype(block.array.dtype)))


def read_elements(source: CheckpointSource, name: str, runs: Iterable[Interval]) -> np.ndarray:
    """Read the elements of a tensor that lie in `runs`, a series of (start, stop) ranges. Return them concatenated, in
    the dtype of the file. Gaps between runs are not read."""
    file, entry = source.locations[name]
    chosen, dtype = list(runs), code_to_dtype(entry.code)
    host = np.empty(sum(stop - start for start, stop in chosen), dtype)
    data, offset = host.view(np.uint8).data, 0
    with SourceFiles(source) as files:
        for run in chosen:
            offset += _read_runs_into(files, file, entry, [run], data[offset:])
    return host


def fill_shards_from_arrays(arrays: Mapping[str, np.ndarray], pieces: Iterable[LocalShard], xp: Any) -> None:
    """Fill each shard in `pieces` with elements of the full array of the same name, converted to the dtype of the
    shard's array. `xp` is the array module of the shards."""
    for piece in pieces:
        whole = arrays[piece.name].reshape(-1)
        for block in iterate_blocks(piece, whole.itemsize):
            host = np.concatenate([whole[start:stop] for start, stop in block.runs])
            block.array[...] = from_host(xp, cast_array(host, np.dtype(block.array.dtype)))


def _reuse_or_allocate_read_buffer(array: Any, dtype: np.dtype) -> np.ndarray:
    """Return a NumPy array of dtype `dtype` to read a file into: `array` itself if it is a contiguous NumPy array of
    that dtype, otherwise a new array of the same size."""
    if isinstance(array, np.ndarray) and array.dtype == dtype and array.flags.c_contiguous:
        return array
    return np.empty(array.size, dtype)


def _read_runs_into(files: SourceFiles, file: str, entry: TensorEntry, runs: list[Interval], data: memoryview) -> int:
    """Read all `runs` (element ranges of a tensor) in one operation, and copy them to the start of `data`. Return the
    number of bytes copied."""
    size, first, last = entry.itemsize, runs[0][0], runs[-1][1]
    if len(runs) == 1:
        part = data[: (last - first) * size]
        files.read_at(file, part, entry.start + first * size)
        return len(part)
    span = memoryview(bytearray((last - first) * size))
    files.read_at(file, span, entry.start + first * size)
    offset = 0
    for start, stop in runs:
        count = (stop - start) * size
        data[offset : offset + count] = span[(start - first) * size : (stop - first) * size]
        offset += count
    return offset


class SourceFiles(ExitStack):
    """Context manager that opens each file of a checkpoint on first use, and closes all of them at the end. Opening a
    file raises CheckpointError if its size has changed since its header was read. The number of bytes read is added to
    `count`."""

    def __init__(self, source: CheckpointSource, count: ByteCounter | None = None) -> None:
        super().__init__()
        self._source, self._count = source, count or ByteCounter()
        self._open: dict[str, int] = {}

    def __getitem__(self, name: str) -> int:
        if name not in self._open:
            path, wanted = self._source.folder / name, self._source.files[name].size
            fd = self._open[name] = self.enter_context(open_regular_file(path))
            if (size := os.fstat(fd).st_size) != wanted:
                raise CheckpointError(f"{path}: {size} bytes here, {wanted} where its header was read")
        return self._open[name]

    def read_at(self, file: str, data: memoryview, offset: int) -> None:
        """Fill `data` with bytes from `file`, starting at byte `offset` of the file. Raise CheckpointError if the file
        is too short."""
        try:
            read_at(self[file], data, offset)
        except CheckpointError as error:
            raise CheckpointError(f"{self._source.folder / file}: {error}") from None
        self._count.nbytes += len(data)
