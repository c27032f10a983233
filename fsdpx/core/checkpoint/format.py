"""The file format of a checkpoint: safetensors headers, dtypes, checksums and file names, and functions that read,
write and flush files."""

from __future__ import annotations

import json
import math
import os
import stat
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from fsdpx.core.array.namespace import parse_dtype
from fsdpx.core.base.dataclass import dataclass, field
from fsdpx.core.base.safe_files import parse_json
from fsdpx.errors import CheckpointError

__all__ = [
    "INDEX_FILE_NAME",
    "MAX_TEXT_BYTES",
    "NOTE_FILE_NAME",
    "STATE_FILE_NAME",
    "STATE_KEY",
    "WEIGHTS_FILE_NAME",
    "FileHeader",
    "FileLayout",
    "PartialCrc",
    "TensorEntry",
    "Tensors",
    "advise_read_ahead",
    "cast_array",
    "code_to_dtype",
    "compute_crc_from_xor",
    "create_zero_filled_file",
    "dtype_to_code",
    "identify_other_format",
    "lay_out_files",
    "make_file_header",
    "make_index_json",
    "open_regular_file",
    "parse_header",
    "read_at",
    "split_into_files",
    "sync_file",
    "sync_folder",
    "write_at",
]  # fmt: skip


def cast_array(array: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """Convert `array` to `dtype`, or return it unchanged if it already has that dtype. Values that overflow become Inf
    without a warning."""
    if array.dtype == dtype:
        return array
    with np.errstate(over="ignore", invalid="ignore", under="ignore"):
        if dtype.name == "bfloat16" and array.dtype == np.float64:
            array = _round_to_odd_float32(array)
        return array.astype(dtype)


def _round_to_odd_float32(array: np.ndarray) -> np.ndarray:
    """Convert a float64 array to float32 by rounding to odd: a value that float32 cannot represent becomes the neighbor
    whose last bit is 1.

    Rounding the result to bfloat16 then gives the same bits as rounding the float64 values directly (Boldo and
    Melquiond, 2008, "Emulation of FMA and correctly rounded sums"). ml_dtypes alone would round twice."""
    near = array.astype(np.float32)
    back = near.astype(np.float64)
    bits = near.view(np.uint32)
    inexact = (back != array) & ~np.isnan(array)
    # undo rounding away from zero, so that all values are rounded toward zero
    bits -= (inexact & (np.abs(back) > np.abs(array))).astype(np.uint32)
    bits |= inexact.astype(np.uint32)
    return near


ONES = 0xFFFFFFFF
POLYNOMIAL = 0xEDB88320  # CRC-32 polynomial with reflected bits: the highest bit is the coefficient of x**0
PAGE_OF_ZEROS = memoryview(bytes(4096))  # for up to this many zeros, zlib is faster than _multiply_polynomials


class PartialCrc:
    """This rank's contribution to the CRC-32 of a tensor whose bytes several ranks read or write. Bytes must be added
    in ascending order of their position in the tensor."""

    __slots__ = ("at", "value")

    def __init__(self) -> None:
        self.at, self.value = 0, 0

    def add_bytes(self, start: int, data: Any) -> None:
        """Add `data`, the bytes of the tensor that begin at byte `start`."""
        assert start >= self.at, "parts of a tensor ascend"
        state = _append_zeros_to_crc(self.value, start - self.at)
        self.value = zlib.crc32(data, state ^ ONES) ^ ONES
        self.at = start + len(data)

    def get_crc_share(self, nbytes: int) -> int:
        """Return the contribution of the bytes added so far to the CRC-32 of a tensor of `nbytes` bytes. The xor of all
        ranks' contributions is passed to `compute_crc_from_xor`."""
        return _append_zeros_to_crc(self.value, nbytes - self.at)


def compute_crc_from_xor(sums: int, nbytes: int) -> int:
    """Return the CRC-32 of a tensor of `nbytes` bytes. `sums` is the xor of the values that `PartialCrc.get_crc_share`
    returned on all ranks."""
    return sums ^ _append_zeros_to_crc(ONES, nbytes) ^ ONES


def _append_zeros_to_crc(state: int, zeros: int) -> int:
    """Return the CRC state after appending `zeros` zero bytes."""
    if state == 0 or zeros == 0:
        return state
    if zeros <= len(PAGE_OF_ZEROS):
        return zlib.crc32(PAGE_OF_ZEROS[:zeros], state ^ ONES) ^ ONES
    return _multiply_polynomials(state, _compute_power_of_x(zeros))


@lru_cache(maxsize=1024)
def _compute_power_of_x(nbytes: int) -> int:
    """Return x ** (8 nbytes) modulo the CRC polynomial."""
    result, square = 1 << 31, 1 << 23  # the polynomials 1 and x**8, with reflected bits
    while nbytes:
        if nbytes & 1:
            result = _multiply_polynomials(result, square)
        square = _multiply_polynomials(square, square)
        nbytes >>= 1
    return result


def _multiply_polynomials(a: int, b: int) -> int:
    """Return the product of two polynomials modulo the CRC polynomial."""
    product = 0
    while a:
        if a & 0x80000000:
            product ^= b
        a = a << 1 & ONES
        b = b >> 1 ^ (POLYNOMIAL if b & 1 else 0)
    return product


MAX_HEADER_BYTES = 100_000_000
"""Maximum size of a header in bytes. The reference implementation of safetensors has the same limit."""

LENGTH_BYTES = 8
"""Size in bytes of the field before the JSON header. The field holds the length of the header in bytes, as a
little-endian integer."""

MAX_DIMS = 64
"""Maximum number of dimensions of a tensor. NumPy has the same limit."""

ITEM_SIZES = {
    "U64": 8, "I64": 8, "F64": 8, "C64": 8, "F32": 4, "U32": 4, "I32": 4, "BF16": 2, "F16": 2, "U16": 2, "I16": 2,
    "F8_E8M0": 1, "F8_E4M3": 1, "F8_E5M2": 1, "I8": 1, "U8": 1, "BOOL": 1,
}  # fmt: skip
"""Number of bytes per element for each dtype code, in the order in which the `safetensors` library sorts tensors."""

DTYPE_NAMES = {
    "F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bf16", "I64": "int64", "I32": "int32",
    "I16": "int16", "I8": "int8", "U64": "uint64", "U32": "uint32", "U16": "uint16", "U8": "uint8", "BOOL": "bool",
}  # fmt: skip


@dataclass(frozen=True)
class TensorEntry:
    """A tensor in a file: its dtype code, its shape, and its byte range [start, stop), counted from the start of the
    file."""

    code: str
    shape: tuple[int, ...]
    start: int
    stop: int

    @property
    def itemsize(self) -> int:
        return ITEM_SIZES[self.code]

    @property
    def elements(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True)
class FileHeader:
    """The header of a safetensors file.

    Attributes
    ----------
    tensors : the entry of each tensor, keyed by name, in file order
    metadata : strings, keyed by name
    header : all bytes before the first tensor
    size : size of the file in bytes
    """

    tensors: dict[str, TensorEntry]
    metadata: dict[str, str]
    header: bytes
    size: int


def dtype_to_code(dtype: np.dtype) -> str:
    """Return the safetensors code for a dtype, such as "F32" for float32. Raise CheckpointError if there is none."""
    for code, name in DTYPE_NAMES.items():
        if dtype.name == ("bfloat16" if name == "bf16" else name):
            return code
    raise CheckpointError(f"arrays of {dtype} cannot be saved: choose one of {', '.join(DTYPE_NAMES.values())}")


def code_to_dtype(code: str) -> np.dtype:
    """Return the dtype for a safetensors code, such as float32 for "F32". Raise CheckpointError if there is none."""
    if code not in DTYPE_NAMES:
        raise CheckpointError(f"tensors of format {code} cannot be loaded: those of {', '.join(DTYPE_NAMES)} can")
    return parse_dtype(DTYPE_NAMES[code])


def make_file_header(
    tensors: Mapping[str, tuple[str, tuple[int, ...]]], metadata: Mapping[str, str] | None = None
) -> FileHeader:
    """Make the header of a file that contains these tensors. The header is byte-identical to the one that the
    `safetensors` library would write. `tensors` maps each name to (dtype code, shape).

    Tensors are sorted by dtype (wide dtypes first, so that all tensors are aligned), then by name. The header is JSON
    without spaces, padded at the end with spaces to a multiple of 8 bytes. Metadata entries are sorted by name."""
    order = list(ITEM_SIZES)
    names = sorted(tensors, key=lambda name: (order.index(tensors[name][0]), name))
    table: dict[str, Any] = {"__metadata__": dict(sorted(metadata.items()))} if metadata else {}
    offset, places = 0, {}
    for name in names:
        code, shape = tensors[name]
        places[name] = (offset, offset + ITEM_SIZES[code] * math.prod(shape))
        table[name] = {"dtype": code, "shape": list(shape), "data_offsets": list(places[name])}
        offset = places[name][1]
    text = json.dumps(table, ensure_ascii=False, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    base = LENGTH_BYTES + len(text)
    header = len(text).to_bytes(LENGTH_BYTES, "little") + text
    entries = {n: TensorEntry(*tensors[n], base + start, base + stop) for n, (start, stop) in places.items()}
    return FileHeader(entries, dict(metadata or {}), header, base + offset)


_FROM_PYTORCH = (
    "safetensors.torch.save_file(torch.load(path, weights_only=True), 'model.safetensors') converts the weights of "
    "PyTorch"
)
_OTHER_FORMATS = {
    b"PK\x03\x04": "a zip file, as torch.save and numpy.savez write: " + _FROM_PYTORCH
    + ", and load_parameters(dict(numpy.load(path))) takes arrays of NumPy",
    **{bytes([0x80, protocol]): f"a pickle, as torch.save writes: {_FROM_PYTORCH}" for protocol in range(2, 6)},
    b"\x89HDF\r\n\x1a\n": "an HDF5 file: read its arrays with h5py, and pass them to load_parameters as a dict",
}  # fmt: skip
"""Formats other than safetensors, keyed by the first bytes of a file. Each value names the format and says how to
convert it."""


def identify_other_format(start: bytes) -> str:
    """Return the name of the format of a file that begins with the bytes `start`, with advice on how to convert it.
    Return "" if the format is unknown."""
    return next((text for first, text in _OTHER_FORMATS.items() if start.startswith(first)), "")


def parse_header(read: Any, size: int, where: str) -> FileHeader:
    """Parse and check the header of a file of `size` bytes. `read(n)` returns the first n bytes of the file, and
    `where` names the file in error messages.

    Raise CheckpointError unless the header is well-formed and each remaining byte of the file belongs to exactly one
    tensor."""

    def make_error(what: str) -> CheckpointError:
        return CheckpointError(f"{where}: {what}")

    if size < LENGTH_BYTES:
        raise make_error(f"truncated: {size} bytes are no safetensors file")
    start = read(LENGTH_BYTES)
    length = int.from_bytes(start, "little")
    if length > MAX_HEADER_BYTES:
        if other := identify_other_format(start):
            raise make_error(f"this is no safetensors file, but {other}")
        raise make_error(
            f"the header would have {length} bytes, more than {MAX_HEADER_BYTES}: this is no safetensors file"
        )
    if LENGTH_BYTES + length > size:
        raise make_error(f"truncated: the header has {length} bytes, the file {size}")
    head = read(LENGTH_BYTES + length)
    if len(head) != LENGTH_BYTES + length:
        raise make_error(f"truncated: {len(head)} bytes of a header of {length} can be read")
    if head[LENGTH_BYTES : LENGTH_BYTES + 1] != b"{":
        raise make_error("the header does not begin with '{': this is no safetensors file")
    try:
        table = parse_json(head[LENGTH_BYTES:])
    except ValueError as error:
        raise make_error(f"the header is no JSON of unique names: {error}") from None
    metadata = table.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
        raise make_error("__metadata__ must map texts to texts")
    entries = {name: _parse_entry(name, row, LENGTH_BYTES + length, make_error) for name, row in table.items()}
    ordered = dict(sorted(entries.items(), key=lambda item: (item[1].start, item[1].stop)))
    _require_no_gaps_or_overlaps(ordered, LENGTH_BYTES + length, size, make_error)
    return FileHeader(ordered, metadata, head, size)


def _parse_entry(name: str, row: Any, base: int, make_error: Any) -> TensorEntry:
    if not isinstance(row, dict) or set(row) != {"dtype", "shape", "data_offsets"}:
        raise make_error(f"tensor {name!r} needs dtype, shape and data_offsets, and nothing else")
    code, shape, offsets = row["dtype"], row["shape"], row["data_offsets"]
    if not isinstance(code, str) or code not in ITEM_SIZES:
        raise make_error(f"tensor {name!r} has the unknown dtype {code!r}")
    if not _is_list_of_counts(shape, MAX_DIMS) or not _is_list_of_counts(offsets, 2) or len(offsets) != 2:
        raise make_error(f"tensor {name!r}: shape {shape!r} and data_offsets {offsets!r} must be lists of integers")
    start, stop = offsets
    if stop - start != ITEM_SIZES[code] * math.prod(shape):
        raise make_error(f"tensor {name!r}: {code} of shape {shape} does not have {stop - start} bytes")
    return TensorEntry(code, tuple(shape), base + start, base + stop)


def _is_list_of_counts(values: Any, max_length: int) -> bool:
    fits = isinstance(values, list) and len(values) <= max_length
    return fits and all(type(v) is int and 0 <= v < 1 << 63 for v in values)


def _require_no_gaps_or_overlaps(entries: Mapping[str, TensorEntry], base: int, size: int, make_error: Any) -> None:
    offset = base
    for name, entry in entries.items():
        if entry.start != offset:
            kind = "a hole" if entry.start > offset else "an overlap"
            raise make_error(
                f"{kind} before tensor {name!r}: it begins at byte {entry.start}, the one before ends at {offset}"
            )
        offset = entry.stop
    if offset > size:
        raise make_error(f"truncated: {size} bytes, its tensors need {offset}")
    if offset < size:
        raise make_error(f"{size - offset} bytes after the last tensor belong to none")


BINARY = getattr(os, "O_BINARY", 0)
NON_BLOCKING_FLAGS = getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_NOCTTY", 0)
"""Flags that keep `os.open` from blocking. Without them, opening a named pipe would wait until another process opens
the other end."""


def write_at(fd: int, data: Any, offset: int) -> None:
    """Write all of `data` to the file, starting at byte `offset` of the file."""
    view = memoryview(data).cast("B")
    while len(view):
        done = _write_once(fd, view, offset)
        view, offset = view[done:], offset + done


def read_at(fd: int, data: Any, offset: int) -> None:
    """Fill the buffer `data` with bytes from the file, starting at byte `offset` of the file. Raise CheckpointError if
    the file is too short."""
    view = memoryview(data).cast("B")
    while len(view):
        done = _read_part_into(fd, view, offset)
        if done == 0:
            raise CheckpointError(f"truncated: the file ends at byte {offset}, {len(view)} more are needed")
        view, offset = view[done:], offset + done


def advise_read_ahead(fd: int, offset: int, count: int) -> None:
    """Tell the operating system that `count` bytes, beginning at byte `offset`, will be needed soon, so that it starts
    reading them. Do nothing on systems without `posix_fadvise`."""
    if hasattr(os, "posix_fadvise"):
        os.posix_fadvise(fd, offset, count, os.POSIX_FADV_WILLNEED)


def _write_once(fd: int, view: memoryview, offset: int) -> int:
    if hasattr(os, "pwrite"):
        return os.pwrite(fd, view, offset)
    os.lseek(fd, offset, os.SEEK_SET)
    return os.write(fd, view)


def _read_part_into(fd: int, view: memoryview, offset: int) -> int:
    if hasattr(os, "preadv"):
        return os.preadv(fd, [view], offset)
    os.lseek(fd, offset, os.SEEK_SET)
    data = os.read(fd, len(view))
    view[: len(data)] = data
    return len(data)


@contextmanager
def open_regular_file(path: Path, writing: bool = False) -> Iterator[int]:
    """Context manager that opens a file and yields its descriptor. It raises CheckpointError if `path` is a folder, a
    named pipe or a device."""
    # check before `os.open`, because opening a device can have side effects
    _require_regular_file(path, os.stat(path))
    fd = os.open(path, (os.O_WRONLY if writing else os.O_RDONLY) | BINARY | NON_BLOCKING_FLAGS)
    try:
        _require_regular_file(path, os.fstat(fd))
        yield fd
    finally:
        os.close(fd)


def _require_regular_file(path: Path, status: os.stat_result) -> None:
    if not stat.S_ISREG(status.st_mode):
        raise CheckpointError(f"{path}: this is a folder, a pipe or a device where a file should be")


def create_zero_filled_file(path: Path, size: int) -> None:
    """Create a file of `size` zero bytes. Raise FileExistsError if the file already exists."""
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | BINARY, 0o666)
    try:
        os.ftruncate(fd, size)
    finally:
        os.close(fd)


def sync_file(fd: int) -> None:
    """Flush an open file to disk (fsync)."""
    os.fsync(fd)


def sync_folder(path: Path) -> None:
    """Flush the directory entries of a folder to disk. Do nothing on systems that cannot open folders (Windows)."""
    if os.name == "posix":
        fd = os.open(path, os.O_RDONLY)
        try:
            sync_file(fd)
        finally:
            os.close(fd)


MAX_TEXT_BYTES = 100_000_000
"""Maximum number of bytes that are read from a manifest or an index."""
WEIGHTS_FILE_NAME = "model.safetensors"
INDEX_FILE_NAME = "model.safetensors.index.json"
STATE_FILE_NAME = "state.safetensors"
NOTE_FILE_NAME = "written.json"
STATE_KEY = "fsdpx"
"""Metadata key in `STATE_FILE_NAME` that stores the `CheckpointScalars` as JSON."""

Tensors = dict[str, tuple[str, tuple[int, ...]]]
"""The (dtype code, shape) of each tensor, keyed by tensor name."""


@dataclass(frozen=True)
class FileLayout:
    """The contents of a checkpoint's files, without the tensor data.

    Attributes
    ----------
    files : the header of each safetensors file, keyed by file name
    texts : the contents of each text file, keyed by file name
    note : contents of `NOTE_FILE_NAME`, a description of the run that writes the files; no checksum covers it, because
        it may differ between otherwise equal checkpoints
    """

    files: dict[str, FileHeader]
    texts: dict[str, bytes] = field(default_factory=dict)
    note: bytes | None = None

    @cached_property
    def locations(self) -> dict[str, tuple[str, TensorEntry]]:
        """The (file name, entry) of each tensor, keyed by tensor name."""
        return {name: (file, entry) for file, name, entry in self.iterate_tensors()}

    def iterate_tensors(self) -> Iterator[tuple[str, str, TensorEntry]]:
        """Yield (file name, tensor name, entry) for each tensor. Arrays of checksums have one element per tensor, in
        this order."""
        for file, contents in self.files.items():
            for name, entry in contents.tensors.items():
                yield file, name, entry


def lay_out_files(weights: Tensors, slots: Tensors | None, state: str | None, shard_bytes: int | None) -> FileLayout:
    """Return the layout of the files of a checkpoint.

    `weights` holds the tensors of the model, in the order in which they are distributed over files. `slots` (optimizer
    tensors) and `state` (a `CheckpointScalars` as JSON) go into a separate file (`STATE_FILE_NAME`), which is written
    only if `state` is not None. `shard_bytes` is the maximum number of tensor bytes in one weights file (a larger
    tensor gets a file of its own). If it is None, all weights go into one file."""
    groups = [weights] if shard_bytes is None else split_into_files(weights, shard_bytes)
    count = len(groups)
    numbered = [f"model-{i:05d}-of-{count:05d}.safetensors" for i in range(1, count + 1)]
    names = [WEIGHTS_FILE_NAME] if count == 1 else numbered
    files = {name: make_file_header(group) for name, group in zip(names, groups, strict=True)}
    texts = {INDEX_FILE_NAME: make_index_json(files)} if len(files) > 1 else {}
    if state is not None:
        files[STATE_FILE_NAME] = make_file_header(slots or {}, {STATE_KEY: state})
    return FileLayout(files, texts)


def split_into_files(tensors: Tensors, max_bytes: int) -> list[Tensors]:
    """Group consecutive tensors into files, so that each file has at most `max_bytes` bytes of tensors or contains only
    one tensor."""
    groups: list[Tensors] = [{}]
    left = max_bytes
    for name, (code, shape) in tensors.items():
        nbytes = ITEM_SIZES[code] * math.prod(shape)
        if groups[-1] and nbytes > left:
            groups.append({})
            left = max_bytes
        groups[-1][name] = (code, shape)
        left -= nbytes
    return groups


def make_index_json(files: Mapping[str, FileHeader]) -> bytes:
    """Return an index of several safetensors files in the format used by Hugging Face, as JSON bytes."""
    total = sum(entry.nbytes for contents in files.values() for entry in contents.tensors.values())
    weights = {name: file for file, contents in files.items() for name in contents.tensors}
    table = {"metadata": {"total_size": total}, "weight_map": weights}
    return (json.dumps(table, indent=2, sort_keys=True, ensure_ascii=False) + "\n").encode()
