"""Tokens in a file that stays on disk."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np

from fsdpx.data.windows import windows
from fsdpx.errors import ConfigError, DataError
from fsdpx.files import open_file, unreadable

__all__ = ["TokenDataset"]


class TokenDataset:
    """A file of token numbers, one after the other, through a memory map: sample i is `x = tokens[i T : i T + T]`,
    `y = tokens[i T + 1 : i T + T + 1]` with T = seq_len, each `(T,)` int32.

    Parameters
    ----------
    path : a `.npy` file of one dim, or bare numbers of `dtype`, as `tokens.tofile(path)` writes them
    seq_len : tokens of a sample; the file must have at least one more
    dtype : of bare numbers
    """

    def __init__(self, path: str | os.PathLike[str], seq_len: int, *, dtype: Any = np.uint16) -> None:
        if not isinstance(seq_len, int) or seq_len < 1:
            raise ConfigError(f"TokenDataset(seq_len={seq_len!r}): a whole number of tokens, 1 or more, is needed")
        self.path, self.seq_len = Path(path), seq_len
        try:
            self.tokens = _mapped(self.path, np.dtype(dtype))
        except (OSError, ValueError) as error:
            raise DataError(f"TokenDataset: {unreadable(error, path)}") from error
        if self.tokens.ndim != 1 or self.tokens.dtype.kind not in "iu":
            shape = f"{self.tokens.dtype}{list(self.tokens.shape)}"
            raise DataError(f"TokenDataset: {path} has {shape}: token numbers in one row are needed")
        if len(self.tokens) < seq_len + 1:
            raise DataError(
                f"TokenDataset: seq_len {seq_len} needs at least {seq_len + 1} tokens, {path} has {len(self.tokens)}"
            )

    def __len__(self) -> int:
        return (len(self.tokens) - 1) // self.seq_len

    def __getitem__(self, i: int) -> tuple[np.ndarray, np.ndarray]:
        if not -len(self) <= i < len(self):
            raise IndexError(f"sample {i} of {len(self)}")
        x, y = self.take(np.array([i % len(self)]))
        return x[0], y[0]

    def take(self, indices: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The windows at `indices` `(k,)`: x, y, each `(k, seq_len)`; k may be 0."""
        return windows(indices, self.seq_len, np.int32, self._read)

    def _read(self, start: int, out: np.ndarray) -> None:
        found = self.tokens[start : start + len(out)]
        out[...] = found
        if (odd := np.flatnonzero(out != found)).size:
            n = start + int(odd[0])
            raise DataError(f"TokenDataset: {self.path}: token {n:,} is {self.tokens[n]}: it does not fit into 32 bits")

    def __repr__(self) -> str:
        return f"TokenDataset({self.path.name}, {len(self.tokens):,} tokens, seq_len={self.seq_len})"


def _mapped(path: Path, dtype: np.dtype[Any]) -> np.ndarray:
    with open_file(path, ours=False) as file:
        if path.suffix != ".npy":
            return np.memmap(file, dtype, "r")
        form = np.lib.format
        header = form.read_array_header_1_0 if form.read_magic(file) == (1, 0) else form.read_array_header_2_0
        shape, by_column, dtype = header(file)
        if dtype.hasobject:
            raise ValueError("Python objects are in it, which are not read")
        return np.memmap(file, dtype, "r", file.tell(), shape, "F" if by_column else "C")
