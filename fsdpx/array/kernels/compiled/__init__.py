"""Kernels as Numba code, for NumPy arrays of float32 and float64; same names and signatures as the plain ones."""

from fsdpx.array.kernels.choice import NUMBA
from fsdpx.array.kernels.compiled import activation, attention, convolution, half, images, loss, norm, normal

__all__ = ["KERNELS"]

_FILES = (activation, attention, convolution, half, images, loss, norm, normal)
KERNELS = {name: getattr(file, name) for file in _FILES for name in file.__all__ if name in NUMBA}
"""By name, from the file that has it."""
