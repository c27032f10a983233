"""Functions as machine code: compiled by Numba once, stored on disk, and run without Numba from then on."""
