"""Kernels of fields as Numba code, with the names and signatures of the plain ones."""
