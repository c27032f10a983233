"""The numbers of gradients in few bits, for both forms of their code."""

import numpy as np

__all__ = ["BLOCK", "LARGEST", "LEVELS", "TINY"]

BLOCK = 256
"""Elements in 8 bits that share a scale."""
LEVELS = 127
TINY, LARGEST = float(np.finfo(np.float32).tiny), float(np.finfo(np.float32).max)
