"""Kernels as Numba code, for NumPy arrays of float32 and float64; same names and signatures as the plain ones."""
