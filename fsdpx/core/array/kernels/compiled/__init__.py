"""Numba implementations of kernels for float32 and float64 NumPy arrays. They have the same names and signatures as the
plain kernels."""
