"""Functions as machine code, which Numba compiles once. The code is stored on disk, and runs without Numba from then
on."""
