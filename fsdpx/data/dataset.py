"""Datasets of arrays, of tokens, and of text as bytes. Tokens and text are read through memory-mapped files."""

from __future__ import annotations

import math
import os
import sysconfig
import zlib
from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import accumulate
from operator import index
from pathlib import Path
from threading import Lock
from tokenize import TokenError
from typing import Any, BinaryIO, Literal, Protocol

import numpy as np

from fsdpx.core.array.namespace import as_array_requiring_unmasked, to_numpy_dtype
from fsdpx.core.base.name_hints import wrap_with_option_check
from fsdpx.core.base.safe_files import describe_read_error, expanduser, open_file
from fsdpx.errors import ConfigError, DataError

__all__ = [
    "ArrayDataset", "Dataset", "OpenFiles", "TextDataset", "TokenDataset", "WindowDataset", "collate",
    "hash_first_sample", "make_file_mapper", "memory_map_array", "python_stdlib_folder", "read_npy_header",
]  # fmt: skip

MAX_OPEN_FILES = 64
"""Maximum number of memory maps that a process keeps open. Each memory map uses a file descriptor."""
_PARSER = Lock()
"""Lock that allows only one thread at a time to parse. Some versions of Python count the nesting depth of their parser
over all threads, and may raise SystemError if several threads parse at once (CPython gh-106905)."""


class OpenFiles:
    """Opens files by path, and keeps the most recently used ones open.

    Each process has its own cache: a forked process opens the files again, since it would otherwise share file
    positions with its parent. Unpickling an `OpenFiles` creates one with an empty cache."""

    def __init__(self, open_: Callable[[Path], Any]) -> None:
        self._open, self._process, self.cache = open_, os.getpid(), lru_cache(MAX_OPEN_FILES)(open_)

    def __call__(self, path: Path) -> Any:
        if self._process != os.getpid():
            self.__init__(self._open)  # type: ignore[misc]
        return self.cache(path)

    def __reduce__(self) -> tuple[Any, ...]:
        return OpenFiles, (self._open,)


def make_file_mapper() -> Callable[[Path], np.ndarray]:
    """Return a function that memory-maps a file as an array of bytes. The most recently used maps stay open."""
    return OpenFiles(_map_file)


def _map_file(file: Path) -> np.ndarray:
    with open_file(file, ours=False) as opened:
        return np.memmap(opened, np.uint8, "r")


class WindowDataset(ABC):
    """Base class of datasets that divide a long sequence into windows of `seq_len + 1` elements. Each window starts
    with the last element of the previous window.

    Sample i is (x, y), where y is x shifted by one element; both have shape `(seq_len,)` and dtype `dtype`."""

    seq_len: int
    dtype: np.dtype[Any]

    @abstractmethod
    def _read_into(self, start: int, out: np.ndarray) -> None:
        """Fill `out` with consecutive elements of the sequence, beginning with element `start`."""

    @abstractmethod
    def __len__(self) -> int: ...

    def __getitem__(self, i: int) -> tuple[np.ndarray, np.ndarray]:
        if not -len(self) <= i < len(self):
            raise IndexError(f"sample {i} of {len(self)}")
        x, y = self.take(np.array([i % len(self)]))
        return x[0], y[0]

    def take(self, indices: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the samples at the given indices (an array of shape `(k,)`; k may be 0) as (x, y), each of shape `(k,
        seq_len)`."""
        rows = np.empty((len(indices), self.seq_len + 1), self.dtype)
        for row, i in zip(rows, indices, strict=True):
            self._read_into(int(i) * self.seq_len, row)
        return np.ascontiguousarray(rows[:, :-1]), np.ascontiguousarray(rows[:, 1:])


class TokenDataset(WindowDataset):
    """Samples of `seq_len` consecutive tokens from a memory-mapped file.

    Sample i is `x = tokens[i * T : i * T + T]` and `y = tokens[i * T + 1 : i * T + T + 1]` with T = seq_len, both
    `(T,)` int32.

    Parameters
    ----------
    path : a `.npy` file with a 1-D array, or a file of raw numbers of `dtype`, as written by `tokens.tofile(path)`
    seq_len : number of tokens in a sample; the file must have at least seq_len + 1 tokens
    dtype : dtype of the raw numbers; ignored for `.npy` files
    """

    dtype = np.dtype(np.int32)  # dtype of the samples, which may differ from the dtype in the file

    @wrap_with_option_check
    def __init__(self, path: str | os.PathLike[str], seq_len: int, *, dtype: Any = np.uint16) -> None:
        if not isinstance(seq_len, int) or seq_len < 1:
            raise ConfigError(f"TokenDataset(seq_len={seq_len!r}): a whole number of tokens, 1 or more, is needed")
        self.path, self.seq_len = expanduser(path), seq_len
        try:
            self.tokens = memory_map_array(self.path, to_numpy_dtype("TokenDataset", dtype))
        except (OSError, ValueError) as error:
            raise DataError(f"TokenDataset: {describe_read_error(error, path)}") from error
        if self.tokens.ndim != 1 or self.tokens.dtype.kind not in "iu":
            shape = f"{self.tokens.dtype}{list(self.tokens.shape)}"
            raise DataError(f"TokenDataset: {path} has {shape}: token numbers in one row are needed")
        if len(self.tokens) < seq_len + 1:
            raise DataError(
                f"TokenDataset: seq_len {seq_len} needs at least {seq_len + 1} tokens, {path} has {len(self.tokens)}"
            )

    def __len__(self) -> int:
        return (len(self.tokens) - 1) // self.seq_len

    def _read_into(self, start: int, out: np.ndarray) -> None:
        found = self.tokens[start : start + len(out)]
        out[...] = found
        if (odd := np.flatnonzero(out != found)).size:
            n = start + int(odd[0])
            raise DataError(f"TokenDataset: {self.path}: token {n:,} is {self.tokens[n]}: it does not fit into 32 bits")

    def __repr__(self) -> str:
        return f"TokenDataset({self.path.name}, {len(self.tokens):,} tokens, seq_len={self.seq_len})"


def memory_map_array(path: Path, dtype: np.dtype[Any]) -> np.ndarray:
    """Memory-map a `.npy` file, or a file of raw numbers of `dtype`. Raise OSError or ValueError if the file cannot be
    mapped."""
    with open_file(path, ours=False) as file:
        if path.suffix != ".npy":
            return np.memmap(file, dtype, "r")
        shape, order, dtype, start = read_npy_header(file, 0, os.fstat(file.fileno()).st_size)
        return np.memmap(file, dtype, "r", start, shape, order)


def read_npy_header(file: BinaryIO, start: int, stop: int) -> tuple[tuple[int, ...], Literal["C", "F"], np.dtype, int]:
    """Read the header of an array that is stored in `.npy` format in an open file, starting at byte `start`. Return the
    shape, memory order and dtype of the array, and the file offset of its first element. Raise OSError or ValueError if
    the array cannot be read or extends beyond byte `stop`."""
    file.seek(start)
    form = np.lib.format
    header = form.read_array_header_1_0 if form.read_magic(file) == (1, 0) else form.read_array_header_2_0
    try:
        with _PARSER:
            shape, by_column, dtype = header(file)
    except (MemoryError, RecursionError, SyntaxError, TokenError, TypeError) as error:
        raise ValueError(f"its header cannot be read: {error!r}") from error
    if dtype.hasobject:
        raise ValueError("Python objects are in it, which are not read")
    if not all(type(n) is int and 0 <= n < 1 << 63 for n in shape):
        raise ValueError(f"it has the shape {shape}, which no array has")
    if file.tell() + math.prod(shape) * dtype.itemsize > stop:
        raise ValueError(f"it is too short for {dtype}{list(shape)}")
    return shape, "F" if by_column else "C", dtype, file.tell()


class Dataset(Protocol):
    """The protocol of datasets. The samples of a dataset are numbered from 0 to `len(dataset) - 1`.

    A dataset may also have a method `take(indices) -> batch` or, like PyTorch and Hugging Face datasets, a method
    `__getitems__(numbers) -> samples`. The loader then reads each batch with a single call of that method."""

    def __len__(self) -> int: ...
    def __getitem__(self, index: int, /) -> Any: ...


class ArrayDataset:
    """Dataset of arrays with one sample per row: `ArrayDataset(x, y)[3]` is `(x[3], y[3])`.

    Parameters
    ----------
    arrays : one or more arrays with samples along dim 0; memory-mapped arrays stay on disk
    """

    def __init__(self, *arrays: Any) -> None:
        if not arrays:
            raise DataError("ArrayDataset() needs at least one array")
        if isinstance(arrays[0], tuple):
            raise ConfigError("ArrayDataset: arrays are given one by one, ArrayDataset(x, y)")
        try:
            self.arrays = tuple(a if hasattr(a, "shape") else np.asarray(a) for a in arrays)
        except ValueError as error:
            raise DataError(f"ArrayDataset: {error}") from error
        if any(a.ndim == 0 for a in self.arrays):
            raise DataError("ArrayDataset: a single number has no samples: dim 0 of every array must be samples")
        counts = [a.shape[0] for a in self.arrays]
        if len(set(counts)) > 1:
            raise DataError(f"ArrayDataset: the arrays have different numbers of samples: {counts}")
        if counts[0] == 0:
            raise DataError("ArrayDataset: the arrays have no samples: the dataset is empty")

    def __len__(self) -> int:
        return int(self.arrays[0].shape[0])

    def __getitem__(self, index: int) -> tuple[Any, ...]:
        return tuple(a[index] for a in self.arrays)

    def take(self, indices: np.ndarray) -> tuple[Any, ...]:
        """Return the rows of each array at the given indices.

        Parameters
        ----------
        indices : sample indices `(k,)`; k may be 0

        Returns
        -------
        tuple of arrays
            k rows of each array of the dataset
        """
        return tuple(a[indices] for a in self.arrays)


def collate(samples: Sequence[Any]) -> Any:
    """Stack samples along a new dim 0. Arrays and numbers become an array; tuples and dicts are stacked entry by
    entry."""
    first = samples[0]
    if isinstance(first, dict):
        return {key: collate([sample[key] for sample in samples]) for key in first}
    if isinstance(first, tuple | list):
        return tuple(collate(column) for column in zip(*samples, strict=True))
    arrays = [as_array_requiring_unmasked(sample) for sample in samples]
    odd = next((a for a in arrays if a.shape != arrays[0].shape), None)
    if odd is not None:
        raise DataError(
            f"samples of shapes {arrays[0].shape} and {odd.shape} do not stack to a batch: "
            "pad them, or pass DataLoader(collate=...); whole arrays go into data.ArrayDataset(x, y)"
        )
    return np.stack(arrays)


def make_empty_batch(batch: Any) -> Any:
    """Return a batch of 0 samples that otherwise has the structure, dtypes and shapes of `batch`."""
    if isinstance(batch, dict):
        return {key: make_empty_batch(value) for key, value in batch.items()}
    if isinstance(batch, tuple | list):
        return tuple(make_empty_batch(value) for value in batch)
    return batch[:0]


def hash_first_sample(dataset: Any) -> int | None:
    """Return a hash of sample 0, so that ranks can check that they have the same dataset. Return None if the sample
    cannot be read, or contains neither numbers nor strings."""
    take = getattr(dataset, "take", None)
    try:
        sample = dataset[0] if take is None else take(np.array([0]))
    except Exception:  # the error is ignored here, since the loader raises it again when it reads the sample
        return None
    parts = [
        a for a in map(_to_array_if_convertible, _iterate_leaves(sample)) if a is not None and a.dtype.kind in "biufcSU"
    ]
    texts = [f"{a.dtype}{a.shape}".encode() + np.ascontiguousarray(a).tobytes() for a in parts]
    return zlib.crc32(b"".join(texts)) if texts else None


def _iterate_leaves(sample: Any) -> Iterator[Any]:
    inner = sample.values() if isinstance(sample, Mapping) else sample if isinstance(sample, tuple | list) else None
    if inner is None:
        yield sample
    else:
        for one in inner:
            yield from _iterate_leaves(one)


def _to_array_if_convertible(value: Any) -> np.ndarray | None:
    try:
        return np.asarray(value)
    # objects that are neither arrays nor numbers are left out of the hash
    except (TypeError, ValueError, RuntimeError):
        return None


SKIPPED_FOLDERS = ("__pycache__", "site-packages", "dist-packages", "node_modules")
MAX_STRETCHES = 16  # the text is divided into at most this many contiguous parts (stretches)
STRETCH_BYTES = 1 << 16  # minimum size of a stretch in bytes, if there is more than one stretch

Split = Literal["train", "validation", "all"]
Piece = tuple[Path, int, int]


def python_stdlib_folder() -> Path:
    """Return the folder of Python's standard library, which contains tens of MB of source code on every machine."""
    return Path(sysconfig.get_paths()["stdlib"])


class TextDataset(WindowDataset):
    """Samples of `seq_len` consecutive bytes from one or more text files.

    Sample i is `x = bytes[i * T : i * T + T]` and `y = bytes[i * T + 1 : i * T + T + 1]` with T = seq_len, both `(T,)`
    of `dtype`, where `bytes` are the concatenated files.

    Parameters
    ----------
    path : a file, a folder, or several of them; the files of a folder are sorted by path, and empty and duplicate
        files are left out
    seq_len : number of bytes in a sample; the split must have at least seq_len + 1 bytes
    suffixes : suffixes of the files to read from folders; hidden files, and files in caches, installed packages and
        hidden folders, are left out
    split : "train", "validation" or "all"; "train" and "validation" are disjoint, and depend only on the text and
        `fraction`
    fraction : fraction of the text that is used for validation. The text is divided into up to 16 stretches of at
        least 64 KiB, and the end of each stretch is used for validation
    dtype : an integer dtype that can represent 0 to 255
    """

    vocab = 256

    @wrap_with_option_check
    def __init__(
        self,
        path: str | os.PathLike[str] | Iterable[str | os.PathLike[str]],
        seq_len: int,
        *,
        suffixes: Sequence[str] = (".py", ".txt", ".md"),
        split: Split = "train",
        fraction: float = 0.1,
        dtype: Any = np.int32,
    ) -> None:
        if isinstance(seq_len, bool) or not hasattr(seq_len, "__index__") or index(seq_len) < 1:
            raise ConfigError(f"TextDataset(seq_len={seq_len!r}): a whole number of bytes, 1 or more, is needed")
        if split not in ("train", "validation", "all"):
            raise ConfigError(f"TextDataset(split={split!r}): choose one of train, validation, all")
        if not isinstance(fraction, int | float) or not 0 < fraction < 1:
            raise ConfigError(f"TextDataset(fraction={fraction!r}): a number between 0 and 1 is needed")
        self.seq_len, self.split, self.dtype = index(seq_len), split, to_numpy_dtype("TextDataset", dtype)
        if self.dtype.kind not in "iu" or self.dtype == np.int8:
            raise ConfigError(f"TextDataset(dtype={self.dtype}): an integer format that holds 0 to 255 is needed")
        roots = [expanduser(path)] if isinstance(path, str | os.PathLike) else [expanduser(p) for p in path]
        self.files = tuple(
            _find_files_with_suffixes(roots, tuple([suffixes] if isinstance(suffixes, str) else suffixes))
        )
        whole = [(file, 0, os.path.getsize(file)) for file in self.files]
        self._pieces = whole if split == "all" else _select_byte_ranges_of_split(whole, split == "validation", fraction)
        self._ends = list(accumulate(stop - start for _, start, stop in self._pieces))
        self._map = make_file_mapper()
        if self.nbytes < self.seq_len + 1:
            raise DataError(
                f"TextDataset: seq_len {self.seq_len} needs at least {self.seq_len + 1} bytes, but the "
                f"{split} text of {_format_paths(roots)} has {self.nbytes}: take a smaller seq_len, more text or "
                "another fraction"
            )

    @property
    def nbytes(self) -> int:
        """Number of bytes in this split."""
        return self._ends[-1] if self._ends else 0

    def __len__(self) -> int:
        return (self.nbytes - 1) // self.seq_len

    def _read_into(self, start: int, out: np.ndarray) -> None:
        """Fill `out` with bytes [start, start + len(out)) of the split."""
        at, done = bisect_right(self._ends, start), 0
        while done < len(out):
            file, _, stop = self._pieces[at]
            begin = stop - (self._ends[at] - start - done)
            count = min(stop - begin, len(out) - done)
            out[done : done + count] = self._map(file)[begin : begin + count]
            at, done = at + 1, done + count

    def __repr__(self) -> str:
        size = f"{len(self.files)} files, {self.nbytes:,} bytes"
        return f"TextDataset({size}, seq_len={self.seq_len}, {self.split})"


def _find_files_with_suffixes(roots: Sequence[Path], suffixes: tuple[str, ...]) -> Iterator[Path]:
    if not roots:
        raise DataError("TextDataset: no path was given")
    seen: set[Path] = set()
    for root in roots:
        if not root.exists():
            raise DataError(f"TextDataset: {root} does not exist (looked from {Path.cwd()})")
        files = _walk_folder(root, suffixes) if root.is_dir() else [_require_readable(root)]
        fresh = [f for f in files if f.resolve() not in seen and os.path.getsize(f)]
        seen.update(f.resolve() for f in fresh)
        yield from fresh
    if not seen:
        kinds = ", ".join(suffixes)
        raise DataError(f"TextDataset: no text in {_format_paths(roots)}: no file of {kinds} that is not empty")


def _require_readable(path: Path) -> Path:
    try:
        open_file(path, ours=False).close()
    except OSError as error:
        raise DataError(f"TextDataset: {describe_read_error(error, path)}") from error
    return path


def _format_paths(roots: Sequence[Path]) -> str:
    return ", ".join(map(str, roots))


def _walk_folder(root: Path, suffixes: tuple[str, ...]) -> list[Path]:
    found: list[Path] = []
    for folder, folders, files in os.walk(root):
        folders[:] = [f for f in folders if f not in SKIPPED_FOLDERS and not f.startswith(".")]
        found += [Path(folder, f) for f in files if f.endswith(suffixes) and not f.startswith(".")]
    return sorted((f for f in found if f.is_file()), key=lambda f: f.relative_to(root).as_posix())


def _select_byte_ranges_of_split(files: Sequence[Piece], validation: bool, fraction: float) -> list[Piece]:
    """Return the byte ranges of `files` that belong to the validation split (if `validation` is true) or to the
    training split. The text is divided into up to 16 stretches; the last `fraction` of each stretch is for validation,
    and the rest is for training."""
    total = sum(stop - start for _, start, stop in files)
    count = min(MAX_STRETCHES, max(1, total // STRETCH_BYTES))
    pieces: list[Piece] = []
    for i in range(count):
        start, stop = total * i // count, total * (i + 1) // count
        edge = stop - int((stop - start) * fraction)
        pieces += _clip_byte_ranges(files, edge, stop) if validation else _clip_byte_ranges(files, start, edge)
    return pieces


def _clip_byte_ranges(files: Sequence[Piece], low: int, high: int) -> Iterator[Piece]:
    """Yield the byte ranges of `files` that make up bytes [low, high) of the concatenated files."""
    at = 0
    for file, _, size in files:
        start, stop = max(low - at, 0), min(high - at, size)
        if start < stop:
            yield file, start, stop
        at += size
