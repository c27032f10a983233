"""Kernels of fields as Numba code; same names and signatures as the plain ones."""
