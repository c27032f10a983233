"""What both forms of a codec's arithmetic share: the levels of numbers in 8 bits, and which form runs."""

from __future__ import annotations

from typing import Any

import numpy as np

from fsdpx.core.array.kernels import choice

__all__ = ["BLOCK_ELEMENTS", "LARGEST", "LEVELS", "TINY", "can_compile"]

BLOCK_ELEMENTS = 256
"""Elements in 8 bits that share a scale."""
LEVELS = 127
TINY, LARGEST = float(np.finfo(np.float32).tiny), float(np.finfo(np.float32).max)


def can_compile(xp: Any) -> bool:
    """Whether Numba code may run on arrays of `xp`."""
    return xp is np and choice.active_mode != "plain" and choice.has_numba()
