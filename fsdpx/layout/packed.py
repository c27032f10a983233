"""Rows of matrices in few bits, filled from numbers and read as numbers: how values come in and go out."""

from __future__ import annotations

from typing import Any

import numpy as np

from fsdpx.array.namespace import from_host, namespace_of, to_host
from fsdpx.array.packed import Packed, Packing
from fsdpx.errors import DataError

__all__ = ["PackedRows"]


class PackedRows:
    """Rows of a packed matrix as a flat array of float32 that is read and filled by whole rows of `grain` elements.

    name: of the matrix, for errors. stored: (rows, bytes)."""

    dtype = np.dtype(np.float32)

    def __init__(self, name: str, stored: Any, columns: int, packing: Packing) -> None:
        self.name, self.grain = name, columns
        self._stored, self._packing = stored, packing

    @property
    def size(self) -> int:
        return int(self._stored.shape[0]) * self.grain

    def __getitem__(self, part: slice) -> PackedRows:
        start, stop, _ = part.indices(self.size)
        assert start % self.grain == stop % self.grain == 0, f"{self.name}: {start} to {stop} are no whole rows"
        return PackedRows(self.name, self._stored[start // self.grain : stop // self.grain], self.grain, self._packing)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        stored = to_host(self._stored)
        return Packed(stored, (stored.shape[0], self.grain), self._packing).dense(dtype or np.float32).reshape(-1)

    def __setitem__(self, part: Any, values: Any) -> None:
        """Store flat `values`; DataError if one of them is NaN or Inf. Only all elements can be set."""
        assert part is Ellipsis
        rows = to_host(values).reshape(-1, self.grain)
        if not (finite := np.isfinite(rows).all(axis=1)).all():
            row = int(np.flatnonzero(~finite)[0])
            raise DataError(f"{self.name} cannot be stored as {self._packing.name}: NaN or Inf among the elements "
                            f"{row * self.grain} to {(row + 1) * self.grain - 1} of this part")  # fmt: skip
        host = np.empty(self._stored.shape, np.uint8)
        self._packing.store(rows, host)
        self._stored[...] = from_host(namespace_of(self._stored), host)
