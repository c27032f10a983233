"""Matrices in 4 bits: NF4 with scales that are quantised once more (Dettmers et al. 2023, QLoRA)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np

from fsdpx.array.namespace import from_host, namespace_of
from fsdpx.array.packed import Packing, padded

__all__ = ["BLOCK", "GROUP", "LEVELS", "NF4"]

BLOCK, GROUP = 64, 256
"""Elements that share a scale, and scales that share an offset and a step."""
LEVELS = np.array(
    [
        -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635,
        -0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634,
        0.33791524171829224, 0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
    ],
    np.float32,
)  # fmt: skip
"""What codes stand for, as published: quantiles of the normal distribution, with a zero."""
MIDDLES = (LEVELS[1:].astype(np.float64) + LEVELS[:-1]) / 2
STEPS = 255
LEAST = 2.0**-120
"""The smallest step: values are far from where processors flush to zero."""
DIGITS = 24
"""Significant bits of a float32: a scale is at most 2^DIGITS steps, so it is exact."""


@dataclass(frozen=True)
class NF4(Packing):
    """Codes of 16 levels. An element is stored as the level nearest to w / s, s being the scale of its block of 64.

    Of 256 scales of a row, or of fewer at its end, each is offset + q step with q from 0 to 255. The step is a power of
    two and the offset a multiple of it, so scales are exact. A scale is rounded down: the largest element of a block is
    -1 or 1 then, the block has the same scale when it is stored again, and a step that is half of this one gives
    it exactly.

    A row takes half a byte for each element and a byte for each scale, filled up to a multiple of 4 bytes, and 8 bytes
    for the step and offset of each 256 scales."""

    name: ClassVar[str] = "nf4"
    dtype: np.dtype
    block: int = field(default=BLOCK, init=False)

    def stride(self, columns: int) -> int:
        return self._seconds(columns) + 8 * self._groups(columns)

    def _groups(self, columns: int) -> int:
        return -(-self.blocks(columns) // GROUP)

    def _seconds(self, columns: int) -> int:
        """Where steps and offsets begin."""
        return padded(-(-columns // 2) + self.blocks(columns))

    def numbers(self, stored: Any, columns: int) -> Any:
        xp = namespace_of(stored)
        pairs = stored[:, : -(-columns // 2)]
        codes = xp.stack((pairs >> 4, pairs & 15), axis=-1).reshape(len(stored), -1)
        return from_host(xp, LEVELS)[codes[:, :columns]]

    def scales(self, stored: Any, columns: int) -> Any:
        xp, count, first = namespace_of(stored), self.blocks(columns), -(-columns // 2)
        step, offset = self._second(stored, columns)
        group = xp.arange(count) // GROUP
        return stored[:, first : first + count].astype(np.float32) * step[:, group] + offset[:, group]

    def _second(self, stored: Any, columns: int) -> tuple[Any, Any]:
        """(rows, groups): steps and offsets."""
        pairs = stored[:, self._seconds(columns) :].view(np.float32)
        return pairs[:, 0::2], pairs[:, 1::2]

    def store(self, values: np.ndarray, stored: np.ndarray) -> None:
        rows, columns = values.shape
        half, count = -(-columns // 2), self.blocks(columns)
        blocks = self.cut(values)
        stored[...] = 0
        steps, offsets = self._second(stored, columns)
        top = np.abs(blocks).max(axis=2, initial=0.0)
        for group in range(self._groups(columns)):
            part = slice(group * GROUP, min((group + 1) * GROUP, count))
            q, steps[:, group], offsets[:, group] = _quantised(top[:, part])
            stored[:, half + part.start : half + part.stop] = q
        scales = self.scales(stored, columns).astype(np.float64)[:, :, None]
        shares = np.divide(blocks, scales, out=np.zeros_like(blocks), where=scales > 0)
        codes = np.searchsorted(MIDDLES, shares).astype(np.uint8).reshape(rows, -1)
        codes[:, columns:] = 0
        stored[:, :half] = codes[:, 0 : 2 * half : 2] << 4 | codes[:, 1 : 2 * half : 2]


def _quantised(top: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Rows of scales in 8 bits, their steps and offsets: all rounded down."""
    low, high = top.min(axis=1), top.max(axis=1)
    step = np.maximum(_power((high - low) / STEPS), np.maximum(_power(high * 2.0**-DIGITS), LEAST))
    lowest = np.floor(low / step)
    q = np.floor(top / step[:, None]) - lowest[:, None]
    return q.astype(np.uint8), step, lowest * step


def _power(x: np.ndarray) -> np.ndarray:
    """The least power of two that is x or more; 0 of 0."""
    share, exponent = np.frexp(x)
    return np.ldexp(np.where(share > 0.5, 1.0, share), exponent)
