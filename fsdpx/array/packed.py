"""Matrices in 8 or 4 bits: rows of codes, each with its scales behind it, in one array of bytes.

A `Packing` describes a format. An element's value is that of its code times the scale of its block, rounded to
float32 at most once, from when it is stored on; to store it again changes nothing."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from fsdpx.array.kernels.half import narrowed
from fsdpx.array.namespace import namespace_of, to_host

__all__ = ["Packed", "PackedInt8", "Packing", "padded"]

MOST = 127
"""The largest number; -128 is not used, so that a matrix and its negative are stored alike."""
LEAST_SCALE = np.float32(2.0**-120)
"""Of rows of zeros and of denormal numbers: far from where processors flush to zero."""
LOW = np.uint32(0xFF)
"""The bits of a scale that are 0: 16 significant ones are left, and 7 of q are 23 of a product's 24."""
LARGEST_SCALE = (np.float32(np.finfo(np.float32).max / MOST).view(np.uint32) & ~LOW).view(np.float32)


class Packing(ABC):
    """How matrices are stored, by rows.

    name: of the format. block: elements of a row that share a scale, None for all of it. dtype: in which layers compute
    with them."""

    name: ClassVar[str]
    block: int | None
    dtype: np.dtype

    def blocks(self, columns: int) -> int:
        """Blocks of a row, each with a scale."""
        return 1 if self.block is None else -(-columns // self.block)

    @abstractmethod
    def stride(self, columns: int) -> int:
        """Bytes of a row, a multiple of 4."""

    def nbytes(self, shape: tuple[int, ...]) -> int:
        rows, columns = shape
        return rows * self.stride(columns)

    @abstractmethod
    def numbers(self, stored: Any, columns: int) -> Any:
        """(rows, columns): what each code stands for, before its scale."""

    @abstractmethod
    def scales(self, stored: Any, columns: int) -> Any:
        """(rows, blocks) in float32."""

    @abstractmethod
    def store(self, values: np.ndarray, stored: np.ndarray) -> None:
        """Fill the bytes of rows, (rows, stride), from their finite values, (rows, columns)."""

    def cut(self, values: np.ndarray) -> np.ndarray:
        """Rows as (rows, blocks, elements) in float64, where ties are seen as ties; filled up with zeros."""
        rows, columns = values.shape
        count, width = self.blocks(columns), columns if self.block is None else self.block
        filled = np.zeros((rows, count * width), np.float64)
        filled[:, :columns] = values
        return filled.reshape(rows, count, width)


def padded(size: int) -> int:
    """The next multiple of 4."""
    return -(-size // 4) * 4


@dataclass(frozen=True)
class PackedInt8(Packing):
    """Whole numbers from -127 to 127. An element w is stored as the number q nearest to w / s, s being the scale of its
    row, or of a block of it, and |w - q s| <= s / 2. Scales have 16 significant bits, so q s is a float32 as it is.

    A row takes its numbers, filled up to a multiple of 4 bytes, and 4 bytes for each scale."""

    name: ClassVar[str] = "int8"
    block: int | None
    dtype: np.dtype

    def stride(self, columns: int) -> int:
        return padded(columns) + 4 * self.blocks(columns)

    def numbers(self, stored: Any, columns: int) -> Any:
        return stored[:, :columns].view(np.int8)

    def scales(self, stored: Any, columns: int) -> Any:
        return stored[:, padded(columns) :].view(np.float32)

    def store(self, values: np.ndarray, stored: np.ndarray) -> None:
        rows, columns = values.shape
        blocks = self.cut(values)
        scales = _scales(np.abs(blocks).max(axis=2, initial=0.0).astype(np.float32))
        stored[...] = 0
        codes = np.clip(np.rint(blocks / scales[:, :, None]), -MOST, MOST)
        self.numbers(stored, columns)[...] = codes.reshape(rows, -1)[:, :columns]
        self.scales(stored, columns)[...] = scales


def _scales(top: np.ndarray) -> np.ndarray:
    """The least number with 16 significant bits that is top / 127 or more, within what a scale may be."""
    scales = (top / np.float32(MOST)).astype(np.float32)
    upwards = ((scales.view(np.uint32) + LOW) & ~LOW).view(np.float32)
    return np.clip(upwards, LEAST_SCALE, LARGEST_SCALE)


class Packed:
    """A matrix in few bits, as layers see it: its shape, and the dtype in which they compute. stored: (rows, bytes).

    `fsdpx.nn.numeric` multiplies by it as it is; elsewhere it becomes an array of `dtype`, whole or the rows that an
    index asks for."""

    __slots__ = ("dtype", "packing", "shape", "stored")
    ndim = 2

    def __init__(self, flat: Any, shape: tuple[int, int], packing: Packing) -> None:
        rows, columns = shape
        self.shape, self.dtype, self.packing = (rows, columns), packing.dtype, packing
        self.stored = flat.reshape(rows, packing.stride(columns))

    @property
    def size(self) -> int:
        return self.shape[0] * self.shape[1]

    @property
    def T(self) -> Any:
        return self.dense(self.dtype).T

    @property
    def numbers(self) -> Any:
        return self.packing.numbers(self.stored, self.shape[1])

    @property
    def scales(self) -> Any:
        return self.packing.scales(self.stored, self.shape[1])

    def __len__(self) -> int:
        return self.shape[0]

    def rows(self, start: int, stop: int) -> Packed:
        return Packed(self.stored[start:stop], (stop - start, self.shape[1]), self.packing)

    def dense(self, dtype: Any = np.float32) -> Any:
        """An array of its values, exact in float32."""
        return self._valued(self.stored, dtype)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return to_host(self.dense(dtype or self.dtype))

    def __getitem__(self, index: Any) -> Any:
        """The rows that an array of whole numbers, a slice or a mask asks for."""
        found = self.stored[index]
        flat = self._valued(found.reshape(-1, self.stored.shape[1]), self.dtype)
        return flat.reshape(*found.shape[:-1], self.shape[1])

    def _valued(self, stored: Any, dtype: Any) -> Any:
        xp, columns, block = namespace_of(stored), self.shape[1], self.packing.block
        scales = self.packing.scales(stored, columns)
        if block is not None:
            scales = scales[:, xp.arange(columns) // block]
        values = self.packing.numbers(stored, columns).astype(np.float32) * scales
        return values if values.dtype == dtype else narrowed(xp, values, dtype)
