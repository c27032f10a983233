"""Reductions over segments compiled with Numba, with the same names and signatures as the plain array code."""
