"""Kernels as Numba code, for NumPy arrays of float32 and float64; same names and signatures as the plain ones."""

from fsdpx.core.array.kernels.compiled import activation, attention, convolution, half, images, loss, norm, normal

__all__ = ["activation", "attention", "convolution", "half", "images", "loss", "norm", "normal"]
