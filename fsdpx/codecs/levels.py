"""The numbers of gradients in few bits, for both forms of their code."""

import numpy as np

__all__ = ["BLOCK", "LANES", "LARGEST", "LEVELS", "SIGNS", "TINY"]

BLOCK = 256
"""Elements in 8 bits that share a scale."""
LEVELS = 127
SIGNS = 1024
"""Signs that share a scale."""
LANES = 32
"""Sums of a block that are added side by side."""
TINY, LARGEST = float(np.finfo(np.float32).tiny), float(np.finfo(np.float32).max)
