"""Rows of matrices in 8 bits, filled from numbers and read as numbers: how values come in and go out."""

from __future__ import annotations

from typing import Any

import numpy as np

from fsdpx.array.namespace import from_host, namespace_of, to_host
from fsdpx.array.packed import Packed, Packing
from fsdpx.errors import DataError

__all__ = ["Rows"]

MOST = 127
"""The largest number; -128 is not used, so that a matrix and its negative are stored alike."""
LEAST_SCALE = np.float32(2.0**-120)
"""Of rows of zeros and of denormal numbers: far from where processors flush to zero."""
LOW = np.uint32(0xFF)
"""The bits of a scale that are 0: 16 significant ones are left, and 7 of q are 23 of a product's 24."""
LARGEST_SCALE = (np.float32(np.finfo(np.float32).max / MOST).view(np.uint32) & ~LOW).view(np.float32)


class Rows:
    """Rows of a packed matrix as a flat array of float32 that is read and filled by whole rows of `grain` elements.

    name: of the matrix, for errors. stored: (rows, bytes)."""

    dtype = np.dtype(np.float32)

    def __init__(self, name: str, stored: Any, columns: int, packing: Packing) -> None:
        self.name, self.grain = name, columns
        self._stored, self._packing = stored, packing

    @property
    def size(self) -> int:
        return int(self._stored.shape[0]) * self.grain

    def __getitem__(self, part: slice) -> Rows:
        start, stop, _ = part.indices(self.size)
        assert start % self.grain == stop % self.grain == 0, f"{self.name}: {start} to {stop} are no whole rows"
        return Rows(self.name, self._stored[start // self.grain : stop // self.grain], self.grain, self._packing)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        stored = to_host(self._stored)
        return Packed(stored, (stored.shape[0], self.grain), self._packing).dense(dtype or np.float32).reshape(-1)

    def __setitem__(self, part: Any, values: Any) -> None:
        """Store flat `values`; DataError if one of them is NaN or Inf. Only all elements can be set."""
        assert part is Ellipsis
        host = np.empty(self._stored.shape, np.uint8)
        _pack(self.name, to_host(values).reshape(-1, self.grain), host, self._packing)
        self._stored[...] = from_host(namespace_of(self._stored), host)


def _pack(name: str, values: np.ndarray, stored: np.ndarray, packing: Packing) -> None:
    rows, columns = values.shape
    count = packing.scales(columns)
    width = columns if packing.block is None else packing.block
    padded = np.zeros((rows, count * width), np.float64)
    padded[:, :columns] = values
    blocks = padded.reshape(rows, count, width)
    top = np.abs(blocks).max(axis=2, initial=0.0).astype(np.float32)
    if not np.isfinite(top).all():
        row = int(np.flatnonzero(~np.isfinite(top).all(axis=1))[0])
        raise DataError(f"{name} cannot be stored as int8: NaN or Inf among the elements {row * columns} to "
                        f"{(row + 1) * columns - 1} of this part")  # fmt: skip
    scales = _scales(top)
    stored[...] = 0
    into = Packed(stored, (rows, columns), packing)
    codes = np.clip(np.rint(blocks / scales[:, :, None]), -MOST, MOST)  # in float64: ties are seen as ties
    into.codes[...] = codes.reshape(rows, count * width)[:, :columns]
    into.scales[...] = scales


def _scales(top: np.ndarray) -> np.ndarray:
    """The least number with 16 significant bits that is top / 127 or more, within what a scale may be."""
    scales = (top / np.float32(MOST)).astype(np.float32)
    upwards = ((scales.view(np.uint32) + LOW) & ~LOW).view(np.float32)
    return np.clip(upwards, LEAST_SCALE, LARGEST_SCALE)
