"""Matrices in 8 bits: rows of whole numbers from -127 to 127, each with its scales behind it, in one array of bytes.

An element w is stored as the number q nearest to w / s, where the scale s belongs to its row, or to a block of it. Its
value is q s from then on, and |w - q s| <= s / 2. Scales have 16 significant bits, so q s is a float32 as it is, and to
store it again changes nothing."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from fsdpx.array.kernels.half import narrowed
from fsdpx.array.namespace import namespace_of, to_host

__all__ = ["Packed", "Packing"]


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
