"""Tiles of attention in bf16, one after the other in compiled code: a part of `inside.py`, which is a script."""

from fsdpx.array.kernels.compiled.words import multiply
from fsdpx.native.tools import jit

__all__ = ["AGAIN", "tiles"]

AGAIN = 50
"""Tiles of a call, which takes longer than one of them."""


@jit
def tiles(a, down, along, b, b_row, c, c_row, rows, columns, words):
    """The product `multiply` of the same arguments, again and again."""
    for _ in range(AGAIN):
        multiply(a, down, along, b, b_row, c, c_row, rows, columns, words, False)
