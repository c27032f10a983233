"""Gradients in one bit with a scale per block."""

from __future__ import annotations

from typing import Any

import numpy as np

from fsdpx.array.random import Stretch
from fsdpx.codecs.compressed import GRAIN, TURNS, Compressed
from fsdpx.codecs.levels import SIGNS
from fsdpx.codecs.signs import add_signs, signs
from fsdpx.comm.calls import Array

__all__ = ["Sign"]


class Sign(Compressed):
    """Of each number its sign travels, with a float32 scale for each 1,024 of them, their mean |x|; what is lost is
    added to the next gradient (1-bit SGD, Seide et al. 2014; EF-signSGD, Karimireddy et al. 2019). A part of n elements
    is ceil(n/8) + 4 ceil(n/1024) bytes, made up to a multiple of 8: a thirty-first of float32.

    feedback : False for plain signs, which need not converge: for comparisons."""

    block = SIGNS

    def __init__(self, feedback: bool = True) -> None:
        self.feedback = bool(feedback)

    def nbytes(self, size: int, turn: int = TURNS) -> int:
        return -(-(-(-size // 8) + 4 * -(-size // SIGNS)) // GRAIN) * GRAIN

    def pack(self, xp: Any, x: Array, wire: Array, lost: Array | None, numbers: Stretch) -> None:
        signs(xp, x, *self._fields(wire, x.size), lost)

    def unpack(self, xp: Any, wire: Array, out: Array, add: bool, numbers: Stretch) -> None:
        add_signs(xp, *self._fields(wire, out.size), out, add)

    def _fields(self, wire: Array, size: int) -> tuple[Array, Array]:
        """The bits and the scales of a part; scales lie in front."""
        scales, bits = 4 * -(-size // SIGNS), -(-size // 8)
        wire[scales + bits :] = 0
        return wire[scales : scales + bits], wire[:scales].view(np.float32)
