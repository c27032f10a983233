"""Text as bytes: files and folders through memory maps, in windows of seq_len + 1."""

import os
import sysconfig
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate
from operator import index
from pathlib import Path
from typing import Any, Literal

import numpy as np

from fsdpx.data.dataset import Windows, maps
from fsdpx.errors import ConfigError, DataError
from fsdpx.files import open_file, unreadable

__all__ = ["TextDataset", "stdlib_sources"]

SKIPPED = ("__pycache__", "site-packages", "dist-packages", "node_modules")
STRETCHES = 16  # into which the text is split at most,
STRETCH = 1 << 16  # bytes of each, at least

Split = Literal["train", "validation", "all"]
Piece = tuple[Path, int, int]


def stdlib_sources() -> Path:
    """The folder of Python's standard library: some tens of MB of source text on every machine."""
    return Path(sysconfig.get_paths()["stdlib"])


class TextDataset(Windows):
    """The bytes of files and folders, one file after the other: sample i is `x = bytes[i T : i T + T]`,
    `y = bytes[i T + 1 : i T + T + 1]` with T = seq_len, each `(T,)` of `dtype`.

    Parameters
    ----------
    path : a file, a folder, or several; files are sorted by path, empty and duplicate ones left out
    seq_len : bytes of a sample; the split must have at least one more
    suffixes : of the files that are read from folders; caches, installed packages and hidden names are left out
    split : "train", "validation" or "all"; the first two are disjoint and depend on the text and `fraction` only
    fraction : share of the text for validation: the end of each of up to 16 stretches of at least 64 KiB
    dtype : an integer dtype that holds 0 to 255
    """

    vocab = 256

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
        self.seq_len, self.split, self.dtype = index(seq_len), split, np.dtype(dtype)
        if self.dtype.kind not in "iu" or self.dtype == np.int8:
            raise ConfigError(f"TextDataset(dtype={self.dtype}): an integer format that holds 0 to 255 is needed")
        roots = [Path(path)] if isinstance(path, str | os.PathLike) else [Path(p) for p in path]
        self.files = tuple(_find(roots, tuple([suffixes] if isinstance(suffixes, str) else suffixes)))
        whole = [(file, 0, os.path.getsize(file)) for file in self.files]
        self._pieces = whole if split == "all" else _cut(whole, split == "validation", fraction)
        self._ends = list(accumulate(stop - start for _, start, stop in self._pieces))
        self._map = maps()
        if self.nbytes < self.seq_len + 1:
            raise DataError(
                f"TextDataset: seq_len {self.seq_len} needs at least {self.seq_len + 1} bytes, but the "
                f"{split} text of {_names(roots)} has {self.nbytes}: take a smaller seq_len, more text or "
                "another fraction"
            )

    @property
    def nbytes(self) -> int:
        """Bytes of this split."""
        return self._ends[-1] if self._ends else 0

    def __len__(self) -> int:
        return (self.nbytes - 1) // self.seq_len

    def _read(self, start: int, out: np.ndarray) -> None:
        """Bytes [start, start + len(out)) of the split."""
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


def _find(roots: Sequence[Path], suffixes: tuple[str, ...]) -> Iterator[Path]:
    if not roots:
        raise DataError("TextDataset: no path was given")
    seen: set[Path] = set()
    for root in roots:
        if not root.exists():
            raise DataError(f"TextDataset: {root} does not exist (looked from {Path.cwd()})")
        files = _walk(root, suffixes) if root.is_dir() else [_file(root)]
        fresh = [f for f in files if f.resolve() not in seen and os.path.getsize(f)]
        seen.update(f.resolve() for f in fresh)
        yield from fresh
    if not seen:
        kinds = ", ".join(suffixes)
        raise DataError(f"TextDataset: no text in {_names(roots)}: no file of {kinds} that is not empty")


def _file(path: Path) -> Path:
    try:
        open_file(path, ours=False).close()
    except OSError as error:
        raise DataError(f"TextDataset: {unreadable(error, path)}") from error
    return path


def _names(roots: Sequence[Path]) -> str:
    return ", ".join(map(str, roots))


def _walk(root: Path, suffixes: tuple[str, ...]) -> list[Path]:
    found: list[Path] = []
    for folder, folders, files in os.walk(root):
        folders[:] = [f for f in folders if f not in SKIPPED and not f.startswith(".")]
        found += [Path(folder, f) for f in files if f.endswith(suffixes) and not f.startswith(".")]
    return sorted((f for f in found if f.is_file()), key=lambda f: f.relative_to(root).as_posix())


def _cut(whole: Sequence[Piece], validation: bool, fraction: float) -> list[Piece]:
    """One side of the split: the last `fraction` of each of up to 16 stretches, or what lies before it."""
    total = sum(stop - start for _, start, stop in whole)
    count = min(STRETCHES, max(1, total // STRETCH))
    pieces: list[Piece] = []
    for i in range(count):
        start, stop = total * i // count, total * (i + 1) // count
        edge = stop - int((stop - start) * fraction)
        pieces += _between(whole, edge, stop) if validation else _between(whole, start, edge)
    return pieces


def _between(whole: Sequence[Piece], low: int, high: int) -> Iterator[Piece]:
    """The pieces of files that hold bytes [low, high) of all files."""
    at = 0
    for file, _, size in whole:
        start, stop = max(low - at, 0), min(high - at, size)
        if start < stop:
            yield file, start, stop
        at += size
