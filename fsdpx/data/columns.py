"""Samples in columns of Parquet and Arrow files, read by pyarrow."""

from __future__ import annotations

import os
from bisect import bisect_right
from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np

from fsdpx.errors import ConfigError, DataError

__all__ = ["ParquetDataset"]

SUFFIXES = (".parquet", ".arrow")
KEPT = 8
"""Row groups kept in memory, for samples that lie next to each other."""


class ParquetDataset:
    """Rows of Parquet files, or of Arrow files as the datasets library writes them, by number and in any order.

    Sample i is a tuple of its values in `columns`: a number, a text, or an array where the column has lists. Only the
    named columns are read, a group of rows at a time (Arrow files are mapped). Needs pyarrow: pip install
    'fsdpx[parquet]'.

    Parameters
    ----------
    paths : a file, a folder of them, or several; those of a folder are sorted by path
    columns : which columns a sample has, in this order
    """

    def __init__(
        self, paths: str | os.PathLike[str] | Sequence[str | os.PathLike[str]], columns: Sequence[str]
    ) -> None:
        self._arrow = _pyarrow()
        if not columns or isinstance(columns, str):
            raise ConfigError(f"ParquetDataset(columns={columns!r}): name the columns of a sample, such as ['tokens']")
        self.columns = tuple(columns)
        given = [paths] if isinstance(paths, str | os.PathLike) else paths
        self.files = [file for path in given for file in _found(Path(path))]
        self._groups = [(file, n, rows) for file in self.files for n, rows in enumerate(self._rows(file))]
        self._ends = list(accumulate(rows for *_, rows in self._groups))
        self._group = lru_cache(KEPT)(self._read)
        if not len(self):
            raise DataError(f"ParquetDataset: no row in {', '.join(map(str, given))}")

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def __getitem__(self, i: int) -> tuple[Any, ...]:
        if not -len(self) <= i < len(self):
            raise IndexError(f"sample {i} of {len(self)}")
        i %= len(self)
        at = bisect_right(self._ends, i)
        row = i - (self._ends[at] - self._groups[at][2])
        return tuple(_value(column[row].as_py()) for column in self._group(at))

    def __repr__(self) -> str:
        return f"ParquetDataset({len(self.files)} files, {len(self):,} samples of {', '.join(self.columns)})"

    def _rows(self, file: Path) -> list[int]:
        """Rows of each group that is read at once; DataError where a column is missing."""
        try:
            if file.suffix == ".arrow":
                table = self._mapped(file)
                names, rows = table.column_names, [table.num_rows]
            else:
                with self._arrow.parquet.ParquetFile(file) as opened:
                    meta = opened.metadata
                    names = opened.schema_arrow.names
                    rows = [meta.row_group(n).num_rows for n in range(meta.num_row_groups)]
        except (OSError, self._arrow.ArrowInvalid) as error:
            raise DataError(f"ParquetDataset: {file}: {error}") from error
        if missing := [name for name in self.columns if name not in names]:
            raise DataError(f"{file}: there is no column {', '.join(missing)}; it has {', '.join(names)}")
        return rows

    def _read(self, at: int) -> list[Any]:
        """The columns of a group."""
        file, number, _ = self._groups[at]
        if file.suffix == ".arrow":
            table = self._mapped(file)
        else:
            with self._arrow.parquet.ParquetFile(file) as opened:
                table = opened.read_row_group(number, columns=list(self.columns))
        return [table.column(name) for name in self.columns]

    def _mapped(self, file: Path) -> Any:
        """An Arrow file, as a stream or with a footer."""
        source = self._arrow.memory_map(str(file))
        try:
            return self._arrow.ipc.open_file(source).read_all()
        except self._arrow.ArrowInvalid:
            return self._arrow.ipc.open_stream(source).read_all()


def _value(value: Any) -> Any:
    return np.asarray(value) if isinstance(value, list) else value


def _pyarrow() -> Any:
    try:
        import pyarrow
        import pyarrow.ipc
        import pyarrow.parquet
    except ImportError as error:
        raise ConfigError("ParquetDataset needs the pyarrow library: pip install 'fsdpx[parquet]'") from error
    return pyarrow


def _found(path: Path) -> list[Path]:
    if not path.exists():
        raise DataError(f"ParquetDataset: {path} does not exist (looked from {Path.cwd()})")
    found = sorted(file for file in path.rglob("*") if file.suffix in SUFFIXES) if path.is_dir() else [path]
    if not found:
        raise DataError(f"ParquetDataset: no *.parquet or *.arrow in {path}")
    return found
