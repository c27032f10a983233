"""Kernels as Numba code for float32 and float64 NumPy arrays, with the names and signatures of the plain kernels."""
