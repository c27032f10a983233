"""Kernels as Numba code for NumPy arrays of float32 and float64, with the names and signatures of the plain kernels."""
