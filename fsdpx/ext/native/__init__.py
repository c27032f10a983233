"""Functions as machine code: compiled by Numba once, kept on disk, and run without Numba from then on."""
