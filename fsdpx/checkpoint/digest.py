"""CRC-32 of bytes that several ranks have parts of: each sums its parts, and the sums are added.

A CRC is linear: with the start value left out, that of a text is the sum (exclusive or) of those of its parts, each
with zeros in the places of the others. The result is `zlib.crc32` of the whole, however it was cut."""

from __future__ import annotations

import zlib
from functools import lru_cache
from typing import Any

__all__ = ["Sum", "whole"]

ONES = 0xFFFFFFFF
POLYNOMIAL = 0xEDB88320  # bits mirrored: the highest bit is x**0
NOTHING = memoryview(bytes(4096))  # up to here it is quicker to read zeros than to multiply


class Sum:
    """What one rank's parts of a tensor add to its CRC; parts come in ascending order."""

    __slots__ = ("at", "value")

    def __init__(self) -> None:
        self.at, self.value = 0, 0

    def add(self, start: int, data: Any) -> None:
        """`data`: bytes from byte `start` of the tensor on."""
        assert start >= self.at, "parts of a tensor ascend"
        state = _shift(self.value, start - self.at)
        self.value = zlib.crc32(data, state ^ ONES) ^ ONES
        self.at = start + len(data)

    def of(self, nbytes: int) -> int:
        """The sum, for a tensor of this size."""
        return _shift(self.value, nbytes - self.at)


def whole(sums: int, nbytes: int) -> int:
    """The CRC-32 of a tensor of `nbytes` from the exclusive or of all ranks' sums."""
    return sums ^ _shift(ONES, nbytes) ^ ONES


def _shift(state: int, zeros: int) -> int:
    """The state after `zeros` more zero bytes."""
    if state == 0 or zeros == 0:
        return state
    if zeros <= len(NOTHING):
        return zlib.crc32(NOTHING[:zeros], state ^ ONES) ^ ONES
    return _times(state, _power(zeros))


@lru_cache(maxsize=1024)
def _power(nbytes: int) -> int:
    """x ** (8 nbytes) modulo the polynomial."""
    result, square = 1 << 31, 1 << 23  # 1 and x**8
    while nbytes:
        if nbytes & 1:
            result = _times(result, square)
        square = _times(square, square)
        nbytes >>= 1
    return result


def _times(a: int, b: int) -> int:
    """The product of two polynomials modulo the CRC's."""
    product = 0
    while a:
        if a & 0x80000000:
            product ^= b
        a = a << 1 & ONES
        b = b >> 1 ^ (POLYNOMIAL if b & 1 else 0)
    return product
