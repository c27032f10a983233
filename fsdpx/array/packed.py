"""Matrices in 8 bits: rows of whole numbers from -127 to 127, each with its scales behind it, in one array of bytes.

An element w is stored as the number q nearest to w / s, where the scale s belongs to its row, or to a block of it. Its
value is q s from then on, and |w - q s| <= s / 2. Scales have 16 significant bits, so q s is a float32 as it is, and to
store it again changes nothing."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from fsdpx.array.kernels.half import narrowed
from fsdpx.array.namespace import from_host, namespace_of, to_host
from fsdpx.errors import DataError

__all__ = ["Packed", "Packing", "Rows"]

MOST = 127
"""The largest number; -128 is not used, so that a matrix and its negative are stored alike."""
LEAST_SCALE = np.float32(2.0**-120)
"""Of rows of zeros and of denormal numbers: far from where processors flush to zero."""
LOW = np.uint32(0xFF)
"""The bits of a scale that are 0: 16 significant ones are left, and 7 of q are 23 of a product's 24."""
LARGEST_SCALE = (np.float32(np.finfo(np.float32).max / MOST).view(np.uint32) & ~LOW).view(np.float32)


@dataclass(frozen=True)
class Packing:
    """How matrices are stored. block: elements of a row that share a scale, None for all of it. dtype: in which layers
    compute with them.

    A row takes its numbers, filled up to a multiple of 4 bytes, and 4 bytes for each scale."""

    block: int | None
    dtype: np.dtype

    def scales(self, columns: int) -> int:
        """Scales of a row."""
        return 1 if self.block is None else -(-columns // self.block)

    def stride(self, columns: int) -> int:
        """Bytes of a row."""
        return _padded(columns) + 4 * self.scales(columns)

    def nbytes(self, shape: tuple[int, ...]) -> int:
        rows, columns = shape
        return rows * self.stride(columns)


def _padded(columns: int) -> int:
    return -(-columns // 4) * 4


class Packed:
    """A matrix in 8 bits, as layers see it: its shape, and the dtype in which they compute. stored: (rows, bytes).

    `fsdpx.nn.numeric` multiplies by it as it is; elsewhere it becomes an array of `dtype`, whole or the rows that an
    index asks for."""

    __slots__ = ("codes", "dtype", "packing", "scales", "shape", "stored")
    ndim = 2

    def __init__(self, flat: Any, shape: tuple[int, int], packing: Packing) -> None:
        rows, columns = shape
        self.shape, self.dtype, self.packing = (rows, columns), packing.dtype, packing
        self.stored = flat.reshape(rows, packing.stride(columns))
        self.codes = self.stored[:, :columns].view(np.int8)
        self.scales = self.stored[:, _padded(columns) :].view(np.float32)

    @property
    def size(self) -> int:
        return self.shape[0] * self.shape[1]

    @property
    def T(self) -> Any:
        return self.dense(self.dtype).T

    def __len__(self) -> int:
        return self.shape[0]

    def dense(self, dtype: Any = np.float32) -> Any:
        """An array of its values, exact in float32."""
        return self._valued(self.codes, self.scales, dtype)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return to_host(self.dense(dtype or self.dtype))

    def __getitem__(self, index: Any) -> Any:
        """The rows that an array of whole numbers, a slice or a mask asks for."""
        return self._valued(self.codes[index], self.scales[index], self.dtype)

    def _valued(self, codes: Any, scales: Any, dtype: Any) -> Any:
        xp = namespace_of(self.stored)
        if self.packing.block is not None:
            scales = scales[..., xp.arange(self.shape[1]) // self.packing.block]
        values = codes.astype(np.float32) * scales
        return values if values.dtype == dtype else narrowed(xp, values, dtype)


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
