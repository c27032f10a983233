"""The numbers of 8-bit gradients, for both forms of their code."""

import numpy as np

__all__ = ["BLOCK", "LARGEST", "LEVELS", "TINY"]

BLOCK = 256
"""Elements that share a scale."""
LEVELS = 127
TINY, LARGEST = float(np.finfo(np.float32).tiny), float(np.finfo(np.float32).max)
