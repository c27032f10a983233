"""Gradients in 8 bits with a scale per block."""

from __future__ import annotations

from typing import Any

import numpy as np

from fsdpx.array.random import Stretch
from fsdpx.codecs.compressed import GRAIN, TURNS, Compressed
from fsdpx.codecs.levels import BLOCK
from fsdpx.codecs.quantise import add_quantised, quantise
from fsdpx.comm.calls import Array

__all__ = ["Int8"]


class Int8(Compressed):
    """Gradients travel as whole numbers from -127 to 127, with a float32 scale for each 256 of them: a part of n
    elements is n + 4 ceil(n/256) bytes, made up to a multiple of 8, a quarter of float32.

    unbiased : numbers are rounded up or down by chance so that each is right in the mean (QSGD, Alistarh et al. 2017),
        and nothing is kept. Else they are rounded to nearest, and what is lost is added to the next gradient."""

    block = BLOCK

    def __init__(self, unbiased: bool = False) -> None:
        self.random, self.feedback = bool(unbiased), not unbiased

    def nbytes(self, size: int, turn: int = TURNS) -> int:
        return -(-(size + 4 * -(-size // BLOCK)) // GRAIN) * GRAIN

    def pack(self, xp: Any, x: Array, wire: Array, lost: Array | None, numbers: Stretch) -> None:
        quantise(xp, x, *self._fields(wire, x.size), lost, numbers if self.random else None)

    def unpack(self, xp: Any, wire: Array, out: Array, add: bool, numbers: Stretch) -> None:
        add_quantised(xp, *self._fields(wire, out.size), out, add)

    def _fields(self, wire: Array, size: int) -> tuple[Array, Array]:
        """The numbers and the scales of a part; scales lie in front."""
        scales = 4 * -(-size // BLOCK)
        wire[scales + size :] = 0
        return wire[scales : scales + size].view(np.int8), wire[:scales].view(np.float32)
