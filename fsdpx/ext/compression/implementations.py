"""Code shared by the NumPy and Numba versions of the gradient codecs: constants of 8-bit quantization, and the choice
of version."""

from __future__ import annotations

from typing import Any

import numpy as np

from fsdpx.core.array.kernels import choice

__all__ = ["BLOCK_ELEMENTS", "LARGEST", "LEVELS", "TINY", "can_run_compiled_kernels"]

BLOCK_ELEMENTS = 256
"""Number of 8-bit elements that share a scale."""
LEVELS = 127
TINY, LARGEST = float(np.finfo(np.float32).tiny), float(np.finfo(np.float32).max)


def can_run_compiled_kernels(xp: Any) -> bool:
    """Return whether Numba kernels may run on arrays of `xp`."""
    return xp is np and choice.active_mode != "plain" and choice.has_numba()
