"""Files that stay mapped, and windows of what lies in them."""

from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from fsdpx.files import open_file

__all__ = ["maps", "windows"]

OPEN_FILES = 64
"""Memory maps kept open; each holds a file descriptor."""


def maps() -> Callable[[Path], np.ndarray]:
    """A function from a file to its bytes, which keeps the maps of the last files."""
    return lru_cache(OPEN_FILES)(_map)


def _map(file: Path) -> np.ndarray:
    with open_file(file, ours=False) as opened:
        return np.memmap(opened, np.uint8, "r")


def windows(
    indices: np.ndarray, seq_len: int, dtype: Any, fill: Callable[[int, np.ndarray], None]
) -> tuple[np.ndarray, np.ndarray]:
    """Windows number `indices` `(k,)` of a long row: x and y, one further, each `(k, seq_len)` of `dtype`.

    fill: called with where a window begins and the `(seq_len + 1,)` elements to fill."""
    rows = np.empty((len(indices), seq_len + 1), dtype)
    for row, i in zip(rows, indices, strict=True):
        fill(int(i) * seq_len, row)
    return np.ascontiguousarray(rows[:, :-1]), np.ascontiguousarray(rows[:, 1:])
