"""Ahead-of-time cache of kernels: machine code that Numba compiles once is stored on disk, and loaded later without
Numba."""
