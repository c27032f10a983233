"""What both forms of a codec's arithmetic share: the levels of numbers in 8 bits, and which form runs."""

from __future__ import annotations

from typing import Any

import numpy as np

from fsdpx.core.array.kernels import choice

__all__ = ["BLOCK", "LARGEST", "LEVELS", "TINY", "compiles"]

BLOCK = 256
"""Elements in 8 bits that share a scale."""
LEVELS = 127
TINY, LARGEST = float(np.finfo(np.float32).tiny), float(np.finfo(np.float32).max)


def compiles(xp: Any) -> bool:
    """Whether Numba code may run on arrays of `xp`."""
    return xp is np and choice.active != "plain" and choice.installed()
